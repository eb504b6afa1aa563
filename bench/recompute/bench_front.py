"""Ask one graph for many goals: is an answer dominated by another, and how far above its bound is each?

    python bench/recompute/bench_front.py --markdown bench/results/recompute/front.md

The goals are five shares of added time, the least peak, and the budgets that these answers need, and 0.1 % more. An
answer is dominated where another has no more of its peak, of what it needs, and of its added time, and clearly less of
one: 0.1 % of the bytes, or 2 % of the added time and 0.01 % of the step. Every plan is checked by ``olla.check``.
Exit status: 0; 1 a plan broke a rule. Answers that are dominated are listed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla
from bench.support.harness import Cell, Report, graph_files, graph_name
from olla.rewriting import needed_bytes

SLOWDOWNS = (0.02, 0.05, 0.1, 0.2, 0.4)
LEAST = "least"
MEMORY, TIME = 1.001, 1.02  # an answer is clearly below another beyond these factors
STEP = 1e-4  # and this share of the step's time


@dataclass(frozen=True)
class Answer:
    """A plan for one goal.

    Attributes:
        goal: as a person says it.
        plan: the answer.
        needed_bytes: of the plan; so many make a budget.
        broken: what the checker said of it; empty if all is well.
    """

    goal: str
    plan: olla.Plan
    needed_bytes: int
    broken: str

    @property
    def gap(self) -> float:
        """How far the peak is above the bound of what was asked, in % of the bound."""
        return 100 * (self.plan.peak_bytes / max(self.plan.peak_lower_bound_bytes, 1) - 1)

    def is_dominated_by(self, other: Answer) -> bool:
        """Whether another answer has no more of all, and clearly less of one."""
        needed, peak, added = other.needed_bytes, other.plan.peak_bytes, other.plan.slowdown
        if needed > self.needed_bytes or peak > self.plan.peak_bytes or added > self.plan.slowdown:
            return False
        less = MEMORY * needed < self.needed_bytes or MEMORY * peak < self.plan.peak_bytes
        return less or TIME * added + STEP < self.plan.slowdown


def answers(graph: olla.Graph, device: str, time_limit: float) -> list[Answer]:
    """Return the answers to all goals."""

    def answer(goal: str, **asked: Any) -> Answer:
        plan = olla.plan(graph, device=device, time_limit=time_limit, **asked)
        broken = ""
        try:
            olla.check(graph, plan)
        except olla.PlanError as error:
            broken = str(error)
        return Answer(goal, plan, needed_bytes(plan), broken)

    found = [answer(f"{share:.0%}", max_slowdown=share) for share in SLOWDOWNS]
    found.append(answer(LEAST, minimise="peak"))
    budgets = [(f"what {a.goal} needs", int(MEMORY * a.needed_bytes)) for a in found]
    return found + [answer(goal, budget=budget) for goal, budget in budgets]


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=(), help="names, patterns or files; default: all")
    parser.add_argument("--device", default="a100")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds per plan (default: 60)")
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    options = parser.parse_args()

    goals = [f"{share:.0%}" for share in SLOWDOWNS] + [LEAST]
    columns = ["graph", "ops"]
    for goal in goals:
        columns += [f"{goal}: peak, % of the best order's", f"{goal}: gap, %"]
    columns += ["dominated", "CPU seconds"]
    rows: list[list[Cell]] = []
    gaps: dict[str, list[float]] = {goal: [] for goal in goals}
    wrong = []
    for path in graph_files(options.graphs):
        graph, name = olla.Graph.load(path), graph_name(path)
        start = time.process_time()
        found = answers(graph, options.device, options.time_limit)
        seconds = time.process_time() - start
        row: list[Cell] = [name, graph.num_ops]
        for answer in found[: len(goals)]:
            gaps[answer.goal].append(answer.gap)
            row += [round(100 * answer.plan.peak_bytes / answer.plan.base_peak_bytes, 2), round(answer.gap, 2)]
        dominated = [
            f"{name}: {a.goal} ({a.needed_bytes:,} B, +{a.plan.slowdown:.3%}) is dominated by "
            f"{b.goal} ({b.needed_bytes:,} B, +{b.plan.slowdown:.3%})"
            for a, b in permutations(found, 2)
            if a.is_dominated_by(b)
        ]
        rows.append([*row, len(dominated), seconds])
        wrong += [f"{name}, {a.goal}: {a.broken}" for a in found if a.broken]
        print("\n".join([f"{name}: {seconds:.1f} s", *dominated]), file=sys.stderr, flush=True)
    summary: dict[str, Cell] = {"device": options.device, "graphs": len(rows), "answers each": 2 * len(goals)}
    for goal in goals:
        summary[f"gap at {goal}, %"] = f"median {statistics.median(gaps[goal]):.2f}, worst {max(gaps[goal]):.2f}"
    summary["pairs in which one is dominated"] = sum(int(str(row[-2])) for row in rows)
    page = Report("Answers to many goals, and the bounds of what was asked", columns, rows, summary)
    page.print()
    if options.markdown:
        page.save(options.markdown)
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
