"""What is expected of olla on a GPU, measured, in three stages that each fit into ten minutes; `make gpu` runs it.

    python bench/pytorch/bench_gpu.py --stages tests memory time
    python bench/pytorch/bench_gpu.py --stages time --cases gpt2:1:256 --seconds 300 --folder build/gpu

tests   tests/cuda and all other tests that need a GPU.
memory  for each model and optimizer: the losses, parameters and state of an ordinary step, to the bit (deterministic
        kernels, updates one parameter at a time); the planned peak, the measured one and torch's own count; requests
        missed; bytes reserved by an ordinary loop, by one with expandable segments, and by olla; for the backend
        "olla" of torch.compile, what its step allocates beside torch.compile's.
time    an ordinary loop, the program order and olla in turns, olla in a CUDA graph, torch.compile and its backend
        "olla" in turns, mode "reduce-overhead"; steps that copy tensors to host memory beside their work.

Every part is a job in a process of its own: parts of bench_run.py, bench_reserved.py and bench_budget_run.py. A page
cuda_STAGE.md is written after each; what a stage had no time for is in it as "not measured". Under the stand-in for
CUDA (docs/cuda.md) models are tiny, times are told and not judged: there time means nothing.

Exit status: 0; 1 if a figure is not as expected, or a part failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

from bench.pytorch import gpu_figures
from bench.pytorch.bench_run import CASES
from bench.pytorch.gpu_figures import Plan
from bench.support.harness import REPOSITORY, Cell, Report
from bench.support.jobs import Answer, Job, run
from bench.support.verdicts import FAILED, judge, overview, table
from tests.cuda import standin

STAGES: dict[str, tuple[str, Callable[[Plan], Iterator[gpu_figures.Part]]]] = {
    "tests": ("Tests that need a GPU", gpu_figures.tests),
    "memory": ("Numbers and memory of training steps on a GPU", gpu_figures.memory),
    "time": ("Times of training steps on a GPU", gpu_figures.times),
}
TINY = [case.split(":")[0] + "-tiny:2" for case in CASES]
MOST_AT_ONCE = 8
LEAST_SECONDS = 30.0


@dataclass
class Stage:
    """One stage while it runs: its jobs, figures and answers, and the page that is written after every answer."""

    name: str
    plan: Plan
    page: Path
    facts: dict[str, Cell]

    def __post_init__(self) -> None:
        self.title, parts_of = STAGES[self.name]
        parts = [gpu_figures.allocator(), *parts_of(self.plan)]
        self.jobs = [job for part in parts for job in part.jobs]
        self.figures = [figure for part in parts for figure in part.figures]
        self.answers: dict[str, Answer] = {}

    def run(self, until: float, folder: Path) -> Report:
        """Run the jobs; return the table of the verdicts."""
        num_at_once = max(1, min(MOST_AT_ONCE, (os.cpu_count() or 1) // 2))
        run(self.jobs, until=until, num_at_once=num_at_once, folder=folder, tell=self._tell)
        return self._write()

    def _tell(self, job: Job, answer: Answer) -> None:
        self.answers[job.name] = answer
        print(f"{job.name}: {answer.fault or 'done'}", file=sys.stderr, flush=True)
        self._write()

    def _write(self) -> Report:
        verdicts = [judge(figure, self.answers) for figure in self.figures]
        report = table(f"{self.title}: what was expected, and what came of it", verdicts, self.facts)
        self.page.parent.mkdir(parents=True, exist_ok=True)
        self.page.write_text(overview(self.title, verdicts) + "\n" + report.markdown())
        return report


def device_facts() -> dict[str, Cell]:
    """Describe the device, its driver and compilers."""
    device = torch.cuda.get_device_properties(0)
    facts: dict[str, Cell] = {
        "device": f"{device.name}, {device.total_memory / 2**30:.0f} GiB, compute capability "
        f"{device.major}.{device.minor}, {device.multi_processor_count} multiprocessors",
        "CUDA of torch": torch.version.cuda,
    }
    queries = {
        "driver": ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        "nvcc": ["nvcc", "--version"],
    }
    for name, command in queries.items():
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            facts[name] = (done.stdout.strip().splitlines() or ["unknown"])[-1]
    if standin.is_present():
        facts = {"under the stand-in": "no GPU: docs/cuda.md says what is real; time means nothing here", **facts}
    return facts


def run_tests(path: str) -> int:
    """Run the tests of one file that need a GPU; print what came of them after each."""
    import pytest

    class Outcomes:
        def __init__(self) -> None:
            self.found: dict[str, Any] = {"passed": 0, "skipped": 0, "failed": []}

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when != "call" and report.passed:
                return
            if report.failed:
                self.found["failed"] += [report.nodeid.rpartition("/")[2]]
            else:
                self.found[report.outcome] += 1
            print("\n" + json.dumps(self.found), flush=True)

    # Versions differ from those that the project pins: what these warn of is no failure.
    options = ["-q", "-W", "default", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=240", "-m", "gpu"]
    standin.with_numbers()
    outcomes = Outcomes()
    status = pytest.main([*options, path], plugins=[outcomes])
    print("\n" + json.dumps(outcomes.found), flush=True)
    return 0 if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) else int(status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", choices=[*STAGES, "all"], default=["all"])
    parser.add_argument("--cases", nargs="+", metavar="MODEL:BATCH[:TOKENS]", help="model-tiny for a try")
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "sgd"], help="times are those of the first")
    parser.add_argument("--swapped", nargs="+", metavar="MODEL:BATCH[:TOKENS]", help="models whose tensors are swapped")
    parser.add_argument("--num-rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=540.0, help="for each stage")
    parser.add_argument("--begun", type=float, help="when the first stage began, in seconds since 1970; default: now")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "bench" / "results" / "pytorch")
    parser.add_argument("--tests-of", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.tests_of:
        return run_tests(given.tests_of)
    if not torch.cuda.is_available():
        raise SystemExit("no GPU, and no stand-in for one: see docs/cuda.md")
    is_real = not standin.is_present()
    cases = given.cases or (CASES if is_real else TINY)
    swapped = given.swapped or (gpu_figures.SWAPPED if is_real else gpu_figures.SWAPPED_TINY)
    plan = Plan(cases, given.optimizers, swapped, given.num_rounds if is_real else 2, are_times_real=is_real)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped: the pages have what was found"))  # jobs end with it
    facts = device_facts()
    spent = max(0.0, time.time() - given.begun) if given.begun else 0.0
    reports = []
    for name in STAGES if "all" in given.stages else given.stages:
        until = time.monotonic() + max(LEAST_SECONDS, given.seconds - spent)
        spent = 0.0
        stage = Stage(name, plan, given.folder / f"cuda_{name}.md", facts)
        reports.append(stage.run(until, REPOSITORY / "build" / "gpu" / name))
        reports[-1].print()
    return 1 if any(report.summary[FAILED] for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
