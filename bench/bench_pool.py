"""Run ordinary training loops on the CPU, on torch's own allocator and in olla.pool: memory, time, equal numbers.

    python bench/bench_pool.py --cases gpt2:1:256 resnet50:4 --markdown bench/results/pool.md

A case is model:batch[:tokens]. Memory is the most a process of its own had resident (VmHWM) during three iterations
after the first ten; seconds are medians of the iterations after these. Exit status: 0; 1 losses differ, less than
99.9 % of the bytes were served as planned, or the arena is more than 0.5 % above its load.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import models
import olla
from bench_run import resident_bytes
from harness import Cell, Report

WARMUP = 10
COLUMNS = [
    "model",
    "optimizer",
    "stock MiB",
    "pool MiB",
    "arena MiB",
    "arena over load",
    "served",
    "misses",
    "stock s",
    "pool s",
    "same losses",
]


def measure(case: str, optimizer: str, mode: str, num_iterations: int) -> dict[str, Any]:
    """Run the loop in this process and return its figures."""
    name, batch, *length = case.split(":")
    torch.manual_seed(0)
    example = models.build(name, int(batch), length=int(length[0]) if length else None, device="cpu")
    optim = models.optimizer(optimizer, example.model)
    pool = olla.pool()
    losses, seconds = [], []
    if mode == "pool":
        pool.__enter__()
    for i in range(WARMUP + 3 + num_iterations):
        if i == WARMUP:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        if i == WARMUP + 3:
            most = resident_bytes("VmHWM")
        begin = time.perf_counter()
        optim.zero_grad()
        loss = example.loss(example.model, example.batch)
        loss.backward()
        optim.step()
        losses.append(loss.item())
        if mode == "pool":
            pool.step()
        seconds.append(time.perf_counter() - begin)
    answer: dict[str, Any] = {"bytes": most, "losses": losses, "seconds": statistics.median(seconds[WARMUP + 3 :])}
    if mode == "pool":
        report = pool.report()
        pool.__exit__(None, None, None)
        excess = report.arena_bytes / report.load_bytes - 1
        answer |= {"arena": report.arena_bytes, "excess": excess, "served": report.served, "misses": report.num_misses}
    return answer


def row_of(case: str, optimizer: str, num_iterations: int) -> tuple[list[Cell], bool]:
    """Measure a loop both ways, each in a process of its own; return its row and whether it is as it should be."""
    answers = []
    for mode in ("stock", "pool"):
        command = [sys.executable, __file__, "--part", case, optimizer, mode, str(num_iterations)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:
            raise SystemExit(f"bench_pool --part {case} {optimizer} {mode} failed with status {done.returncode}")
        answers.append(json.loads(done.stdout.splitlines()[-1]))
    stock, pool = answers
    same = stock["losses"] == pool["losses"]
    row: list[Cell] = [case, optimizer, *(round(a["bytes"] / 2**20) for a in answers), round(pool["arena"] / 2**20)]
    row += [f"{pool['excess']:.3%}", f"{pool['served']:.3%}", pool["misses"], stock["seconds"], pool["seconds"], same]
    return row, same and pool["served"] >= 0.999 and pool["excess"] <= 0.005


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["gpt2:1:256", "resnet50:4", "unet:2"])
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "momentum"])
    parser.add_argument("--num-iterations", type=int, default=10)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        case, optimizer, mode, num_iterations = args.part
        print(json.dumps(measure(case, optimizer, mode, int(num_iterations))))
        return 0
    report = Report("Ordinary training loops in olla.pool, on the CPU", COLUMNS)
    right = True
    for case in args.cases:
        for optimizer in args.optimizers:
            row, is_right = row_of(case, optimizer, args.num_iterations)
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
