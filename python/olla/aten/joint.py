"""A joint graph of forward and backward as a captured step: what lies between the two is one op of the graph."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from olla.aten.checkpoints import renew_views, write_again
from olla.errors import CaptureError
from olla.inductor.compat import compat
from olla.inductor.saving.kinds import is_view
from olla.pytorch.capture import Captured
from olla.pytorch.capture.costs import results_of
from olla.pytorch.capture.inputs import Input
from olla.pytorch.capture.results import Structure
from olla.pytorch.capture.storages import fold
from olla.pytorch.program.variants import drawn_from

# Stands for the loss and whatever else runs between forward and backward. As a random operator it keeps its place among
# those: forward's draws stay before it, backward's behind it.
_library: Any = torch.library.Library("olla", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("between(Tensor[] results) -> Tensor[]", tags=(torch.Tag.nondeterministic_seeded,))
BETWEEN = torch.ops.olla.between.default
# With `train=True` these read nothing of the running statistics they are given, which forward has changed by then.
_NORMS_BACKWARD = {
    torch.ops.aten.native_batch_norm_backward.default: ("running_mean", "running_var"),
    torch.ops.aten.cudnn_batch_norm_backward.default: ("running_mean", "running_var"),
    torch.ops.aten.miopen_batch_norm_backward.default: ("running_mean", "running_var"),
}
_NO_EFFECT = ("aten::_assert_tensor_metadata",)  # assertions on sizes and types, which are guarded anyway


class JointStep:
    """A joint graph as a captured step.

    Args:
        module: the joint graph; it is changed.
        num_forward: results that are forward's.
        static: positions of inputs that are parameters or buffers.
        name: of the graph.

    Attributes:
        captured: the step; its outputs are those of forward and backward.
        num_forward: as given.
        tangents: node that stands for a gradient of a result -> its placeholder in the joint graph that was given.
        placeholders: of the joint graph, in order, tangents included.
        num_again: operators that are recomputed because the user's checkpoints ask for it.
        between: the op that stands for what runs between forward and backward.
        changed: tensors of inputs that forward changes.

    Raises:
        CaptureError: the graph cannot be planned; the message says why.
    """

    def __init__(self, module: fx.GraphModule, num_forward: int, static: list[int], name: str) -> None:
        graph = module.graph
        graph.eliminate_dead_code()
        self.num_forward = num_forward
        self.placeholders = graph.find_nodes(op="placeholder")
        self.tangents: dict[fx.Node, fx.Node] = {}
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target in _NORMS_BACKWARD:
                _without_statistics(node)
        compat.settle_recompute_tags(module)
        self.num_again = write_again(graph, num_forward)
        changed = compat.changed_inputs(graph)
        _keep_changed_inputs(graph, changed)
        self._insert_between(graph)
        given = [node for node in self.placeholders if not compat.is_tangent(node)]
        inputs = [_input(node, position in static) for position, node in enumerate(given)]
        erased = [node for node in self.placeholders if compat.is_tangent(node)]
        for node in erased:
            graph.erase_node(node)
        output: Any = graph.output_node()
        output.args = (list(output.args[0]),)
        folded = fold(module, inputs, name)
        names = [f"output {i}" for i in range(len(output.args[0]))]
        self.captured = Captured(**vars(folded), module=module, outputs=names, structure=Structure.of(()))
        self.between = next(v for v, nodes in enumerate(self.captured.nodes) if nodes[0].target is BETWEEN)
        self.changed = sorted({t for node in changed for t in self.captured.tensors[node]})

    def replays(self, op: int) -> bool:
        """Whether an op draws from the default generator of a device, whose state can be saved for backward."""
        return isinstance(drawn_from(self.captured.module, self.captured.nodes[op][0]), str)

    def _insert_between(self, graph: fx.Graph) -> None:
        """Put the op between forward and backward behind all that forward's results need."""
        output: Any = graph.output_node()
        results = [n for n in output.args[0][: self.num_forward] if isinstance(n, fx.Node) and compat.is_tensor_node(n)]
        tangents = [n for n in self.placeholders if compat.is_tangent(n)]
        behind: set[fx.Node] = set(tangents)
        first = output
        for node in graph.nodes:
            if any(n in behind for n in node.all_input_nodes) and node.op != "output":
                behind.add(node)
                first = node if first is output else first
        before = {node: i for i, node in enumerate(graph.nodes)}
        if any(node in behind or before[node] > before[first] for node in results):
            raise CaptureError("a result of forward is computed behind the first gradient")
        with graph.inserting_before(first):
            between = graph.call_function(BETWEEN, (list(dict.fromkeys(results)),))
            between.meta["val"] = [n.meta["val"] for n in tangents]
            for i, tangent in enumerate(tangents):
                item = graph.call_function(operator.getitem, (between, i))
                item.meta.update(tangent.meta)
                tangent.replace_all_uses_with(item)
                self.tangents[item] = tangent


def stand_for_sparse(graph: fx.Graph) -> None:
    """Let sparse gradients of embeddings, which have no storage of their own, count as the rows in them."""
    num_rows: dict[fx.Node, int] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout == torch.sparse_coo:
            inputs = [(n, n.meta["val"]) for n in node.all_input_nodes]
            indices = [given.numel() for _, given in inputs if given.dtype in (torch.int32, torch.int64)]
            num_rows[node] = sum(num_rows[n] for n, _ in inputs if n in num_rows) or max(indices, default=0)
            with value.fake_mode:  # type: ignore[attr-defined]
                rows = (num_rows[node], *value.shape[1:])
                node.meta["val"] = torch.empty(rows, dtype=value.dtype, device=value.device)


def _without_statistics(node: fx.Node) -> None:
    """Take the running statistics from a backward of a batch norm in training, which does not read them."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    if "train" in names and node.args[names.index("train")] is not True:
        return
    unread = {names.index(name) for name in _NORMS_BACKWARD[node.target]}
    node.args = tuple(None if i in unread else arg for i, arg in enumerate(node.args))


def _keep_changed_inputs(graph: fx.Graph, changed: set[fx.Node]) -> None:
    """Make the graph read a clone, taken at its start, of every input that forward mutates and backward reads."""
    roots = {node: node for node in changed}
    behind: set[fx.Node] = {n for n in graph.find_nodes(op="placeholder") if compat.is_tangent(n)}
    copied: dict[fx.Node, None] = {}
    begun = False
    for node in graph.nodes:
        if node.op == "output":
            break
        if any(n in behind for n in node.all_input_nodes):
            behind.add(node)
            begun = True
        if is_view(node) and (source := node.all_input_nodes[:1]) and source[0] in roots:
            roots[node] = roots[source[0]]
        if begun:
            copied |= {roots[n]: None for n in node.all_input_nodes if n in roots}
    first = next((n for n in graph.nodes if n.op not in ("placeholder", "get_attr")), None)
    copies = []
    for node in copied:
        assert first is not None
        with graph.inserting_before(first):
            copy = graph.call_function(compat.clone, (node,))
        copy.meta["val"] = node.meta["val"].clone()
        copies.append(copy)
        for user in list(node.users):
            if user is not copy and user.op != "output":
                user.replace_input_with(node, copy)
    renew_views(graph, copies)


def _input(node: fx.Node, is_static: bool) -> Input:
    value = node.meta["val"]
    kind = ("parameter" if value.requires_grad else "buffer") if is_static else "input"
    return Input(kind, node.name, node.name)


def obstacle(module: fx.GraphModule) -> str:
    """Return why a graph is left to torch's partitioner; empty where olla can plan it."""
    if reason := compat.obstacle(module, holds_graphs=False):
        return reason
    if not _makes_something(module.graph):
        return "there is nothing to plan: forward returns views of what it is given"
    for node in module.graph.nodes:
        if node.op == "placeholder" and not compat.is_tensor_node(node):
            return f"its input {node.name} is no tensor: sizes of batches vary, see torch.compile(dynamic=False)"
        if node.op != "call_function":
            continue
        if compat.is_symbolic(node) or any(_is_symbolic(v) for v in results_of(node)):
            return f"the size of {node.name} is not known while it is compiled"
        if getattr(node.target, "namespace", "").startswith("_c10d"):
            return f"{node.target} communicates"
        draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if (
            node.is_impure()
            and not draws
            and getattr(getattr(node.target, "_schema", None), "name", "") not in _NO_EFFECT
        ):
            return f"{node.target} has an effect beside its result"
    return ""


def _makes_something(graph: fx.Graph) -> bool:
    """Whether forward has an operator that is no view."""
    behind: set[fx.Node] = set()
    for node in graph.nodes:
        if compat.is_tangent(node) or any(n in behind for n in node.all_input_nodes):
            behind.add(node)
        elif node.op == "call_function" and node.target is not operator.getitem and not is_view(node):
            return True
    return False


def _is_symbolic(value: torch.Tensor) -> bool:
    return any(not isinstance(size, int) for size in (*value.shape, *value.stride()))
