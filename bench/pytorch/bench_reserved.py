"""What a GPU must have for training: bytes that torch's allocator takes from it, over the whole life of a process.

    python bench/pytorch/bench_reserved.py --optimizers adamw --markdown bench/results/pytorch/reserved.md
    python bench/pytorch/bench_reserved.py --optimizers sgd --markdown bench/results/pytorch/reserved_sgd.md

An ordinary loop, the same with expandable segments and in `olla.pool`, and `olla.compile` without a goal and within 5
and 10 % of added time, each in a process of its own: the most bytes allocated and reserved, model and first step
included, and the most in one more step. The models are those of bench_run.py and others. Sizes, order and allocator are
real under the stand-in for CUDA (docs/cuda.md) too, and the page then says that it was used; kernels and numbers play
no part there.

The numbers are compared by a small version of each model, with deterministic kernels, in one more process: each way of
olla, at planned addresses, must have the losses of the ordinary loop to the bit.

Exit status: 1 if a way of olla reserves more than the loop, or a goal more than none, a request was missed, or losses
differ.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla
from bench.pytorch.bench_run import CASES, World, make_repeatable
from bench.support.harness import Cell, Report, answer, ask
from olla.pytorch.pool import PoolReport
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
    "whisper:2",
    "mixtral_100m:1:128",
    "dlrm:512",
    "lora:1",
    "mae:8",
]
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
GOALS: dict[str, dict[str, Any]] = {"olla": {}, "olla 5 %": {"max_slowdown": 0.05}, "olla 10 %": {"max_slowdown": 0.1}}
WAYS = {
    "eager": "ordinary loop",
    "expandable": "loop, expandable segments",
    "olla": "olla.compile",
    "olla 5 %": "olla.compile, max_slowdown=0.05",
    "olla 10 %": "olla.compile, max_slowdown=0.1",
    "pool": "olla.pool",
}
OURS = (*GOALS, "pool")
COLUMNS = ["case", "optimizer", "way", "plan saves %", "allocated MiB", "reserved MiB", "of the loop's"]
COLUMNS += [
    "in one more step: allocated MiB",
    "reserved in it MiB",
    "planned addresses",
    "misses",
    "losses as the loop's",
]
COLUMNS += ["at or below the loop", "at or below no goal"]
MIB = 2**20


class Loop:
    """Training in one of the ways; `advance` takes a step.

    Args:
        world: its model, optimizer and batch.
        way: of WAYS; expandable segments are for whoever starts the process.
        pool: that the ordinary loop is in, if any.
    """

    def __init__(self, world: World, way: str, pool: olla.Pool | None) -> None:
        self.step = self._pool = None
        if way in GOALS:
            parts = {"optimizer": world.optimizer, "loss": world.loss, "arena": True}
            self.step = olla.compile(world.model, **parts, **GOALS[way])
        self._pool = pool
        self._train = world.train("eager")[0] if self.step is None else functools.partial(self.step, world.batch)

    def advance(self) -> float:
        """Take a step, and return its loss."""
        loss = self._train().item()
        if self._pool is not None:
            self._pool.step()
        return loss


def pool_of(way: str) -> contextlib.AbstractContextManager[Any]:
    """Return the pool to train in, or nothing where the way has none."""
    return olla.pool("cuda") if way == "pool" else contextlib.nullcontext()


def measure(case: str, optimizer: str, way: str) -> dict[str, Any]:
    """Train in this process; return the most bytes allocated and reserved, and what the plan says."""
    torch.nn.functional.linear(torch.ones(8, 8, device="cuda"), torch.ones(8, 8, device="cuda"))
    before = torch.cuda.memory_allocated()  # what cuBLAS keeps
    world = World(case, optimizer, "cuda")
    with pool_of(way) as pool:
        loop = Loop(world, way, pool)
        for _ in range(NUM_STEPS):
            loop.advance()
        found: dict[str, Any] = {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
        }
        torch.cuda.reset_peak_memory_stats()
        loop.advance()
        found["in step"] = torch.cuda.max_memory_allocated()
        found["reserved in step"] = torch.cuda.max_memory_reserved()
        if pool is not None:
            report = pool.report()
            found |= {"planned addresses": addresses(report), "misses": report.num_misses}
    if loop.step is not None:
        report = loop.step.report()
        found["saved"] = 1 - report.planned_peak_bytes / report.eager_peak_bytes
        found["misses"] = report.num_misses
        found["in arena"] = report.in_arena
        found["planned addresses"] = "all" if report.in_arena else "none"
        found["planned"] = report.planned_peak_bytes
        found["measured"] = report.measured_peak_bytes
        resident = models.device_bytes([*world.values(), *world.model.buffers(), *world.batch.values()])
        found["expected in step"] = before + resident + report.arena_bytes + report.output_bytes
    return found


def addresses(report: PoolReport) -> str:
    """Return which share of the requested bytes a pool served at planned addresses, or that it went off."""
    if report.state == "off":
        return "off: would reserve more" if "reserve" in report.note else "off"
    return f"{report.served:.1%}" if report.num_planned else "none"


def compare(case: str, optimizer: str) -> dict[str, bool | None]:
    """Train a small version of a model in all ways; return which have the losses of the ordinary loop.

    None: the loop does not repeat its own, or no step was at planned addresses.
    """
    name, batch, *_ = case.split(":")
    first = World(f"{name.removesuffix('-tiny')}-tiny:{batch}", optimizer, "cuda")
    make_repeatable(first)
    torch.empty(1 << 28, dtype=torch.uint8, device="cuda")  # reserved from here on, so that a pool finds room
    losses: dict[str, list[float]] = {}
    is_planned: dict[str, bool] = {}
    for way in ("eager", "again", *OURS):
        world = copy.deepcopy(first)
        torch.manual_seed(7)
        with pool_of(way) as pool:
            loop = Loop(world, way, pool)
            losses[way] = [loop.advance() for _ in range(NUM_STEPS)]
            is_planned[way] = pool is None or pool.report().num_planned > 0
        if loop.step is not None:
            is_planned[way] = loop.step.report().in_arena
            loop.step.release()
    repeats = losses["eager"] == losses["again"]
    return {way: losses[way] == losses["eager"] if repeats and is_planned[way] else None for way in OURS}


def measured(case: str, optimizer: str) -> tuple[dict[str, dict[str, Any]], dict[str, bool | None]]:
    """Measure all ways, each in a process of its own, and compare their numbers in another one."""
    found: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        variables = {"OLLA_DISK_CACHE": "0"} | (EXPANDABLE if way == "expandable" else {})
        found[way] = ask(__file__, "--one", case, optimizer, way, environment=variables)
    return found, ask(__file__, "--compare", case, optimizer, environment={"OLLA_DISK_CACHE": "0"})


def rows_of(
    case: str, optimizer: str, found: dict[str, dict[str, Any]], equal: dict[str, bool | None]
) -> list[list[Cell]]:
    """Return a row for each way; see `measured`."""
    reserved = {way: answer["reserved"] for way, answer in found.items()}
    rows = []
    for way, title in WAYS.items():
        mine = found[way]
        row: list[Cell] = [case, optimizer, title, 100 * mine["saved"] if way in GOALS else None]
        row += [round(mine[key] / MIB) for key in ("allocated", "reserved")]
        row += [reserved[way] / reserved["eager"]]
        row += [round(mine[key] / MIB) for key in ("in step", "reserved in step")]
        row += [mine.get("planned addresses"), mine.get("misses"), equal.get(way)]
        row.append(reserved[way] <= reserved["eager"] if way in OURS else None)
        row.append(reserved[way] <= reserved["olla"] if way in GOALS and way != "olla" else None)
        rows.append(row)
    return rows


def faults_of(rows: list[list[Cell]]) -> list[str]:
    """Return what is not as promised, cell by cell."""
    faults = []
    for row in rows:
        cells = dict(zip(COLUMNS, row, strict=True))
        wrong = [column for column in COLUMNS[-3:] if cells[column] is False]
        if cells["misses"]:
            wrong.append("misses")
        if cells["way"] in {WAYS[way] for way in OURS} and cells["losses as the loop's"] is None:
            wrong.append("losses not compared")
        faults += [f"{cells['case']} {cells['optimizer']} {cells['way']}: {', '.join(wrong)}"] if wrong else []
    return faults


def page_of(rows: list[list[Cell]]) -> Report:
    """Return the page of what was measured so far."""
    faults = faults_of(rows)
    judged = [row for row in rows if row[-2] is not None]
    notes: dict[str, Cell] = {
        "device": torch.cuda.get_device_name(),
        "allocated, reserved": f"the most of the process over {NUM_STEPS} steps, model and first step included",
        "plan saves": "of the peak that the step has in its own order, as its report says",
        "losses as the loop's": f"to the bit, {NUM_STEPS} steps of a small version of the model at planned addresses",
        "judged": f"{len(judged)} cells of olla, by their bytes, misses and losses",
        "verdict": "FAILED: " + "; ".join(faults) if faults else "every cell holds",
    }
    return Report("Bytes that torch's allocator reserves", COLUMNS, rows, notes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=[*CASES, *OTHERS], metavar="MODEL:BATCH[:TOKENS]")
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "sgd"])
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--compare", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        answer(measure(*arguments.one))
    if arguments.compare:
        answer(compare(*arguments.compare))
    rows: list[list[Cell]] = []
    for optimizer in arguments.optimizers:
        for case in arguments.cases:
            rows += rows_of(case, optimizer, *measured(case, optimizer))
            for row in rows[-len(WAYS) :]:
                print(*row, sep=", ", file=sys.stderr, flush=True)
            if arguments.markdown:
                page_of(rows).save(arguments.markdown)
    page_of(rows).print()
    return 1 if faults_of(rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
