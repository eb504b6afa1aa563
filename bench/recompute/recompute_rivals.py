"""The rivals of a budget: block checkpointing and PyTorch's min-cut partitioner, on our graphs.

Both choose which values of the forward pass are saved; the others are made again in the backward pass, as late as
possible and at most once. That is a list of drops, and olla's own rewriter simulates it: same memory, same time model.
In-place results beyond the program's own are not granted to rivals.

* ``torch.utils.checkpoint``: the forward pass is cut into k segments at its narrow places; the first j of them keep
  only what crosses a cut. It restores the state of the random numbers, so dropout is recomputed as a whole.
* ``torch._functorch.partitioners``: its own ``choose_saved_values_set`` runs here, on an FX graph with a node per op
  and value of ours, for ``activation_memory_budget`` 0.1 to 1.0. As after PyTorch's decompositions, pointwise ops and
  softmax are recomputable, norms are statistics and a pointwise result, dropout is a mask and a pointwise result.

Read and run with torch 2.13; other versions may have moved these functions.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import networkx
import numpy as np
import torch
from networkx.algorithms.flow import boykov_kolmogorov
from numpy.typing import NDArray
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._inductor.custom_graph_pass import CustomRuntimeEstimator
from torch.utils._ordered_set import OrderedSet

import olla
from olla import _core
from olla.graph import Lists, Rerun, operator, profile_of, rules
from olla.graph.operators import BATCH_NORMS, DROPOUTS, IN_PLACE
from olla.order.base_orders import early_updates

BUDGETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_MOST_SEGMENTS = 64
_NORMS = BATCH_NORMS | {"aten.native_layer_norm", "aten.native_group_norm"}
_POINTWISE = torch.ops.aten.mul.Tensor  # stands for every op that PyTorch's partitioner calls fusible


@dataclass(frozen=True)
class Point:
    """What one choice of a rival costs.

    Attributes:
        rival: "checkpoint" or "min-cut".
        setting: its own parameter, in words.
        peak_bytes: resident memory and workspaces included.
        added_seconds: estimated, of what is recomputed.
        seconds: of the whole sweep over the rival's settings.
    """

    rival: str
    setting: str
    peak_bytes: int
    added_seconds: float
    seconds: float


class Simulation:
    """A graph, its order and its values, on which drops are tried."""

    def __init__(self, graph: olla.Graph, order: NDArray[np.int32], device: str, replay_random: bool) -> None:
        r = rules(graph, profile_of(device), in_place=False)
        draws = graph.random | ~graph.recomputable | [operator(target) in DROPOUTS for target in graph.targets]
        if replay_random:
            r.rerun[draws] = Rerun.WHOLE
        self.graph, self.draws, self.base_seconds = graph, draws, float(r.seconds.sum())
        self.evictor = r.evictor(graph, order)
        values = self.evictor.values
        self.tensor, self.producer = values.tensor, values.producer
        self.reads, self.overwrites, self.makes = (
            Lists(*lists) for lists in (values.reads, values.overwrites, values.makes)
        )
        self.step = np.argsort(order).astype(np.int32)
        self.forward = np.array([kind == "forward" for kind in graph.op_kinds], dtype=np.bool_)
        self.can_drop = np.zeros(len(self.tensor), dtype=np.bool_)
        self.can_drop[values.rerun_makes[1]] = True
        self.can_drop[self.producer >= 0] &= self.forward[self.producer[self.producer >= 0]]
        self._keep_what_cannot_follow()
        self.last = np.full(len(self.tensor), -1, dtype=np.int32)  # step of the last forward op that uses a value
        for v in np.flatnonzero(self.forward):
            used = np.concatenate((self.reads.of(v), self.overwrites.of(v), self.makes.of(v)))
            self.last[used] = np.maximum(self.last[used], self.step[v])

    def _keep_what_cannot_follow(self) -> None:
        """Keep what is made from an overwritten value that can itself not be made again."""
        gone = np.zeros(len(self.tensor), dtype=np.bool_)
        gone[self.overwrites.item] = True
        for v in np.flatnonzero(self.forward):
            inputs = np.concatenate((self.reads.of(v), self.overwrites.of(v)))
            if np.any(gone[inputs] & ~self.can_drop[inputs]):
                self.can_drop[self.makes.of(v)] = False

    def point(self, dropped: NDArray[np.bool_], rival: str, setting: str, seconds: float) -> Point | None:
        """Simulate that these values are not kept past the forward pass; None where that makes no sense."""
        values = np.flatnonzero(dropped & self.can_drop).astype(np.int32)
        if not self.evictor.reset(values, self.last[values]):
            return None
        return Point(rival, setting, self.evictor.peak, max(0.0, self.evictor.added_seconds), seconds)


def base_order(graph: olla.Graph, time_limit: float = 5.0) -> NDArray[np.int32]:
    """Return our best order with early weight updates, the one that our own choice starts from."""
    plan = olla.plan(graph, layout=False, time_limit=time_limit)
    early = early_updates(graph, plan.order)
    found = _core.order(graph.core, [early], 0, _core.Limits(time_limit=time_limit, max_work=None, progress=None))
    return found.order if found.peak_bytes <= plan.peak_bytes else plan.order


def checkpoint(graph: olla.Graph, order: NDArray[np.int32], device: str) -> list[Point]:
    """Return the points of block checkpointing: every number of segments, the first j of k checkpointed."""
    start = time.perf_counter()
    simulation = Simulation(graph, order, device, replay_random=True)
    steps = np.sort(simulation.step[simulation.forward])
    made = np.full(len(simulation.tensor), -1, dtype=np.int64)
    has_producer = simulation.producer >= 0
    made[has_producer] = simulation.step[simulation.producer[has_producer]]
    size = graph.tensor_bytes[simulation.tensor] * simulation.can_drop
    ends = _narrow_places(steps, made, simulation.last, size)
    weight = np.cumsum(np.bincount(np.maximum(made, 0), weights=size, minlength=graph.num_ops))
    seconds = time.perf_counter() - start
    points = []
    for k in range(1, min(len(ends), _MOST_SEGMENTS) + 1):
        aims = weight[steps[-1]] * np.arange(1, k) / k  # segments of about as many bytes
        cuts = np.unique(ends[np.minimum(np.searchsorted(weight[ends], aims), len(ends) - 1)])
        cuts = np.append(cuts[cuts < steps[-1]], steps[-1])
        first, last = np.searchsorted(cuts, made), np.searchsorted(cuts, simulation.last)
        inside = (made >= 0) & (first == last)
        for j in range(1, len(cuts) + 1):
            begin = time.perf_counter()
            point = simulation.point(inside & (first < j), "checkpoint", f"{j} of {k}", 0.0)
            seconds += time.perf_counter() - begin
            if point is not None:
                points.append(point)
    return [Point(p.rival, p.setting, p.peak_bytes, p.added_seconds, seconds) for p in points]


def _narrow_places(
    steps: NDArray[np.int32], made: NDArray[np.int64], last: NDArray[np.int32], size: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the forward steps behind which as few bytes cross as nowhere near: one op in 64, or its neighbours."""
    change = np.zeros(int(max(last.max(), made.max())) + 2, dtype=np.int64)
    alive = (made >= 0) & (last > made)
    np.add.at(change, made[alive], size[alive])
    np.add.at(change, last[alive], -size[alive])
    crossing = np.cumsum(change)[steps]
    padded = np.pad(crossing, 1, constant_values=np.iinfo(np.int64).max)
    lowest = (crossing <= padded[:-2]) & (crossing <= padded[2:])
    return np.asarray(steps[lowest], dtype=np.int64)


class _Flops(CustomRuntimeEstimator):
    """What the partitioner's default estimator counts, from our graph: its nodes have no shapes."""

    def __call__(self, node: fx.Node) -> float:
        return float(max(node.meta["flops"], 1))

    def uuid(self) -> None:
        return None


@dataclass(frozen=True)
class Joint:
    """A forward and backward pass as the partitioner wants it; value_of: FX node -> our value."""

    graph: fx.Graph
    info: Any  # partitioners.NodeInfo
    value_of: dict[fx.Node, int]


def joint_graph(simulation: Simulation) -> Joint:
    """Describe forward and backward pass as an FX graph whose tensors have our sizes and no shape."""
    graph, joint = simulation.graph, fx.Graph()
    node_of: dict[int, fx.Node] = {}
    value_of: dict[fx.Node, int] = {}
    forward: list[fx.Node] = []
    backward: list[fx.Node] = []
    parameters: list[fx.Node] = []

    def node(name: str, target: Any, inputs: list[fx.Node], value: int, flops: int, into: list[fx.Node]) -> None:
        if target is None:
            made = joint.placeholder(name)
        else:
            made = joint.create_node("call_function", target, tuple(inputs), name=name)
        num_bytes = int(graph.tensor_bytes[simulation.tensor[value]])
        made.meta.update(val=torch.empty(num_bytes, dtype=torch.uint8, device="meta"), flops=flops)
        node_of[value] = made
        value_of[made] = value
        into.append(made)

    for value in np.flatnonzero(simulation.producer < 0).tolist():
        node(f"primals_{value}", None, [], value, 0, forward)
        if graph.tensor_kinds[simulation.tensor[value]] in ("parameter", "buffer"):
            parameters.append(node_of[value])
    for v, kind in enumerate(graph.op_kinds):
        if kind not in ("forward", "backward"):
            continue
        inputs = [node_of[int(x)] for x in (*simulation.reads.of(v), *simulation.overwrites.of(v))]
        made = simulation.makes.of(v).tolist()
        name = operator(graph.targets[v])
        target = torch.ops.aten.native_dropout.default if simulation.draws[v] else _target(name)
        into = forward if kind == "forward" else backward
        flops = int(graph.flops[v])
        first, rest = made[:1], made[1:]
        split = name in _NORMS | DROPOUTS and len(made) > 1
        for i, value in enumerate(rest if split else made):
            node(f"op{v}_{i}", target, inputs, value, flops, into)
        if split:
            node(f"op{v}_first", _POINTWISE, [*inputs[:1], *(node_of[x] for x in rest[:2])], first[0], flops, into)
    joint.output(tuple(backward))
    inputs = [n for n in forward if n.op == "placeholder"]
    info = partitioners.NodeInfo(
        inputs,
        OrderedSet(forward),
        OrderedSet(backward),
        OrderedSet(backward),
        OrderedSet(),
        {n: i for i, n in enumerate(forward)},
        OrderedSet(parameters),
    )
    behind: Any
    for behind in reversed(joint.nodes):
        if behind.op == "output" or info.is_required_fw(behind):
            behind.dist_from_bw = min([int(1e9), *(user.dist_from_bw + 1 for user in behind.users)])
        else:
            behind.dist_from_bw = 0
    return Joint(joint, info, value_of)


def _target(name: str) -> Any:
    """Return the operator that the partitioner looks up in its lists, as it stands after PyTorch's decompositions."""
    base = name.rstrip("_") if name.endswith("_") else name
    if base in IN_PLACE or base in ("aten._safe_softmax", "aten.gelu"):
        return _POINTWISE
    if base in _NORMS:
        return torch.ops.aten.var_mean.correction
    packet: Any = getattr(torch.ops.aten, base.removeprefix("aten."), None) if base.startswith("aten.") else None
    return torch.ops.aten.alias.default if packet is None else getattr(packet, packet.overloads()[0])


@contextlib.contextmanager
def _fast_cuts() -> Iterator[None]:
    """Let the partitioner find minimum cuts the faster way, and those that no budget changes once."""
    slow, solve = networkx.minimum_cut, partitioners.solve_min_cut
    found: dict[Any, Any] = {}

    def once(graph: Any, info: Any, options: Any, dont_ban: Any = None) -> Any:
        if dont_ban:
            return solve(graph, info, options, dont_ban)
        key = tuple(vars(options).values())
        if key not in found:
            found[key] = solve(graph, info, options)
        return found[key]

    networkx.minimum_cut = functools.partial(slow, flow_func=boykov_kolmogorov)
    partitioners.solve_min_cut = once  # type: ignore[assignment]
    try:
        yield
    finally:
        networkx.minimum_cut, partitioners.solve_min_cut = slow, solve


def min_cut(graph: olla.Graph, order: NDArray[np.int32], device: str) -> list[Point]:
    """Return the points of the min-cut partitioner, one per activation_memory_budget."""
    simulation = Simulation(graph, order, device, replay_random=False)
    joint = joint_graph(simulation)
    points = []
    start = time.perf_counter()
    estimator = functorch_config.patch(activation_memory_budget_runtime_estimator=_Flops())
    with estimator, _fast_cuts():
        saved = {b: partitioners.choose_saved_values_set(joint.graph, joint.info, b) for b in BUDGETS}
    seconds = time.perf_counter() - start
    for budget, nodes in saved.items():
        dropped = np.ones(len(simulation.tensor), dtype=np.bool_)
        dropped[[joint.value_of[node] for node in nodes]] = False
        point = simulation.point(dropped, "min-cut", f"{budget:.1f}", seconds)
        if point is not None:
            points.append(point)
    return points
