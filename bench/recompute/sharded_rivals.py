"""Fixed answers to what sharded parameters ask, as rewritings of one graph; and the least that must be gathered.

FSDP2 with reshard_after_forward=True gathers every parameter of a block again in backward. Beside that, "full" computes
a block again from its input, "selective" keeps what matrix products and attention make. Here each gets what olla's
rewritings get, and its own way does not have: results in place, tensors that go with their last use, parameters one by
one instead of whole blocks of them, nothing fetched ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import highspy
import numpy as np
from numpy.typing import NDArray

import olla
from olla import _core
from olla.graph import DeviceProfile, Lists, Rules
from olla.graph.collectives import gathers
from olla.order.gathers import gathered_late
from olla.order.overlap import overlapped
from olla.recompute.rewrite import recomputed_graph

_KEPT_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten._scaled_dot_product")


class Rival(NamedTuple):
    """What a fixed answer needs.

    Attributes:
        peak_bytes: of a rank.
        added_seconds: of what is recomputed and gathered again.
        gathered_bytes: of all all-gathers.
        step_seconds: of its timeline, with collectives beside other ops as far as its peak allows.
    """

    peak_bytes: int
    added_seconds: float
    gathered_bytes: int
    step_seconds: float


def fixed(graph: olla.Graph, allowed: Rules, device: DeviceProfile, keeps: Callable[[str], bool] | None) -> Rival:
    """Return what FSDP2 needs that gathers every parameter of a block again.

    Args:
        graph: a captured Llama of transformers.
        allowed: what may be done with its ops.
        device: what seconds are estimated for.
        keeps: whether a block's forward keeps what an operator makes, by its target; None: it keeps everything.
    """
    order = gathered_late(graph, np.arange(graph.num_ops, dtype=np.int32))
    search = allowed.evictor(graph, order)
    values, steps = _dropped(graph, search, order, keeps)
    assert search.reset(np.array(values, dtype=np.int32), np.array(steps, dtype=np.int32))
    made = recomputed_graph(graph, allowed, search)
    program = np.arange(made.graph.num_ops, dtype=np.int32)
    peak = _core.profile(made.graph.core, program).peak_bytes
    assert peak == search.peak
    seconds = olla.timeline(made.graph, overlapped(made.graph, made.graph.core, program, device), device).seconds
    return Rival(int(peak), float(made.added_seconds), gathered_bytes(made.graph), seconds)


def _dropped(
    graph: olla.Graph, search: _core.CoreRecomputeSearch, order: NDArray[np.int32], keeps: Callable[[str], bool] | None
) -> tuple[list[int], list[int]]:
    """Return the values that forward does not keep, and the last steps of forward that use them."""
    place = np.argsort(order)
    found = search.values
    reads, overwrites = Lists(*found.reads), Lists(*found.overwrites)
    users: dict[int, list[int]] = {}
    for v in range(graph.num_ops):
        for x in (*reads.of(v).tolist(), *overwrites.of(v).tolist()):
            users.setdefault(x, []).append(v)
    forward = [kind == "forward" for kind in graph.op_kinds]
    gather, block = gathers(graph), _blocks(graph)
    values, steps = [], []
    for x, maker in enumerate(found.producer.tolist()):
        if maker < 0 or not forward[maker] or not any(not forward[u] for u in users.get(x, ())):
            continue
        if gather[maker]:
            names = [graph.tensor_names[t] for t in graph.reads.of(maker).tolist()]
            dropped = graph.collectives[maker] == "wait" and any(".layers." in name for name in names)
        else:
            dropped = keeps is not None and maker in block and not keeps(graph.targets[maker])
        if dropped:
            values.append(x)
            steps.append(int(max(place[u] for u in (maker, *users[x]) if forward[u])))
    return values, steps


def _blocks(graph: olla.Graph) -> set[int]:
    """Return the ops inside blocks of layers, without the sums that end them: these are the input of the next block."""
    names = [graph.tensor_names[t] for t in range(graph.num_tensors)]
    gather = gathers(graph)
    embedded = next(v for v in range(graph.num_ops) if graph.targets[v].startswith("aten.embedding."))
    first = _next_use(graph, embedded)
    ends, last = set(), first
    for v in np.flatnonzero(gather).tolist():
        if graph.collectives[v] == "all_gather" and names[graph.reads.of(v)[0]].endswith("mlp.down_proj.weight"):
            product = _next_use(graph, v + 1, "aten.mm")
            last = _next_use(graph, product, "aten.add.")
            ends.add(last)
    return {v for v in range(first, last) if v not in ends}


def _next_use(graph: olla.Graph, v: int, target: str = "") -> int:
    made = {*graph.writes.of(v).tolist(), *graph.mutates.of(v).tolist()}
    return next(
        u
        for u in range(v + 1, graph.num_ops)
        if graph.targets[u].startswith(target) and not made.isdisjoint(graph.reads.of(u).tolist())
    )


def keeps_products(target: str) -> bool:
    """Whether selective checkpointing keeps what an operator makes."""
    return target.startswith(_KEPT_PRODUCTS)


def gathered_bytes(graph: olla.Graph) -> int:
    """Return the bytes of all all-gathers."""
    return int(graph.message_bytes[[kind == "all_gather" for kind in graph.collectives]].sum())


def least_gathered_bytes(graph: olla.Graph, order: NDArray[np.int32], peak_bytes: int) -> float:
    """Return a lower bound on the bytes of all-gathers, with every other op of a plan at its place.

    Between two uses of a parameter it is kept, or gathered again. A share of it may be, here: the linear relaxation of
    that choice, so that no step has more than the peak.

    Args:
        graph: of the plan, rewritten.
        order: int32[num_ops], of the plan.
        peak_bytes: of the plan.

    Complexity:
        A linear program of one column for each gap between two uses, one row for each place where gaps begin or end.
    """
    place = np.argsort(order)
    profile = _core.profile(graph.core, order)
    gather = gathers(graph)
    issues = [v for v in np.flatnonzero(gather).tolist() if graph.collectives[v] == "all_gather"]
    shard_of = {int(graph.writes.of(v)[0]): int(graph.reads.of(v)[0]) for v in issues}
    size = {shard_of[t]: int(graph.tensor_bytes[t]) for t in shard_of}
    other = profile.live_bytes.astype(np.int64).copy()  # during each step, without what is gathered
    uses: dict[int, set[int]] = {}
    for t, shard in shard_of.items():
        other[profile.first[t] : profile.last[t]] -= graph.tensor_bytes[t]
        uses.setdefault(shard, set())
    for v in range(graph.num_ops):
        if not gather[v]:
            for t in (*graph.reads.of(v).tolist(), *graph.mutates.of(v).tolist()):
                if t in shard_of:
                    uses[shard_of[t]].add(int(place[v]))
    gaps = []
    for shard, steps in uses.items():
        ordered = sorted(steps)
        for step in ordered:
            other[step] += size[shard]
        gaps += [(a + 1, b, size[shard]) for a, b in pairwise(ordered) if b > a + 1]
    room = peak_bytes - other
    assert (room >= 0).all()
    kept = _most_kept(gaps, room)
    return float(sum(size.values()) + sum(num for _, _, num in gaps) - kept)


def _most_kept(gaps: list[tuple[int, int, int]], room: NDArray[np.int64]) -> float:
    """Return the most bytes that are kept through gaps [first, last) of so many bytes, within the room of each step."""
    if not gaps:
        return 0.0
    unit = 2.0**20
    edges = sorted({edge for first, last, _ in gaps for edge in (first, last)})
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    none: list[int] = []
    for _, _, num in gaps:
        solver.addCol(-num / unit, 0.0, 1.0, 0, np.array(none, dtype=np.int32), np.array(none, dtype=np.float64))
    for low, high in pairwise(edges):
        inside = [i for i, (first, last, _) in enumerate(gaps) if first <= low and high <= last]
        least = float(room[low:high].min()) / unit
        if sum(gaps[i][2] for i in inside) / unit > least:
            sizes = np.array([gaps[i][2] / unit for i in inside])
            solver.addRow(-highspy.kHighsInf, least, len(inside), np.array(inside, dtype=np.int32), sizes)
    solver.run()
    assert solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return -solver.getInfo().objective_function_value * unit
