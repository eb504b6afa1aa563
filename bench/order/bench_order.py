"""Plan captured training steps; compare with the best known peaks and bounds, and with PyTorch Inductor's four orders.

    python bench/order/bench_order.py --graphs gpt2_b1 'resnet50*' --markdown bench/results/order/order.md

Every plan is checked by ``olla.check``. Exit status: 0; 1 a plan broke a rule, or, with --strict, missed a reference, a
limit of time or the fragmentation aimed at.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla
from bench.support.harness import Cell, Report, graph_files, graph_name, measure, references
from tests.support.generate import stack

# What --strict asks of planning alone, and of the arena beyond the load.
MAX_SECONDS, MAX_MEDIAN_SECONDS, MAX_FRAGMENTATION = 20.0, 0.5, 0.001


@dataclass(frozen=True)
class Result:
    """What one graph gave; reference figures are None where there are none."""

    name: str
    plan: olla.Plan
    num_ops: int
    seconds: float
    reference_peak_bytes: int | None
    reference_bound_bytes: int | None
    inductor_bytes: dict[str, int]  # heuristic -> peak; empty where it did not run
    broken: str  # what the checker said; empty if it accepted the plan

    @property
    def proved(self) -> bool:
        return self.plan.peak_bytes == self.plan.lower_bound_bytes

    @property
    def reaches_reference(self) -> bool | None:
        """Whether peak and bound are both as good as the reference's, or better."""
        if self.reference_peak_bytes is None or self.reference_bound_bytes is None:
            return None
        peak_reached = self.plan.peak_bytes <= self.reference_peak_bytes
        return peak_reached and self.plan.lower_bound_bytes >= self.reference_bound_bytes

    @property
    def inductor_excess(self) -> float | None:
        """How much more the best of Inductor's orders needs than ours, as a fraction of ours."""
        if not self.inductor_bytes:
            return None
        return min(self.inductor_bytes.values()) / max(1, self.plan.peak_bytes) - 1

    @property
    def fragmentation(self) -> float:
        return (self.plan.arena_bytes - self.plan.load_bytes) / max(1, self.plan.load_bytes)


def run(path: Path, time_limit: float | None, with_inductor: bool) -> Result:
    """Plan and check one graph file, and run the rival on it."""
    graph = olla.Graph.load(path)
    limit: dict[str, Any] = {} if time_limit is None else {"time_limit": time_limit}
    plan, timing = measure(lambda: olla.plan(graph, **limit))
    broken = ""
    try:
        olla.check(graph, plan)
    except olla.PlanError as error:
        broken = str(error)
    rivals: dict[str, int] = {}
    if with_inductor:
        from tests.support.pytorch import inductor

        rivals = {name: found.peak_bytes for name, found in inductor.heuristics(graph).items()}
    known = references(path.parent).get(graph_name(path), {})
    return Result(
        graph_name(path), plan, graph.num_ops, timing.median_seconds,
        known.get("best_known_peak_bytes"), known.get("lower_bound_bytes"), rivals, broken,
    )  # fmt: skip


def report(results: list[Result]) -> Report:
    """Lay the results out as a table with a summary. Peaks are bytes; percentages say so."""
    rivals = list(next((r.inductor_bytes for r in results if r.inductor_bytes), {}))
    stages = [s for s in dict.fromkeys(s for r in results for s in r.plan.seconds) if s != "total"]
    columns = ["graph", "ops", "program peak", "peak", "reference", "bound", "reference bound", "gap %", "proved"]
    columns += ["reaches reference", "checked", "fragmentation %", "seconds", *(f"{stage} s" for stage in stages)]
    columns += [f"inductor {rival}" for rival in rivals] + (["inductor excess %"] if rivals else [])
    rows: list[list[Cell]] = []
    for r in results:
        row: list[Cell] = [r.name, r.num_ops, r.plan.program_peak_bytes, r.plan.peak_bytes, r.reference_peak_bytes]
        row += [r.plan.lower_bound_bytes, r.reference_bound_bytes, 100 * r.plan.gap, r.proved, r.reaches_reference]
        row += [not r.broken, 100 * r.fragmentation, r.seconds, *(r.plan.seconds.get(stage) for stage in stages)]
        if rivals:
            row += [r.inductor_bytes.get(rival) for rival in rivals]
            row.append(None if r.inductor_excess is None else 100 * r.inductor_excess)
        rows.append(row)
    return Report("Operator order: peak memory of captured training steps, bytes", columns, rows, summary(results))


def summary(results: list[Result]) -> dict[str, Cell]:
    """Count and average over all graphs."""
    known = [r for r in results if r.reaches_reference is not None]
    seconds = [r.seconds for r in results]
    lines: dict[str, Cell] = {
        "graphs": len(results),
        "graphs with a reference": len(known),
        "peak and bound equal to the reference or better": sum(bool(r.reaches_reference) for r in known),
        "peak below the reference": sum(r.plan.peak_bytes < (r.reference_peak_bytes or 0) for r in known),
        "bound above the reference": sum(r.plan.lower_bound_bytes > (r.reference_bound_bytes or 0) for r in known),
        "proved optimal": sum(r.proved for r in results),
        "median seconds": statistics.median(seconds),
        "most seconds": max(seconds),
        "most fragmentation %": 100 * max(r.fragmentation for r in results),
        "plans the checker refused": sum(bool(r.broken) for r in results),
    }
    excess = [r.inductor_excess for r in results if r.inductor_excess is not None]
    if excess:
        lines["best of Inductor's orders, mean excess %"] = 100 * statistics.mean(excess)
        lines["best of Inductor's orders, worst excess %"] = 100 * max(excess)
        lines["graphs where one of Inductor's orders is as good"] = sum(x <= 0 for x in excess)
    return lines


def failures(results: list[Result], strict: bool) -> list[str]:
    """Say what went wrong, one line each."""
    lines = [f"{r.name}: {r.broken}" for r in results if r.broken]
    if strict:
        for r in results:
            lines += [f"{r.name}: peak or bound misses the reference"] if r.reaches_reference is False else []
            lines += [f"{r.name}: {r.seconds:.1f} s of planning"] if r.seconds > MAX_SECONDS else []
            lines += [f"{r.name}: {r.fragmentation:.2%} fragmentation"] if r.fragmentation > MAX_FRAGMENTATION else []
        median = statistics.median(r.seconds for r in results)
        if median > MAX_MEDIAN_SECONDS:
            lines.append(f"median of planning {median:.2f} s, at most {MAX_MEDIAN_SECONDS} s expected")
    return lines


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=[], help="names, patterns or files; default: all")
    parser.add_argument("--time-limit", type=float, help="seconds per graph; default: olla.plan's own")
    parser.add_argument("--no-inductor", action="store_true", help="leave the rival out (torch is not needed then)")
    parser.add_argument("--strict", action="store_true", help="missing a reference or a limit is a failure")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    options = parser.parse_args()

    paths = graph_files(options.graphs)
    olla.plan(stack(300))  # compiles or loads the warm starts' kernels
    results = []
    for path in paths:
        results.append(run(path, options.time_limit, not options.no_inductor))
        print(f"{results[-1].name}: {results[-1].seconds:.2f} s", file=sys.stderr, flush=True)
    page = report(results)
    page.print()
    for out in (options.json, options.markdown):
        if out:
            page.save(out)
    wrong = failures(results, options.strict)
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
