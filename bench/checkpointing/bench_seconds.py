"""What checkpoints cost in real steps on the CPU, beside what was estimated.

    python bench/checkpointing/bench_seconds.py --markdown bench/results/checkpointing/seconds.md

Forward and backward of small models, one thread, processor seconds, ways in turns, medians of the rounds. "whole":
`olla.checkpoint(max_slowdown=0.2, selective=False)`; "selective": with operators saved inside of modules. Losses and
gradients are compared to the bit. Added: measured against the loop without checkpoints; estimated for the CPU's
profile. Peaks are those of the table of `olla.checkpoint`. The last line is of 100 products of eight numbers: what the
processor takes for one operator of a module with saved operators beyond one of a whole one, forward or recomputed.

Exit status: 1 if losses or gradients differ.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla
from bench.support.harness import Report
from olla.checkpointing.regions import ModuleRegion, apply, remove
from tests.support.pytorch import compile_cases

CASES = ["bert b32", "vit b32", "gpt2 b8, 1024 tokens", "llama 1B b4", "resnet50 b32", "convnext b32"]
CASES += ["t5 b16, 512 tokens"]
WAYS = {"loop": None, "whole": False, "selective": True}
COLUMNS = ["model", "way", "modules", "peak MiB", "processor ms", "added", "estimated", "same bits"]


def step(example: Any) -> list[torch.Tensor]:
    """Run forward and backward; return the loss and the gradients."""
    torch.manual_seed(0)
    example.model.zero_grad()
    loss = example.loss(example.model, example.batch)
    loss.backward()
    return [loss.detach(), *(p.grad for p in example.model.parameters() if p.grad is not None)]


def processor_seconds(run: Callable[[], object]) -> float:
    """Return what a call takes of the processor."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


def measure(case: str, num_rounds: int) -> list[list[Any]]:
    """Return the rows of a model."""
    torch.manual_seed(0)
    example, _ = compile_cases.build(case, "small", "cpu")
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    chosen: dict[str, Any] = {}
    same = dict.fromkeys(WAYS, True)
    expected = [t.clone() for t in step(example)]
    for _ in range(num_rounds):
        for way, selective in WAYS.items():
            if selective is not None:
                chosen[way] = olla.checkpoint(
                    example.model, example.batch, loss=example.loss, max_slowdown=0.2, selective=selective
                )
            same[way] &= all(map(torch.equal, expected, step(example)))
            seconds[way].append(processor_seconds(lambda: step(example)))
            olla.checkpoint.remove(example.model)
    rows = []
    for way in WAYS:
        found, took = chosen.get(way, chosen["whole"]), statistics.median(seconds[way])
        added = statistics.median(a / b - 1 for a, b in zip(seconds[way], seconds["loop"], strict=True))
        peak = found.eager_peak_bytes if way == "loop" else found.peak_bytes
        estimated = "" if way == "loop" else f"{found.added_seconds / found.base_seconds:.1%}"
        number = 0 if way == "loop" else len(found.modules)
        rows.append([case, way, number, round(peak / 2**20, 1), took * 1e3, f"{added:.1%}", estimated, same[way]])
    return rows


class Products(nn.Module):
    """A hundred products of a few numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the products."""
        for _ in range(100):
            x = x * self.weight
        return x


def per_operator(num_rounds: int) -> float:
    """Return the microseconds of an operator beyond those in a module without saved operators."""
    model, x = Products(), torch.ones(8)
    found = []
    for _ in range(num_rounds * 10):
        took = []
        for region in (ModuleRegion(), ModuleRegion(frozenset({("aten.mul.Tensor", 3)}))):
            apply(model, region)
            model(x).sum().backward()
            took.append(processor_seconds(lambda: model(x).sum().backward()))
            remove(model)
        found.append((took[1] - took[0]) / 200)  # each runs forward and is recomputed
    return statistics.median(found) * 1e6


def main() -> int:
    """Print the table; return 1 if losses or gradients differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("Checkpointed steps on the CPU", COLUMNS)
    for case in args.cases:
        report.rows += measure(case, args.rounds)
    report.summary["an operator beside saved ones"] = f"{per_operator(args.rounds):.1f} microseconds more"
    report.print()
    if args.markdown is not None:
        report.save(args.markdown)
    return 0 if all(row[-1] for row in report.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
