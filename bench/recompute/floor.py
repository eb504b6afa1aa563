"""The least peak at whatever time, and what no plan can go below, by every set of large tensors that can be live.

    python bench/recompute/floor.py --graphs resnet50_b32

"working set" is resident memory and the largest single op, as captured. What is proved is at least that of the largest
op over an input that it may overwrite. Where a plan ends above that, the proof asks more: all tensors of less than the
largest size are taken to need no memory and to be there at any time, any op may run at any time and any number of
times, over any such input. Sets of large tensors that can then be live without the limit being passed are searched
exhaustively. An op that none of them lets run needs more, in every order and rewriting.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla
from bench.recompute.bench_budget import GRAPHS
from bench.support.harness import Cell, Report, graph_files, graph_name
from olla.graph import Lists, Rules, profile_of, rules
from olla.swap.bound import working_sets

_LEAST_GAP = 1.001  # of a peak to its working set, that is worth a proof
_MOST_STATES = 2_000_000


class Move(NamedTuple):
    """One way to run an op: what must be live, what is made in new memory, what is made over an input that ends."""

    op: int
    needs: frozenset[int]
    new: frozenset[int]
    over: frozenset[int]
    ends: frozenset[int]


def moves(graph: olla.Graph, allowed: Rules, least_bytes: int) -> tuple[list[Move], dict[int, int]]:
    """Return the ways to run every op that has to do with large values, and the bytes of those."""
    values = allowed.evictor(graph, np.arange(graph.num_ops, dtype=np.int32)).values
    tensor, producer = values.tensor, values.producer
    resident = np.ones(graph.num_tensors, dtype=np.bool_)
    resident[graph.writes.item] = False
    num_bytes = np.where(resident[tensor] & ~graph.donated[tensor], 0, graph.tensor_bytes[tensor])
    is_large = (num_bytes >= max(1, least_bytes)) & (producer >= 0)
    large = {x: int(num_bytes[x]) for x in np.flatnonzero(is_large).tolist()}
    reads, overwrites, makes = (Lists(*lists) for lists in (values.reads, values.overwrites, values.makes))
    found = []
    for v in range(graph.num_ops):
        changed = [x for x in overwrites.of(v).tolist() if x in large]
        needs = frozenset(x for x in (*reads.of(v).tolist(), *changed) if x in large)
        made = frozenset(x for x in makes.of(v).tolist() if x in large)
        if not needs and not made:
            continue
        found.append(Move(v, needs, made, frozenset(), frozenset()))
        if changed:  # what it changes, in place; the others in new memory
            over = frozenset(x for x in made if any(tensor[x] == tensor[y] for y in changed))
            found.append(Move(v, needs, made - over, over, frozenset(changed)))
        if allowed.in_place[v] and len(made) == 1:
            same = [x for x in needs if large[x] >= large[next(iter(made))]]
            found += [Move(v, needs, frozenset(), made, frozenset([x])) for x in same]
        if len(saved := allowed.rerun_reads.of(v)):  # again, from less than it read
            again = frozenset(x for x in needs if tensor[x] in saved)
            first = [x for x in makes.of(v)[:1].tolist() if x in large]
            found.append(Move(v, again, frozenset(first), frozenset(), frozenset()))
    return found, large


def blocked(ways: list[Move], large: dict[int, int], most_bytes: int) -> tuple[set[int], int]:
    """Return the ops that no reachable set of live large values lets run within so many bytes; the least bytes beyond.

    Complexity:
        O(sets of values within the limit * ways).
    """

    def size(live: frozenset[int]) -> int:
        return sum(large[x] for x in live)

    waiting = {way.op for way in ways}
    seen: set[frozenset[int]] = {frozenset()}
    queue = [frozenset[int]()]
    beyond = sum(large.values())

    def smaller(live: frozenset[int]) -> Iterator[frozenset[int]]:
        for k in range(len(live) + 1):
            yield from map(frozenset, combinations(live, k))

    while queue and waiting:
        live = queue.pop()
        for way in ways:
            if not way.needs <= live:
                continue
            during = live | way.new
            if size(during) > most_bytes:
                beyond = min(beyond, size(during))
                continue
            waiting.discard(way.op)
            for after in smaller((during - way.ends) | way.over):
                if after not in seen:
                    seen.add(after)
                    queue.append(after)
        if len(seen) > _MOST_STATES:
            raise MemoryError(f"more than {_MOST_STATES:,} sets of live tensors: take larger ones")
    return waiting, beyond


def least_peak(graph: olla.Graph, allowed: Rules, least_bytes: int) -> tuple[int, int]:
    """Return bytes that no plan goes below, whatever time it takes, and an op that forces them.

    Args:
        graph: the training step.
        allowed: its rules.
        least_bytes: of a large value.
    """
    ways, large = moves(graph, allowed, least_bytes)
    limit, forcing = 0, -1
    while True:
        left, beyond = blocked(ways, large, limit)
        if not left:
            return graph.resident_bytes + limit, forcing
        limit, forcing = beyond, min(left)


def main() -> int:
    """Plan the graphs; return the exit status: 1 if a plan is further than 10 % above working set and proof."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=GRAPHS, help="names, patterns or files; default: the twelve")
    parser.add_argument("--time-limit", type=float, default=15.0, help="seconds per plan (default: 15)")
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    options = parser.parse_args()
    columns = ["graph", "peak MiB", "working set MiB", "above it, %", "proved MiB", "above that, %", "forced by"]
    report, wrong = Report("The least peak at whatever time, and what no plan can go below", columns), 0
    for path in graph_files(options.graphs):
        graph = olla.Graph.load(path)
        plan = olla.plan(graph, minimise="peak", time_limit=options.time_limit, layout=False)
        allowed = rules(graph, profile_of("a100"))
        plain = int(working_sets(graph, allowed._replace(in_place=np.zeros_like(allowed.in_place))).max())
        sets = working_sets(graph, allowed)
        proved, op = int(sets.max()), int(sets.argmax())
        if plan.peak_bytes > _LEAST_GAP * proved:
            written = graph.tensor_bytes[graph.writes.item]
            bound, forcing = least_peak(graph, allowed, int(written.max()))
            if bound > proved:
                proved, op = bound, forcing
        above = [100 * (plan.peak_bytes / least - 1) for least in (plain, proved)]
        wrong += min(above) > 10
        row: list[Cell] = [graph_name(path), plan.peak_bytes / 2**20, plain / 2**20, above[0]]
        report.rows.append([*row, proved / 2**20, above[1], graph.op_names[op]])
        print(*report.rows[-1], file=sys.stderr)
    report.print()
    if options.markdown:
        report.save(options.markdown)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
