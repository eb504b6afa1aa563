"""Every method of `olla.plan` on the same graphs: peak, arena, bound and seconds side by side.

    python bench/methods/bench_methods.py --methods auto roam smartpool --graphs gpt2_b1 'resnet50*' --markdown out.md

Without captured graphs, generated ones are planned. Every plan is checked by ``olla.check``. Exit status: 0; 1 where
``auto`` is worse than another method: a higher peak, or the same and a larger arena. (Where the step may free tensors
that it was given, these lie outside the arena, and an order of a higher peak can have a smaller arena. Such cases are
counted.)
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla
from bench.support.harness import Cell, Report, graph_files, graph_name, measure
from olla.plan import METHODS
from tests.support.generate import random_graph, stack

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

    def need(self, method: str) -> tuple[int, int]:
        """Return peak and arena, in bytes: what plans are compared by."""
        return self.plans[method].peak_bytes, self.plans[method].arena_bytes

    def auto_is_worse_than(self, method: str) -> bool:
        return self.are_there("auto", method) and self.need("auto") > self.need(method)

    def has_smaller_arena_than_auto(self, method: str) -> bool:
        return self.are_there("auto", method) and self.need("auto")[1] > self.need(method)[1]

    def are_there(self, *methods: str) -> bool:
        return all(method in self.plans for method in methods)


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
    columns += ["arena excess %, mean", "worst arena excess %", "seconds, geometric mean", "auto is faster by"]
    columns += ["auto is worse on", "smaller arena than auto on"]
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
        line += [sum(row.auto_is_worse_than(method) for row in done)]
        line += [sum(row.has_smaller_arena_than_auto(method) for row in done)]
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
        text = "\n".join(page.markdown() for page in pages)
        options.markdown.write_text(text.replace("\n# ", "\n## "))  # one page: the tables are its sections
    wrong = [
        f"{row.name}: auto needs (peak, arena) {row.need('auto')}, {method} {row.need(method)} bytes"
        for row in rows
        for method in options.methods
        if row.auto_is_worse_than(method)
    ]
    wrong += [f"{row.name}: auto failed: {row.failed['auto']}" for row in rows if "auto" in row.failed]
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
