"""Run training steps on the CPU: eager, captured in program order, and as planned by olla; memory and time of each.

    python bench/bench_run.py --cases gpt2:1:256 resnet50:4 --optimizers adamw --markdown bench/results/run.md

A case is model:batch[:tokens]. Memory is the most a process of its own had resident (VmHWM) during three steps after
the first three. Times are of one process in which the three take turns. Exit status: 0; 1 losses or parameters of the
planned step differ from those of the program order, or memory was not as planned.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import models
import olla
from harness import Cell, Report
from olla.pytorch.feeds import Feed, flatten
from olla.pytorch.program import compile_program

MODES = ("eager", "program", "olla")
WARMUP = 3
COLUMNS = [
    "model",
    "optimizer",
    "ops",
    "eager MiB",
    "program MiB",
    "olla MiB",
    "planned MiB",
    "saved by plan",
    "eager s",
    "program s",
    "olla s",
    "olla / program",
    "equal to program",
    "equal to eager",
    "missed bytes",
    "once s",
]
Train = Callable[[], torch.Tensor]


class World:
    """One model with its optimizer and batch, and the ways to take a step of it."""

    def __init__(self, case: str, optimizer: str) -> None:
        name, batch, *length = case.split(":")
        torch.manual_seed(0)
        example = models.build(name, int(batch), length=int(length[0]) if length else None, device="cpu")
        self.model, self.batch, self.loss = example.model, example.batch, example.loss
        self.optimizer = models.optimizer(optimizer, self.model)

    def train(self, mode: str) -> tuple[Train, Any]:
        """Return a function that takes one step, and the compiled step if there is one."""
        if mode == "eager":
            return self._eager, None
        if mode == "program":
            return self._program(), None
        step = olla.compile(self.model, optimizer=self.optimizer, loss=self.loss)
        return lambda: step(self.batch), step

    def _eager(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(self.model, self.batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _program(self) -> Train:
        captured = olla.capture(self.model, self.batch, optimizer=self.optimizer, loss=self.loss)
        sources = Feed(self.model, self.optimizer).sources(captured.inputs)
        program = compile_program(captured, range(captured.graph.num_ops))

        def train() -> torch.Tensor:
            leaves, _ = flatten(self.batch)
            with torch.no_grad():
                return program(sources(leaves))[0]

        return train


def resident_bytes(key: str) -> int:
    """Return VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {key}: memory is measured on Linux only")


def measure_memory(case: str, optimizer: str, mode: str) -> dict[str, Any]:
    """Return the most memory resident during three steps."""
    train, _ = World(case, optimizer).train(mode)
    for _ in range(WARMUP):
        train()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    for _ in range(3):
        train()
    return {"bytes": resident_bytes("VmHWM")}


def measure_time(case: str, optimizer: str, num_rounds: int) -> dict[str, Any]:
    """Take turns between the modes; return seconds, losses and whether they agree."""
    first = World(case, optimizer)
    worlds = {mode: copy.deepcopy(first) for mode in MODES}
    trains = {mode: world.train(mode) for mode, world in worlds.items()}
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    losses: dict[str, list[float]] = {mode: [] for mode in MODES}
    for turn in range(WARMUP + num_rounds):
        for mode, (train, _) in trains.items():
            torch.manual_seed(turn)
            begin = time.perf_counter()
            loss = train()
            seconds[mode].append(time.perf_counter() - begin)
            losses[mode].append(float(loss))
    values = {mode: list(world.model.state_dict().values()) for mode, world in worlds.items()}

    def equal(other: str) -> bool:
        pairs = zip(values["olla"], values[other], strict=True)
        return losses["olla"] == losses[other] and all(torch.equal(a, b) for a, b in pairs)

    timed = {mode: s[WARMUP:] for mode, s in seconds.items()}
    report = trains["olla"][1].report()
    return {
        "ops": report.num_ops,
        "planned": report.planned_peak_bytes,
        "saved": 1 - report.planned_peak_bytes / report.eager_peak_bytes,
        "missed": report.missed_bytes,
        "once": report.capture_seconds + report.plan_seconds + report.record_seconds,
        "as planned": report.planned_peak_bytes == report.measured_peak_bytes,
        **{mode: statistics.median(s) for mode, s in timed.items()},
        "ratio": statistics.median(a / b for a, b in zip(timed["olla"], timed["program"], strict=True)),
        "equal program": equal("program"),
        "equal eager": equal("eager"),
    }


def in_own_process(*arguments: str) -> dict[str, Any]:
    """Run a part of this script in a process of its own."""
    done = subprocess.run([sys.executable, __file__, "--part", *arguments], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"bench_run --part {' '.join(arguments)} failed with status {done.returncode}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def row_of(case: str, optimizer: str, num_rounds: int) -> tuple[list[Cell], bool]:
    """Measure one model with one optimizer; return its row and whether all answers are right."""
    memory = [in_own_process("memory", case, optimizer, mode)["bytes"] / 2**20 for mode in MODES]
    t = in_own_process("time", case, optimizer, str(num_rounds))
    row: list[Cell] = [case, optimizer, t["ops"], *(round(m) for m in memory), round(t["planned"] / 2**20)]
    row += [f"{t['saved']:.1%}", *(t[mode] for mode in MODES), t["ratio"], t["equal program"], t["equal eager"]]
    row += [t["missed"], t["once"]]
    return row, t["equal program"] and t["missed"] == 0 and t["as planned"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["gpt2:1:256", "bert_base:2:128", "vit_b16:2", "resnet50:4"])
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "momentum"])
    parser.add_argument("--num-rounds", type=int, default=10)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        kind, case, optimizer, last = args.part
        answer = measure_memory(case, optimizer, last) if kind == "memory" else measure_time(case, optimizer, int(last))
        print(json.dumps(answer))
        return 0
    report = Report("Training steps on the CPU", COLUMNS)
    right = True
    for case in args.cases:
        for optimizer in args.optimizers:
            row, is_right = row_of(case, optimizer, args.num_rounds)
            report.rows.append(row)
            right &= is_right
    report.summary["threads"] = torch.get_num_threads()
    report.print()
    for path in (args.markdown, args.json):
        if path is not None:
            report.save(path)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
