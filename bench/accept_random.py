"""Compare planning with brute force on small random graphs and buffers.

    python bench/accept_random.py --num-graphs 5000

Orders: the least peak over all orders by exhaustive search in plain Python (sharing nothing with the core), against the
plan, its bound, and the plan of the integer program. Layouts: the least height over all placements of up to seven
buffers. Prints counts and the seeds of disagreements; exit status 1 if there is one.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

import olla
from generate import random_graph
from harness import Report
from olla import _core


@dataclass(frozen=True)
class Model:
    """A graph as plain Python, its dependencies derived anew. Sets of ops are bit masks: bit v is op v."""

    num_ops: int
    tensor_bytes: list[int]
    workspace_bytes: list[int]
    producer: list[int]  # mask of the op that writes tensor t; 0 if resident
    users: list[int]  # mask of the ops that read or mutate tensor t
    kept: list[bool]  # tensor t is never freed: an output, or resident and not donated
    before: list[int]  # mask of the ops that must run before op v

    @classmethod
    def of(cls, graph: olla.Graph) -> Model:
        ops, tensors = range(graph.num_ops), range(graph.num_tensors)
        columns = (graph.reads, graph.writes, graph.mutates)
        reads, writes, mutates = ([set(lists.of(v).tolist()) for v in ops] for lists in columns)
        before = [_mask(graph.after.of(v).tolist()) for v in ops]
        for u, v in itertools.combinations(ops, 2):
            shared = (reads[u] | mutates[u] | writes[u]) & (reads[v] | mutates[v])
            ordered = any(t in writes[u] or t in mutates[u] or t in mutates[v] for t in shared)
            if ordered or (graph.random[u] and graph.random[v]):
                before[v] |= 1 << u
        producer = [_mask(v for v in ops if t in writes[v]) for t in tensors]
        outputs = set(graph.outputs.tolist())
        return cls(
            num_ops=graph.num_ops,
            tensor_bytes=graph.tensor_bytes.tolist(),
            workspace_bytes=graph.workspace_bytes.tolist(),
            producer=producer,
            users=[_mask(v for v in ops if t in reads[v] | mutates[v]) for t in tensors],
            kept=[t in outputs or not (producer[t] or graph.donated[t]) for t in tensors],
            before=before,
        )

    def step_bytes(self, done: int, op: int) -> int:
        """Bytes live while op runs after the ops in the mask done, in whatever order those ran."""
        born, own = done | 1 << op, 1 << op
        live = self.workspace_bytes[op]
        for size, producer, users, kept in zip(self.tensor_bytes, self.producer, self.users, self.kept, strict=True):
            if producer & own or ((not producer or producer & born) and (kept or users & ~done)):
                live += size
        return live


def _mask(ops: Iterable[int]) -> int:
    return sum(1 << v for v in set(ops))


def least_peak(graph: olla.Graph) -> int:
    """Return the least peak over all orders of a graph of up to about ten ops.

    The memory of a step depends on which ops ran before it, not on their order, so that all orders are covered by going
    through all sets of ops that can have run: O(2^ops * ops * tensors).
    """
    model = Model.of(graph)
    best = {0: graph.resident_bytes}
    for _ in range(model.num_ops):
        reached: dict[int, int] = {}
        for done, peak in best.items():
            for op in range(model.num_ops):
                if not done >> op & 1 and model.before[op] & done == model.before[op]:
                    value = max(peak, model.step_bytes(done, op))
                    after = done | 1 << op
                    reached[after] = min(value, reached.get(after, value))
        best = reached
    return min(best.values())


def least_height(buffers: list[tuple[int, int, int]]) -> int:
    """Return the least height of buffers (lower, upper, size) over all placements: up to about seven of them.

    In order of a best placement's offsets, putting every buffer on top of the highest one it meets in time raises none
    of them. So the least height over all permutations is exact; a branch ends where it cannot fall below the best one.
    """
    load = max((sum(s for a, b, s in buffers if a <= t < b) for t, _, _ in buffers), default=0)
    best = sum(size for _, _, size in buffers)

    def search(placed: list[tuple[int, int, int]], left: list[tuple[int, int, int]], height: int) -> None:
        nonlocal best
        if height >= best or best == load:
            return
        if not left:
            best = height
            return
        for i, (lower, upper, size) in enumerate(left):
            top = max((t for a, b, t in placed if a < upper and lower < b), default=0) + size
            search([*placed, (lower, upper, top)], left[:i] + left[i + 1 :], max(height, top))

    search([], [b for b in buffers if b[0] < b[1] and b[2] > 0], 0)
    return best


def check_graph(seed: int, max_ops: int) -> list[str]:
    """Return what disagrees on one random graph."""
    rng = random.Random(seed)
    # Larger sizes without a common divisor pass what floating point tells apart: the integer program then says so.
    window, max_bytes = rng.choice((3, 6, 12)), rng.choice((3, 64, 1 << 20))
    graph = random_graph(rng.randint(0, max_ops), seed=seed, window=window, max_bytes=max_bytes)
    exact = least_peak(graph)
    wrong = []
    for name, solve in (("auto", plan_auto), ("ilp", plan_ilp), ("ilp alone", ilp_alone)):
        try:
            peak, bound = solve(graph)
        except olla.OllaError as error:
            print(f"seed {seed}, {name}: {error}", file=sys.stderr)
            wrong.append(f"{name} fails")
            continue
        wrong += [f"{name} peak"] if peak != exact else []
        wrong += [f"{name} bound"] if bound != exact else []
    return wrong


def plan_auto(graph: olla.Graph, method: str = "auto") -> tuple[int, int]:
    """Return the peak and the bound of a checked plan."""
    plan = olla.plan(graph, method=method)
    olla.check(graph, plan)
    return plan.peak_bytes, plan.lower_bound_bytes


def plan_ilp(graph: olla.Graph) -> tuple[int, int]:
    """Return the peak and the bound of a checked plan by the integer program, given warm starts and a bound."""
    return plan_auto(graph, "ilp")


def ilp_alone(graph: olla.Graph) -> tuple[int, int]:
    """Return the peak and the bound that the integer program finds from the program order and no bound at all."""
    from olla.ilp import highs_library

    program = np.arange(graph.num_ops, dtype=np.int32)
    _, peak, bound, *_ = _core.order_ilp(graph.core, program, 0, highs_library(), 30.0, 0, 1, None)
    return int(peak), int(bound)


def check_buffers(seed: int) -> list[str]:
    """Return what disagrees on one random set of buffers."""
    rng = random.Random(seed)
    alignment = rng.choice((1, 1, 4))
    buffers = []
    for _ in range(rng.randint(0, 7)):
        lower = rng.randint(0, 8)
        buffers.append((lower, lower + rng.randint(0, 6), rng.randint(0, 12)))
    columns = np.array(buffers, dtype=np.int64).reshape(-1, 3).T.copy()
    offsets, height, _, bound, _ = _core.layout(*columns, alignment, 5.0, 0, None)
    rounded = [(a, b, -(-s // alignment) * alignment) for a, b, s in buffers]
    least = least_height(rounded)
    wrong = [f"layout {what}" for what, value in (("height", height), ("bound", bound)) if value != least]
    for (one, low), (two, high) in itertools.permutations(zip(rounded, offsets.tolist(), strict=True), 2):
        together = one[0] < two[1] and two[0] < one[1] and one[0] < one[1] and two[0] < two[1]
        if low % alignment or (together and low <= high < low + one[2] and two[2]):
            wrong.append("layout overlap")
            break
    return wrong


def main() -> int:
    """Run the comparison; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-graphs", type=int, default=300)
    parser.add_argument("--num-layouts", type=int, help="default: as many as graphs")
    parser.add_argument("--max-ops", type=int, default=9)
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    num_layouts = options.num_graphs if options.num_layouts is None else options.num_layouts

    counts: Counter[str] = Counter()
    seeds: dict[str, list[int]] = {}
    first = options.first_seed
    cases = [(seed, check_graph(seed, options.max_ops)) for seed in range(first, first + options.num_graphs)]
    cases += [(seed, check_buffers(seed)) for seed in range(first, first + num_layouts)]
    for seed, wrong in cases:
        for what in wrong:
            counts[what] += 1
            seeds.setdefault(what, []).append(seed)
    page = Report("Agreement with brute force", ["what", "cases", "disagreements", "first seeds"])
    orders = [f"{name} {what}" for name in ("auto", "ilp", "ilp alone") for what in ("peak", "bound", "fails")]
    for what in (*orders, "layout height", "layout bound", "layout overlap"):
        num_cases = num_layouts if what.startswith("layout") else options.num_graphs
        page.rows.append([what, num_cases, counts[what], " ".join(map(str, seeds.get(what, [])[:10])) or "-"])
    page.print()
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main())
