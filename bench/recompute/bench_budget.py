"""Fit a budget: how far the peak falls for an added time, on top of the best order, and how far it could fall at most.

    python bench/recompute/bench_budget.py --markdown bench/results/recompute/budget.md
    python bench/recompute/bench_budget.py --chunked-loss 8 --markdown bench/results/recompute/budget_chunked.md
    python bench/recompute/bench_budget.py --rivals --markdown bench/results/recompute/budget_rivals.md
    python bench/recompute/bench_budget.py --all --markdown bench/results/recompute/budget_planning.md

Every plan is checked, against the original graph too, by ``olla.check``. Memory is simulated, time is a roofline model
of the device. With --rivals: block checkpointing and PyTorch's min-cut partitioner, and our peak at their added time.
With --all: planning times over every captured graph. Exit status: 0; 1 a plan broke a rule, a rival's peak at equal
added time was below ours, or, with --strict, a target was missed. A plan below its bound
ends the benchmark with an error.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla
from bench.support.harness import Cell, Report, graph_files, graph_name, measure

GRAPHS = (
    "resnet50_b32",
    "vgg11_b32",
    "mobilenetv2_b32",
    "efficientnet_b0_b32",
    "googlenet_b32",
    "vit_b16_b32",
    "transformer_b32",
    "unet_b8",
    "bert_base_b32",
    "gpt2_b32",
    "llama1b_b4",
    "gpt2xl_b4",
)
SLOWDOWNS = (0.02, 0.05, 0.1, 0.2, 0.33)
# What --strict asks, by added time: least mean reduction, largest mean distance to the bound, in points of %.
REDUCTIONS = {0.05: 26.0, 0.1: 39.5, 0.2: 55.0}
CHUNKED_REDUCTIONS = {0.05: 28.5, 0.1: 42.0, 0.2: 55.0}
GAPS = {0.05: 1.5, 0.1: 1.5}
MAX_MEDIAN_SECONDS, MAX_SECONDS = 2.0, 15.0


@dataclass(frozen=True)
class Result:
    """One graph at one added time; reductions in % of the peak of the best order."""

    name: str
    slowdown: float
    plan: olla.Plan
    seconds: float
    broken: str  # what the checker said, or that the bound is above the peak; empty if all is well

    @property
    def reduction(self) -> float:
        return 100 * (1 - self.plan.peak_bytes / self.plan.base_peak_bytes)

    @property
    def most_reduction(self) -> float:
        """No plan falls further within the plan's own added time."""
        return 100 * (1 - self.plan.peak_lower_bound_bytes / self.plan.base_peak_bytes)


def run(path: Path, slowdown: float, device: str, time_limit: float, num_chunks: int | None = None) -> Result:
    """Plan and check one graph file within one added time."""
    graph = olla.Graph.load(path)
    goal = {"max_slowdown": slowdown, "chunked_loss": num_chunks}
    plan, timing = measure(lambda: olla.plan(graph, device=device, time_limit=time_limit, **goal))
    broken = ""
    try:
        olla.check(graph, plan)
    except olla.PlanError as error:
        broken = str(error)
    if plan.slowdown > slowdown * (1 + 1e-9):
        broken = f"adds {plan.slowdown:.2%}"
    return Result(graph_name(path), slowdown, plan, timing.median_seconds, broken)


def report(results: list[Result], device: str, num_chunks: int | None = None) -> Report:
    """Lay out a table: one row per graph, its reduction and its bound per added time, and the mean."""
    slowdowns = sorted({r.slowdown for r in results})
    columns = ["graph"]
    for s in slowdowns:
        columns += [f"<= {s:.0%}", f"at most, {s:.0%}"]
    columns += ["recomputed ops", "in place", *(["chunked losses"] if num_chunks else []), "seconds"]
    rows: list[list[Cell]] = []
    by_name: dict[str, list[Result]] = {}
    for r in results:
        by_name.setdefault(r.name, []).append(r)
    for name, of_graph in by_name.items():
        of_graph.sort(key=lambda r: r.slowdown)
        row: list[Cell] = [name]
        for r in of_graph:
            row += [round(r.reduction, 2), round(r.most_reduction, 2)]
        middle = of_graph[len(of_graph) // 2].plan
        row += [middle.num_recomputed, middle.num_in_place]
        if num_chunks:
            row.append(middle.chunked.num_losses if middle.chunked else 0)
        row.append(statistics.median(r.seconds for r in of_graph))
        rows.append(row)
    mean: list[Cell] = ["mean"]
    summary: dict[str, Cell] = {"device": device, "graphs": len(by_name)}
    for s in slowdowns:
        chosen = [r for r in results if r.slowdown == s]
        found, most = statistics.mean(r.reduction for r in chosen), statistics.mean(r.most_reduction for r in chosen)
        mean += [round(found, 2), round(most, 2)]
        summary[f"points to the bound at {s:.0%}, mean"] = round(most - found, 2)
    mean += [None, None, *([None] if num_chunks else []), statistics.median(r.seconds for r in results)]
    summary["median seconds"] = statistics.median(r.seconds for r in results)
    summary["most seconds"] = max(r.seconds for r in results)
    summary["plans refused"] = sum(bool(r.broken) for r in results)
    title = "Budget: reduction of the total peak on top of the best order, %, and the most that is possible"
    if num_chunks:
        title += f"; large losses in {num_chunks} chunks"
    return Report(title, columns, [*rows, mean], summary)


def failures(results: list[Result], strict: bool, wanted: dict[float, float]) -> list[str]:
    """Say what went wrong, one line each."""
    lines = [f"{r.name} at {r.slowdown:.0%}: {r.broken}" for r in results if r.broken]
    if not strict:
        return lines
    for s in sorted({r.slowdown for r in results}):
        chosen = [r for r in results if r.slowdown == s]
        found, most = statistics.mean(r.reduction for r in chosen), statistics.mean(r.most_reduction for r in chosen)
        if s in wanted and found < wanted[s]:
            lines.append(f"mean reduction {found:.2f} % within {s:.0%}, at least {wanted[s]} % expected")
        if s in GAPS and most - found > GAPS[s]:
            lines.append(f"{most - found:.2f} points to the bound at {s:.0%}, at most {GAPS[s]} expected")
    if (median := statistics.median(r.seconds for r in results)) > MAX_MEDIAN_SECONDS:
        lines.append(f"median of planning {median:.2f} s, at most {MAX_MEDIAN_SECONDS} s expected")
    lines += [f"{r.name}: {r.seconds:.1f} s of planning" for r in results if r.seconds > MAX_SECONDS]
    return lines


def outs(options: argparse.Namespace) -> list[Path]:
    """Return the files that the report is written to."""
    return [out for out in (options.json, options.markdown) if out]


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=GRAPHS, help="names, patterns or files; default: the twelve")
    parser.add_argument(
        "--slowdowns", nargs="+", type=float, default=SLOWDOWNS, metavar="X", help="shares of added time"
    )
    parser.add_argument("--device", default="a100")
    parser.add_argument("--time-limit", type=float, default=15.0, help="seconds per plan (default: 15)")
    parser.add_argument("--chunked-loss", type=int, metavar="K", help="compute large losses in K chunks of rows")
    parser.add_argument("--strict", action="store_true", help="a missed target is a failure")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--rivals", action="store_true", help="compare with checkpointing and the min-cut partitioner")
    mode.add_argument("--all", action="store_true", help="planning times over every captured graph")
    options = parser.parse_args()
    if options.rivals:
        from bench.recompute import versus

        return versus.run(graph_files(options.graphs), options.device, options.time_limit, outs(options))
    if options.all:
        from bench.recompute import planning_seconds

        return planning_seconds.run(options.device, options.time_limit, options.strict, outs(options))

    results = []
    for path in graph_files(options.graphs):
        for slowdown in options.slowdowns:
            results.append(run(path, slowdown, options.device, options.time_limit, options.chunked_loss))
            r = results[-1]
            print(
                f"{r.name} {slowdown:.0%}: {r.reduction:.2f} of {r.most_reduction:.2f} %, {r.seconds:.2f} s",
                file=sys.stderr,
            )
    page = report(results, options.device, options.chunked_loss)
    page.print()
    for out in outs(options):
        page.save(out)
    wrong = failures(results, options.strict, CHUNKED_REDUCTIONS if options.chunked_loss else REDUCTIONS)
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
