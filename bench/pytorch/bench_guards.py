"""Time what the guards of a compiled step cost at every call, beside the same step without them.

    python bench/pytorch/bench_guards.py --markdown bench/results/pytorch/guards.md

Models of 10, 100, 500 and 1,000 modules. Guarded and unguarded calls alternate. The
limit is 100 us for 500 modules, in proportion for more. Exit status 1 if it is exceeded.
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
from olla.pytorch.binding import batch_key, flatten
from olla.pytorch.captures import Capture

ALLOWED_SECONDS, ALLOWED_MODULES = 100e-6, 500


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


def measure(num_modules: int, num_times: int) -> tuple[list[Any], bool]:
    """Return a row of the table, and whether the limit holds."""
    model, x = model_of(num_modules), torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    step = olla.compile(model, optimizer=optimizer, loss=loss, time_limit=0.2, disk_cache=False)
    for _ in range(3):
        step(x)
    capture = step._captures.latest
    assert isinstance(capture, Capture)
    leaves, spec = flatten(x)
    key = batch_key(leaves, spec, "cpu")
    guarded, unguarded = step._captures.find, lambda key, leaves: (capture, capture.gather(leaves), "")
    steps: dict[str, list[float]] = {"guarded": [], "unguarded": []}
    for i in range(2 * num_times):
        name = ("guarded", "unguarded")[i % 2]
        step._captures.find = guarded if name == "guarded" else unguarded  # type: ignore[method-assign]
        start = time.perf_counter()
        step(x)
        steps[name].append(time.perf_counter() - start)
    step._captures.find = guarded  # type: ignore[method-assign]
    values = best(lambda: guarded(key, leaves), 20 * num_times)
    sources = best(lambda: capture.gather(leaves), 20 * num_times)
    key_seconds = best(lambda: batch_key(leaves, spec, "cpu"), 20 * num_times)
    cost = values - sources
    num = len(list(model.modules()))
    allowed = ALLOWED_SECONDS * max(1.0, num / ALLOWED_MODULES)
    medians = [statistics.median(steps[name]) for name in ("guarded", "unguarded")]
    micro = [f"{1e6 * s:.1f}" for s in (cost, allowed, key_seconds)]
    milli = [f"{1e3 * s:.2f}" for s in medians]
    guard = capture._guard
    num_places = sum(len(places.watched) for places in guard._places) + len(guard._probes)
    return [num, len(list(model.parameters())), num_places, *micro, *milli], cost <= allowed


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", type=int, nargs="*", default=[10, 100, 500, 1000], metavar="N")
    parser.add_argument("--times", type=int, default=50, metavar="N", help="pairs of steps")
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    args = parser.parse_args()
    torch.set_num_threads(1)
    columns = [
        "modules", "parameters", "places compared", "guard us", "allowed us", "key of the batch us", "step ms",
        "step without guards ms",
    ]  # fmt: skip
    page = Report("Guards of a compiled step", columns)
    holds = []
    for num_modules in args.modules:
        row, fits = measure(num_modules, args.times)
        page.rows.append(row)
        holds.append(fits)
    page.summary["within what is allowed"] = f"{sum(holds)} of {len(holds)}"
    page.summary["what is measured"] = "guard, key: least of many calls; steps: medians of alternating ones, one thread"
    page.print()
    if args.markdown:
        page.save(args.markdown)
    return int(not all(holds))


if __name__ == "__main__":
    raise SystemExit(main())
