"""What a process has for training, on the CPU resident and on CUDA reserved: an ordinary loop, olla.pool, olla.compile.

    python bench/pytorch/bench_process.py --markdown bench/results/pytorch/process.md
    python bench/pytorch/bench_process.py --device cuda --markdown bench/results/pytorch/process_cuda.md

Each loop runs each way in a process of its own, and what that had before the first iteration is taken off: libraries,
model and batch. It is the most during the last three of eight iterations, and the most over all of them: on the CPU
what is resident (VmHWM), on CUDA what torch's allocator reserved. Under the stand-in for CUDA (docs/cuda.md) sizes and
order are real.

Exit status: 1 if a pool needs more than the loop, or a compiled step not less than it where its report says so by more
than 10 % and 50 MiB.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla
from bench.pytorch.bench_run import resident_bytes
from bench.support.harness import Cell, Report, answer, ask
from tests.support.pytorch import models

SMALL = {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 4000}
HIDDEN = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
CASES: dict[str, dict[str, Any]] = {  # model/optimizer -> arguments of models.build
    "gpt2/adamw": {"batch_size": 4, "length": 128, "settings": SMALL},
    "gpt2/sgd": {"batch_size": 4, "length": 128, "settings": SMALL},
    "bert_base/adamw": {"batch_size": 4, "length": 128, "settings": {**HIDDEN, "vocab_size": 4000}},
    "llama_100m/adamw": {"batch_size": 4, "length": 128, "settings": {**HIDDEN, "vocab_size": 4000}},
    "vit_b16/adamw": {"batch_size": 16, "image_size": 64, "settings": {**HIDDEN, "patch_size": 8}},
    "t5_small/adamw": {"batch_size": 4, "length": 64},
    "resnet18/adamw": {"batch_size": 8, "image_size": 96},
    "resnet18/sgd": {"batch_size": 8, "image_size": 96},
    "mobilenet_v2/adamw": {"batch_size": 8, "image_size": 96},
    "efficientnet_b0/adamw": {"batch_size": 8, "image_size": 96},
    "convnext_t/sgd": {"batch_size": 2, "image_size": 96},
    "unet/adamw": {"batch_size": 1},
}
WAYS = ("loop", "pool", "compile")
NUM_ITERATIONS, NUM_LAST = 8, 3
LEAST_SHARE, LEAST_BYTES = 0.1, 50 << 20
SLACK_BYTES = {"last": 4 << 20, "all": 16 << 20}  # on the CPU: the planner's own code and data, and while it plans
MIB = 2**20


def measure(case: str, way: str, device: str) -> dict[str, Any]:
    """Train in this process; return the most bytes over all iterations and over the last, and what the report says."""
    name, _, optimizer = case.partition("/")
    torch.manual_seed(0)
    example = models.build(name, **CASES[case], device=device)
    updates = models.optimizer(optimizer, example.model)
    pool = olla.pool(device) if way == "pool" else None
    step = None
    if way == "compile":
        step = olla.compile(example.model, optimizer=updates, loss=example.loss, disk_cache=False)
    before = _now(device)
    _begin(device)
    over_all, losses = 0, list[float]()
    if pool is not None:
        pool.__enter__()
    for i in range(NUM_ITERATIONS):
        if i == NUM_ITERATIONS - NUM_LAST:
            over_all = _most(device)
            _begin(device)
        if step is not None:
            losses.append(step(example.batch).item())
            continue
        updates.zero_grad()
        loss = example.loss(example.model, example.batch)
        loss.backward()
        updates.step()
        losses.append(loss.item())
        del loss
        if pool is not None:
            pool.step()
    last = _most(device)
    planned = step or pool
    if planned is not None and device == "cpu":  # it lets VmHWM start anew, and notes what that was
        over_all = max(over_all, planned.report().process_peak_before_bytes or 0)
    found: dict[str, Any] = {"last": last - before, "all": max(over_all, last) - before, "losses": losses}
    if step is not None:
        report = step.report()
        found |= {"planned": report.planned_peak_bytes, "eager": report.eager_peak_bytes}
    if pool is not None:
        found |= {"served": pool.report().served, "arena": pool.report().arena_bytes}
    return found


def _now(device: str) -> int:
    return torch.cuda.memory_reserved() if device == "cuda" else resident_bytes("VmRSS")


def _most(device: str) -> int:
    return torch.cuda.max_memory_reserved() if device == "cuda" else resident_bytes("VmHWM")


def _begin(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        answer(measure(*arguments.one))
    rows: list[list[Cell]] = []
    for case in arguments.cases:
        found = {way: ask(__file__, "--one", case, way, arguments.device) for way in WAYS}
        eager, planned = (found["compile"][key] for key in ("eager", "planned"))
        says_less = eager - planned > max(LEAST_SHARE * eager, LEAST_BYTES)
        well = found["compile"]["all"] < found["loop"]["all"] or not says_less
        for key, slack in SLACK_BYTES.items():
            most = found["loop"][key] + (slack if arguments.device == "cpu" else 0)
            well &= found["pool"][key] <= most
        if arguments.device == "cpu":  # under the stand-in for CUDA numbers mean nothing here
            well &= found["loop"]["losses"] == found["pool"]["losses"] == found["compile"]["losses"]
        sizes = [round(found[way][key] / MIB) for key in ("last", "all") for way in WAYS]
        says = [round(n / MIB) for n in (eager, planned, found["pool"]["arena"])]
        rows.append([case, *sizes, *says, f"{found['pool']['served']:.1%}", well])
        print(*rows[-1], file=sys.stderr, flush=True)
    columns = ["case", *(f"{way}: {when} MiB" for when in ("last", "all") for way in WAYS)]
    columns += ["report: eager MiB", "report: planned MiB", "pool: arena MiB", "served", "as promised"]
    faults = [str(row[0]) for row in rows if not row[-1]]
    notes: dict[str, Cell] = {
        "last": f"the most in the last {NUM_LAST} of {NUM_ITERATIONS} iterations, less what was there before the first",
        "all": f"the most in all {NUM_ITERATIONS}, capture and recording included",
        "judged": "pool: both, on the CPU with 4 and 16 MiB for the planner's own code and data; compile: all",
        "verdict": f"FAILED: {', '.join(faults)}" if faults else "every loop is as promised",
    }
    if arguments.device == "cuda":
        notes["device"] = torch.cuda.get_device_name()
    what = "reserved" if arguments.device == "cuda" else "resident"
    report = Report(f"Bytes that a process has {what}: a loop, in a pool, compiled", columns, rows, notes)
    report.print()
    if arguments.markdown:
        report.save(arguments.markdown)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
