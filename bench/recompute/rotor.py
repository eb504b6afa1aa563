"""Rotor as a rival: optimal checkpointing of a chain of stages, written anew from the paper, on our graphs.

The forward pass is cut into stages where few bytes cross. Rotor's dynamic program says, for a memory limit, which
stages keep everything for the backward pass, and which are recomputed from which checkpoint, any number of times. Its
schedule is a list of stages to run; it becomes a graph in which every run is an op of its own, and olla's simulation of
that graph says what it really needs: tensors die after their last use, what nothing uses is not run.

It is the solver of linear graphs in Rockmate, too.

Source: Beaumont, Eyraud-Dubois, Hermann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains: how to train
deep neural networks with limited memory" (Inria RR-9302, 2019), theorem 1.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import olla
from bench.recompute.recompute_rivals import Point
from olla import _core
from olla.graph import profile_of

_SLOTS = 400  # memory of the dynamic program, in equal parts
_LIMITS = 12  # memory limits tried, from the least feasible to all


@dataclass(frozen=True)
class Chain:
    """Stages of a step, and their figures: time in seconds, memory in slots. Index 0 is the first stage.

    Attributes:
        forward, backward: ops of each stage, in order; those of updates are among the latter.
        forward_seconds, backward_seconds: float64[n].
        crossing: int64[n], what the next stages read of it and of those before.
        saved: int64[n], what its own backward ops, or later stages, use of what it makes.
        forward_extra, backward_extra: int64[n], most that one op takes besides.
    """

    forward: list[list[int]]
    backward: list[list[int]]
    forward_seconds: NDArray[np.float64]
    backward_seconds: NDArray[np.float64]
    crossing: NDArray[np.int64]
    saved: NDArray[np.int64]
    forward_extra: NDArray[np.int64]
    backward_extra: NDArray[np.int64]


def rotor(
    graph: olla.Graph, order: NDArray[np.int32], device: str, num_stages: Iterable[int] = (8, 16, 32)
) -> list[Point]:
    """Return the points of Rotor, over chains of several lengths and memory limits.

    Raises:
        ValueError: an op of the forward pass changes a tensor in place; a second run would change it again.
    """
    start = time.perf_counter()
    forward = [int(v) for v in order if graph.op_kinds[v] == "forward"]
    if any(len(graph.mutates.of(v)) for v in forward):
        raise ValueError("Rotor recomputes stages, and a forward op of this graph changes a tensor in place")
    seconds = profile_of(device).op_seconds(graph)
    found: dict[tuple[int, float], str] = {}
    for num in num_stages:
        chain = chain_of(graph, order, forward, seconds, num)
        table = solve(chain)
        (feasible,) = np.nonzero(np.isfinite(table[0, -1]))
        for limit in np.unique(np.linspace(feasible[0], _SLOTS, _LIMITS, dtype=int)) if len(feasible) else ():
            unrolled = unroll(graph, chain, list(schedule(chain, table, int(limit))))
            steps = np.arange(unrolled.num_ops, dtype=np.int32)
            peak = int(_core.profile(unrolled.core, steps).peak_bytes)
            added = float(profile_of(device).op_seconds(unrolled).sum() - seconds.sum())
            found.setdefault((peak, max(0.0, added)), f"{limit / _SLOTS:.0%} of {len(chain.forward)} stages")
    spent = time.perf_counter() - start
    return [Point("Rotor", setting, peak, added, spent) for (peak, added), setting in found.items()]


def chain_of(
    graph: olla.Graph, order: NDArray[np.int32], forward: list[int], seconds: NDArray[np.float64], num_stages: int
) -> Chain:
    """Cut the forward pass where the fewest bytes cross, once in each of so many parts of equal bytes."""
    made_at = {int(t): i for i, v in enumerate(forward) for t in graph.writes.of(v)}
    last = {t: i for i, v in enumerate(forward) for t in map(int, graph.reads.of(v)) if t in made_at}
    size = graph.tensor_bytes
    change = np.zeros(len(forward) + 1, dtype=np.int64)
    for t, end in last.items():
        change[made_at[t]] += size[t]
        change[end] -= size[t]
    crosses = np.cumsum(change)[:-1]
    weight = np.cumsum([int(size[graph.writes.of(v)].sum()) for v in forward])
    parts = np.searchsorted(weight, weight[-1] * np.arange(1, num_stages) / num_stages)
    half = max(1, len(forward) // (2 * num_stages))
    nearest = [max(0, p - half) + int(np.argmin(crosses[max(0, p - half) : p + half])) for p in parts]
    ends = sorted({*nearest, len(forward) - 1})
    stage_of = np.searchsorted(ends, np.arange(len(forward)))
    num = len(ends)
    stage = {t: int(stage_of[i]) for t, i in made_at.items()}
    ops: tuple[list[list[int]], list[list[int]]] = [[] for _ in range(num)], [[] for _ in range(num)]
    for i, v in enumerate(forward):
        ops[0][stage_of[i]].append(v)
    # What many stages read, such as positions, says of no backward op to which stage it belongs.
    near = {t: s for t, s in stage.items() if stage_of[last.get(t, made_at[t])] <= s + 1}
    used = set[int]()
    made = dict[int, int]()  # by ops of the backward pass -> stage
    extra = np.zeros((2, num), dtype=np.int64)
    for v in map(int, order):
        reads = [int(t) for t in (*graph.reads.of(v), *graph.mutates.of(v))]
        writes = [int(t) for t in graph.writes.of(v)]
        if graph.op_kinds[v] == "forward":
            s, temporary = int(stage[writes[0]]), writes
        else:
            used.update(t for t in reads if t in stage)
            s = min((near.get(t, made.get(t, num - 1)) for t in reads), default=num - 1)
            ops[1][s].append(v)
            made.update(dict.fromkeys((*writes, *(int(t) for t in graph.mutates.of(v))), s))
            temporary = [*writes, *(t for t in reads if t in made and graph.tensor_kinds[t] == "temporary")]
        at = int(graph.op_kinds[v] != "forward"), s
        extra[at] = max(extra[at], int(size[list(set(temporary))].sum()) + int(graph.workspace_bytes[v]))
    saved = np.zeros(num, dtype=np.int64)
    for t, s in stage.items():
        if t in used or stage_of[last.get(t, made_at[t])] > s:
            saved[s] += size[t]
    total = int(saved.sum() + crosses[ends].max() + extra.max())
    slots = [-(-a * _SLOTS // total) for a in (crosses[ends], saved, extra[0], extra[1])]
    times = [np.array([seconds[part].sum() for part in parts]) for parts in ops]
    return Chain(*ops, *times, *slots)


def solve(chain: Chain) -> NDArray[np.float64]:
    """Return the least seconds of stages s to t within m slots: float64[s, t, m]; infinite where they do not fit."""
    num = len(chain.forward)
    best = np.full((num, num, _SLOTS + 1), np.inf)
    for length in range(num):
        for s in range(num - length):
            t = s + length
            best[s, t] = np.minimum.reduce([cost for _, cost in _choices(chain, best, s, t)])
    return best


def _choices(chain: Chain, best: NDArray[np.float64], s: int, t: int) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """Yield what may be done first, and its costs: keep all of stage s (-1), or come back to s after stages k to t."""
    gradient = chain.crossing
    keep = max(
        gradient[t] + chain.saved[s] + chain.forward_extra[s], gradient[s] + chain.saved[s] + chain.backward_extra[s]
    )
    rest = _less(best[s + 1, t], chain.saved[s]) if t > s else np.zeros(_SLOTS + 1)
    yield -1, _at_least(chain.forward_seconds[s] + chain.backward_seconds[s] + rest, keep)
    passing = gradient[t] + chain.crossing[s] + chain.forward_extra[s]
    for k in range(s + 1, t + 1):
        again = chain.forward_seconds[s:k].sum()
        cost = again + _less(best[k, t], chain.crossing[k - 1]) + best[s, k - 1]
        yield k, _at_least(cost, passing)
        passing = max(passing, gradient[t] + chain.crossing[k - 1] + chain.crossing[k] + chain.forward_extra[k])


def _less(costs: NDArray[np.float64], slots: int) -> NDArray[np.float64]:
    """Return the costs where so many slots are taken already."""
    slots = min(int(slots), _SLOTS + 1)
    return np.concatenate([np.full(slots, np.inf), costs[: _SLOTS + 1 - slots]])


def _at_least(costs: NDArray[np.float64], slots: int) -> NDArray[np.float64]:
    """Return the costs, infinite below so many slots."""
    return np.where(np.arange(_SLOTS + 1) >= slots, costs, np.inf)


def schedule(chain: Chain, best: NDArray[np.float64], slots: int) -> Iterator[tuple[str, int]]:
    """Yield what to run: ("forward", stage) or ("backward", stage)."""
    todo: list[tuple[str, int, int, int]] = [("all", 0, len(chain.forward) - 1, slots)]
    while todo:
        what, s, t, m = todo.pop()
        if what == "backward":
            yield "backward", s
            continue
        first = min(((cost[m], k) for k, cost in _choices(chain, best, s, t)), key=lambda found: found[0])[1]
        if first < 0:
            yield "forward", s
            todo.append(("backward", s, s, 0))
            if t > s:
                todo.append(("all", s + 1, t, m - int(chain.saved[s])))
        else:
            yield from (("forward", k) for k in range(s, first))
            todo.append(("all", s, first - 1, m))
            todo.append(("all", first, t, m - int(chain.crossing[first - 1])))


def unroll(graph: olla.Graph, chain: Chain, runs: list[tuple[str, int]]) -> olla.Graph:
    """Return the graph of a schedule: an op for every run, which reads what was made last; unused runs are left out."""
    ops = [v for what, s in runs for v in (chain.forward if what == "forward" else chain.backward)[s]]
    if missing := set(range(graph.num_ops)) - set(ops):
        raise ValueError(f"the schedule leaves out ops {sorted(missing)[:5]}")
    if len(ops) - len(set(ops)) != len([v for v in ops if graph.op_kinds[v] == "forward"]) - sum(
        map(len, chain.forward)
    ):
        raise ValueError("the schedule runs an op of the backward pass twice")
    needed = {int(t) for t in graph.outputs}
    kept = list[int]()
    for v in reversed(ops):
        writes, mutates = set(map(int, graph.writes.of(v))), set(map(int, graph.mutates.of(v)))
        if writes & needed or mutates:
            needed = (needed - writes) | set(map(int, graph.reads.of(v))) | mutates
            kept.append(v)
    builder = olla.Graph.builder(graph.name)
    place = {
        t: builder.tensor(int(graph.tensor_bytes[t]), kind=kind)
        for t, kind in enumerate(graph.tensor_kinds)
        if kind != "temporary"
    }
    for v in reversed(kept):
        reads, mutates = ([place[int(t)] for t in lists.of(v)] for lists in (graph.reads, graph.mutates))
        for t in map(int, graph.writes.of(v)):
            place[t] = builder.tensor(int(graph.tensor_bytes[t]))
        builder.op(
            graph.op_names[v],
            kind=graph.op_kinds[v],
            target=graph.targets[v],
            reads=reads,
            writes=[place[int(t)] for t in graph.writes.of(v)],
            mutates=mutates,
            workspace_bytes=int(graph.workspace_bytes[v]),
            seconds=float(graph.seconds[v]),
            flops=int(graph.flops[v]),
            moved_bytes=int(graph.moved_bytes[v]),
            launches=int(graph.launches[v]),
            shape=graph.shapes[v],
        )
    for t in graph.outputs:
        builder.output(place[int(t)])
    return builder.build()
