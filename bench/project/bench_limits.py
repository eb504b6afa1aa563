"""How long `--time-limit 1` takes: every graph, with and without goals, in seconds of processor time.

    python bench/project/bench_limits.py --generated 20000 100000 --markdown bench/results/project/limits.md

Reading the file, planning and checking count, in a process where the package is loaded. What is allowed is the limit
and one more second. A budget is nine tenths of the peak in program order; that nothing fits it is an answer too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla
from bench.support.harness import Report, graph_files, graph_name
from tests.support.generate import random_graph, stack

GOALS: dict[str, dict[str, Any]] = {
    "none": {},
    "max_slowdown=0.1": {"max_slowdown": 0.1},
    'minimise="peak"': {"minimise": "peak"},
    "budget": {"budget": 0},
}
LIMIT_SECONDS, ALLOWED_SECONDS = 1.0, 2.0
BUDGET_SHARE = 0.9


def timed(path: Path, goal: dict[str, Any], program_peak_bytes: int) -> tuple[float, float, str]:
    """Plan a file; return seconds of processor time, of the clock, and what came of it."""
    if "budget" in goal:
        goal = {"budget": max(1, int(BUDGET_SHARE * program_peak_bytes))}
    processor, clock = time.process_time(), time.perf_counter()
    try:
        answer = olla.plan(path, time_limit=LIMIT_SECONDS, **goal).status.value
    except olla.BudgetError:
        answer = "nothing fits"
    return time.process_time() - processor, time.perf_counter() - clock, answer


def generated(sizes: list[int], folder: Path) -> list[Path]:
    """Write generated graphs of each size."""
    paths = []
    for size in sizes:
        graphs = {
            "transformer": stack(size),
            "convnet": stack(size, family="convnet"),
            "convnet_clip": stack(size, family="convnet", clip=True, spread=0.5, seed=1),
            "random": random_graph(size, seed=1, max_bytes=1 << 20),
        }
        for name, graph in graphs.items():
            paths.append(folder / f"{name}_{size}.json.gz")
            graph.save(paths[-1])
    return paths


def main() -> int:
    """Run the benchmark; return 1 where a plan took longer than allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="*", default=None, help="names, patterns or files; default: all")
    parser.add_argument("--generated", nargs="*", type=int, default=[], metavar="NUM_OPS")
    parser.add_argument("--goals", nargs="+", choices=GOALS, default=list(GOALS))
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    options = parser.parse_args()
    report = Report("Time limits", ["graph", "ops", *(f"goal: {goal}" for goal in options.goals), "most, clock"])
    over, most = 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        captured = [] if options.graphs == [] else graph_files(options.graphs or ())
        olla.plan(stack(100), time_limit=LIMIT_SECONDS, max_slowdown=0.1)  # loads what is loaded once
        for path in [*captured, *generated(options.generated, Path(folder))]:
            graph = olla.Graph.load(path)
            found = [timed(path, GOALS[goal], graph.program_peak_bytes) for goal in options.goals]
            report.rows.append([graph_name(path), graph.num_ops, *(row[0] for row in found), max(r[1] for r in found)])
            over += sum(row[0] > ALLOWED_SECONDS for row in found)
            most = max(most, *(row[0] for row in found))
    report.summary["most seconds of processor time"] = f"{most:.2f}, {ALLOWED_SECONDS:g} allowed"
    report.summary["plans that took longer than allowed"] = str(over)
    report.print()
    if options.markdown:
        report.save(options.markdown)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
