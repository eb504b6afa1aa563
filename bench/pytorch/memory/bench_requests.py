"""What a request for memory costs the host: at a planned address beside torch's own allocator, measured in turn.

    eval "$(python tests/cuda/standin.py)"  # where there is no GPU
    python bench/pytorch/memory/bench_requests.py --markdown bench/results/pytorch/memory/requests.md

A request and the end of an earlier one, asked for in C++ without tensors (requests.cpp): in the arena of a step and of
a pool, with no and with 500 blocks that wait for another stream, as those of prefetchers do. Each round measures both
allocators; the ratio is the median of those of all rounds. Under the stand-in for CUDA (docs/cuda.md) its functions are
called in place of the driver's, by both. Beside that, what a step behind a CUDA graph pays to know that 500 tensors
are where they were.

Exit status: 1 if a request costs more than 1.5 x torch's, the addresses more than 20 microseconds, or one was missed.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the repository, for bench and tests

import olla
from bench.support.harness import Cell, Report
from olla.pytorch.memory import arrange, extension
from olla.pytorch.memory.replay import Replay, Table, load
from olla.pytorch.program import cudagraph
from tests.cuda.standin import with_numbers

SOURCE = Path(__file__).with_name("requests.cpp")
NUM_REQUESTS, NUM_LIVE, NUM_ROUNDS = 2000, 32, 31
NUM_HELD, HELD_FLOATS, SIDE_CYCLES = 500, 1024, 20_000_000
MOST_RATIO, MOST_MICROSECONDS, NUM_TENSORS = 1.5, 20.0, 500
EMPTY = Table(0, np.zeros(2, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), 512)
Cycle = Callable[[], float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    arguments = parser.parse_args()
    report = Report(
        "A request for memory", ["where", "blocks that wait", "torch ns", "olla ns", "olla / torch", "misses"]
    )
    cycle, is_well = compiled(), True
    for where, measure in (("step", in_steps), ("pool", in_pool)):
        for num_held in (0, NUM_HELD):
            pairs, num_misses = measure(cycle, num_held)
            own, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratio = statistics.median(second / first for first, second in pairs)
            is_well &= ratio <= MOST_RATIO and num_misses == 0
            report.rows.append([where, num_held, round(own), round(ours), ratio, num_misses])
    microseconds = address_microseconds()
    is_well &= microseconds <= MOST_MICROSECONDS
    notes: dict[str, Cell] = {
        "device": torch.cuda.get_device_name(),
        "medians": f"of {NUM_ROUNDS} rounds of {NUM_REQUESTS} requests, of which {NUM_LIVE} are alive at once",
        f"addresses of {NUM_TENSORS} tensors compared": f"{microseconds:.1f} microseconds",
    }
    report.summary = notes
    report.print()
    if arguments.markdown:
        report.save(arguments.markdown)
    return 0 if is_well else 1


def compiled() -> Cycle:
    """Compile requests.cpp against torch; return nanoseconds of one request in a round."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "requests.so"
        flags = [*extension._flags("cuda"), *extension._link_flags("cuda")]
        subprocess.run([*extension._compiler(), str(SOURCE), *flags, "-o", str(made)], check=True)
        library = ctypes.CDLL(str(made))
    library.nanoseconds.restype = ctypes.c_double
    return lambda: float(library.nanoseconds(ctypes.c_int64(NUM_REQUESTS), ctypes.c_int64(NUM_LIVE)))


@contextmanager
def waiting(num_held: int, *, keep: bool = False) -> Iterator[None]:
    """Have blocks that a side stream, which is not done, uses after their end; with keep they end later."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SIDE_CYCLES)
    tensors = [torch.empty(HELD_FLOATS, device="cuda") for _ in range(num_held)]
    for tensor in tensors:
        tensor.record_stream(side)
        del tensor
    if not keep:
        tensors.clear()
    yield
    assert keep or not side.query(), "the side stream was done before the requests were"
    side.synchronize()


def round_of(cycle: Cycle, num_held: int, *, keep: bool = False) -> float:
    with waiting(num_held, keep=keep):
        return cycle()


def in_steps(cycle: Cycle, num_held: int) -> tuple[list[tuple[float, float]], int]:
    """Measure steps of one op; return pairs of torch's own nanoseconds and those in the arena, and the misses."""
    replay = load(torch.device("cuda"))

    def step(table: Table, *, recording: bool = False) -> float:
        replay.activate(table, recording=recording)
        replay.begin(0)
        taken = round_of(cycle, num_held, keep=recording)
        replay.end()
        return taken

    step(EMPTY, recording=True)
    recorded = replay.stop_recording()
    table = arrange.arrange(recorded, 1, 512, 1.0, 0).table
    pairs, num_misses = [], 0
    for _ in range(NUM_ROUNDS):
        own = round_of(cycle, num_held)
        pairs.append((own, step(table)))
        num_misses += replay.deactivate(keep_arena=True).num_misses
    replay.release()
    return pairs, num_misses


def in_pool(cycle: Cycle, num_held: int) -> tuple[list[tuple[float, float]], int]:
    """Measure the same in iterations of a pool."""
    replay: Replay = load(torch.device("cuda"))
    torch.empty(1 << 28, device="cuda")  # the loop has reserved more than the arena, or the pool would leave it
    torch.cuda.empty_cache()
    pairs = []
    with olla.pool("cuda") as pool:
        for _ in range(4):
            round_of(cycle, num_held, keep=True)
            pool.step()
        before = pool.report()
        for _ in range(NUM_ROUNDS):
            replay.activate(EMPTY)  # a step that has no window open: the pool is suspended
            own = round_of(cycle, num_held)
            replay.deactivate()
            pairs.append((own, round_of(cycle, num_held)))
            pool.step()
        report = pool.report()
    if report.state != "planned":
        raise SystemExit(f"the pool is off: {report.note}")
    return pairs, report.num_misses - before.num_misses


def address_microseconds() -> float:
    """Return what a look at the addresses of tensors takes."""
    values = [torch.empty(4, device="cuda") for _ in range(NUM_TENSORS)]
    there = cudagraph.Addresses(values, range(NUM_TENSORS))
    times = []
    for _ in range(1000):
        start = time.perf_counter()
        is_there = there.are_those_of(values)
        times.append(time.perf_counter() - start)
        assert is_there
    return statistics.median(times) * 1e6


if __name__ == "__main__":
    if (standin := with_numbers()) is not None:
        standin.schedule("late")
    raise SystemExit(main())
