"""Trace the update of one parameter of each kind and copy it for the others: layers repeat, and so do their updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils import _pytree as pytree

from olla.pytorch.capture import optimizers
from olla.pytorch.capture.costs import storage_of
from olla.pytorch.capture.inputs import Input

TEMPLATE = "olla_template"  # key of node.meta: number of the update that the node is traced for


@dataclass
class ParameterUpdate:
    """The update of one parameter: the nodes of its tensors, and the traced update that it copies."""

    nodes: list[str]  # names of those that stand for the parameter, its state and its gradient when it is updated
    template: int  # the number of the update that was traced for it: its own, or that of an earlier one


@dataclass(eq=False)
class Updates:
    """The user's optimizer over the tensors of a trace, and the updates it made.

    Args:
        optimizer: the user's.
        inputs: of the step.
        tensors: tensor i stands for input i.
        names: id of each parameter of the user's -> its name.
        mark: called with the number of an update for all nodes recorded since its last call.

    Attributes:
        groups, state: what to lend the optimizer, by the user's own parameters.
        made: in the optimizer's order.
        gradients: gradient i belongs to made[i].
    """

    _optimizer: torch.optim.Optimizer
    _inputs: Sequence[Input]
    _tensors: Sequence[torch.Tensor]
    names: InitVar[dict[int, str]]
    _mark: Callable[[int], None]
    made: list[ParameterUpdate] = field(default_factory=list, init=False)
    gradients: list[torch.Tensor] = field(default_factory=list, init=False)

    def __post_init__(self, names: dict[int, str]) -> None:
        optimizer, inputs, tensors = self._optimizer, self._inputs, self._tensors
        self._positions: dict[str | int, list[int]] = {}  # of each parameter and its state, the parameter first
        rates: dict[str | int, dict[str, torch.Tensor]] = {}
        for position, i in enumerate(inputs):
            if i.kind in ("parameter", "optimizer_state"):
                self._positions.setdefault(i.key, []).append(position)
            elif i.kind == "rate":
                rates.setdefault(i.key, {})[i.entry] = tensors[position]
        self._names = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        self.groups: list[dict[str, Any]] = []
        for number, group in enumerate(optimizer.param_groups):
            settings = optimizers.with_rates(optimizers.one_by_one(group), rates[number])
            self.groups.append({**settings, "params": list(group["params"])})
        self.state = {
            parameter: {inputs[e].entry: tensors[e] for e in self._positions[name][1:]}
            for group, names_in in zip(optimizer.param_groups, self._names, strict=True)
            for parameter, name in zip(group["params"], names_in, strict=True)
        }

    def trace(self, gradients: dict[str, torch.Tensor]) -> None:
        """Trace one step of the optimizer; where it treats parameters one by one, one update of each kind only."""
        members = [[name for name in names_in if name in gradients] for names_in in self._names]
        if not optimizers.updates_are_independent(self._optimizer):
            self._run([(g, [self._positions[n] for n in m]) for g, m in zip(self.groups, members, strict=True)])
            return
        templates: dict[Any, int] = {}
        any_shape = optimizers.updates_are_elementwise(self._optimizer)
        for number, group in enumerate(self.groups):
            for name in members[number]:
                positions = self._positions[name]
                entries = [self._inputs[p].entry for p in positions]
                used = [*(self._tensors[p] for p in positions), gradients[name]]
                key = signature(number, used, entries, any_shape)
                template = templates.setdefault(key, len(self.made))
                self.made.append(ParameterUpdate([_node_name(t) for t in used], template))
                self.gradients.append(gradients[name])
                if template == len(self.made) - 1:
                    self._run([(group, [positions])])
                    self._mark(template)

    def _run(self, members: list[tuple[dict[str, Any], list[list[int]]]]) -> None:
        """Let the optimizer update some parameters: those whose positions stand beside each group's settings."""
        groups = [{**group, "params": [self._tensors[p[0]] for p in positions]} for group, positions in members]
        updated = (p for _, positions in members for p in positions)
        state = {self._tensors[p]: {self._inputs[e].entry: self._tensors[e] for e in rest} for p, *rest in updated}
        optimizers.run_stand_in(self._optimizer, groups, state)


def signature(group: int, tensors: list[torch.Tensor], entries: list[str], any_shape: bool) -> tuple[Any, ...]:
    """Return what two parameters must have in common for the same operators to update both.

    Args:
        group: the group of the optimizer.
        tensors: the parameter, its state, its gradient.
        entries: of the state.
        any_shape: whether updates go element by element: then contiguous tensors may be of any shape.
    """
    shape = tensors[0].shape
    likes = [t.shape == shape and t.is_contiguous() and not t.is_complex() for t in tensors]
    if any_shape and shape and all(like or not t.shape for like, t in zip(likes, tensors, strict=True)):
        layout: Any = tuple((like, t.dtype, str(t.device)) for like, t in zip(likes, tensors, strict=True))
    else:
        layout = tuple((tuple(t.shape), t.stride(), t.dtype, str(t.device)) for t in tensors)
    return (group, layout, tuple(entries))


def copy_updates(module: fx.GraphModule, updates: list[ParameterUpdate], num_outputs: int) -> None:
    """Give every parameter its update, in the optimizer's order.

    Args:
        module: its outputs are num_outputs of the step, then one gradient per update, which keeps the operators of the
            gradient alive. It is changed in place: the gradients are no longer outputs.
        updates: in the order of the optimizer.
        num_outputs: of the step.

    Complexity: O(nodes copied).
    """
    graph = module.graph
    named = {n.name: n for n in graph.nodes}
    output: Any = graph.output_node()
    output.args = (list(output.args[0])[:num_outputs],)
    traced: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if TEMPLATE in node.meta and not str(node.target).startswith("profiler."):
            traced.setdefault(node.meta[TEMPLATE], []).append(node)
    end: Any = None
    for number, update in enumerate(updates):
        nodes = traced.get(update.template, [])
        if update.template == number:
            end = nodes[-1] if nodes else end
        elif nodes:
            sources = updates[update.template].nodes
            other = {named[old]: named[new] for old, new in zip(sources, update.nodes, strict=True)}
            end = _copy(graph, nodes, other, end)


def _node_name(tensor: torch.Tensor) -> str:
    """Return the node that stands for a tensor now: the last operator that changed it in place, if there is one."""
    mode: Any = get_proxy_mode()
    return str(get_proxy_slot(tensor, mode.tracer).proxy.node.name)


def _copy(graph: fx.Graph, nodes: list[fx.Node], other: dict[fx.Node, fx.Node], end: fx.Node) -> fx.Node:
    """Append copies of nodes after ``end``, with other inputs, the parameter first; return the last copy."""
    bases: dict[int, torch.Tensor] = {storage_of(old.meta["val"]): new.meta["val"] for old, new in other.items()}
    shape, new_shape = next((old.meta["val"].shape, new.meta["val"].shape) for old, new in other.items())

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if shape == new_shape or not tensor.shape:
            return _fake_like(tensor, bases)
        assert tensor.shape == shape, f"an update by elements makes a tensor of shape {tuple(tensor.shape)}"
        if (storage := storage_of(tensor)) not in bases:
            bases[storage] = torch.empty(new_shape, dtype=tensor.dtype, device=tensor.device)
        return bases[storage]

    for node in nodes:
        with graph.inserting_after(end):
            end = graph.node_copy(node, lambda n: other.get(n, n))
        other[node] = end
        end.meta["val"] = pytree.tree_map_only(torch.Tensor, fake, node.meta.get("val"))
        end.meta.pop("tensor_meta", None)  # of the other shape
    return end


def _fake_like(tensor: torch.Tensor, bases: dict[int, torch.Tensor]) -> torch.Tensor:
    """Return a fake of the same shape; on the storage that stands for the tensor's, or on a new one."""
    if (storage := storage_of(tensor)) not in bases:
        return bases.setdefault(storage, torch.empty_like(tensor))
    base = bases[storage]
    if base.dtype == tensor.dtype and base.shape == tensor.shape and base.stride() == tensor.stride():
        return base
    return base.detach().view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
