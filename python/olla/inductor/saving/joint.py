"""A joint graph of forward and backward as a graph of olla: kernels, what is fused into them, and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import fx

from olla._core import CoreRecomputeSearch, CoreRules
from olla.graph import DeviceProfile, Graph, Rerun
from olla.inductor.compat import compat
from olla.inductor.saving.emission import goes_on
from olla.inductor.saving.kinds import (
    Fusion,
    arithmetic,
    fusion_of,
    is_drawn,
    is_truth,
    is_view,
    may_run_again,
    num_elements,
    writes_over,
)

_FUSED_SHARE = 0.25  # of a fused op's inputs and results that pass through memory, about
_ARITHMETIC_SHARE = 0.02  # of that traffic's time that a fused op takes where its inputs are at hand anyway


@dataclass(frozen=True)
class Joint:
    """What the planner sees of a joint graph.

    Attributes:
        graph: op v is `nodes[v]`; views are no ops, their readers read the base tensor.
        start_graphs: the same, with other sizes of what pointwise operators make; see `starting`.
        nodes: fx node of op v, in base order: those of forward, then those of backward. None: the tangents arrive.
        tensor: of every fx node that holds one tensor: the graph's tensor, for a view the one it looks at.
        split: the first op of backward.
        late: ops before it that backward runs unless their results are saved; nothing in forward needs them.
        seconds, rerun, rerun_seconds, store_seconds, keep_seconds, fusion, unsaved: rules per op; see
            cpp/olla/graph/values.hpp.
        draw_seconds: of op v, the part of its seconds that goes into drawing random numbers.
        flops: int64[num_ops], of matrix products, convolutions and attention.
        reduced_in_place: whether a kernel may write over what a reduction in it reads; see values.hpp.
    """

    graph: Graph
    start_graphs: list[Graph]
    nodes: list[fx.Node | None]
    tensor: dict[fx.Node, int]
    split: int
    late: NDArray[np.int32]
    seconds: NDArray[np.float64]
    rerun: NDArray[np.uint8]
    rerun_seconds: NDArray[np.float64]
    store_seconds: NDArray[np.float64]
    keep_seconds: NDArray[np.float64]
    draw_seconds: NDArray[np.float64]
    fusion: NDArray[np.uint8]
    unsaved: NDArray[np.uint8]
    flops: NDArray[np.int64]
    reduced_in_place: bool

    @property
    def communicates(self) -> bool:
        """Whether the graph holds communication between processes."""
        return any(node is not None and compat.communicates(node) for node in self.nodes)

    @property
    def step_seconds(self) -> float:
        """Estimated seconds of forward and backward with everything saved."""
        return float(self.seconds.sum())

    def evictor(self) -> CoreRecomputeSearch:
        """Return a search over what to save and what to recompute."""
        num_ops = len(self.nodes)
        rules = CoreRules(
            seconds=self.seconds,
            rerun=self.rerun,
            rerun_seconds=self.rerun_seconds,
            rerun_reads=(np.zeros(num_ops + 1, dtype=np.int64), np.zeros(0, dtype=np.int32)),
            in_place=np.array([n is not None and (writes_over(n) or goes_on(n)) for n in self.nodes], dtype=np.uint8)
            | (self.fusion != Fusion.KERNEL),
            fusion=self.fusion,
            store_seconds=self.store_seconds,
            keep_seconds=self.keep_seconds,
            unsaved=self.unsaved,
            reduced_in_place=self.reduced_in_place,
            split=self.split,
        )
        return CoreRecomputeSearch(self.graph.core, np.arange(num_ops, dtype=np.int32), rules)

    def without_products(self, most: float = 0.0) -> Joint:
        """Return the model with no matrix product, convolution or attention recomputable, but those that must be.

        Args:
            most: share of all flops up to which one may still be recomputed.
        """
        never = (self.flops > most * self.flops.sum()) & (self.unsaved == 0)
        return replace(self, rerun=np.where(never, np.uint8(Rerun.NEVER), self.rerun))

    def by_traffic(self) -> Joint:
        """Return the model in which random numbers and boolean tensors cost only their memory traffic."""
        if not (self.draw_seconds.any() or self.keep_seconds.any()):
            return self
        return replace(
            self,
            start_graphs=self.start_graphs[:1],
            seconds=np.maximum(self.seconds - self.draw_seconds, 0.0),
            rerun_seconds=np.maximum(self.rerun_seconds - self.draw_seconds, 0.0),
            store_seconds=np.maximum(self.store_seconds - self.keep_seconds, 0.0),
            keep_seconds=np.zeros_like(self.keep_seconds),
            draw_seconds=np.zeros_like(self.draw_seconds),
        )

    def starting(self) -> list[CoreRecomputeSearch]:
        """Return searches for minimum cuts at which the greedy may start.

        The first doubles the bytes of pointwise results: a saved one lies beside its inputs, which forward may still
        need. The second charges time only for recomputed unfused kernels. A third, on devices where boolean tensors are
        slow to write and read, sizes these by the bytes that could be moved in that time.
        """
        free = np.where(self.fusion == Fusion.KERNEL, self.rerun_seconds, 0.0)
        twice, *dear = [replace(self, graph=graph).evictor() for graph in self.start_graphs]
        return [twice, replace(self, rerun_seconds=free).evictor(), *dear]

    def bounding(self) -> tuple[CoreRecomputeSearch, NDArray[np.float64]]:
        """Return a search whose lower bounds hold for fused code, and the seconds it charges per recomputed op.

        A pointwise result can be inlined into its readers instead of stored, so the bounds let every pointwise op be
        recomputed at no cost. Recomputable reductions are free, too, and so are ops that forward does not need, which
        can run in backward.
        """
        pointwise = self.fusion == Fusion.POINTWISE
        seconds = np.where(self.fusion == Fusion.KERNEL, self.rerun_seconds, 0.0)
        seconds[self.late] = 0
        rerun = np.where(pointwise, np.uint8(Rerun.WHOLE), self.rerun)
        return replace(self, rerun=rerun, rerun_seconds=seconds).evictor(), seconds


class _JointBuilder:
    def __init__(self) -> None:
        self.tensor: dict[fx.Node, int] = {}
        self.bytes: list[int] = []
        self.reads: list[list[int]] = []
        self.writes: list[list[int]] = []
        self.nodes: list[fx.Node | None] = []

    def add_tensor(self, node: fx.Node) -> None:
        self.tensor[node] = len(self.bytes)
        self.bytes.append(compat.size_of(node))

    def add_op(self, node: fx.Node | None, made: list[fx.Node]) -> None:
        """Append an op that makes the tensors of some nodes."""
        read = node.all_input_nodes if node is not None else []
        self.reads.append(sorted({t for n in read for t in self.tensors_of(n)}))
        for result in made:
            self.add_tensor(result)
        self.writes.append([self.tensor[result] for result in made])
        self.nodes.append(node)

    def add(self, node: fx.Node) -> None:
        """Append a node that computes: a view and an element of a tuple name what is there already."""
        source = aliased(node)
        if source is not None and source in self.tensor:
            self.tensor[node] = self.tensor[source]
            return
        if compat.is_getitem(node):
            return  # named where its tuple was made
        if compat.changes_inputs(node):
            self.add_op(node, [])
            if isinstance(node.args[0], fx.Node) and node.args[0] in self.tensor:
                self.tensor[node] = self.tensor[node.args[0]]
        elif compat.is_tensor_node(node):
            self.add_op(node, [node])
        elif compat.runs_kernels(node):
            self.add_op(node, [user for user in elements(node) if compat.is_tensor_node(user)])

    def tensors_of(self, node: fx.Node) -> list[int]:
        if node in self.tensor:
            return [self.tensor[node]]
        return [self.tensor[user] for user in elements(node) if user in self.tensor]  # a tuple that is read whole


def elements(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that take an element of what a node returns, and those of tuples in it behind their own."""
    waiting = [node]
    for parent in waiting:
        for user in parent.users:
            if compat.is_getitem(user) and user.args[0] is parent and not compat.is_symbolic(user):
                yield user
                if not compat.is_tensor_node(user):
                    waiting.append(user)


def aliased(node: fx.Node) -> fx.Node | None:
    """Return the node whose memory a view, or an element of a tuple of views, looks at; None for everything else."""
    if compat.is_getitem(node):
        parent = node.args[0]
        return aliased(parent) if isinstance(parent, fx.Node) and is_view(parent) else None
    if is_view(node) and isinstance(node.args[0], fx.Node):
        return node.args[0]
    return None


def base_order(graph: fx.Graph, info: Any) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
    """Return the nodes of forward and those of backward, and which of forward's run in backward unless saved.

    A node that needs no gradient and is not needed by forward's results may run in either graph. It is placed in
    forward as early as possible, so that its result can be saved in place of larger ones; the planner moves it where
    that helps.
    """
    forward: list[fx.Node] = []
    backward: list[fx.Node] = []
    either: list[fx.Node] = []
    ready: dict[fx.Node, int] = {}  # how many of forward's nodes must have run
    begun = False
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        begun = begun or (node in info.tangents_closure and not info.is_required_fw(node))
        if info.is_required_fw(node) or (not begun and node not in info.tangents_closure):
            forward.append(node)
            ready[node] = len(forward)
            continue
        inputs = [n for n in node.all_input_nodes if n.op != "placeholder"]
        free = is_view(node) or compat.is_getitem(node) or compat.is_symbolic(node) or may_run_again(node)
        if node in info.tangents_closure or not free or not all(n in ready for n in inputs):
            backward.append(node)
            continue
        ready[node] = max((ready[n] for n in inputs), default=0)
        either.append(node)
    placed = [*forward, *either]
    late = [node for node in placed if not info.is_required_fw(node)]
    return sorted(placed, key=ready.__getitem__), backward, late


def build(graph: fx.Graph, info: Any, num_forward: int, device: DeviceProfile) -> Joint:
    """Return what the planner needs to know of a joint graph.

    Args:
        graph: the joint graph, functional but for copies into its inputs; sizes are taken at their hints.
        info: torch's classification of its nodes.
        num_forward: results of the joint graph that are forward's.
        device: what seconds are estimated for.

    Complexity:
        O(nodes + edges).
    """
    b = _JointBuilder()
    for node in graph.find_nodes(op="placeholder"):
        if compat.is_tensor_node(node) and not compat.is_tangent(node):
            b.add_tensor(node)
    num_given = len(b.bytes)
    forward, backward, late = base_order(graph, info)
    for node in forward:
        b.add(node)
    split = len(b.nodes)
    ops = {node: op for op, node in enumerate(b.nodes)}
    moved = np.array([ops[node] for node in late if node in ops], dtype=np.int32)
    b.add_op(None, [node for node in graph.find_nodes(op="placeholder") if compat.is_tangent(node)])
    for node in backward:
        b.add(node)
    output: Any = graph.output_node()
    outputs = sorted({t for n in output.all_input_nodes for t in b.tensors_of(n) if t >= num_given})
    results = {t for n in output.args[0][:num_forward] if isinstance(n, fx.Node) for t in b.tensors_of(n)}
    return _with_rules(b, outputs, results, split, moved, device)


def _with_rules(
    b: _JointBuilder, outputs: list[int], results: set[int], split: int, late: NDArray[np.int32], device: DeviceProfile
) -> Joint:
    sizes = np.array(b.bytes, dtype=np.int64)
    fusion = np.array([Fusion.KERNEL if n is None else fusion_of(n) for n in b.nodes], dtype=np.uint8)
    again = [  # forward's results are in memory anyway, and must be its own
        n is not None and v < split and may_run_again(n) and results.isdisjoint(b.writes[v])
        for v, n in enumerate(b.nodes)
    ]
    flops = np.array([0 if n is None else compat.node_flops(n) for n in b.nodes], dtype=np.int64)
    moved = np.array([sizes[r].sum() + sizes[w].sum() for r, w in zip(b.reads, b.writes, strict=True)], dtype=np.int64)
    kernel = fusion == Fusion.KERNEL
    work = np.array([0.0 if n is None else arithmetic(n, device) for n in b.nodes])
    seconds = device.estimate(work, np.where(kernel, moved, moved * _FUSED_SHARE).astype(np.int64), kernel * 1)
    made = np.array([sizes[w].sum() for w in b.writes], dtype=np.int64)
    traffic = device.estimate(flops * 0, moved, kernel * 0)
    rerun_seconds = np.select([kernel, fusion == Fusion.REDUCTION], [seconds, traffic], traffic * _ARITHMETIC_SHARE)
    truths = np.where(fusion == Fusion.POINTWISE, [num_elements(n, is_truth) for n in b.nodes], 0)
    keep_seconds = truths * device.truth_seconds
    store_seconds = device.estimate(flops * 0, 2 * made, kernel * 0 + 1) + keep_seconds
    draw_seconds = device.draw_seconds * np.array([num_elements(n, is_drawn) for n in b.nodes], dtype=np.float64)
    unsaved = np.array([n is not None and compat.must_recompute(n) for n in b.nodes], dtype=np.uint8)
    doubled = sizes.copy()
    doubled[[t for v in np.flatnonzero(fusion == Fusion.POINTWISE).tolist() for t in b.writes[v]]] *= 2
    start_sizes = [doubled]
    if keep_seconds.any():
        start_sizes.append(doubled.copy())
        for v in np.flatnonzero(keep_seconds).tolist():
            start_sizes[1][b.writes[v]] = int(keep_seconds[v] * device.bytes_per_second)
    graph = Graph.from_arrays(tensor_bytes=sizes, reads=b.reads, writes=b.writes, outputs=outputs)
    return Joint(
        graph=graph,
        start_graphs=[replace(graph, tensor_bytes=those) for those in start_sizes],
        nodes=b.nodes,
        tensor=b.tensor,
        split=split,
        late=late,
        seconds=seconds + draw_seconds,
        rerun=np.where(again, Rerun.WHOLE, Rerun.NEVER).astype(np.uint8),
        rerun_seconds=rerun_seconds + draw_seconds,
        store_seconds=store_seconds,
        keep_seconds=keep_seconds,
        draw_seconds=draw_seconds,
        fusion=fusion,
        unsaved=unsaved,
        flops=flops,
        reduced_in_place=any(
            n is not None and compat.is_tensor_node(n) and n.meta["val"].device.type == "cuda" for n in b.nodes
        ),
    )
