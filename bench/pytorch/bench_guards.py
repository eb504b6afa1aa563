"""Time what a call of a compiled step costs beside its operators: Dynamo's guards, and what olla compares and gathers.

    python bench/pytorch/bench_guards.py --markdown bench/results/pytorch/guards.md

Models of 10, 100, 500 and 1,000 modules. In place of the operators stand results that
were computed before.
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
from olla.pytorch.captures import Capture


class Block(nn.Module):
    """Nine modules, six of them without tensors of their own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, width))
        self.drop, self.scale = nn.Dropout(0.1), 0.5
        self.act = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A residual block."""
        return x + self.scale * self.act(self.drop(self.body(self.norm(x))))


def model_of(num_modules: int, width: int = 8) -> nn.Module:
    """Return a model of about so many modules."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(max(1, num_modules // 9))))


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss that reads little."""
    return model(x).square().mean()


def best(run: Callable[[], Any], num_times: int) -> float:
    """Return the least seconds of many calls: what the code takes where nothing else runs."""
    seconds = []
    for _ in range(num_times):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure(num_modules: int, num_times: int) -> list[Any]:
    """Return a row of the table."""
    model, x = model_of(num_modules), torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    step = olla.compile(model, optimizer=optimizer, loss=loss, time_limit=0.2, disk_cache=False)
    start = time.process_time()
    step(x)
    first = time.process_time() - start
    for _ in range(3):
        step(x)
    seconds = []
    for _ in range(num_times):
        start = time.perf_counter()
        step(x)
        seconds.append(time.perf_counter() - start)
    capture, follower = step._captures.latest, step._follower
    assert isinstance(capture, Capture)
    assert follower is not None
    assert not follower.reason  # or something else would be measured
    assert step.report().num_captures == 1
    outputs = capture.runner.run(capture.gather([x]))
    capture.runner.run = lambda values: outputs  # type: ignore[method-assign]
    whole = best(lambda: step(x), 20 * num_times)
    followed = follower._followed
    followed._backend._run = lambda graph, inputs: outputs
    dynamo = best(lambda: followed(model, x, False), 20 * num_times)
    micro = [f"{1e6 * s:.0f}" for s in (whole, dynamo, whole - dynamo)]
    numbers = [len(list(model.modules())), len(list(model.parameters()))]
    return [*numbers, *micro, f"{1e3 * statistics.median(seconds):.2f}", f"{first:.2f}"]


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", type=int, nargs="*", default=[10, 100, 500, 1000], metavar="N")
    parser.add_argument("--times", type=int, default=50, metavar="N", help="pairs of steps")
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    args = parser.parse_args()
    torch.set_num_threads(1)
    columns = ["modules", "parameters", "call us", "of it Dynamo us", "olla us", "step ms", "first step s"]
    page = Report("A call of a compiled step", columns)
    page.rows = [measure(num_modules, args.times) for num_modules in args.modules]
    page.summary["what is measured"] = (
        "call: least of many, without its operators; step: median; first step: processor time; one thread"
    )
    page.print()
    if args.markdown:
        page.save(args.markdown)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
