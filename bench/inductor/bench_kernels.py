"""What taking fusions back does to the peak of compiled steps.

    python bench/inductor/bench_kernels.py --markdown bench/results/inductor/kernels.md
    python bench/inductor/bench_kernels.py --size small --cases "resnet50 b32"

Steps of tests/support/pytorch/compile_cases.py with ``max_recomputed=0.05``, on fake tensors. Of backward's kernels:
the planned peak of the best order with all of Inductor's fusions, the one that was taken and its lower bound, and how
many fusions were taken back. Of the whole step: the replayed peak without an optimizer's state, and the allocations
of the generated code.

Exit status: 0; 1 if a planned peak is above that with all fusions, or below its bound.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla.inductor
from bench.support.harness import Cell, Report
from olla.inductor.kernels import order
from olla.inductor.simulate.step import SimulatedStep, replay
from tests.support.pytorch import compile_cases

COLUMNS = ["model", "kernels of backward", "with all fusions, MiB", "planned, MiB", "bound, MiB", "fusions taken back"]
COLUMNS += ["replayed, MiB", "allocations"]
MEBI = 2**20
MOST_RECOMPUTED = 0.05


def replayed(case: str, size: str) -> SimulatedStep:
    """Replay a step, after which the records hold its graphs alone."""
    example, _ = compile_cases.build(case, size)
    order.forget()
    with olla.inductor.enable(max_recomputed=MOST_RECOMPUTED):
        return replay(example.model, example.batch, example.loss)


def num_allocations(run: SimulatedStep) -> int:
    """Count the allocations in the generated wrappers."""
    return sum(len(re.findall(r"= empty_strided_", source)) for source in run.sources)


def measure(case: str, size: str) -> tuple[list[Cell], bool]:
    """Return a row, and whether its figures are in order."""
    run = replayed(case, size)
    (backward,) = [record for record in order.records() if record.name.endswith("backward")]
    peaks = backward.fused_peak_bytes, backward.peak_bytes, backward.lower_bound_bytes
    row: list[Cell] = [case, backward.num_kernels, *(peak / MEBI for peak in peaks), backward.num_unfused]
    return [*row, run.peak_bytes / MEBI, num_allocations(run)], peaks == tuple(sorted(peaks, reverse=True))


def main() -> int:
    """Run it; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--cases", nargs="+", default=list(compile_cases.CASES), choices=list(compile_cases.CASES))
    parser.add_argument("--size", default="full", choices=["full", "small", "tiny"])
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    page = Report("Compiled steps: fusions taken back", COLUMNS)
    wrong = []
    for case in arguments.cases:
        row, right = measure(case, arguments.size)
        page.rows.append(row)
        wrong += [] if right else [case]
        print(case, file=sys.stderr, flush=True)
    page.summary["models"] = arguments.size
    page.summary["planned above what all fusions need, or below the bound"] = ", ".join(wrong) or "none"
    page.print()
    if arguments.markdown:
        page.save(arguments.markdown)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
