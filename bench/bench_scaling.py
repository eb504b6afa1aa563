"""How time and memory grow with size: every method of olla.plan, and the native stages of planning and of layout.

    python bench/bench_scaling.py --native build/bench/bench/native --markdown bench/results/scaling.md
    python bench/bench_scaling.py --layout --native build/bench/bench/native --markdown bench/results/scaling_layout.md

A method is measured in a process of its own, after a small plan that loads what is loaded once: seconds of the second
plan, and how far it raised the process's peak of resident memory. The native binaries measure themselves.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import olla
from generate import stack
from harness import Cell, Report
from olla.methods import METHODS

SIZES = (300, 1_000, 3_000, 10_000, 30_000, 100_000)
MOST_OPS = {
    "ilp": 10_000,
    "joint": 3_000,
    "model": 3_000,
}  # beyond, all that grows is how far they are over their limit
STARTUP_SECONDS = 120.0  # for imports, and a planner that looks at the clock late
LEAST_SECONDS, LEAST_MEBIBYTES = 0.02, 4.0  # shorter and smaller ones tell nothing about growth


class Run(NamedTuple):
    """A plan of one generated graph by one method."""

    method: str
    num_ops: int
    seconds: float
    mebibytes: float  # that the plan added to the peak
    status: str
    gap: float  # of the peak over the bound, relative to the peak
    excess: float  # of the arena over the load, relative to the load


def plan_once(method: str, num_ops: int, family: str, time_limit: float) -> Run:
    """Plan in this process."""
    graph = stack(num_ops, family="convnet" if family == "convnet" else "transformer")
    olla.plan(stack(100, family="convnet"), method=method, time_limit=time_limit)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    plan = olla.plan(graph, method=method, time_limit=time_limit)
    seconds = time.perf_counter() - begin
    added = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    olla.check(graph, plan)
    gap = (plan.peak_bytes - plan.lower_bound_bytes) / max(1, plan.peak_bytes)
    excess = (plan.arena_bytes - plan.load_bytes) / max(1, plan.load_bytes)
    return Run(method, graph.num_ops, seconds, added / 1024, plan.status.name.lower(), gap, excess)


def plan_apart(method: str, num_ops: int, family: str, time_limit: float) -> Run | str:
    """Plan in a process of its own; return what went wrong where that fails."""
    command = [sys.executable, __file__, "--one", method, "--sizes", str(num_ops), "--family", family]
    command += ["--time-limit", str(time_limit)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=3 * time_limit + STARTUP_SECONDS
        )
    except subprocess.TimeoutExpired:
        return "killed"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:200]
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def exponent(points: Iterable[tuple[float, float]], least: float) -> float | None:
    """Fit the slope of log value over log size by least squares; None below two values that are large enough.

    Example:
        >>> exponent([(1, 2.0), (10, 20.0), (100, 200.0)], 0.1)
        1.0
    """
    logs = [(math.log(size), math.log(value)) for size, value in points if value >= least]
    if len({x for x, _ in logs}) < 2:
        return None
    x_mean = math.fsum(x for x, _ in logs) / len(logs)
    y_mean = math.fsum(y for _, y in logs) / len(logs)
    slope = math.fsum((x - x_mean) * (y - y_mean) for x, y in logs) / math.fsum((x - x_mean) ** 2 for x, _ in logs)
    return round(slope, 2)


def methods_report(family: str, sizes: Sequence[int], methods: Sequence[str], time_limit: float) -> Report:
    """Plan graphs of every size by every method; exponents of seconds, where the plan took less than its limit."""
    report = Report(
        f"`olla.plan` of a generated {family}, at most {time_limit:g} s",
        ["method", "ops", "seconds", "added MiB", "status", "peak over bound %", "arena over load %"],
    )
    for method in methods:
        runs: list[Run] = []
        for size in sizes:
            if size > MOST_OPS.get(method, size):
                continue
            run = plan_apart(method, size, family, time_limit)
            if isinstance(run, str):
                report.rows.append([method, size, None, None, f"failed: {run}", None, None])
                continue
            runs.append(run)
            row: list[Cell] = [method, run.num_ops, run.seconds, round(run.mebibytes, 1), run.status]
            report.rows.append([*row, 100 * run.gap, 100 * run.excess])
            print(f"{method} {run.num_ops}: {run.seconds:.3f} s", file=sys.stderr, flush=True)
        within = [run for run in runs if run.seconds < time_limit]
        seconds = exponent(((run.num_ops, run.seconds) for run in within), LEAST_SECONDS)
        mebibytes = exponent(((run.num_ops, run.mebibytes) for run in within), LEAST_MEBIBYTES)
        report.summary[f"{method}, grows as ops to the power"] = (
            f"seconds {'-' if seconds is None else seconds}, memory {'-' if mebibytes is None else mebibytes}"
        )
    return report


def highs_library() -> str:
    """Find the HiGHS library of the highspy wheel."""
    spec = importlib.util.find_spec("highspy")
    if spec is None or spec.origin is None:
        raise SystemExit("highspy is not installed: the integer programs cannot be solved")
    return str(next(Path(spec.origin).parent.glob("libhighs*")))


def native_tables(binary: Path, arguments: Sequence[str]) -> str:
    """Run a native binary and return the tables it prints, under a heading that says how it was called."""
    if not binary.is_file():
        raise SystemExit(f"{binary.name} is not there: cmake --preset bench && cmake --build --preset bench")
    done = subprocess.run([str(binary), *arguments], capture_output=True, text=True, check=True)
    shown = [Path(word).name if Path(word).is_absolute() else word for word in arguments]
    return f"## `{' '.join([binary.name, *shown])}`\n\n{done.stdout}\n"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", action="store_true", help="layouts instead of plans")
    parser.add_argument("--native", type=Path, metavar="FOLDER", help="where the native binaries are; else none is run")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, metavar="METHOD")
    parser.add_argument("--family", default="convnet", choices=("convnet", "transformer"))
    parser.add_argument("--sizes", nargs="+", type=int, metavar="N")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds of every run; default 10")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of layouts; default: all cores")
    parser.add_argument("--note", default="", help="a sentence for the page, about the machine")
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    parser.add_argument("--one", choices=METHODS, help=argparse.SUPPRESS)  # what plan_apart asks of its process
    return parser.parse_args()


def main() -> int:
    """Run the benchmark; return the exit status."""
    options = parse()
    if options.one:
        print(json.dumps(plan_once(options.one, options.sizes[0], options.family, options.time_limit)._asdict()))
        return 0
    sizes = ["--sizes", ",".join(map(str, options.sizes))] if options.sizes else []
    limit = ["--time-limit", f"{options.time_limit:g}"]
    native = ""
    if options.layout:
        report = Report("How layouts grow with the number of buffers", [])
        binary, arguments = "bench_scaling_layout", ["--threads", str(options.threads)]
    else:
        chosen = options.sizes or SIZES
        report = methods_report(options.family, chosen, options.methods, options.time_limit)
        binary, arguments = "bench_scaling", ["--family", options.family, "--highs", highs_library()]
        report.print()
    if options.native:
        native = native_tables(options.native / binary, [*arguments, *sizes, *limit])
        print(native)
    if options.markdown:
        options.markdown.write_text(page(report, native, options.note))
    return 1 if any(str(row[4]).startswith("failed") for row in report.rows) else 0


def page(report: Report, native: str, note: str) -> str:
    """Lay out the page: the methods, the native tables, the machine."""
    measured = "Measured on " + ", ".join(f"{name} {value}" for name, value in report.machine.items()) + "."
    table = report.markdown().removesuffix(measured + "\n").rstrip() if report.rows else f"# {report.title}"
    return "\n\n".join(filter(None, [table, native.rstrip(), measured, note])) + "\n"


if __name__ == "__main__":
    sys.exit(main())
