"""What the parts of the searches for an order, and for what to recompute, are worth: plans with each of them left out.

    python bench/recompute/ablate_search.py --markdown bench/results/recompute/search_ablation.md
    python bench/recompute/ablate_search.py --orders --markdown bench/results/order/order_ablation.md
    python bench/recompute/ablate_search.py --quick

Rewritten steps: the least peak within some added time, the least added time for a budget, the least peak at whatever
time. They are limited in work, so that other work on the machine changes nothing; what is counted is processor time.
Orders alone: captured steps and random graphs; on some of these the program order's refinement leaves a gap, and what
follows is limited in time. `olla.plan` checks every plan. A new part has to win its row here before it moves in.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla
from bench.support.harness import Cell, Report, graph_files, graph_name
from olla.base import rivals
from olla.order import auto
from olla.recompute import improving
from olla.recompute import search as recompute
from tests.support.generate import random_graph, stack
from tests.support.plans import hard_graph

Patches = tuple[AbstractContextManager[Any], ...]
Goal = tuple[str, float]  # a keyword of olla.plan, and its value; see GOALS

GOALS: tuple[Goal, ...] = (("max_slowdown", 0.1), ("budget", 0.8), ("minimise", 0.0))
"""Within a share of added time; for a share of the least peak that an order alone reaches; at whatever time."""
RANDOM = ((300, 12, 3), (1000, 12, 3), (200, 100, 6))  # ops of random graphs, their window, and how many
HARD = ((80, 3), (120, 3))  # ops, and how many
_ORDER_LIMIT = 15.0  # seconds for one order
_TIME_LIMIT = 600.0  # beyond what the work takes


def _without_start(name: str) -> AbstractContextManager[Any]:
    """Leave out one of the heuristics for orders: all of them enter a search in one place."""
    real = rivals.orders

    def orders(core: Any, schedules: Mapping[str, Callable[[], Any]], notes: list[str]) -> Any:
        return real(core, {key: schedule for key, schedule in schedules.items() if key != name}, notes)

    return mock.patch.object(rivals, "orders", orders)


def _set(owner: Any, **values: Any) -> Patches:
    return tuple(mock.patch.object(owner, name, value) for name, value in values.items())


# What is left out -> how.
REWRITING: dict[str, Patches] = {
    "nothing": (),
    "greedy: early updates on the first order": (_without_start("the best order with early updates"),),
    "greedy: all further base orders": _set(recompute, base_orders=lambda *_: []),
    "greedy: program order with early updates": (_without_start("early updates"),),
    "greedy: the best order": (_without_start("the best order"),),
    "greedy: depth first with early updates": (_without_start("depth first with early updates"),),
    "least peak memory first": (_without_start("least peak memory first"),),
    "breadth first": (_without_start("breadth first"),),
    "improvement": _set(recompute.RecomputeSearch, _search=lambda *_: None),
    "improvement: of the base order that is best": _set(recompute, _RIVAL_SHARE=0),
    "improvement: starts from bounds": _set(improving, _NUM_SEED_OPS=0),
    "improvement: destroy and repair": _set(improving, _MAX_ROUNDS=0),
    "less time: a lower peak within less": _set(recompute.RecomputeSearch, _press=lambda *_: None),
    "less time: from the beginning": _set(recompute.RecomputeSearch, _begin_again=lambda *_: None),
    "a lower peak for the same time, before more is paid": _set(recompute.RecomputeSearch, lower=lambda _: None),
    "the order of the rewritten graph as a base": _set(recompute.RecomputeSearch, _rebase=lambda *_: None),
    "list schedules of rewritten graphs": _set(auto.OrderSearch, schedules=lambda _: []),
}


ORDERS: dict[str, Patches] = {
    "nothing": (),
    "all further starts": _set(auto.OrderSearch, warm_starts=lambda _: []),
    "hoisting": (_without_start("hoisting"),),
    "list schedules": _set(auto.OrderSearch, schedules=lambda _: []),
}


@contextmanager
def left_out(patches: Patches) -> Iterator[None]:
    """Plan without what the patches leave out."""
    with ExitStack() as stack_of_patches:
        for patch in patches:
            stack_of_patches.enter_context(patch)
        yield


class Outcome(NamedTuple):
    """What a plan reaches: its peak in bytes, or for a budget its added time in percent; None: refused."""

    value: float | None
    seconds: float  # processor time


def outcome(graph: olla.Graph, goal: Goal, peak_bytes: int) -> Outcome:
    """Plan for one goal.

    Args:
        graph: the training step.
        goal: see `Goal`.
        peak_bytes: the least of an order of the graph, of which a budget is a share.
    """
    keyword, value = goal
    wanted = {"budget": int(value * peak_bytes), "minimise": "peak"}.get(keyword, value)
    start = time.process_time()
    try:
        plan = olla.plan(graph, layout=False, time_limit=_TIME_LIMIT, **{keyword: wanted})  # type: ignore[arg-type]
    except olla.BudgetError:
        return Outcome(None, time.process_time() - start)
    seconds = time.process_time() - start
    added = 100 * plan.added_seconds / plan.base_seconds if plan.base_seconds > 0 else 0.0
    return Outcome(added if keyword == "budget" else plan.peak_bytes, seconds)


def weigh_rewriting(graphs: Sequence[tuple[str, olla.Graph]], goals: Sequence[Goal], rows: Iterable[str]) -> Report:
    """Leave each part out, on all graphs and for all goals."""
    peaks = {name: olla.plan(graph, layout=False).peak_bytes for name, graph in graphs}
    first: dict[tuple[str, Goal], Outcome] = {}
    table: list[list[Cell]] = []
    for row in rows:
        with left_out(REWRITING[row]):
            found = {(name, goal): outcome(graph, goal, peaks[name]) for name, graph in graphs for goal in goals}
        first = first or found
        table.append([row, *compared(first, found, goals)])
        print(*table[-1], file=sys.stderr, flush=True)
    columns = ["left out"]
    for keyword, value in goals:
        what = "added time, mean change in points" if keyword == "budget" else "peak, mean change %"
        columns += [f"{keyword} {value:g}: worse" if value else "least peak: worse", "better", what, "CPU s"]
    notes: dict[str, Cell] = {
        "graphs": ", ".join(name for name, _ in graphs),
        "worse, better": "graphs whose peak (or added time, for a budget) is higher, or lower, than with everything",
        "budget": "share of the least peak that an order alone reaches; one that is refused alone is worse",
    }
    return Report("Rewritten steps: each part of the search left out", columns, table, notes)


def compared(
    first: Mapping[tuple[str, Goal], Outcome], found: Mapping[tuple[str, Goal], Outcome], goals: Sequence[Goal]
) -> list[Cell]:
    """Return, for every goal, how many are worse and better, the mean change, and the processor time."""
    cells: list[Cell] = []
    for goal in goals:
        changes: list[float] = []
        worse = better = 0
        for key in (key for key in found if key[1] == goal):
            before, after = first[key].value, found[key].value
            if before is None or after is None:
                worse, better = worse + (before is not None), better + (after is not None)
                continue
            change = after - before if goal[0] == "budget" else 100 * (after / before - 1)
            worse, better = worse + (change > 1e-9), better + (change < -1e-9)
            changes.append(change)
        seconds = sum(outcome.seconds for key, outcome in found.items() if key[1] == goal)
        cells += [worse, better, statistics.fmean(changes or [0.0]), seconds]
    return cells


def weigh_orders(graphs: Iterable[tuple[str, olla.Graph]]) -> Report:
    """Leave out what follows where the refined program order is not proved to be the best.

    All rows of a graph follow each other, so that other work on the machine meets them alike.
    """
    plans: dict[str, list[olla.Plan]] = {row: [] for row in ORDERS}
    seconds = dict.fromkeys(ORDERS, 0.0)
    for name, graph in graphs:
        for row, patches in ORDERS.items():
            start = time.process_time()
            with left_out(patches):
                plans[row].append(olla.plan(graph, layout=False, time_limit=_ORDER_LIMIT))
            seconds[row] += time.process_time() - start
            if row == "nothing" and "warmstart" not in plans[row][-1].seconds:  # nothing followed
                for others in list(plans.values())[1:]:
                    others.append(plans[row][-1])
                break
        print(name, *(row[-1].peak_bytes for row in plans.values()), file=sys.stderr, flush=True)
    table: list[list[Cell]] = []
    for row, found in plans.items():
        changes = [
            100 * (p.peak_bytes / max(1, q.peak_bytes) - 1) for p, q in zip(found, plans["nothing"], strict=True)
        ]
        proved = sum(plan.peak_bytes == plan.lower_bound_bytes for plan in found)
        further = sum("warmstart" in plan.seconds for plan in found)
        worse, better = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
        gap = 100 * statistics.fmean(plan.gap for plan in found)
        table.append([row, len(found), proved, further, worse, better, statistics.fmean(changes), gap, seconds[row]])
    columns = ["left out", "graphs", "proved best", "not by the program order alone", "worse", "better"]
    columns += ["peak, mean change %", "mean gap %", "CPU s"]
    notes: dict[str, Cell] = {"seconds for an order, at most": _ORDER_LIMIT}
    return Report("Orders alone: what follows the program order, left out", columns, table, notes)


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--graphs", nargs="+", default=[], metavar="GRAPH", help="names or files; default: all captured"
    )
    parser.add_argument("--rows", nargs="+", default=[], choices=REWRITING, metavar="PART", help="default: all")
    parser.add_argument("--orders", action="store_true", help="orders alone")
    parser.add_argument("--quick", action="store_true", help="one generated step and one random graph alone")
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    options = parser.parse_args()
    if options.quick:
        graphs = [("step", stack(300))]
        orders = [*graphs, ("random", random_graph(40))]
        goals = GOALS[:1]
    else:
        graphs = [(graph_name(path), olla.Graph.load(path)) for path in graph_files(options.graphs)]
        orders = [
            *graphs,
            *(
                (f"random {n}, {window}, {k}", random_graph(n, seed=k, window=window, max_bytes=1 << 20))
                for n, window, count in RANDOM
                for k in range(count)
            ),
            *((f"hard {n}, {k}", hard_graph(n, k)) for n, count in HARD for k in range(count)),
        ]
        goals = GOALS
    rows = list(dict.fromkeys(["nothing", *(options.rows or REWRITING)]))
    pages = [weigh_orders(orders)] if options.orders else [weigh_rewriting(graphs, goals, rows), weigh_orders(orders)]
    for page in pages:
        page.print()
    if options.markdown:
        options.markdown.write_text("\n".join(page.markdown() for page in pages))
    return 0


if __name__ == "__main__":
    sys.exit(main())
