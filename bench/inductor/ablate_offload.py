"""What the search for copies to host memory is worth: added time under budgets, with more of it, less, and another.

    python bench/inductor/ablate_offload.py --markdown bench/results/inductor/offload_ablation.md

Each model's joint graph is captured once, weighed for an A100 and its link, with products as fast as in half precision
and as in float32. Budgets lie between the least peak by recomputation alone and the peak with everything saved. What is
compared is the planner's added time, recomputation and waiting together, as the copies are written.

Exit status: 1 if a plan does not fit its budget, or takes longer than without copies.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import numpy as np
from numpy.typing import NDArray

from bench.inductor.ablate_saving import joint_of
from bench.support.harness import Cell, Report
from olla import _core
from olla.graph import PROFILES
from olla.inductor.saving import offload, saving
from olla.inductor.saving.joint import Joint
from olla.plan import Goal, Link, Swapping
from tests.support.pytorch import compile_cases

DEVICE = PROFILES["a100"]
SPEEDS = {  # of products: on tensor cores, and in float32 proper
    "half": DEVICE,
    "single": replace(DEVICE, flops_per_second=DEVICE.single_flops_per_second),
}
SHARES = (0.5, 0.3, 0.2, 0.1, 0.05, 0.02)  # of the way from the least peak to everything saved
GREEDY_WORK = 40_000_000  # runs simulated, for each plan of the front
CASES = ("resnet50 b32", "bert b32", "vit b32", "gpt2 b32, 512 tokens", "llama 1B b4", "unet b8")


def _ranked(key: Callable[[Any], NDArray[Any]]) -> tuple[AbstractContextManager[Any]]:
    begin = offload._OffloadSearch.__init__

    def otherwise(search: Any, *given: Any) -> None:
        begin(search, *given)
        search.ranking = np.argsort(key(search), kind="stable").astype(np.int32)

    return (mock.patch.object(offload._OffloadSearch, "__init__", otherwise),)


def _greedy(search: Any, budget: int) -> Iterator[Any]:
    """Yield the set that the greedy of olla.swap chooses, block by block, each with simulations of its own."""
    limits = _core.Limits(time_limit=1e9, max_work=GREEDY_WORK, progress=None)
    yield search.core.fit(budget, float(search.begin[-1]), limits).block


# What is searched -> how it is put in place.
ROWS: dict[str, tuple[AbstractContextManager[Any], ...]] = {
    "as it is": (),
    "two numbers of tensors, not six": (mock.patch.object(offload, "_NUM_SIZES", 2),),
    "sixteen numbers": (mock.patch.object(offload, "_NUM_SIZES", 16),),
    "ranked by when they are used last": _ranked(lambda search: search.last),
    "ranked by how long they are idle": _ranked(
        lambda search: search.begin[search.last + 1] - search.begin[search.next]
    ),
    "the greedy of olla.swap": (mock.patch.object(offload._OffloadSearch, "sets", _greedy),),
    "six plans of the front, not 24": (mock.patch.object(saving, "_NUM_COPIED", 6),),
    "twelve plans of the front": (mock.patch.object(saving, "_NUM_COPIED", 12),),
    "48 plans of the front": (mock.patch.object(saving, "_NUM_COPIED", 48),),
}


class Fronts:
    """The plans of one joint graph, with copies and without."""

    def __init__(self, joint: Joint) -> None:
        self.alone = saving.Front(joint)
        self.copied = saving.Front(joint, host=Swapping(link=Link.of(DEVICE)))
        least = self.alone.choose(Goal(device=DEVICE, minimise="peak"))
        lowest, most = least.peak_bytes, least.saved_peak_bytes
        self.goals = [Goal(device=DEVICE, budget_bytes=int(lowest + share * (most - lowest))) for share in SHARES]
        self.without = [self.alone.choose(goal).slowdown for goal in self.goals]

    def added(self) -> float:
        """Return the mean added time over the budgets, in percent of the step."""
        found = [self.copied.choose(goal) for goal in self.goals]
        for choice, goal, without in zip(found, self.goals, self.without, strict=True):
            if choice.peak_bytes > (goal.budget_bytes or 0) or choice.slowdown > without:
                raise SystemExit(
                    f"{choice.peak_bytes} bytes and {choice.slowdown} for {goal}, without copies {without}"
                )
        return 100 * float(np.mean([choice.slowdown for choice in found]))


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = list(compile_cases.CASES_ON_GPU)
    parser.add_argument("--cases", nargs="+", default=CASES, choices=cases, metavar="CASE")
    parser.add_argument("--size", default="full", choices=compile_cases.SIZES)
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    options = parser.parse_args()
    fronts = {
        f"{case}, {speed}": Fronts(joint_of(case, options.size, device))
        for case in options.cases
        for speed, device in SPEEDS.items()
    }
    table: list[list[Cell]] = [["no copies", *(100 * float(np.mean(f.without)) for f in fronts.values()), None]]
    for row, patches in ROWS.items():
        start = time.process_time()
        with ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            cells: list[Cell] = [f.added() for f in fronts.values()]
        table.append([row, *cells, time.process_time() - start])
        print(*table[-1], file=sys.stderr, flush=True)
    page = Report(
        f"Copies to host memory: added time, %, mean of {len(SHARES)} budgets", ["search", *fronts, "CPU s"], table
    )
    page.print()
    if options.markdown:
        page.save(options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
