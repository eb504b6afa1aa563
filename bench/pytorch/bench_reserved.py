"""What a GPU must have for training: bytes that torch's allocator takes from it, over the whole life of a process.

    python bench/pytorch/bench_reserved.py --markdown bench/results/pytorch/reserved.md

An ordinary loop, the same with expandable segments, and olla with planned addresses, each in a process of its own: the
most bytes allocated and reserved, model and first step included, and the most allocated in one more step. Sizes, order
and allocator are real under the stand-in for CUDA (docs/cuda.md) too, and the page then says that it was used; kernels
and numbers play no part here.

Exit status: 1 if olla reserves more than the loop where its plan saves more than 5 %.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

from bench.pytorch.bench_run import CASES, LEAST_SAVED, World
from bench.support.harness import Cell, Report, answer, ask
from tests.support.pytorch import models

NUM_STEPS = 4
WAYS = {"eager": {}, "expandable": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "olla": {}}
MIB = 2**20


def measure(case: str, optimizer: str, way: str) -> dict[str, Any]:
    """Train in this process; return the most bytes allocated and reserved, and what the plan says."""
    torch.nn.functional.linear(torch.ones(8, 8, device="cuda"), torch.ones(8, 8, device="cuda"))
    before = torch.cuda.memory_allocated()  # what cuBLAS keeps
    world = World(case, optimizer, "cuda")
    train, step = world.train("olla" if way == "olla" else "eager")
    for _ in range(NUM_STEPS):
        train()
    found: dict[str, Any] = {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }
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
    variables = {**WAYS[way], "OLLA_DISK_CACHE": "0"}
    found: dict[str, Any] = ask(__file__, "--one", case, optimizer, way, environment=variables)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="MODEL:BATCH[:TOKENS]")
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "sgd"])
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        answer(measure(*arguments.one))
    rows: list[list[Cell]] = []
    is_well = True
    for case in arguments.cases:
        for optimizer in arguments.optimizers:
            found = {way: apart(case, optimizer, way) for way in WAYS}
            saved, below = found["olla"]["saved"], found["olla"]["reserved"] < found["eager"]["reserved"]
            is_well &= below or saved <= LEAST_SAVED
            row: list[Cell] = [case, optimizer, 100 * saved]
            for way in WAYS:
                row += [round(found[way][key] / MIB) for key in ("allocated", "reserved")]
            rows.append([*row, found["olla"]["misses"], below])
            print(*rows[-1], file=sys.stderr, flush=True)
    columns = ["case", "optimizer", "plan saves %"]
    columns += [f"{way}: {what} MiB" for way in WAYS for what in ("allocated", "reserved")]
    notes: dict[str, Cell] = {
        "device": torch.cuda.get_device_name(),
        "peaks": f"of the process, over {NUM_STEPS} steps",
    }
    report = Report("Bytes that torch's allocator reserves", [*columns, "misses", "below eager"], rows, notes)
    report.print()
    if arguments.markdown:
        report.save(arguments.markdown)
    return 0 if is_well else 1


if __name__ == "__main__":
    raise SystemExit(main())
