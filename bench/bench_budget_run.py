"""Run training steps within budgets: memory and added time as planned, and as it happens; results to the bit.

    python bench/bench_budget_run.py --markdown bench/results/budget_run.md
    python bench/bench_budget_run.py --cases gpt2:1:256 --goals max_slowdown=0.1 budget=0.9

A case is model:batch[:tokens]; a goal is max_slowdown=SHARE, minimise=peak, or budget=SHARE of the unbudgeted peak.
The unbudgeted step and the budgeted one, of equal models, take turns; each time is the median of their steps.

peak      resident memory, outputs and the most of the arena in use at once
arena     resident memory, outputs and the whole arena: what a budget limits
added     share of the unbudgeted step's time: by plan (roofline), by the seconds of the ops that ran again when
          recorded, and by the clock
equal     losses, parameters, buffers and optimizer state of all steps, to the bit

Exit status: 0; 1 if results differ, the measured peak is not the planned one, or an arena is above its budget.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import models
import olla
from harness import Cell, Report

CASES = ["gpt2:1:256", "resnet50:4"]
GOALS = ["max_slowdown=0.1", "minimise=peak"]
COLUMNS = ["case", "optimizer", "goal", "resident MiB", "unbudgeted peak MiB", "planned peak MiB", "measured peak MiB"]
COLUMNS += ["arena MiB", "saved %", "added by plan %", "added by ops %", "added by clock %", "recomputed", "in place"]
COLUMNS += ["equal", "holds"]
MEBI = 2**20


class World:
    """One model with its compiled step, and what its steps returned."""

    def __init__(self, case: str, optimizer: str, time_limit: float, **goal: Any) -> None:
        name, batch, *length = case.split(":")
        torch.manual_seed(0)
        example = models.build(name, int(batch), length=int(length[0]) if length else None, device="cpu")
        self.model, self.batch = example.model, example.batch
        self.optimizer = models.optimizer(optimizer, self.model)
        self.step = olla.compile(
            self.model,
            optimizer=self.optimizer,
            loss=example.loss,
            time_limit=time_limit,
            disk_cache=False,
            **goal,
        )
        self.random = torch.get_rng_state()
        self.losses: list[torch.Tensor] = []
        self.seconds: list[float] = []

    def run(self) -> None:
        """Take one step, with random numbers of its own."""
        torch.set_rng_state(self.random)
        start = time.perf_counter()
        self.losses.append(self.step(self.batch))
        self.seconds.append(time.perf_counter() - start)
        self.random = torch.get_rng_state()

    def values(self) -> list[torch.Tensor]:
        """Losses, parameters, buffers and optimizer state."""
        states = [self.optimizer.state[p] for p in self.model.parameters() if p in self.optimizer.state]
        state = [s[k] for s in states for k in sorted(s) if isinstance(s[k], torch.Tensor)]
        return [*self.losses, *self.model.state_dict().values(), *state]


def goal_of(text: str, peak_bytes: int) -> dict[str, Any]:
    """Return the options of olla.compile for a goal."""
    name, _, value = text.partition("=")
    if name == "minimise":
        return {name: value}
    return {name: float(value)} if name == "max_slowdown" else {name: int(float(value) * peak_bytes)}


def measure(case: str, goal: str, arguments: argparse.Namespace) -> tuple[list[Cell], bool]:
    """Return one row of the table, and whether all checks hold."""
    plain = World(case, arguments.optimizer, arguments.time_limit)
    plain.run()
    before = plain.step.report()
    within = World(case, arguments.optimizer, arguments.time_limit, **goal_of(goal, before.planned_peak_bytes))
    within.run()
    for _ in range(arguments.steps - 1):
        plain.run()
        within.run()
    report = within.step.report()
    budget = report.budget
    equal = all(torch.equal(a, b) for a, b in zip(plain.values(), within.values(), strict=True))
    arena = report.resident_bytes + report.output_bytes + report.arena_bytes
    fits = budget.budget_bytes is None or arena <= budget.budget_bytes
    holds = equal and fits and report.measured_peak_bytes == report.planned_peak_bytes and report.num_misses == 0
    medians = [statistics.median(world.seconds[2:]) for world in (plain, within)]
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
        100 * (medians[1] / medians[0] - 1),
        budget.num_recomputed,
        budget.num_in_place,
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
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--time-limit", type=float, default=15.0)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    page = Report(f"Steps within a budget, {arguments.steps} of each", COLUMNS)
    failed = []
    for case in arguments.cases:
        for goal in arguments.goals:
            row, holds = measure(case, goal, arguments)
            page.rows.append(row)
            failed += [] if holds else [f"{case} {goal}"]
    page.summary["failed"] = ", ".join(failed) or "none"
    page.print()
    if arguments.markdown:
        page.save(arguments.markdown)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
