"""Trace the update of one parameter of each kind and copy it for the others: layers repeat, and so do their updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

TEMPLATE = "olla_template"  # key of node.meta: number of the template whose update the node belongs to


@dataclass
class Update:
    """The update of one parameter: the inputs it works on, and which template has its operators.

    Attributes:
        inputs: positions of the parameter and its state among the inputs of the step, the parameter first.
        template: number of the template.
        traced: whether this is the update the template was traced from.
    """

    inputs: list[int]
    template: int
    traced: bool


def signature(group: int, tensors: list[torch.Tensor], entries: list[str]) -> tuple[Any, ...]:
    """Return what two parameters must have in common for the same operators to update both."""
    layout = tuple((tuple(t.shape), t.stride(), t.dtype, str(t.device)) for t in tensors)
    return (group, layout, tuple(entries))


def copy_updates(module: fx.GraphModule, updates: list[Update], num_outputs: int) -> None:
    """Give every parameter its update, in the optimizer's order.

    Args:
        module: its outputs are num_outputs of the step, then one gradient per update. It is changed in place, and the
            gradients are outputs no more.
        updates: in the order of the optimizer.
        num_outputs: of the step.

    Complexity: O(nodes copied).
    """
    graph = module.graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    results = list(output.args[0])
    gradients = results[num_outputs:]
    output.args = (results[:num_outputs],)
    traced: dict[int, tuple[list[fx.Node], list[fx.Node]]] = {}
    for node in graph.nodes:
        if TEMPLATE in node.meta and not str(node.target).startswith("profiler."):
            traced.setdefault(node.meta[TEMPLATE], ([], []))[1].append(node)
    end: fx.Node | None = None
    for update, gradient in zip(updates, gradients, strict=True):
        bound = [*(placeholders[i] for i in update.inputs), gradient]
        if update.traced:
            template = traced.setdefault(update.template, ([], []))
            template[0].extend(bound)
            end = template[1][-1] if template[1] else end
            continue
        sources, nodes = traced[update.template]
        if nodes:
            assert end is not None
            end = _copy(graph, nodes, dict(zip(sources, bound, strict=True)), end)


def _copy(graph: fx.Graph, nodes: list[fx.Node], other: dict[fx.Node, fx.Node], end: fx.Node) -> fx.Node:
    """Append copies of nodes after ``end``, with other inputs; return the last copy."""
    bases = {_storage(old.meta["val"]): new.meta["val"] for old, new in other.items()}
    for node in nodes:
        with graph.inserting_after(end):
            end = graph.node_copy(node, lambda n: other.get(n, n))
        other[node] = end
        end.meta["val"] = pytree.tree_map_only(torch.Tensor, lambda t: _fake_like(t, bases), node.meta.get("val"))
    return end


def _fake_like(tensor: torch.Tensor, bases: dict[int, torch.Tensor]) -> torch.Tensor:
    """Return a fake of the same shape; on the storage that stands for the tensor's, or on a new one."""
    base = bases.get(_storage(tensor))
    if base is None:
        base = bases[_storage(tensor)] = torch.empty_like(tensor)
        return base
    same = base.dtype == tensor.dtype and base.shape == tensor.shape and base.stride() == tensor.stride()
    return (
        base
        if same
        else base.detach().view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    )


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
