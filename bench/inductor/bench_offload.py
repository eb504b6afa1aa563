"""Copies to host memory in compiled steps: what a budget costs with them, and by recomputation alone.

Under the stand-in for CUDA (docs/cuda.md): sizes, order, events, torch's allocator and pinned memory are real, seconds
are estimated for an A100 and its link to the host. Budgets lie between the least peak by recomputation and the peak
with everything saved; the last two lie below the former. What was planned is compared with what torch counts.

    eval "$(python tests/cuda/standin.py)"
    python bench/inductor/bench_offload.py --markdown bench/results/inductor/offload.md

Exit status: 1 if a plan with copies takes longer than one without, or torch counts further above a plan with copies
than above those without, where workspaces of libraries are not planned.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

from bench.inductor.cuda_peaks import give_back
from bench.support.harness import Report
from olla.inductor.compat import compat
from olla.inductor.saving.saving import SavedChoice
from olla.inductor.settings import patches
from tests.support.pytorch import models, standing

MIB = 2**20
HOST = "64GB"
SHARES = (0.3, 0.1, 0.03)  # of the way from the least peak by recomputation to everything saved
BELOW = (0.1, 0.25)  # of the least peak by recomputation
CLOSE = 1.01  # of what was planned: allocators round
CASES: dict[str, tuple[str, int, int | None]] = {
    "gpt2 b16, 512 tokens": ("gpt2", 16, 512),
    "vit b32": ("vit_b16", 32, None),
    "llama 1B b4": ("llama_1b", 4, None),
}


class Step(NamedTuple):
    """What a step needed, and the plan of its one graph.

    Attributes:
        peak_bytes: of forward and backward with all they take and return, without workspaces of cuBLAS.
        host_bytes: pinned memory.
    """

    peak_bytes: int
    host_bytes: int
    choice: SavedChoice


@contextlib.contextmanager
def compiling(settings: dict[str, Any]) -> Iterator[None]:
    """Compile anew, without kernels; times mean nothing here, so no product is padded by them."""
    blocks = (compat.uncached(), standing.without_times(), standing.without_triton(), compat.config.patch(settings))
    with contextlib.ExitStack() as stack:
        for block in (*blocks, compat.config.patch(shape_padding=False)):
            stack.enter_context(block)
        yield


def measure(case: str, **goal: Any) -> Step:
    """Run two forwards and backwards under a goal."""
    torch.compiler.reset()
    give_back()
    torch._C._host_emptyCache()
    name, batch_size, length = CASES[case]
    example = models.build(name, batch_size, length=length, device="cuda")
    settings, choices = patches(**goal), list[SavedChoice]()
    settings["custom_partitioner_fn"].choices = choices
    with compiling(settings):
        step = torch.compile(lambda model, batch: example.loss(model, batch))
        for _ in range(2):
            example.model.zero_grad()
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.reset_peak_host_memory_stats()
            step(example.model, example.batch).backward()
            torch.cuda.synchronize()
    choice = max(reversed(choices), key=lambda choice: choice.saved_peak_bytes)  # a first call may compile twice
    workspaces = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    workspaces -= torch.cuda.memory_allocated()
    host_bytes = torch.cuda.host_memory_stats()["active_bytes.peak"]
    return Step(torch.cuda.max_memory_allocated() - workspaces, host_bytes, choice)


class Case:
    """The rows of one model.

    Args:
        name: of CASES.
        page: to write on.
    """

    def __init__(self, name: str, page: Report) -> None:
        self.name, self.page, self.wrong = name, page, 0
        self.unplanned = 0  # bytes beyond a plan without copies: workspaces of libraries

    def run(self) -> None:
        """Fill them."""
        least = self._row("least", minimise="peak")
        lowest, most = least.peak_bytes, least.saved_peak_bytes
        self._row("least", minimise="peak", host_budget=HOST)
        for share in SHARES:
            budget = int(lowest + share * (most - lowest))
            alone = self._row("budget", budget=budget)
            self.wrong += self._row("budget", budget=budget, host_budget=HOST).added_seconds > alone.added_seconds
        for share in BELOW:
            self._row(f"{share:.0%} below the least", budget=int((1 - share) * lowest), host_budget=HOST)

    def _row(self, what: str, **goal: Any) -> SavedChoice:
        step = measure(self.name, **goal)
        choice, copies = step.choice, step.choice.offload
        if "host_budget" not in goal:
            self.unplanned = max(self.unplanned, step.peak_bytes - choice.known_peak_bytes)
        self.wrong += step.peak_bytes > CLOSE * choice.known_peak_bytes + self.unplanned
        budget = goal.get("budget")
        pinned = copies.host_bytes if copies else 0
        self.wrong += step.host_bytes > CLOSE * pinned
        row: list[Any] = [self.name, what, budget and budget / MIB, "yes" if "host_budget" in goal else "no"]
        row += [choice.known_peak_bytes / MIB, step.peak_bytes / MIB, 100 * choice.slowdown]
        row += [100 * (copies.stall_seconds if copies else 0.0) / choice.step_seconds]
        row += [len(copies.copy) if copies else 0, pinned / MIB, step.host_bytes / MIB]
        self.page.rows.append(row)
        self.page.print()
        return choice


def main() -> int:
    """Run it; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    columns = ["model", "goal", "budget MiB", "copies", "planned MiB", "counted MiB", "added time, %"]
    columns += ["of it waiting, %", "tensors", "pinned MiB, planned", "pinned MiB"]
    page = Report("Copies to host memory in compiled steps", columns)
    wrong = 0
    for name in arguments.cases:
        case = Case(name, page)
        case.run()
        wrong += case.wrong
    page.summary["device"] = torch.cuda.get_device_name()
    page.summary["further above the plan, or slower, than without copies"] = f"{wrong} of {len(page.rows)}"
    page.print()
    if arguments.markdown:
        page.save(arguments.markdown)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
