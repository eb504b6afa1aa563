"""What `olla.fit` says of ordinary loops on a GPU, beside what torch's allocator allocates and reserves for them.

    python bench/fit/bench_fit_reserved.py --markdown bench/results/fit/reserved.md
    python bench/fit/bench_fit_reserved.py --cases gpt2:1,2:256 --optimizers adamw

A case is model:batches[:tokens]; models are those of tests/support and bench/support. `olla.fit` sees the model on the
meta device, without weights. The loop runs on CUDA for three iterations, each case with each optimizer in a process of
its own, each batch with nothing reserved before; under the stand-in for CUDA (docs/cuda.md) sizes, order and allocator
are real, kernels and numbers play no part. The page has, model, optimizer state and batch included:

allocated       the most that torch's allocator had in use at once
cuBLAS          of it: what cuBLAS keeps as its workspaces
other           of it: what operators request and free before they end, at the peak
estimate        of `olla.fit`, which knows no workspaces; its error is of what is allocated without both
reserved        the most that torch's allocator took from the device, and the estimate of it; the error is of what is
                reserved without cuBLAS's workspaces

Exit status: 1 if a median error is above 1 % of what is allocated or 5 % of what is reserved.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla
from bench.support import worlds
from bench.support.harness import Cell, Report, answer, ask
from tests.support.pytorch import models

CASES = [
    "gpt2:1,2,4:256",
    "bert_base:2,4,8:128",
    "roberta_base:2,4,8:128",
    "distilbert:4,8,16:128",
    "llama_100m:1,2,4:256",
    "mixtral_100m:1,2,4:128",
    "t5_small:2,4,8:64",
    "mistral:2,4,8:128",
    "qwen3:2,4,8:128",
    "gemma3_text:2,4,8:128",
    "bloom:2,4,8:128",
    "electra:2,4,8:128",
    "bart:2,4,8:128",
    "resnet18:4,8,16",
    "resnet50:2,4,8",
    "mobilenet_v2:4,8,16",
    "efficientnet_b0:2,4,8",
    "convnext_t:2,4,8",
    "vgg16:1,2,4",
    "vit_b16:2,4,8",
    "swin_t:2,4,8",
    "mae:8,16,32",
    "whisper:2,4,8",
    "unet:1,2,4",
    "dlrm:512,1024,2048",
]
OPTIMIZERS = ["sgd", "adam", "adamw", "adafactor"]
NUM_ITERATIONS = 3
MOST_ALLOCATED, MOST_RESERVED = 0.01, 0.05  # median errors
MIB = 2**20


def make(name: str, batch: int, length: int | None, optimizer: str, device: str) -> tuple[Any, ...]:
    """Return model, batch, optimizer and loss."""
    from tests.support.pytorch.programs import families

    torch.manual_seed(0)
    with torch.device(device):
        if name in worlds.NAMES:
            example = worlds.build(name, batch)
        elif name in models.NAMES:
            example = models.build(name, batch, length=length, device=device)
        else:
            sizes = {"width": 512, "layers": 6, "batch": batch, "length": length or 128}
            example = models.Example(*families.family(name, checkpointed=False, **sizes), families.loss_of)
        return example.model, example.batch, models.optimizer(optimizer, example.model), example.loss


def estimate(*case: Any) -> dict[str, Any]:
    """Return what `olla.fit` says of the ordinary loop, in bytes."""
    name, batch, length, optimizer = case
    found = olla.fit(
        lambda n: make(name, n, length, optimizer, "meta"),
        memory="1TB",
        sizes=[batch],
        progress=lambda stage, *_: not stage.endswith(": planned"),  # the ordinary loop is enough
    )
    way = found.rows[0].ways["eager"]
    return {"estimate": way.peak_bytes, "estimate_reserved": way.reserved_bytes}


def record(*case: Any) -> dict[str, int]:
    """Return what torch's allocator has for the loop, in bytes."""
    model, batch, optimizer, loss = make(*case, "cuda")

    def iterate() -> None:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()

    for _ in range(NUM_ITERATIONS):
        iterate()
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    with _BetweenOps() as between:
        iterate()
    kept = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    cublas = kept - torch.cuda.memory_allocated()
    return {"allocated": allocated, "reserved": reserved, "cublas": cublas, "tensors": between.most_bytes - cublas}


def apart(name: str, batches: str, length: str, optimizer: str) -> list[dict[str, int]]:
    """Estimate and record every batch of a case, in this process."""
    found = []
    for batch in map(int, batches.split(",")):
        case = (name, batch, int(length) or None, optimizer)
        found.append({**estimate(*case), **record(*case)})
        gc.collect()
        torch.cuda.empty_cache()
        if torch.cuda.memory_reserved():
            raise RuntimeError(f"{torch.cuda.memory_reserved()} bytes are still reserved after {case}")
        torch.cuda.reset_peak_memory_stats()
    return found


class _BetweenOps(TorchDispatchMode):
    """Sees what is allocated between operators: without what they request and free themselves."""

    most_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.most_bytes = max(self.most_bytes, torch.cuda.memory_allocated())
        return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="MODEL:BATCH,...[:TOKENS]")
    parser.add_argument("--optimizers", nargs="+", default=OPTIMIZERS, choices=OPTIMIZERS)
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        answer(apart(*arguments.one))
    rows: list[list[Cell]] = []
    errors: dict[str, dict[str, float]] = {"allocated": {}, "reserved": {}}
    for case in arguments.cases:
        name, batches, *length = case.split(":")
        for optimizer in arguments.optimizers:
            measured = ask(__file__, "--one", name, batches, *(length or ["0"]), optimizer)
            for batch, found in zip(batches.split(","), measured, strict=True):
                label = f"{name}, {batch}, {optimizer}"
                tensors, reserved = found["tensors"], found["reserved"] - found["cublas"]
                errors["allocated"][label] = found["estimate"] / tensors - 1
                errors["reserved"][label] = found["estimate_reserved"] / reserved - 1
                other = max(0, found["allocated"] - found["cublas"] - tensors)
                sizes = [found["allocated"], found["cublas"], other]
                figures: list[Cell] = [round(n / MIB, 1) for n in (*sizes, found["estimate"])]
                figures += [f"{errors['allocated'][label]:+.2%}", round(found["reserved"] / MIB)]
                figures += [round(found["estimate_reserved"] / MIB), f"{errors['reserved'][label]:+.2%}"]
                rows.append([name, *(length or [None]), int(batch), optimizer, *figures])
                print(*rows[-1], file=sys.stderr, flush=True)
    columns = ["model", "tokens", "batch", "optimizer", "allocated MiB", "cuBLAS MiB", "other workspaces MiB"]
    columns += ["estimate MiB", "error", "reserved MiB", "estimate of it MiB", "its error"]
    medians = {key: statistics.median(abs(error) for error in found.values()) for key, found in errors.items()}
    notes: dict[str, Cell] = {}
    for key, most in (("allocated", MOST_ALLOCATED), ("reserved", MOST_RESERVED)):
        worst = max(errors[key], key=lambda label: abs(errors[key][label]))
        median = f"median error {medians[key]:.3%}, at most {most:.0%} wanted"
        notes[key] = f"{median}; worst {errors[key][worst]:+.2%}: {worst}"
    notes["without"] = "errors are of what is allocated without workspaces, and reserved without those of cuBLAS"
    notes["device"] = torch.cuda.get_device_name()
    report = Report("Ordinary loops on a GPU: estimated without weights, and measured", columns, rows, notes)
    report.print()
    if arguments.markdown:
        report.save(arguments.markdown)
    return 0 if medians["allocated"] <= MOST_ALLOCATED and medians["reserved"] <= MOST_RESERVED else 1


if __name__ == "__main__":
    raise SystemExit(main())
