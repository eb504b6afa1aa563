"""How long do windows, recorded and planned allocations take, beside torch's own allocator?

python bench/pytorch/bench_replay.py
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

from bench.support.harness import Report, Timing
from olla.pytorch.memory.replay import Replay, Table, load

NUM_CALLS = 20_000
NUM_LIVE = 1_000  # blocks in use while planned allocations are timed


def nanoseconds(call: Callable[[], object], num_calls: int = NUM_CALLS) -> Timing:
    """Time one call; the empty loop is taken off."""

    def loop(body: Callable[[], object]) -> float:
        start = time.perf_counter_ns()
        for _ in range(num_calls):
            body()
        return (time.perf_counter_ns() - start) / num_calls

    return Timing.of([loop(call) - loop(lambda: None) for _ in range(11)])


def in_window(replay: Replay, num_bytes: int) -> Callable[[], None]:
    def call() -> None:
        replay.begin(0)
        torch.empty(num_bytes, dtype=torch.uint8)
        replay.end()

    return call


def filled(replay: Replay, num_bytes: int) -> list[torch.Tensor]:
    """Activate a table whose op 1 holds NUM_LIVE small blocks, and let it run; op 0 has one block of num_bytes."""
    sizes = np.full(1 + NUM_LIVE, 64)
    sizes[0] = num_bytes
    ends = np.cumsum(-(-sizes // 64) * 64)
    offsets = np.concatenate([[0], ends[:-1]])
    replay.activate(Table(int(ends[-1]), np.array([0, 1, 1 + NUM_LIVE]), sizes, offsets))
    replay.begin(1)
    live = [torch.empty(64, dtype=torch.uint8) for _ in range(NUM_LIVE)]
    replay.end()
    return live


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    options = parser.parse_args()
    page = Report("Windows and planned allocations", ["what", "median ns", "least", "most"])

    def add(name: str, timing: Timing) -> None:
        page.rows.append([name, timing.median_seconds, timing.min_seconds, timing.max_seconds])

    sizes = {"64 B": 64, "64 MiB": 64 << 20}
    for name, num_bytes in sizes.items():
        empty = partial(torch.empty, num_bytes, dtype=torch.uint8)
        add(f"torch.empty of {name}, before any window", nanoseconds(empty))
    replay = load(torch.device("cpu"))
    none = np.zeros(0, np.int64)
    replay.activate(Table(0, np.zeros(2, np.int64), none, none), recording=True)  # nothing is planned

    def windows() -> None:
        for _ in range(100):
            replay.begin(0)
            replay.end()

    add("100 times begin and end", nanoseconds(windows, 1000))
    add("torch.empty of 64 B, recorded", nanoseconds(in_window(replay, 64)))
    recorded = replay.stop_recording()
    num_misses = 0
    for name, num_bytes in sizes.items():
        live = filled(replay, num_bytes)
        add(f"torch.empty of {name}, planned, {NUM_LIVE:,} blocks in use", nanoseconds(in_window(replay, num_bytes)))
        counters = replay.deactivate()
        num_misses += counters.num_misses
        del live
    add("torch.empty of 64 B, outside windows", nanoseconds(partial(torch.empty, 64, dtype=torch.uint8)))
    right = num_misses == 0 and replay.held_bytes == 0 and len(recorded.op) == 11 * NUM_CALLS
    page.summary["every request recorded, hit and freed"] = right
    page.print()
    for out in (options.json, options.markdown):
        if out:
            page.save(out)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
