"""How time and memory grow with size: every method of olla.plan, and the native stages of planning and of layout.

    python bench/project/bench_scaling.py --native build/bench/bench/native --markdown bench/results/project/scaling.md
    python bench/project/bench_scaling.py --layout --native build/bench/bench/native \\
        --markdown bench/results/project/scaling_layout.md

Two kinds of graphs: training steps, on which orders are soon proved best, and small random graphs, on which the
integer programs have to search. A method is measured in a process of its own, after a small plan
that loads what is loaded once: seconds of the second plan, the peak of resident memory while it ran, and how far that
is above what was there before. The native binaries measure themselves.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla
from bench.support.harness import Cell, Report, machine
from olla.plan import METHODS
from tests.support.generate import random_graph, stack

SIZES = {"convnet": (300, 1_000, 3_000, 10_000, 30_000, 100_000), "random": (8, 12, 16, 20, 24, 32, 48)}
WORDS = {"convnet": "generated convnets", "random": "small random graphs"}
NATIVE_FAMILY = {"convnet": "convnet", "random": "tangle"}
MOST_OPS = {
    "ilp": 10_000,
    "joint": 3_000,
    "model": 3_000,
}  # beyond, all that grows is how far they are over their limit
PROVE = ("auto", "ilp", "joint", "model")  # what these do where they prove nothing, their limits say
STARTUP_SECONDS = 120.0  # for imports, and a planner that looks at the clock late
LEAST_SECONDS, LEAST_MEBIBYTES = 0.01, 2.0  # shorter and smaller ones tell nothing about growth


class Run(NamedTuple):
    """A plan of one generated graph by one method."""

    method: str
    num_ops: int
    seconds: float
    peak_mebibytes: float  # resident, of the process
    added_mebibytes: float  # above what was resident before
    status: str
    gap: float  # of the peak over the bound, relative to the peak
    excess: float  # of the arena over the load, relative to the load


def plan_once(method: str, num_ops: int, family: str, time_limit: float) -> Run:
    """Plan in this process."""
    graph = random_graph(num_ops, seed=1) if family == "random" else stack(num_ops, family="convnet")
    olla.plan(stack(100, family="convnet"), method=method, time_limit=time_limit)
    before = forget_peak()
    begin = time.perf_counter()
    plan = olla.plan(graph, method=method, time_limit=time_limit)
    seconds = time.perf_counter() - begin
    peak = resident("VmHWM")
    olla.check(graph, plan)
    gap = (plan.peak_bytes - plan.lower_bound_bytes) / max(1, plan.peak_bytes)
    excess = (plan.arena_bytes - plan.load_bytes) / max(1, plan.load_bytes)
    return Run(method, graph.num_ops, seconds, peak, peak - before, plan.status.name.lower(), gap, excess)


def resident(field: str) -> float:
    """Read a field of /proc/self/status, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) / 1024


def forget_peak() -> float:
    """Give back what is free, let the peak of resident memory start anew, and return what is resident, in MiB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def plan_apart(method: str, num_ops: int, family: str, time_limit: float) -> Run | str:
    """Plan in a process of its own; return what went wrong where that fails."""
    command = [sys.executable, __file__, "--one", method, "--sizes", str(num_ops), "--families", family]
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


def growth(runs: Sequence[Run], time_limit: float) -> str:
    """Fit exponents over the runs that did all their work: those of a method that proves, where they proved."""
    done = [run for run in runs if run.seconds < time_limit and (run.method not in PROVE or run.status == "optimal")]
    seconds = exponent(((run.num_ops, run.seconds) for run in done), LEAST_SECONDS)
    mebibytes = exponent(((run.num_ops, run.added_mebibytes) for run in done), LEAST_MEBIBYTES)
    shown = ["-" if power is None else str(power) for power in (seconds, mebibytes)]
    return f"seconds {shown[0]}, memory {shown[1]}; {len(done)} of {len(runs)} runs"


def methods_report(family: str, sizes: Sequence[int], methods: Sequence[str], time_limit: float) -> Report:
    """Plan graphs of every size by every method, and fit exponents."""
    report = Report(
        f"`olla.plan` of {WORDS[family]}, at most {time_limit:g} s",
        ["method", "ops", "seconds", "peak MiB", "added MiB", "status", "peak over bound %", "arena over load %"],
    )
    for method in methods:
        runs: list[Run] = []
        for size in sizes:
            if size > MOST_OPS.get(method, size):
                continue
            run = plan_apart(method, size, family, time_limit)
            if isinstance(run, str):
                report.rows.append([method, size, None, None, None, f"failed: {run}", None, None])
                continue
            runs.append(run)
            row: list[Cell] = [method, run.num_ops, run.seconds, run.peak_mebibytes, run.added_mebibytes]
            report.rows.append([*row, run.status, 100 * run.gap, 100 * run.excess])
            print(f"{method} {run.num_ops}: {run.seconds:.3f} s", file=sys.stderr, flush=True)
        report.summary[f"{method}, grows as ops to the power"] = growth(runs, time_limit)
    return report


def highs_library() -> str:
    """Find the HiGHS library of the highspy wheel."""
    spec = importlib.util.find_spec("highspy")
    if spec is None or spec.origin is None:
        raise SystemExit("highspy is not installed: the integer programs cannot be solved")
    library = next(Path(spec.origin).parent.glob("libhighs*"), None)
    if library is None:
        raise SystemExit(
            "this highspy brings no shared library of HiGHS, which the C++ benchmark opens: pip install 'highspy<1.16'"
        )
    return str(library)


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
    parser.add_argument(
        "--native", type=Path, metavar="FOLDER", help="where the native binaries are; --layout needs them"
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, metavar="METHOD")
    parser.add_argument("--families", nargs="+", default=list(SIZES), choices=SIZES, metavar="FAMILY")
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
        run = plan_once(options.one, options.sizes[0], options.families[0], options.time_limit)
        print(json.dumps(run._asdict()))
        return 0
    limit = ["--time-limit", f"{options.time_limit:g}"]
    reports: list[Report] = []
    tables: list[str] = []
    if options.layout:
        sizes = ["--sizes", ",".join(map(str, options.sizes))] if options.sizes else []
        arguments = ["--threads", str(options.threads), *sizes, *limit]
        tables.append(native_tables(options.native / "bench_scaling_layout", arguments))
    for family in [] if options.layout else options.families:
        chosen = options.sizes or SIZES[family]
        reports.append(methods_report(family, chosen, options.methods, options.time_limit))
        reports[-1].print()
        if options.native:
            arguments = ["--family", NATIVE_FAMILY[family], "--highs", highs_library()]
            arguments += ["--sizes", ",".join(map(str, chosen)), *limit]
            tables.append(native_tables(options.native / "bench_scaling", arguments))
    print("\n".join(tables))
    if options.markdown:
        title = "How layouts grow with size" if options.layout else "How planning grows with size"
        options.markdown.write_text(page(title, reports, tables, options.note))
    return 1 if any("failed" in str(row[5]) for report in reports for row in report.rows) else 0


def page(title: str, reports: Sequence[Report], tables: Sequence[str], note: str) -> str:
    """Lay out the page: the methods, the native tables, the machine."""
    facts = machine()
    measured = "Measured on " + ", ".join(f"{name} {value}" for name, value in facts.items()) + "."
    shown = [f"#{report.markdown().partition('Measured on')[0].rstrip()}" for report in reports]
    return "\n\n".join(filter(None, [f"# {title}", *shown, *map(str.rstrip, tables), measured, note])) + "\n"


if __name__ == "__main__":
    sys.exit(main())
