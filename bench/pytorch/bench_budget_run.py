"""Run training steps within budgets: memory and added time as planned, and as it happens; results to the bit.

    python bench/pytorch/bench_budget_run.py --markdown bench/results/pytorch/budget_run.md
    python bench/pytorch/bench_budget_run.py --cases gpt2:1:256 --goals max_slowdown=0.1 budget=0.8 swap=0.05
    python bench/pytorch/bench_budget_run.py --device cuda --goals budget=0.8 swap=0.8

A case is model:batch[:tokens], model-tiny for a try; a goal is max_slowdown=SHARE, minimise=peak, budget=SHARE of what
the unbudgeted peak has above resident memory, or swap=SHARE or autoswap=SHARE, the same budget met with swapping, or
chunked=SHARE, with its losses in eight chunks of rows, or swaps_within=SHARE, the least peak within a share of added
time by swaps alone. Each step runs alone, one after the other; losses, parameters, buffers and optimizer state are
compared by digest. Times are medians.

peak      resident memory, outputs and the most of the arena in use at once
arena     resident memory, outputs and the whole arena: what a budget limits
added     share of the unbudgeted step's time: by plan (roofline, or ops as recorded), by the recorded seconds of
          recomputation and of waiting for copies, and by the clock
host      memory that swapped tensors take in the host
equal     losses, parameters, buffers and optimizer state of all steps, to the bit; with chunks, which round otherwise,
          losses to a thousandth

Exit status: 0; 1 if results differ, the measured peak is not the planned one, requests are missed, or an arena is above
its budget.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla
from bench.pytorch.bench_run import World, make_repeatable
from bench.support.harness import Cell, Report
from olla.report.step import StepReport

CASES = ["gpt2:1:256", "bert_base:2:128", "resnet50:4", "unet:1", "llama_100m:1:256"]
GOALS = ["budget=0.95", "budget=0.9", "budget=0.8", "swap=0.8", "autoswap=0.95", "chunked=0.7"]
COLUMNS = ["case", "optimizer", "goal", "resident MiB", "unbudgeted peak MiB", "planned peak MiB", "measured peak MiB"]
COLUMNS += ["arena MiB", "saved %", "added by plan %", "added by ops %", "added by clock %", "recomputed", "in place"]
COLUMNS += ["swapped MiB", "host MiB", "missed", "equal", "holds"]
MEBI = 2**20
NUM_CHUNKS = 8


class Outcome(NamedTuple):
    """What some steps left behind."""

    report: StepReport
    seconds: float
    losses: list[float]
    digest: str  # of losses, parameters, buffers and optimizer state


def train(case: str, arguments: argparse.Namespace, **goal: Any) -> Outcome:
    """Take some steps of a model, which is made anew."""
    world = World(case, arguments.optimizer, arguments.device)
    on_cuda = arguments.device == "cuda"
    wait = torch.cuda.synchronize if on_cuda else lambda: None
    options = {"time_limit": arguments.time_limit, "disk_cache": False, "arena": True if on_cuda else None, **goal}
    if on_cuda:
        make_repeatable(world)
    step = olla.compile(world.model, optimizer=world.optimizer, loss=world.loss, **options)
    torch.manual_seed(7)
    losses, seconds = [], []
    for _ in range(arguments.steps):
        start = time.perf_counter()
        losses.append(step(world.batch))
        wait()
        seconds.append(time.perf_counter() - start)
    digest = hashlib.sha256()
    for value in (*losses, *world.values()):
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    report = step.report()
    step.release()
    return Outcome(report, statistics.median(seconds[-2:]), [float(x) for x in losses], digest.hexdigest())


def goal_of(text: str, report: StepReport) -> dict[str, Any]:
    """Return the options of olla.compile for a goal."""
    name, _, value = text.partition("=")
    if name == "minimise":
        return {name: value}
    if name == "max_slowdown":
        return {name: float(value)}
    if name == "swaps_within":
        return {"max_slowdown": float(value), "swap": True, "recompute": False, "in_place": False}
    budget = report.resident_bytes + int(float(value) * (report.planned_peak_bytes - report.resident_bytes))
    ways: dict[str, dict[str, Any]] = {
        "swap": {"swap": True},
        "autoswap": {"method": "autoswap"},
        "chunked": {"chunked_loss": NUM_CHUNKS},
    }
    return {"budget": budget, **ways.get(name, {})}


def measure(case: str, goal: str, plain: Outcome, arguments: argparse.Namespace) -> tuple[list[Cell], bool]:
    """Return one row of the table, and whether all checks hold."""
    before = plain.report
    within = train(case, arguments, **goal_of(goal, before))
    report = within.report
    budget, swap = report.budget, report.swap
    assert budget is not None
    equal = plain.digest == within.digest
    if budget.num_chunked_losses > 0:
        equal = all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(plain.losses, within.losses, strict=True))
    arena = report.resident_bytes + report.output_bytes + report.arena_bytes
    fits = budget.budget_bytes is None or arena <= budget.budget_bytes
    holds = equal and fits and report.measured_peak_bytes == report.planned_peak_bytes and report.num_misses == 0
    row: list[Cell] = [
        case,
        arguments.optimizer,
        goal,
        before.resident_bytes / MEBI,
        before.planned_peak_bytes / MEBI,
        report.planned_peak_bytes / MEBI,
        (report.measured_peak_bytes or 0) / MEBI,
        arena / MEBI,
        100 * (1 - report.planned_peak_bytes / before.planned_peak_bytes),
        100 * budget.planned_slowdown,
        100 * (budget.measured_slowdown or 0.0),
        100 * (within.seconds / plain.seconds - 1),
        budget.num_recomputed,
        budget.num_in_place,
        swap.swapped_bytes / MEBI if swap else 0.0,
        swap.host_bytes / MEBI if swap else 0.0,
        report.num_misses,
        equal,
        holds,
    ]
    print(report, flush=True)
    return row, holds


def main() -> int:
    """Run it; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--goals", nargs="+", default=GOALS)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--time-limit", type=float, default=15.0)
    parser.add_argument("--note", default="", help="what a reader of the table should know")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json-line", action="store_true", help="print the rows in one line of JSON at the end")
    arguments = parser.parse_args()
    page = Report(f"Steps within a budget, {arguments.steps} of each", COLUMNS)
    if arguments.note:
        page.summary["note"] = arguments.note
    failed = []
    for case in arguments.cases:
        plain = train(case, arguments)
        print(plain.report, flush=True)
        for goal in arguments.goals:
            try:
                row, holds = measure(case, goal, plain, arguments)
            except olla.BudgetError as error:
                page.summary[f"{case} {goal}"] = str(error)
                print(case, goal, error, flush=True)
                continue
            page.rows.append(row)
            failed += [] if holds else [f"{case} {goal}"]
            page.summary["failed"] = ", ".join(failed) or "none"
            if arguments.markdown:
                page.save(arguments.markdown)  # what there is, should the rest be interrupted
    page.print()
    if arguments.json_line:
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in page.rows]
        print(json.dumps({"rows": rows, "summary": page.summary}))
    if arguments.markdown:
        page.save(arguments.markdown)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
