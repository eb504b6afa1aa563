"""What a GPU must have for training: bytes that torch's allocator takes from it, over the whole life of a process.

    python bench/pytorch/bench_reserved.py --markdown bench/results/pytorch/reserved.md

An ordinary loop, the same with expandable segments and in `olla.pool`, and `olla.compile` without a goal and within 5
and 10 % of added time, each in a process of its own: the most bytes allocated and reserved, model and first step
included, and the most allocated in one more step. The models are those of bench_run.py and seven others. Sizes, order
and allocator are real under the stand-in for CUDA (docs/cuda.md) too, and the page then says that it was used; kernels
and numbers play no part here.

Exit status: 1 if a way of olla reserves more than the loop, or a goal more than none, or a request was missed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla
from bench.pytorch.bench_run import CASES, World
from bench.support.harness import Cell, Report, answer, ask
from tests.support.pytorch import models

NUM_STEPS = 6
OTHERS = [
    "t5_small:2:64",
    "mobilenet_v2:4",
    "convnext_t:2",
    "swin_t:2",
    "efficientnet_b0:2",
    "resnet18:8",
    "gpt2-tiny:64",
]
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
GOALS: dict[str, dict[str, Any]] = {"olla": {}, "olla 5 %": {"max_slowdown": 0.05}, "olla 10 %": {"max_slowdown": 0.1}}
WAYS = ("eager", "expandable", *GOALS, "pool")
MIB = 2**20


def measure(case: str, optimizer: str, way: str) -> dict[str, Any]:
    """Train in this process; return the most bytes allocated and reserved, and what the plan says."""
    torch.nn.functional.linear(torch.ones(8, 8, device="cuda"), torch.ones(8, 8, device="cuda"))
    before = torch.cuda.memory_allocated()  # what cuBLAS keeps
    world = World(case, optimizer, "cuda")
    step = None
    if way in GOALS:
        parts = {"optimizer": world.optimizer, "loss": world.loss, "arena": True}
        step = olla.compile(world.model, **parts, **GOALS[way])
    train = world.train("eager")[0] if step is None else functools.partial(step, world.batch)
    with olla.pool("cuda") if way == "pool" else contextlib.nullcontext() as pool:
        for _ in range(NUM_STEPS):
            train()
            if pool is not None:
                pool.step()
    found: dict[str, Any] = {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }
    if pool is not None:
        report = pool.report()
        return found | {"pool": "planned" if report.num_planned else "off", "misses": report.num_misses}
    torch.cuda.reset_peak_memory_stats()
    train()
    found["in step"] = torch.cuda.max_memory_allocated()
    if step is not None:
        report = step.report()
        found["saved"] = 1 - report.planned_peak_bytes / report.eager_peak_bytes
        found["misses"] = report.num_misses
        found["in arena"] = report.in_arena
        found["planned"] = report.planned_peak_bytes
        found["measured"] = report.measured_peak_bytes
        resident = models.device_bytes([*world.values(), *world.model.buffers(), *world.batch.values()])
        found["expected in step"] = before + resident + report.arena_bytes + report.output_bytes
    return found


def apart(case: str, optimizer: str, way: str) -> dict[str, Any]:
    """Measure in a process of its own."""
    variables = {"OLLA_DISK_CACHE": "0"} | (EXPANDABLE if way == "expandable" else {})
    found: dict[str, Any] = ask(__file__, "--one", case, optimizer, way, environment=variables)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=[*CASES, *OTHERS], metavar="MODEL:BATCH[:TOKENS]")
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "sgd"])
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        answer(measure(*arguments.one))
    columns = ["case", "optimizer", "plan saves %"]
    columns += [f"{way}: {what} MiB" for way in WAYS for what in ("allocated", "reserved")]
    columns += ["pool is", "misses", "at or below"]
    notes: dict[str, Cell] = {
        "device": torch.cuda.get_device_name(),
        "peaks": f"of the process, over {NUM_STEPS} steps",
    }
    rows: list[list[Cell]] = []
    is_well = True
    for case in arguments.cases:
        for optimizer in arguments.optimizers:
            found = {way: apart(case, optimizer, way) for way in WAYS}
            reserved = {way: answer["reserved"] for way, answer in found.items()}
            misses = sum(answer.get("misses", 0) for answer in found.values())
            below = all(reserved[way] <= reserved["eager"] for way in (*GOALS, "pool"))
            below &= all(reserved[way] <= reserved["olla"] for way in GOALS)
            is_well &= below and misses == 0
            row: list[Cell] = [case, optimizer, 100 * found["olla"]["saved"]]
            for way in WAYS:
                row += [round(found[way][key] / MIB) for key in ("allocated", "reserved")]
            rows.append([*row, found["pool"]["pool"], misses, below])
            print(*rows[-1], file=sys.stderr, flush=True)
            report = Report("Bytes that torch's allocator reserves", columns, rows, notes)
            if arguments.markdown:
                report.save(arguments.markdown)
    report.print()
    return 0 if is_well else 1


if __name__ == "__main__":
    raise SystemExit(main())
