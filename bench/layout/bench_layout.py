"""Lay out generated and public sets of buffers: ours beside greedy rules, omnimalloc and OR-Tools.

    python bench/layout/bench_layout.py --rivals-python rivals/bin/python --markdown bench/results/layout/layout.md
    python bench/layout/bench_layout.py --capacity            # public sets, or tight ones: seconds until a layout fits

Every solver runs in a process of its own (place.py) with the same time limit and threads, one after the other; every
answer is checked here for overlap, and its height is computed here. Exit status: 0; 1 an answer was wrong, or, with
--strict, ours was higher than supermalloc's or missed a limit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

from bench.support.harness import REPOSITORY, Cell, Report
from tests.support.buffers import CAPACITY, FAMILIES, Problem, generate, load
from tests.support.overlap import highest_end, overlapping

RIVALS = ("supermalloc", "portfolio", "size first", "life first", "CP-SAT")
MOST_BUFFERS = {"CP-SAT": 2_000, "size first": 200_000, "life first": 200_000}  # beyond, their time is quadratic
STARTUP_SECONDS = 120.0  # granted on top of the limit: loading, objects, what cannot be interrupted
SIZES = (1_000, 10_000, 100_000, 1_000_000)
MAX_GAP = {"training": 0.001, "recomputation": 0.001, "pipeline": 0.012}  # what --strict asks
MAX_SECONDS, MAX_MEBIBYTES = 10.0, 4096.0


@dataclass(frozen=True)
class Limits:
    """What every solver gets."""

    time_limit: float
    threads: int
    seed: int = 0
    capacity: int = 0


@dataclass(frozen=True)
class Answer:
    """What one solver gave on one problem; height is None where it gave no layout."""

    height_bytes: int | None
    seconds: float | None
    cpu_seconds: float | None
    mebibytes: float | None
    status: str
    wrong: str = ""  # what is wrong with the layout; empty where nothing is


@dataclass
class Result:
    """All answers to one problem."""

    problem: Problem
    load_bytes: int
    answers: dict[str, Answer] = field(default_factory=dict)

    def height(self, solver: str) -> int | None:
        answer = self.answers.get(solver)
        return answer.height_bytes if answer else None

    def gap(self, solver: str) -> float | None:
        """Height above the load, as a fraction of the load."""
        height = self.height(solver)
        return None if height is None else (height - self.load_bytes) / max(1, self.load_bytes)


def solve(solver: str, python: str, problem: Problem, limits: Limits) -> Answer:
    """Run a solver in a process of its own and check its answer."""
    if problem.num_buffers > MOST_BUFFERS.get(solver, problem.num_buffers):
        return Answer(None, None, None, None, "left out")
    with tempfile.TemporaryDirectory() as folder:
        question, reply = Path(folder, "problem.npz"), Path(folder, "answer.npz")
        columns = {"lower": problem.lower, "upper": problem.upper, "size": problem.size}
        columns["capacity"] = np.array(limits.capacity)
        np.savez(question, allow_pickle=False, **columns)
        command = [python, str(Path(__file__).with_name("place.py")), solver, str(question), str(reply)]
        command += ["--time-limit", str(limits.time_limit), "--threads", str(limits.threads)]
        command += ["--seed", str(limits.seed)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=limits.time_limit + STARTUP_SECONDS
            )
        except subprocess.TimeoutExpired:
            return Answer(None, None, None, None, "killed")
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
            return Answer(None, None, None, None, "failed", f"{solver}: {last[0][:200]}")
        with np.load(reply) as file:
            offsets, facts = file["offsets"], json.loads(str(file["facts"]))
    times = (facts["seconds"], facts["cpu_seconds"], facts["mebibytes"])
    if len(offsets) != problem.num_buffers:
        return Answer(None, *times, facts["status"])
    clash = overlapping(problem.lower, problem.upper, problem.size, offsets)
    wrong = f"{solver}: buffer {clash} overlaps one below it" if clash >= 0 else ""
    if offsets.min(initial=0) < 0:
        wrong = f"{solver}: a negative offset"
    return Answer(highest_end(problem.lower, problem.upper, problem.size, offsets), *times, facts["status"], wrong)


def public_files() -> list[Path]:
    """Find the public sets: ``$OLLA_SHARED/layouts``, else ``../shared/layouts`` beside the repository."""
    return sorted((Path(os.environ.get("OLLA_SHARED", REPOSITORY.parent / "shared")) / "layouts").glob("*.csv"))


def problems(families: Sequence[str], sizes: Sequence[int], num_seeds: int, files: Iterable[Path]) -> Iterable[Problem]:
    """Yield every problem, made only when its turn comes."""
    yield from map(load, files)
    for family in families:
        for size in sizes:
            for seed in range(num_seeds):
                yield generate(family, size, seed)


def compare(problem: Problem, pythons: dict[str, str], limits: Limits) -> Result:
    """Run all solvers on one problem."""
    result = Result(problem, problem.load_bytes)
    for solver, python in pythons.items():
        result.answers[solver] = solve(solver, python, problem, limits)
    return result


def report(results: list[Result], solvers: Sequence[str], limits: Limits) -> Report:
    """Lay the results out as a table, three columns a solver, with a summary."""
    columns = ["set", "buffers", "load"]
    for solver in solvers:
        columns += [f"{solver} height", "gap %", "s", "status"]
    columns += ["olla CPU s", "olla MiB"]
    rows: list[list[Cell]] = []
    for r in results:
        row: list[Cell] = [r.problem.name, r.problem.num_buffers, r.load_bytes]
        for solver in solvers:
            answer, gap = r.answers[solver], r.gap(solver)
            row += [answer.height_bytes, None if gap is None else 100 * gap, answer.seconds, answer.status]
        ours = r.answers["olla"]
        rows.append([*row, ours.cpu_seconds, ours.mebibytes and round(ours.mebibytes)])
    title = f"Layout: heights in bytes, at most {limits.time_limit:g} s and {limits.threads} threads each"
    return Report(title, columns, rows, summary(results, solvers))


def summary(results: list[Result], solvers: Sequence[str]) -> dict[str, Cell]:
    """Count and average: ours against the rivals, the gaps by family and size, how many of ours miss their limit."""
    lines: dict[str, Cell] = {"sets": len(results), "answers that are wrong": len(list(wrong_answers(results)))}
    for rival in solvers[1:]:
        pairs = [(r.height("olla"), r.height(rival)) for r in results if r.answers[rival].status != "left out"]
        both = [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]
        lines[f"{rival}: sets tried, answered"] = f"{len(pairs)}, {len(both)}"
        lines[f"{rival}: ours lower, equal, higher"] = ", ".join(
            str(count)
            for count in (
                sum(ours < theirs for ours, theirs in both),
                sum(ours == theirs for ours, theirs in both),
                sum(ours > theirs for ours, theirs in both),
            )
        )
    for group in dict.fromkeys(map(group_of, results)):
        members = [r for r in results if group_of(r) == group]
        cells = []
        for solver in solvers:
            gaps = [gap for r in members if (gap := r.gap(solver)) is not None]
            if gaps:
                count = "" if len(gaps) == len(members) else f" ({len(gaps)} of {len(members)})"
                cells.append(f"{solver} {100 * statistics.mean(gaps):.4f}{count}")
        lines[f"mean gap %, {group}"] = ", ".join(cells)
        limit = MAX_GAP.get(members[0].problem.family)
        ours = [gap for r in members if (gap := r.gap("olla")) is not None]
        if limit and ours:
            count = sum(gap > limit for gap in ours)
            most = 100 * max(ours)
            lines[f"largest gap %, {group}"] = f"olla {most:.4f}; above {100 * limit:g}: {count} of {len(ours)}"
    known = [r for r in results if r.problem.optimum_bytes is not None]
    if known:
        for solver in solvers:
            reached = sum(r.height(solver) == r.problem.optimum_bytes for r in known)
            lines[f"known optimum reached, {solver}"] = f"{reached} of {len(known)}"
    return lines


def group_of(result: Result) -> str:
    return result.problem.name.rpartition("_s")[0] or result.problem.family


def wrong_answers(results: list[Result]) -> Iterable[str]:
    for r in results:
        for answer in r.answers.values():
            if answer.wrong:
                yield f"{r.problem.name}: {answer.wrong}"


def misses(results: list[Result]) -> Iterable[str]:
    """Say where ours misses what --strict asks."""
    for r in results:
        name, ours, theirs, gap = r.problem.name, r.answers["olla"], r.height("supermalloc"), r.gap("olla")
        if ours.height_bytes is None or gap is None:
            yield f"{name}: no layout"
            continue
        if theirs is not None and ours.height_bytes > theirs:
            yield f"{name}: {ours.height_bytes - theirs} bytes above supermalloc"
        if gap > MAX_GAP.get(r.problem.family, float("inf")):
            yield f"{name}: {gap:.4%} above the load"
        if (ours.mebibytes or 0) > MAX_MEBIBYTES or (ours.seconds or 0) > 1.1 * MAX_SECONDS:
            yield f"{name}: {ours.seconds:.1f} s, {ours.mebibytes:.0f} MiB"


def decide(sets: Sequence[Problem], pythons: dict[str, str], limits: Limits, num_seeds: int) -> tuple[Report, bool]:
    """Time the decision: does a layout fit the capacity? The median over seeds; False where a set was not solved."""
    columns = ["set", "buffers", "capacity"]
    for solver in pythons:
        columns += [f"{solver} s", "least s", "most s", "solved"]
    rows: list[list[Cell]] = []
    good, total = True, 0.0
    for problem in sets:
        row: list[Cell] = [problem.name, problem.num_buffers, limits.capacity]
        for solver, python in pythons.items():
            seeds = range(num_seeds) if solver == "olla" else range(1)  # the rivals have no seed, or get one go
            answers = [
                solve(solver, python, problem, Limits(limits.time_limit, limits.threads, seed, limits.capacity))
                for seed in seeds
            ]
            seconds = [answer.seconds for answer in answers if answer.seconds is not None]
            solved = sum(a.height_bytes is not None and a.height_bytes <= limits.capacity for a in answers)
            row += [statistics.median(seconds), min(seconds), max(seconds)] if seconds else [None] * 3
            row.append(f"{solved} of {len(answers)}")
            good = good and not any(a.wrong for a in answers) and (solver != "olla" or solved == len(answers))
            if solver == "olla" and seconds:
                total += statistics.median(seconds)
        rows.append(row)
        print(f"{problem.name}: {row[3]} s, {row[6]}", file=sys.stderr, flush=True)
    title = f"Layout: seconds until a layout fits the capacity, {limits.threads} threads, median of {num_seeds} seeds"
    return Report(title, columns, rows, {"ours, sum of medians, s": total}), good


def versions(python: str) -> dict[str, str]:
    """Ask the rivals' interpreter for their versions."""
    names = ("omnimalloc", "ortools")
    script = f"from importlib import metadata\nfor name in {names!r}: print(metadata.version(name))"
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{python}: the rivals are not there; pip install -r bench/requirements-rivals.txt for it")
    return dict(zip(names, done.stdout.split(), strict=True))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=FAMILIES, metavar="FAMILY")
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), metavar="M")
    parser.add_argument("--num-seeds", type=int, default=2, help="sets per family and size; default 2")
    parser.add_argument("--files", nargs="+", type=Path, help="CSV files in place of the public sets")
    parser.add_argument("--quick", action="store_true", help="one small set of each family")
    parser.add_argument(
        "--capacity", nargs="?", type=int, const=CAPACITY, metavar="BYTES",
        help=f"decide whether this is enough, for the files or else tight sets; default {CAPACITY}",
    )  # fmt: skip
    parser.add_argument("--decisions", type=int, default=7, metavar="N", help="seeds with --capacity; default 7")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for every solver; default 10")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of every solver; default: all cores")
    parser.add_argument("--rivals-python", metavar="PYTHON", help="interpreter with the rivals; without it: ours alone")
    parser.add_argument("--rivals", nargs="*", default=list(RIVALS), choices=RIVALS)
    parser.add_argument("--strict", action="store_true", help="above supermalloc, or beyond a limit, is a failure")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    return parser.parse_args()


def main() -> int:
    """Run the benchmark; return the exit status."""
    options = parse()
    limits = Limits(options.time_limit, options.threads, capacity=options.capacity or 0)
    pythons = {"olla": sys.executable}
    if options.rivals_python:
        pythons |= dict.fromkeys(options.rivals, options.rivals_python)
    files = options.files if options.files is not None else public_files()
    if options.capacity:
        sets = [load(path) for path in files] or [generate("tight", 150, seed) for seed in range(5)]
        page, good = decide(sets, pythons, limits, options.decisions)
        lines = [] if good else ["a set was not solved, or an answer was wrong"]
    else:
        sizes, num_seeds = ([300], 1) if options.quick else (options.sizes, options.num_seeds)
        results = []
        for problem in problems(options.families, sizes, num_seeds, files):
            results.append(compare(problem, pythons, limits))
            cells = (f"{s} {100 * g:.4f} %" for s in pythons if (g := results[-1].gap(s)) is not None)
            print(f"{problem.name}: {', '.join(cells)}", file=sys.stderr, flush=True)
        page = report(results, list(pythons), limits)
        lines = [*wrong_answers(results), *(misses(results) if options.strict else ())]
    page.machine |= versions(options.rivals_python) if options.rivals_python else {}
    page.print()
    for out in (options.json, options.markdown):
        if out:
            page.save(out)
    print("\n".join(lines), file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
