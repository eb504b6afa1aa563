"""The parts of bench_gpu.py: which jobs they run, and which figures are expected of what those find."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.pytorch.bench_run import LEAST_SAVED, MOST_TIME
from bench.support.harness import REPOSITORY, Cell
from bench.support.jobs import Job
from bench.support.verdicts import Figure, NotExpected, NotMeasured, at_most, exactly

Found = dict[str, Any]
HERE = Path(__file__).parent
FRESH = {"OLLA_DISK_CACHE": "0"}
SWAPPED = ["gpt2:8:512", "resnet50:32"]  # large enough that copies have work to hide behind
SWAPPED_TINY = ["gpt2-tiny:32"]
MOST_BEYOND_PLAN = 0.01  # of what a step allocates
MOST_COMPILED_TIME = 1.08  # times torch.compile's: the backend adds up to 5 % unless told otherwise
SWAPS_WITHIN = 0.1  # added to a step's time, by plan
MOST_BESIDE_PLAN = 0.05  # of a step's time that swaps may add beyond what is planned
MIB = 2**20


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    cases: Sequence[str]
    optimizers: Sequence[str]
    swapped: Sequence[str]
    num_rounds: int
    are_times_real: bool


@dataclass
class Part:
    """Jobs, and figures of what they find."""

    jobs: list[Job] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)

    def job(self, name: str, script: str, *arguments: str, **options: Any) -> str:
        """Add a job of a script of this folder; return its name."""
        self.jobs.append(Job(name, [sys.executable, str(HERE / script), *arguments], **options))
        return name

    def figure(self, subject: str, name: str, jobs: Sequence[str], value: Any, *expected: Any) -> None:
        """Add a figure; ``expected`` is a pair of words and check, or nothing."""
        self.figures.append(Figure(subject, name, tuple(jobs), value, *expected))


def allocator() -> Part:
    """The planning allocator is compiled against this torch before jobs run beside each other that all need it."""
    code = "import json, torch; from olla.pytorch.memory import replay; replay.load(torch.device('cuda')); "
    part, name = Part(), "allocator"
    part.jobs.append(Job(name, [sys.executable, "-c", code + "print(json.dumps({'loaded': True}))"], is_alone=True))
    part.figure(name, "compiled and loaded", [name], lambda found: found["loaded"], *exactly(True))
    return part


def tests(plan: Plan) -> Iterator[Part]:
    """One job per file of tests."""
    folder = REPOSITORY / "tests"
    marked = [path for path in sorted(folder.rglob("test_*.py")) if "@pytest.mark.gpu" in path.read_text()]
    for path in [*sorted((folder / "cuda").glob("test_*.py")), *marked]:
        part, name = Part(), path.relative_to(REPOSITORY).as_posix()
        part.job(name, "bench_gpu.py", "--tests-of", name, environment=FRESH, most_seconds=1200)
        part.figure(name, "passed", [name], lambda found: found["passed"])
        part.figure(name, "skipped", [name], lambda found: found["skipped"])
        part.figure(name, "failed", [name], lambda found: ", ".join(found["failed"]) or "none", *exactly("none"))
        yield part


def memory(plan: Plan) -> Iterator[Part]:
    """Numbers and bytes of each model and optimizer; then those of the backend."""
    pairs = [(case, optimizer) for optimizer in plan.optimizers for case in plan.cases]
    for case, optimizer in pairs:
        yield _numbers(case, optimizer)
        yield _bytes(case, optimizer)
    for case in plan.cases:
        yield _compiled_bytes(case, plan.optimizers[0])


def _numbers(case: str, optimizer: str) -> Part:
    part, of = Part(), f"{case}, {optimizer}"
    job = part.job(f"numbers of {of}", "bench_run.py", "--part", "check", case, optimizer, "cuda", environment=FRESH)

    def equal_to_torch(found: Found) -> Cell:
        if not found["equal eager"] and not found["repeats"]:
            raise NotMeasured("an ordinary loop does not repeat its own numbers on this device")
        return bool(found["equal eager"])

    part.figure(of, "equal to an ordinary loop", [job], equal_to_torch, *exactly(True))
    part.figure(of, "equal to program order", [job], lambda found: found["equal program"], *exactly(True))
    return part


def _bytes(case: str, optimizer: str) -> Part:
    part, of = Part(), f"{case}, {optimizer}"
    eager, expandable, ours = (
        part.job(f"bytes of {of}, {way}", "bench_reserved.py", "--one", case, optimizer, way)
        for way in ("eager", "expandable", "olla")
    )

    def share(key: str) -> Any:
        def value(ordinary: Found, planned: Found) -> Cell:
            if planned["saved"] <= LEAST_SAVED:
                raise NotExpected(f"the plan saves {planned['saved']:.1%}")
            return round(planned[key] / ordinary[key], 3)

        return value

    def beyond_plan(found: Found) -> Cell:
        return None if found["measured"] is None else found["measured"] - found["planned"]

    part.figure(of, "planned MiB", [ours], lambda found: round(found["planned"] / MIB, 1))
    part.figure(of, "at planned addresses", [ours], lambda found: found["in arena"], *exactly(True))
    part.figure(of, "measured - planned bytes", [ours], beyond_plan, *exactly(0))
    part.figure(of, "misses", [ours], lambda found: found["misses"], *exactly(0))
    part.figure(
        of,
        "allocated in a step / by plan",
        [ours],
        lambda found: round(found["in step"] / found["expected in step"], 4),
        *at_most(1 + MOST_BEYOND_PLAN),
    )
    for name, job in (("eager", eager), ("expandable segments", expandable), ("olla", ours)):
        for key in ("in step", "reserved"):
            what = "allocated in a step" if key == "in step" else key
            part.figure(of, f"{name}: {what} MiB", [job], lambda found, key=key: round(found[key] / MIB))
    part.figure(of, "allocated / eager", [eager, ours], share("in step"), *at_most(1))
    part.figure(of, "reserved / eager", [eager, ours], share("reserved"), *at_most(1))
    return part


def _compiled_bytes(case: str, optimizer: str) -> Part:
    part, of = Part(), f"{case}, {optimizer}"
    modes = ("compile", "compile-olla")
    jobs = [
        part.job(f"bytes of {of}, {mode}", "bench_run.py", "--part", "memory", case, optimizer, "cuda", mode)
        for mode in modes
    ]
    for mode, job in zip(modes, jobs, strict=True):
        part.figure(of, f"{mode}: allocated in a step MiB", [job], lambda found: round(found["bytes"] / MIB))
    part.figure(of, "compile-olla / compile", jobs, lambda a, b: round(b["bytes"] / a["bytes"], 3), *at_most(1))
    return part


def times(plan: Plan) -> Iterator[Part]:
    """Plans and kernels are made beside each other first, and found on disk by what is timed alone."""
    cases = [(case, _Times(plan, case)) for case in plan.cases]
    for _, of in cases:
        yield of.prepared("eager", "program", "olla")
    for _, of in cases:
        yield of.ordinary()
        yield of.graphs()
    for case in plan.swapped:
        yield _swaps(plan, case)
    for modes in (("compile", "compile-olla"), ("reduce-overhead",)):
        for _, of in cases:
            yield of.prepared(*modes)
    for _, of in cases:
        yield of.compiled()
        yield of.reduced_overhead()


class _Times:
    """Parts that time one model."""

    def __init__(self, plan: Plan, case: str) -> None:
        self._plan = plan
        self._case = case
        self._of = f"{case}, {plan.optimizers[0]}"

    def prepared(self, *modes: str) -> Part:
        """Steps whose times do not count; their failure shows where they are timed."""
        part = Part()
        self._job(part, "made: ", 0, *modes)
        return part

    def ordinary(self) -> Part:
        part, modes = Part(), ("eager", "program", "olla")
        job = self._timed(part, *modes)
        self._ratio(part, job, "olla", "program", MOST_TIME)
        self._ratio(part, job, "olla", "eager")
        return part

    def graphs(self) -> Part:
        part = Part()
        job = self._timed(part, "olla-graphs")
        expected = self._at_most(MOST_TIME)
        other = self._name("", "eager", "program", "olla")
        part.figure(
            self._of,
            "olla-graphs / eager",
            [job, other],
            lambda ours, others: round(_middle(ours, "olla-graphs") / _middle(others, "eager"), 3),
            *expected,
        )
        return part

    def compiled(self) -> Part:
        part = Part()
        job = self._timed(part, "compile", "compile-olla")
        self._ratio(part, job, "compile-olla", "compile", MOST_COMPILED_TIME)
        return part

    def reduced_overhead(self) -> Part:
        part = Part()
        self._timed(part, "reduce-overhead")
        return part

    def _timed(self, part: Part, *modes: str) -> str:
        job = self._job(part, "", self._plan.num_rounds, *modes, is_alone=True)
        for mode in modes:
            part.figure(self._of, f"{mode} ms", [job], lambda found, mode=mode: round(1e3 * _middle(found, mode), 3))
        return job

    def _job(self, part: Part, prefix: str, num_rounds: int, *modes: str, **options: Any) -> str:
        arguments = ("--part", "time", self._case, self._plan.optimizers[0], "cuda", str(num_rounds), *modes)
        return part.job(self._name(prefix, *modes), "bench_run.py", *arguments, **options)

    def _name(self, prefix: str, *modes: str) -> str:
        return f"{prefix}times of {self._of}, {' '.join(modes)}"

    def _ratio(self, part: Part, job: str, ours: str, other: str, most: float | None = None) -> None:
        def value(found: Found) -> Cell:
            return round(statistics.median(a / b for a, b in zip(found[ours], found[other], strict=True)), 3)

        part.figure(self._of, f"{ours} / {other}", [job], value, *(self._at_most(most) if most else ()))

    def _at_most(self, most: float) -> tuple[Any, ...]:
        return at_most(most) if self._plan.are_times_real else ("time means nothing here",)


def _middle(found: Found, mode: str) -> float:
    return statistics.median(found[mode])


def _swaps(plan: Plan, case: str) -> Part:
    """Steps that copy tensors to host memory and back beside their work: the least peak within some added time."""
    part, of = Part(), f"{case}, {plan.optimizers[0]}, swaps alone"
    within = SWAPS_WITHIN if plan.are_times_real else 1.0
    goal = ("--goals", f"swaps_within={within:g}", "--device", "cuda", "--time-limit", "5")
    job = part.job(
        f"swaps of {case}",
        "bench_budget_run.py",
        *("--cases", case, "--optimizer", plan.optimizers[0], *goal, "--json-line"),
        is_alone=True,
    )

    def row(key: str) -> Any:
        def value(found: Found) -> Cell:
            if not found["rows"]:
                raise NotMeasured("; ".join(f"{name}: {why}" for name, why in found["summary"].items()))
            if found["rows"][0]["swapped MiB"] == 0:
                raise NotMeasured(f"within {within:.0%} of added time nothing can be swapped")
            return found["rows"][0][key]

        return value

    def beside_plan(found: Found) -> Cell:
        return round((row("added by clock %")(found) - row("added by plan %")(found)) / 100, 3)

    part.figure(of, "equal", [job], row("equal"), *exactly(True))
    part.figure(of, "as planned", [job], row("holds"), *exactly(True))
    for key in ("saved %", "swapped MiB", "added by plan %", "added by clock %"):
        part.figure(of, key, [job], row(key))
    expected = at_most(MOST_BESIDE_PLAN) if plan.are_times_real else ("time means nothing here",)
    part.figure(of, "added by clock - by plan", [job], beside_plan, *expected)
    return part
