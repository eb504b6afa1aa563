"""Compare planning with brute force on small random graphs and buffers.

    python bench/project/accept_random.py --num-graphs 5000

The brute force is the tests' oracle: plain Python that shares nothing with the core. Orders: the least peak over all
orders, against the plan, its bound, and the plan of the integer program. Arenas: the least arena over all orders and
layouts of up to seven ops, against the joint program. Layouts: the least height over all placements of up to seven
buffers, against the search and the address program. Prints counts and the seeds of disagreements; exit status 1 if
there is one.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla
from bench.support.harness import Report
from olla import _core
from olla.layout import LayoutOptions, place
from tests.support import oracle
from tests.support.generate import small_random_graph

_MAX_ARENA_OPS = 7  # brute force tries all orders, and all layouts of each


def check_graph(seed: int, max_ops: int) -> list[str]:
    """Return what disagrees on one random graph."""
    graph = small_random_graph(seed, max_ops)
    exact = oracle.best_peak(graph)
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
    from olla.ilp import order_ilp

    found = order_ilp(graph.core, np.arange(graph.num_ops, dtype=np.int32), time_limit=30.0)
    return found.peak_bytes, found.lower_bound_bytes


def check_arena(seed: int) -> list[str]:
    """Return what disagrees about the smallest arena of one random graph."""
    graph = small_random_graph(seed, _MAX_ARENA_OPS)
    alignment = random.Random(seed).choice((1, 8))
    exact = oracle.best_arena(graph, alignment)
    wrong = []
    for name, solve in (("joint", plan_joint), ("joint alone", joint_alone)):
        try:
            arena, bound = solve(graph, alignment)
        except olla.OllaError as error:
            print(f"seed {seed}, {name}: {error}", file=sys.stderr)
            wrong.append(f"{name} fails")
            continue
        wrong += [f"{name} arena"] if arena != exact else []
        wrong += [f"{name} bound"] if bound != exact else []
    return wrong


def plan_joint(graph: olla.Graph, alignment: int) -> tuple[int, int]:
    """Return the arena and its bound of a checked plan by the joint program, given the split and a bound."""
    plan = olla.plan(graph, method="joint", alignment=alignment)
    olla.check(graph, plan)
    return plan.arena_bytes, plan.arena_lower_bound_bytes


def joint_alone(graph: olla.Graph, alignment: int) -> tuple[int, int]:
    """Return the arena and the bound that the joint program finds from the program order and no bound at all."""
    from olla.ilp import joint_ilp

    found = joint_ilp(_core.arena_graph(graph.core, alignment), np.arange(graph.num_ops, dtype=np.int32))
    return found.arena_bytes, found.lower_bound_bytes


def check_buffers(seed: int) -> list[str]:
    """Return what disagrees on one random set of buffers."""
    from olla.ilp import address_ilp

    rng = random.Random(seed)
    alignment = rng.choice((1, 1, 4))
    buffers = []
    for _ in range(rng.randint(0, 7)):
        lower = rng.randint(0, 8)
        buffers.append((lower, lower + rng.randint(0, 6), rng.randint(0, 12)))
    columns = np.array(buffers, dtype=np.int64).reshape(-1, 3).T.copy()
    found = place(*columns, LayoutOptions(alignment=alignment), 5.0)
    program = address_ilp(*columns, alignment=alignment)
    rounded = [(a, b, -(-s // alignment) * alignment) for a, b, s in buffers]
    columns[2] = [size for _, _, size in rounded]
    least = oracle.best_height(*columns.tolist())
    wrong = ["layout height"] if found.height_bytes != least else []
    wrong += ["layout bound"] if found.bound_bytes != least else []
    wrong += ["address height"] if program.height_bytes != least else []
    wrong += ["address bound"] if program.lower_bound_bytes != least else []
    for (one, low), (two, high) in itertools.permutations(zip(rounded, found.offsets.tolist(), strict=True), 2):
        together = one[0] < two[1] and two[0] < one[1] and one[0] < one[1] and two[0] < two[1]
        if low % alignment or (together and low <= high < low + one[2] and two[2]):
            wrong.append("layout overlap")
            break
    return wrong


def main() -> int:
    """Run the comparison; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-graphs", type=int, default=300)
    parser.add_argument("--num-arenas", type=int, help="default: as many as graphs")
    parser.add_argument("--num-layouts", type=int, help="default: as many as graphs")
    parser.add_argument("--max-ops", type=int, default=9)
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    num_layouts = options.num_graphs if options.num_layouts is None else options.num_layouts
    num_arenas = options.num_graphs if options.num_arenas is None else options.num_arenas

    counts: Counter[str] = Counter()
    seeds: dict[str, list[int]] = {}
    first = options.first_seed
    cases = [(seed, check_graph(seed, options.max_ops)) for seed in range(first, first + options.num_graphs)]
    cases += [(seed, check_arena(seed)) for seed in range(first, first + num_arenas)]
    cases += [(seed, check_buffers(seed)) for seed in range(first, first + num_layouts)]
    for seed, wrong in cases:
        for what in wrong:
            counts[what] += 1
            seeds.setdefault(what, []).append(seed)
    page = Report("Agreement with brute force", ["what", "cases", "disagreements", "first seeds"])
    orders = [f"{name} {what}" for name in ("auto", "ilp", "ilp alone") for what in ("peak", "bound", "fails")]
    arenas = [f"{name} {what}" for name in ("joint", "joint alone") for what in ("arena", "bound", "fails")]
    layouts = ["layout height", "layout bound", "layout overlap", "address height", "address bound"]
    for what in (*orders, *arenas, *layouts):
        num_cases = num_layouts if what in layouts else num_arenas if what in arenas else options.num_graphs
        page.rows.append([what, num_cases, counts[what], " ".join(map(str, seeds.get(what, [])[:10])) or "-"])
    page.print()
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main())
