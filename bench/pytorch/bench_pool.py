"""Run ordinary training loops on the CPU, on torch's own allocator and in olla.pool: memory, time, equal numbers.

    python bench/pytorch/bench_pool.py --cases gpt2:1:256 resnet50:4 gpt2:2:64/AAAAAAAAAB \\
        --markdown bench/results/pytorch/pool.md

A case is model:batch[:tokens][/order]. The letters of the order are the iterations, over and over: A trains on the
batch, B on its first half, E evaluates it. After a warm-up of ten iterations, or four orders, come two orders, at least
three iterations, during which memory is the most a process of its own has resident (VmHWM); after these the time is
taken: the median, over all orders, of the seconds of an iteration. "Served" counts all iterations from the first plan
on, "later" those after the warm-up. Exit status: 0; 1 losses differ, less than 99.9 % of the later bytes were served as
planned, or the arena is more than 0.5 % above its load.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla
from bench.pytorch.bench_run import resident_bytes
from bench.support.harness import Cell, Report, ask
from tests.support.pytorch import models

WARMUP = 10
ORDERS = ["gpt2:2:64/AB", "gpt2:2:64/AAAAAAAAAB", "gpt2:2:64/AAAAAAAAEE", "resnet18:4/AABE"]
COLUMNS = [
    "model",
    "optimizer",
    "stock MiB",
    "pool MiB",
    "arena MiB",
    "arena over load",
    "plans",
    "served",
    "later",
    "misses",
    "stock s",
    "pool s",
    "same losses",
]


def measure(case: str, optimizer: str, mode: str, num_iterations: int) -> dict[str, Any]:
    """Run the loop in this process and return its figures."""
    build, _, order = case.partition("/")
    order = order or "A"
    name, batch, *length = build.split(":")
    torch.manual_seed(0)
    example = models.build(name, int(batch), length=int(length[0]) if length else None, device="cpu")
    optim = models.optimizer(optimizer, example.model)
    pool = olla.pool()
    half = {key: value[: len(value) // 2] for key, value in example.batch.items()}
    losses, seconds = [], []
    n = len(order)
    warm = WARMUP if n == 1 else 4 * n
    timed = warm + max(3, 2 * n)
    if mode == "pool":
        pool.__enter__()
    for i in range(timed + max(num_iterations, 2 * n) // n * n):
        if i == warm:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
            early = pool.report()
        if i == timed:
            most = resident_bytes("VmHWM")
        begin = time.perf_counter()
        losses.append(iterate(example, optim, half, order[i % n]))
        if mode == "pool":
            pool.step()
        seconds.append(time.perf_counter() - begin)
    per_order = [statistics.mean(seconds[i : i + n]) for i in range(timed, len(seconds), n)]
    answer: dict[str, Any] = {"bytes": most, "losses": losses, "seconds": statistics.median(per_order)}
    if mode == "pool":
        report = pool.report()
        pool.__exit__(None, None, None)
        requested = report.requested_bytes - early.requested_bytes
        answer |= {"arena": report.arena_bytes, "excess": report.arena_bytes / max(report.load_bytes, 1) - 1}
        answer |= {"served": report.served, "misses": report.num_misses, "plans": report.num_plans}
        answer["later"] = (report.served_bytes - early.served_bytes) / requested if requested else 0.0
    return answer


def iterate(example: models.Example, optim: torch.optim.Optimizer, half: dict[str, torch.Tensor], kind: str) -> float:
    """Run one iteration of a kind and return its loss."""
    if kind == "E":
        with torch.no_grad():
            loss: float = example.loss(example.model.eval(), example.batch).item()
        example.model.train()
        return loss
    optim.zero_grad()
    value = example.loss(example.model, half if kind == "B" else example.batch)
    value.backward()
    optim.step()
    return float(value.item())


def row_of(case: str, optimizer: str, num_iterations: int) -> tuple[list[Cell], bool]:
    """Measure a loop both ways, each in a process of its own; return its row and whether it is as it should be."""
    answers = []
    for mode in ("stock", "pool"):
        answers.append(ask(__file__, "--part", case, optimizer, mode, str(num_iterations)))
    stock, pool = answers
    same = stock["losses"] == pool["losses"]
    row: list[Cell] = [case, optimizer, *(round(a["bytes"] / 2**20) for a in answers), round(pool["arena"] / 2**20)]
    row += [f"{pool['excess']:.3%}", pool["plans"], f"{pool['served']:.3%}", f"{pool['later']:.3%}", pool["misses"]]
    row += [stock["seconds"], pool["seconds"], same]
    return row, same and pool["later"] >= 0.999 and pool["excess"] <= 0.005


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["gpt2:1:256", "resnet50:4", "unet:2", *ORDERS])
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
