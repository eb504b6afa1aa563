"""Least added time for a memory limit, by trying everything: all orders, all recomputations, all overwritten inputs.

For tiny graphs that change resident tensors alone, each op with at most one result. Nothing here uses olla's core.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from olla import Graph, _core
from olla.graph import Rules
from olla.graph.columns import lists_of


@dataclass(frozen=True)
class Permissions:
    """What each op of a tiny graph may do: seconds of a run, whether it may be recomputed, whether it may overwrite."""

    seconds: list[int]
    again: list[bool]
    in_place: list[bool]


def least_added_seconds(graph: Graph, allowed: Permissions, peak_bytes: int) -> float:
    """Return the least time beyond one run of each op with which no step needs more than peak_bytes; inf if none does.

    Dijkstra over (ops that have run, tensors in memory). Complexity: exponential; for 6 ops or fewer.
    """
    reads = [frozenset(graph.reads.of(v).tolist()) for v in range(graph.num_ops)]
    result = [graph.writes.of(v).tolist() for v in range(graph.num_ops)]
    written = frozenset(t for ts in result for t in ts)
    size = graph.tensor_bytes.tolist()
    given = frozenset(t for t in range(graph.num_tensors) if t not in written and graph.donated[t])
    resident = sum(size[t] for t in range(graph.num_tensors) if t not in written | given)
    outputs = frozenset(graph.outputs.tolist()) & written
    changers: dict[int, int] = {}  # of each tensor that is changed: the ops that do, as bits
    before = list[list[tuple[int, int]]]()  # of each op: what it uses, and whose changes it sees
    for v in range(graph.num_ops):
        used = {*graph.reads.of(v).tolist(), *graph.mutates.of(v).tolist()}
        before.append([(t, changers.get(t, 0)) for t in used])
        for t in graph.mutates.of(v).tolist():
            changers[t] = changers.get(t, 0) | 1 << v
    everything = (1 << graph.num_ops) - 1

    start = (0, given)
    best = {start: 0}
    queue: list[tuple[int, int, int, frozenset[int]]] = [(0, 0, *start)]
    count = 0

    def push(cost: int, done: int, live: frozenset[int]) -> None:
        nonlocal count
        if cost < best.get((done, live), 1 << 60):
            best[done, live] = cost
            count += 1
            heapq.heappush(queue, (cost, count, done, live))

    while queue:
        cost, _, done, live = heapq.heappop(queue)
        if cost > best[done, live]:
            continue
        if done == everything and outputs <= live:
            return cost
        for t in live:
            push(cost, done, live - {t})
        held = resident + sum(size[t] for t in live)
        for v in range(graph.num_ops):
            again = bool(done >> v & 1)
            if (again and not allowed.again[v]) or not (reads[v] & (written | given)) <= live or set(result[v]) & live:
                continue
            if any(done & changers.get(t, 0) != seen for t, seen in before[v]):  # another value, gone or not there yet
                continue
            added = allowed.seconds[v] if again else 0
            after = done | 1 << v
            need = held + int(graph.workspace_bytes[v])
            if need + sum(size[t] for t in result[v]) <= peak_bytes:
                push(cost + added, after, live | set(result[v]))
            if not allowed.in_place[v] or need > peak_bytes or len(result[v]) != 1:
                continue
            for x in reads[v] & live & written:
                if size[x] == size[result[v][0]]:
                    push(cost + added, after, live - {x} | set(result[v]))
    return math.inf


def least_peak_bytes(graph: Graph, allowed: Permissions, added_seconds: float) -> int:
    """Return the least peak with which at most added_seconds are added, by bisection over the limit."""
    low, high = 0, int(graph.tensor_bytes.sum() + graph.workspace_bytes.sum())
    while low < high:
        middle = (low + high) // 2
        if least_added_seconds(graph, allowed, middle) <= added_seconds:
            high = middle
        else:
            low = middle + 1
    return low


@st.composite
def tiny(draw: st.DrawFn, max_ops: int = 6, updates: bool = False) -> tuple[Graph, Permissions]:
    """A graph with one result per op, and what its ops may do; equal sizes are common.

    With `updates`, ops may change a parameter in place as well, also one that is read by what comes before alone; an
    update has no result.
    """
    builder = Graph.builder("tiny")
    donated = st.just(False) if updates else st.booleans()
    tensors = [builder.tensor(draw(st.integers(0, 3)), kind="parameter", donated=draw(donated)) for _ in range(2)]
    parameters = list(tensors)
    num_ops = draw(st.integers(2 if updates else 1, max_ops))
    changes = list[bool]()
    for v in range(num_ops):
        recent = list(dict.fromkeys([*(parameters if updates else ()), *tensors[-4:]]))
        changes.append(updates and v > 0 and (v == num_ops - 1 or draw(st.integers(0, 3)) == 0))
        if changes[-1]:
            changed = draw(st.sampled_from(parameters))
            others = [t for t in recent if t != changed]
            read = draw(st.lists(st.sampled_from(others), max_size=1))
            builder.op(f"update_{v}", reads=read, mutates=[changed], kind="update")
            continue
        reads = draw(st.lists(st.sampled_from(recent), max_size=3, unique=True))
        written = builder.tensor(draw(st.sampled_from([1, 2, 2, 4, 4, 7])))
        builder.op(f"op_{v}", reads=reads, writes=[written], workspace_bytes=draw(st.sampled_from([0, 0, 0, 2])))
        tensors.append(written)
    for t in draw(st.lists(st.sampled_from(tensors[2:]), max_size=2, unique=True)):
        builder.output(t)
    flags = st.lists(st.booleans(), min_size=num_ops, max_size=num_ops)
    seconds = draw(st.lists(st.integers(1, 5), min_size=num_ops, max_size=num_ops))
    again, in_place = ([may and not change for may, change in zip(draw(flags), changes, strict=True)] for _ in range(2))
    return builder.build(), Permissions(seconds, again, in_place)


def evictor(graph: Graph, allowed: Permissions, order: NDArray[np.int32] | None = None) -> _core.CoreRecomputeSearch:
    """The searches of the core on an order; default: the program's."""
    seconds = np.array(allowed.seconds, dtype=np.float64)
    rules = Rules(
        seconds=seconds,
        rerun=np.array(allowed.again, dtype=np.uint8),
        rerun_seconds=seconds,
        rerun_moved_bytes=np.zeros(graph.num_ops, dtype=np.int64),
        rerun_reads=lists_of([[]] * graph.num_ops),
        in_place=np.array(allowed.in_place, dtype=np.uint8),
    )
    return rules.evictor(graph, np.arange(graph.num_ops, dtype=np.int32) if order is None else order)
