"""Forward and backward of a planned joint graph as two graphs: every run of an operator a node, in planned order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from olla.aten.checkpoints import drawn_again
from olla.aten.joint import BETWEEN, JointStep
from olla.inductor.compat import compat
from olla.pytorch.capture.costs import results_of
from olla.pytorch.capture.generator import Source, state_of
from olla.pytorch.program.schedule import OpSchedule, ScheduledOp
from olla.pytorch.program.variants import drawn_from, dropout_again, is_dropout, mask_of

OVER = "olla_over"  # in `meta` of a node: the index, among its inputs, of the one that its result overwrites
FUNCTIONAL_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
_NORM = torch.ops.aten._native_batch_norm_legit.no_stats
_Key = tuple[Any, ...]  # a node, and the tensors its value lives in


class Halves(NamedTuple):
    """Forward and backward as separate graphs.

    Attributes:
        forward, backward: their graphs, in planned order.
        saved_bytes: of each value that forward makes and keeps for backward.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    saved_bytes: tuple[int, ...]


class _Divider:
    """Writes the planned order as a joint graph, and notes what backward reads of forward."""

    def __init__(self, joint: JointStep, schedule: OpSchedule) -> None:
        self.joint, self.schedule = joint, schedule
        self.old = joint.captured.module.graph
        self.graph = fx.Graph()
        self.saved: dict[fx.Node, None] = {}
        self.forward: set[fx.Node] | None = None  # the nodes of forward, once it has ended
        self._values: dict[_Key, fx.Node] = {}
        self._states: dict[int, fx.Node] = {}  # of an op that draws: the state of its generator before
        self._temporary = [kind == "temporary" for kind in joint.captured.graph.tensor_kinds]
        self._place: Any = None
        self._given: dict[fx.Node, fx.Node] = {}

    def divide(self, order: Sequence[int]) -> None:
        for node in self.joint.placeholders:
            self._given[node] = self.graph.node_copy(node)
        for node in self.old.find_nodes(op="get_attr"):
            self._values[self._key(node)] = self.graph.node_copy(node)
        for node in self.old.find_nodes(op="placeholder"):
            self._values[self._key(node)] = self._given[node]
        self._put_all(self.joint.captured.prologue)
        forward_results: list[Any] = []
        output: Any = self.old.output_node()
        results = output.args[0]
        num_forward = self.joint.num_forward
        for op in order:
            call = self.schedule.calls[op]
            self._place = call.place
            if call.nodes[0].target is not BETWEEN:
                self._run(call)
                continue
            forward_results = [self._result(item) for item in results[:num_forward]]
            self.forward = set(self.graph.nodes)
            for node in call.nodes[1:]:
                if (tangent := self.joint.tangents.get(node)) is None:
                    self._put(node)
                else:
                    self._values[self._key(node)] = self._given[tangent]
        self._place = self.schedule.outputs
        backward_results = [self._result(item) for item in results[num_forward:]]
        self.graph.output((*forward_results, *backward_results)).meta.update(output.meta)

    def _result(self, item: Any) -> Any:
        return self._value(item) if isinstance(item, fx.Node) else item

    def _key(self, node: fx.Node) -> _Key:
        tensors = [t for t in self.joint.captured.tensors[node] if self._temporary[t]]
        return (node, *(tensors if self._place is None else (self._place.get(t, t) for t in tensors)))

    def _value(self, node: fx.Node) -> fx.Node:
        """Return the new node that holds a value, noted as saved if it is one of forward that backward reads."""
        return self._read(self._values[self._key(node)])

    def _read(self, new: fx.Node) -> fx.Node:
        if self.forward is not None and new in self.forward and new.op != "get_attr" and not compat.is_tangent(new):
            self.saved[new] = None
        return new

    def _run(self, call: ScheduledOp) -> None:
        kernel, *followers = call.nodes
        if call.draw >= 0 and not call.replay:
            source = drawn_from(self.joint.captured.module, kernel)
            self._states[call.draw] = self._state(source, kernel)
        if call.replay:
            source = drawn_from(self.joint.captured.module, kernel)
            state = self._read(self._states[call.draw])
            args, kwargs = fx.node.map_arg((kernel.args, kernel.kwargs), self._value)
            self._add(kernel, drawn_again, (state, source, kernel.target, args, kwargs), {})
        elif call.again and is_dropout(kernel):
            mask = mask_of(kernel)
            assert mask is not None
            x: Any = kernel.args[0]
            self._add(kernel, dropout_again, (self._value(x), self._value(mask), kernel.args[1]), {})
        elif call.again:
            assert kernel.target is FUNCTIONAL_NORM
            x, weight, bias, _, _, *others = kernel.args
            args = fx.node.map_arg((x, weight, bias, *others), self._value)
            self._add(kernel, _NORM, args, {})
        else:
            taken = self._taken(kernel, call.over)
            new = self._put(kernel)
            if taken is not None:
                new.meta[OVER] = new.all_input_nodes.index(taken)
        self._put_all(followers)

    def _taken(self, kernel: fx.Node, tensor: int) -> fx.Node | None:
        """Return the new node of the argument that lives in a tensor; None for tensor -1."""
        tensors = self.joint.captured.tensors
        taken = next((n for n in kernel.all_input_nodes if tensor in tensors[n]), None) if tensor >= 0 else None
        return None if taken is None else self._value(taken)

    def _state(self, source: Source, kernel: fx.Node) -> fx.Node:
        new = self.graph.call_function(state_of, (source,))  # type: ignore[arg-type]
        state = state_of(source)
        with results_of(kernel)[0].fake_mode:  # type: ignore[attr-defined]
            new.meta["val"] = torch.empty(state.shape, dtype=state.dtype)
        return new

    def _put_all(self, nodes: Sequence[fx.Node]) -> None:
        for node in nodes:
            self._put(node)

    def _put(self, node: fx.Node) -> fx.Node:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._value)
        return self._add(node, node.target, args, kwargs)

    def _add(self, node: fx.Node, target: Any, args: Any, kwargs: Any) -> fx.Node:
        new = self.graph.create_node("call_function", target, tuple(args), kwargs, node.name)
        new.meta.update(node.meta)
        if new.is_impure():
            compat.keep_in(new, backward=self.forward is not None)
        self._values[self._key(node)] = new
        return new


def divided(joint: JointStep, schedule: OpSchedule, order: Sequence[int], static: Sequence[int]) -> Halves:
    """Return forward and backward of a joint graph, as a plan runs it.

    Args:
        joint: the graph.
        schedule: what runs.
        order: ops of the schedule in the order to run them.
        static: positions of inputs that are parameters or buffers.

    Complexity: O(nodes + edges).
    """
    divider = _Divider(joint, schedule)
    divider.divide(order)
    module = fx.GraphModule(joint.captured.module, divider.graph)
    saved = list(divider.saved)
    given = module.graph.find_nodes(op="placeholder")
    halves = compat.split(module, saved, [], [given[i] for i in static], joint.num_forward)
    return Halves(*halves, tuple(compat.size_of(node) for node in saved if node.op != "placeholder"))
