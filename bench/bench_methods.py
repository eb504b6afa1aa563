"""Every method of `olla.plan` on the same graphs: peak, arena, bound and seconds side by side.

    python bench/bench_methods.py --methods auto roam smartpool --graphs gpt2_b1 'resnet50*' --markdown out.md

Without captured graphs, generated ones are planned. Every plan is checked by ``olla.check``. Exit status: 0; 1 where
``auto`` is worse than another method: a higher peak, or a larger arena.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import olla
from generate import random_graph, stack
from harness import Cell, Report, graph_files, graph_name, measure
from olla.methods import METHODS

QUICK_OPS, QUICK_SECONDS = 500, 2.0  # --quick: at most so many ops, at most so long


@dataclass(frozen=True)
class Row:
    """What the methods gave on one graph; a method that failed is absent from plans and has its error in failed."""

    name: str
    num_ops: int
    plans: dict[str, olla.Plan]
    seconds: dict[str, float]
    failed: dict[str, str]

    @property
    def best_peak_bytes(self) -> int:
        return min(plan.peak_bytes for plan in self.plans.values())

    @property
    def best_bound_bytes(self) -> int:
        return max(plan.lower_bound_bytes for plan in self.plans.values())

    @property
    def best_arena_bytes(self) -> int:
        return min(plan.arena_bytes for plan in self.plans.values())

    def worse_than(self, method: str) -> list[str]:
        """Say where auto needs more than the method."""
        if "auto" not in self.plans or method not in self.plans:
            return []
        ours, theirs = self.plans["auto"], self.plans[method]
        found = []
        for what in ("peak_bytes", "arena_bytes"):
            if getattr(ours, what) > getattr(theirs, what):
                found.append(
                    f"{self.name}: {what} is {getattr(ours, what)} by auto, {getattr(theirs, what)} by {method}"
                )
        return found


def run(graph: olla.Graph, name: str, methods: Sequence[str], time_limit: float) -> Row:
    """Plan one graph by every method and check the plans."""
    plans, seconds, failed = {}, {}, {}
    for method in methods:
        try:
            plan, timing = measure(lambda method=method: olla.plan(graph, method=method, time_limit=time_limit))
            olla.check(graph, plan)
            plans[method], seconds[method] = plan, timing.median_seconds
        except olla.OllaError as error:
            failed[method] = str(error)
    return Row(name, graph.num_ops, plans, seconds, failed)


def tables(rows: list[Row], methods: Sequence[str]) -> list[Report]:
    """Lay the results out: one summary, then one table for each quantity."""
    quantities: dict[str, Callable[[Row, str], Cell]] = {
        "Peak, bytes": lambda row, method: row.plans[method].peak_bytes,
        "Arena, bytes": lambda row, method: row.plans[method].arena_bytes,
        "Proved lower bound of the peak, bytes": lambda row, method: row.plans[method].lower_bound_bytes,
        "Seconds": lambda row, method: row.seconds[method],
    }
    reports = [summary(rows, methods)]
    for title, value in quantities.items():
        report = Report(title, ["graph", "ops", *methods], machine=reports[0].machine)
        for row in rows:
            cells = [value(row, method) if method in row.plans else "failed" for method in methods]
            report.rows.append([row.name, row.num_ops, *cells])
        reports.append(report)
    return reports


def summary(rows: list[Row], methods: Sequence[str]) -> Report:
    """Count and average per method. Excess is over the best peak, or arena, that any method reached."""
    columns = ["method", "graphs", "failed", "peak optimal", "proved by itself", "peak excess %, mean", "worst"]
    columns += [
        "arena excess %, mean",
        "worst arena",
        "seconds, geometric mean",
        "auto is faster by",
        "auto is worse on",
    ]
    report = Report("Methods of olla.plan side by side", columns)
    for method in methods:
        done = [row for row in rows if method in row.plans]
        if not done:
            continue
        plans = [row.plans[method] for row in done]
        peaks = [excess(plan.peak_bytes, row.best_peak_bytes) for plan, row in zip(plans, done, strict=True)]
        arenas = [excess(plan.arena_bytes, row.best_arena_bytes) for plan, row in zip(plans, done, strict=True)]
        optimal = sum(plan.peak_bytes == row.best_bound_bytes for plan, row in zip(plans, done, strict=True))
        faster = [row.seconds[method] / row.seconds["auto"] for row in done if "auto" in row.seconds]
        line: list[Cell] = [method, len(done), sum(method in row.failed for row in rows), optimal]
        line += [sum(plan.status is olla.Status.OPTIMAL for plan in plans)]
        line += [100 * statistics.mean(peaks), 100 * max(peaks), 100 * statistics.mean(arenas), 100 * max(arenas)]
        line += [geometric_mean([row.seconds[method] for row in done]), geometric_mean(faster)]
        line += [sum(bool(row.worse_than(method)) for row in done)]
        report.rows.append(line)
    return report


def excess(num_bytes: int, best_bytes: int) -> float:
    """Return how much more that is, as a fraction of the best."""
    return num_bytes / best_bytes - 1 if best_bytes else 0.0


def geometric_mean(values: Sequence[float]) -> float | None:
    """Return the geometric mean; None of nothing."""
    return math.exp(statistics.mean(math.log(max(value, 1e-6)) for value in values)) if values else None


def graphs(names: Sequence[str], quick: bool) -> list[tuple[str, olla.Graph]]:
    """Load the graphs named, or all; generate some where none are there."""
    try:
        found = [(graph_name(path), olla.Graph.load(path)) for path in graph_files(names)]
    except SystemExit:
        if names:
            raise
        found = [
            (f"{family}_{n}", stack(n, family=family)) for family in ("convnet", "transformer") for n in (300, 3000)
        ]
        found += [(f"random_{seed}", random_graph(60, seed=seed, max_bytes=1 << 20)) for seed in range(5)]
    return [(name, graph) for name, graph in found if not quick or graph.num_ops <= QUICK_OPS]


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, help="default: all")
    parser.add_argument("--graphs", nargs="+", default=[], help="names, patterns or files; default: all")
    parser.add_argument("--time-limit", type=float, default=15.0, help="seconds per graph and method (default: 15)")
    parser.add_argument(
        "--quick", action="store_true", help=f"graphs of at most {QUICK_OPS} ops, {QUICK_SECONDS:g} s each"
    )
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    options = parser.parse_args()

    time_limit = min(options.time_limit, QUICK_SECONDS) if options.quick else options.time_limit
    for method in options.methods:
        olla.plan(random_graph(40, seed=1), method=method, time_limit=5.0)  # loads libraries, compiles warm starts
    rows = []
    for name, graph in graphs(options.graphs, options.quick):
        rows.append(run(graph, name, options.methods, time_limit))
        print(
            f"{name}: " + ", ".join(f"{m} {s:.2f} s" for m, s in rows[-1].seconds.items()), file=sys.stderr, flush=True
        )
    pages = tables(rows, options.methods)
    for page in pages:
        page.print()
    if options.markdown:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(
            "\n".join(page.markdown().replace("# ", "# " if i == 0 else "## ", 1) for i, page in enumerate(pages))
        )
    wrong = [line for row in rows for method in options.methods for line in row.worse_than(method)]
    wrong += [
        f"{row.name}: {method} failed: {error}"
        for row in rows
        for method, error in row.failed.items()
        if method == "auto"
    ]
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
