"""What fused code on a CPU takes for random numbers and truth values, beside the memory it moves.

    python bench/inductor/bench_fused_costs.py --markdown bench/results/inductor/fused_costs.md

One core, Inductor's loops over as many elements as fit into its caches, medians of processor time. The profile "cpu" of
python/olla/devices.py has about a sixteenth of these figures: it stands for sixteen cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

from bench.support.harness import Report
from olla.graph import PROFILES

NUM_ELEMENTS = 2**19
LARGE = 2**25  # elements that no cache holds
NUM_SAMPLES = 31


def nanoseconds(function: Callable[..., object], *inputs: torch.Tensor, random: bool = False) -> float:
    """Return the nanoseconds per element of a function compiled by Inductor, whose results are checked."""
    compiled = torch.compile(function)
    found, expected = compiled(*inputs), function(*inputs)
    if random:  # other numbers of the same distribution
        found, expected = torch.std(found), torch.std(expected)  # type: ignore[call-overload]
    torch.testing.assert_close(found, expected, rtol=0.05 if random else None, atol=0.0 if random else None)
    samples = []
    for _ in range(NUM_SAMPLES):
        start = time.process_time()
        compiled(*inputs)
        samples.append(time.process_time() - start)
    return 1e9 * statistics.median(samples) / inputs[0].numel()


def main() -> int:
    """Run it; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(NUM_ELEMENTS)
    mask = x > 0
    large = torch.randn(LARGE)
    plain = nanoseconds(lambda x: x * 2 + 1, x)
    moved = nanoseconds(lambda x, y: y.copy_(x * 2 + 1), large, torch.zeros_like(large))  # into pages that are there
    stored = nanoseconds(lambda x: (x * 2 + 1, x > 0), x) - plain
    read = nanoseconds(lambda x, mask: torch.where(mask, x * 2, 1.0), x, mask) - plain
    drawn = nanoseconds(lambda x: torch.rand_like(x) * x, x, random=True) - plain
    bandwidth = 2 * x.element_size() / moved  # bytes per nanosecond
    page = Report(
        "What fused code takes on one core", ["what", "ns per element", "as bytes moved", "in the profile, ns"]
    )
    truth, draw = (1e9 * seconds for seconds in (PROFILES["cpu"].truth_seconds, PROFILES["cpu"].draw_seconds))
    page.rows.append(["read and write float32, from memory", moved, 2 * x.element_size(), None])
    page.rows.append(["write a truth value beside", stored, stored * bandwidth, None])
    page.rows.append(["read a truth value beside", read, read * bandwidth, None])
    page.rows.append(["both", stored + read, (stored + read) * bandwidth, truth])
    page.rows.append(["draw a random number beside", drawn, drawn * bandwidth, draw])
    page.summary["vector instructions"] = torch.backends.cpu.get_cpu_capability()
    page.print()
    if arguments.markdown:
        page.save(arguments.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
