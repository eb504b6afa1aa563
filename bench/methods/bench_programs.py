"""The integer programs alone: no warm start, no bound by minimum cuts, program order as the only incumbent.

    python bench/methods/bench_programs.py --graphs 'alexnet*' vgg11_b32 --markdown bench/results/methods/programs.md

The methods `ilp`, `joint` and `model` of `olla.plan` start from good orders and stop where minimum cuts prove one
optimal; this shows what their programs do without. Beside them, `auto`. Every answer is simulated again. A program has
reached `auto` when it ends by itself with a peak or an arena as low; where it does not, the time limit counts as its
time, so that what is said of the ratio holds all the more without one. Exit status: 0; 1 where a program's peak or
arena is below a bound that `auto` proved.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla
from bench.methods.bench_methods import geometric_mean
from bench.support.harness import Cell, Report, graph_files, graph_name, measure
from olla import _core
from olla.graph import nearest_order
from olla.ilp import joint_ilp, order_ilp
from olla.methods.model import control_edges

PROGRAMS = ("ilp", "model", "joint")


@dataclass(frozen=True)
class Run:
    """What one program reached: bytes, whether it was not too large to be built, whether proved, seconds in all."""

    num_bytes: int
    built: bool
    proved: bool
    seconds: float


def order_alone(core: _core.CoreGraph, time_limit: float) -> Run:
    """Solve the order program; the bytes are the peak's."""
    found, timing = measure(lambda: order_ilp(core, time_limit=time_limit))
    assert _core.profile(core, found.order).peak_bytes == found.peak_bytes
    return Run(
        found.peak_bytes, "not built" not in found.figures.message, found.status == "optimal", timing.median_seconds
    )


def joint_alone(core: _core.CoreGraph, alignment: int, time_limit: float) -> Run:
    """Solve the joint program; the bytes are the arena's."""
    arena = _core.arena_graph(core, alignment)
    start = nearest_order(arena, np.arange(arena.num_ops, dtype=np.int32))
    found, timing = measure(lambda: joint_ilp(arena, start, time_limit=time_limit))
    return Run(
        found.arena_bytes, "not built" not in found.figures.message, found.status == "optimal", timing.median_seconds
    )


def cells(run: Run, best: int) -> list[Cell]:
    """Return a program's part of a row: how far above the best, whether proved, seconds."""
    if not run.built:
        return ["not built", False, None]
    return [100 * (run.num_bytes / best - 1) if best else 0.0, run.proved, run.seconds]


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=[], help="names, patterns or files; default: all captured ones")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds per graph and program (default: 60)")
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    options = parser.parse_args()

    columns = ["graph", "ops", "auto s"]
    for program in PROGRAMS:
        columns += [f"{program}: excess %", "proved", "s"]
    report = Report("Integer programs without warm start and without the bound by minimum cuts", columns)
    ratios: dict[str, list[float]] = {program: [] for program in PROGRAMS}
    built, proved, reached = (dict.fromkeys(PROGRAMS, 0) for _ in range(3))
    wrong = []
    for path in graph_files(options.graphs):
        graph = olla.Graph.load(path)
        plan, timing = measure(lambda graph=graph: olla.plan(graph), num_repeats=3)
        edges = control_edges(graph, graph.core)
        runs = {
            "ilp": order_alone(graph.core, options.time_limit),
            "model": order_alone(graph.core.constrained(edges.before, edges.after), options.time_limit),
            "joint": joint_alone(graph.core, plan.alignment, options.time_limit),
        }
        bounds = {"ilp": plan.lower_bound_bytes, "model": plan.lower_bound_bytes, "joint": plan.arena_lower_bound_bytes}
        best = {"ilp": plan.peak_bytes, "model": plan.peak_bytes, "joint": plan.arena_bytes}
        row: list[Cell] = [graph_name(path), graph.num_ops, timing.median_seconds]
        for program, run in runs.items():
            row += cells(run, best[program])
            as_low = run.built and run.proved and run.num_bytes <= best[program]
            built[program] += run.built
            proved[program] += run.built and run.proved
            reached[program] += as_low
            ratios[program].append((run.seconds if as_low else options.time_limit) / timing.median_seconds)
            if run.num_bytes < bounds[program]:
                wrong.append(f"{row[0]}: {program} reached {run.num_bytes} bytes, auto's bound is {bounds[program]}")
        report.rows.append(row)
        print(*row, file=sys.stderr, flush=True)
    report.summary["time limit, s"] = options.time_limit
    for program in PROGRAMS:
        report.summary[f"{program}: built, ended with a proof, reached auto"] = (
            f"{built[program]}, {proved[program]}, {reached[program]}"
        )
        report.summary[f"{program}: auto is faster by at least (geometric mean)"] = geometric_mean(ratios[program])
    report.print()
    if options.markdown:
        report.save(options.markdown)
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
