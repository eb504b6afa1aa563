"""What the parts of the backend's choice of what is saved are worth: plans with each of them left out.

    python bench/inductor/ablate_saving.py --markdown bench/results/inductor/saving_ablation.md
    python bench/inductor/ablate_saving.py --cases "resnet50 b32" --rows "all cuts"
    python bench/inductor/ablate_saving.py --size tiny

Each model's joint graph is captured once; for each way to weigh time (a CPU's, and a GPU's) and each goal the choice is
made with all parts and with one left out. What is compared is what the planner sees: the peak, or the added time within
a budget. Searches are limited in work, so that other work on the machine changes nothing; what is counted is processor
time. A new part has to win its row here before it moves in.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

from bench.support.harness import Cell, Report
from olla.graph import PROFILES, DeviceProfile
from olla.inductor.compat.compat import config
from olla.inductor.saving import saving
from olla.inductor.saving.joint import Joint
from olla.inductor.saving.saving import EVERYTHING, Again, SavedChoice
from olla.inductor.settings import patches
from olla.inductor.simulate.step import replay
from olla.plan import Goal
from tests.support.pytorch import compile_cases

DEVICES = ("cpu", "a100")
_DEVICE = PROFILES["a100"]  # of goals; a joint graph has its own
_BUDGET = 0.3  # of the way from the least peak to the peak with all saved


class Captured(BaseException):
    """The joint graph is known: the rest of the compilation is not needed. No fallback catches this."""


def joint_of(case: str, size: str, device: str | DeviceProfile) -> Joint:
    """Return the planner's model of a case's joint graph, weighed for a device."""
    found: list[Joint] = []

    def keep(front: saving.Front, goal: Goal) -> SavedChoice:
        found.append(front.joint)
        raise Captured

    example, _ = compile_cases.build(case, size)
    settings = patches(device=device, minimise="peak")
    with config.patch(settings), mock.patch.object(saving.Front, "choose", keep), suppress(Captured):
        replay(example.model, example.batch, example.loss)
    (joint,) = found
    return joint


def _without_cuts(*left_out: int) -> tuple[AbstractContextManager[Any], ...]:
    """Leave out some of the searches for minimum cuts at which the greedy starts."""
    starting, steps = Joint.starting, saving._PRICE_STEPS

    def others(joint: Joint) -> Any:
        return [cuts for i, cuts in enumerate(starting(joint)) if i not in left_out]

    kept = tuple(step for i, step in enumerate(steps) if i not in left_out)
    return mock.patch.object(Joint, "starting", others), *_set(_PRICE_STEPS=kept)


def _set(**values: Any) -> tuple[AbstractContextManager[Any], ...]:
    return tuple(mock.patch.object(saving, name, value) for name, value in values.items())


def _as_it_is(best: Any, points: Any, joint: Joint, evictor: Any, again: Again) -> None:
    evictor.reset(best.values, best.steps)


# What is left out -> how.
ROWS: dict[str, tuple[AbstractContextManager[Any], ...]] = {
    "nothing": (),
    "cuts: pointwise results count twice": _without_cuts(0),
    "cuts: only kernels take time to run again": _without_cuts(1),
    "cuts: truth values cost what could be moved meanwhile": _without_cuts(2),
    "all cuts": _without_cuts(0, 1, 2),
    "every second price": _set(_PRICE_STEPS=tuple(2 * step for step in saving._PRICE_STEPS)),
    "the long run from the lowest peak": _set(_LAST_WORK=saving._RUN_WORK),
    "small products": _set(_SMALL_SHARES=()),
    "every second share of small products": _set(_SMALL_SHARES=saving._SMALL_SHARES[::2]),
    "plans by traffic": (mock.patch.object(Joint, "by_traffic", lambda joint: joint),),
    "clearing": _set(_clear=_as_it_is),
}


@contextmanager
def left_out(row: str) -> Iterator[None]:
    """Choose without what a row leaves out."""
    with ExitStack() as stack:
        for patch in ROWS[row]:
            stack.enter_context(patch)
        yield


class Asked(NamedTuple):
    """One question: a goal, and the most that is recomputed; what counts of its answer."""

    name: str
    goal: Callable[[int, int], dict[str, Any]]  # of the least peak and the one with all saved: what `Goal` is made of
    again: Again = EVERYTHING
    counts: str = "peak_bytes"


def _within(least: int, most: int) -> dict[str, Any]:
    return {"budget_bytes": int(least + _BUDGET * (most - least))}


def _least(*_: int) -> dict[str, Any]:
    return {"minimise": "peak"}


ASKED = (
    Asked("5 % slower", lambda *_: {"max_slowdown": 0.05}),
    Asked("1 % of products", _least, Again(0.01, 0.01)),
    Asked("5 % of flops", _least, Again(0.05)),
    Asked("least peak", _least),
    Asked("a budget", _within, counts="added_seconds"),
)


class Outcome(NamedTuple):
    """What a choice reaches: bytes, or seconds as a share of the step's; and the processor time it took."""

    value: float
    seconds: float


def outcomes(joint: Joint, ends: tuple[int, int]) -> dict[str, Outcome]:
    """Return the answers to all questions about one joint graph."""
    found = {}
    for asked in ASKED:
        start, goal = time.process_time(), Goal(device=_DEVICE, **asked.goal(*ends))
        choice = saving.choose(joint, goal, asked.again)
        seconds = time.process_time() - start
        _check(joint, asked, goal, choice)
        value = getattr(choice, asked.counts) if choice.peak_bytes <= (goal.budget_bytes or math.inf) else math.inf
        found[asked.name] = Outcome(value / joint.step_seconds if asked.counts == "added_seconds" else value, seconds)
    return found


def _check(joint: Joint, asked: Asked, goal: Goal, choice: SavedChoice) -> None:
    """Raise SystemExit where a choice is below its bound, or recomputes more than was asked for."""
    limits = {
        "flops": (choice.recomputed_flops, asked.again.flops * float(joint.flops.sum())),
        "seconds": (choice.added_seconds, (goal.max_slowdown or math.inf) * joint.step_seconds),
        "bytes of the bound": (choice.lower_bound_bytes, choice.peak_bytes),
    }
    for what, (found, most) in limits.items():
        if found > most * (1 + 1e-9):
            raise SystemExit(f"{asked.name}: {found} {what}, expected at most {most}")


def compared(before: Mapping[Any, Outcome], after: Mapping[Any, Outcome], asked: Asked) -> list[Cell]:
    """Return how many answers to one question are worse, how many better, and the mean change of those that hold."""
    changes = []
    for key in (key for key in before if key[1] == asked.name):
        a, b = before[key].value, after[key].value
        changes.append(100 * (b - a) if asked.counts == "added_seconds" else 100 * (b / a - 1))
    held = [c for c in changes if math.isfinite(c)] or [math.nan]
    return [sum(c > 1e-9 for c in changes), sum(c < -1e-9 for c in changes), statistics.fmean(held)]


def weigh(joints: Mapping[str, Joint], rows: Sequence[str]) -> Report:
    """Leave each part out, for all joint graphs and questions."""
    ends = {}
    for name, joint in joints.items():
        least = saving.choose(joint, Goal(device=_DEVICE, minimise="peak"))
        ends[name] = least.peak_bytes, least.saved_peak_bytes
    first: dict[Any, Outcome] = {}
    table: list[list[Cell]] = []
    for row in rows:
        found: dict[Any, Outcome] = {}
        with left_out(row):
            for name, joint in joints.items():
                found |= {(name, asked): outcome for asked, outcome in outcomes(joint, ends[name]).items()}
        first = first or found
        cells = [cell for asked in ASKED for cell in compared(first, found, asked)]
        table.append([row, *cells, sum(outcome.seconds for outcome in found.values())])
        print(*table[-1], file=sys.stderr, flush=True)
    columns = ["left out"]
    for asked in ASKED:
        change = "added time, points" if asked.counts == "added_seconds" else "peak, %"
        columns += [f"{asked.name}: worse", "better", change]
    notes: dict[str, Cell] = {
        "joint graphs, and for which device time is estimated": ", ".join(joints),
        "worse, better": "joint graphs whose peak (or added time, for a budget) is higher, or lower, than with all; a "
        "budget that is not kept is worse, and not in the mean",
        "a budget": f"the least peak and {_BUDGET:.0%} of what is above it with all saved",
    }
    return Report("What is saved for backward: each part of the choice left out", [*columns, "CPU s"], table, notes)


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = list(compile_cases.CASES_ON_GPU)
    parser.add_argument("--cases", nargs="+", default=cases, choices=cases, metavar="CASE", help="default: all")
    parser.add_argument("--size", default="full", choices=compile_cases.SIZES)
    parser.add_argument("--rows", nargs="+", default=[], choices=ROWS, metavar="PART", help="default: all")
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    options = parser.parse_args()
    joints = {}
    for case in options.cases:
        for device in DEVICES:
            joints[f"{case} {device}"] = joint_of(case, options.size, device)
            print(f"{case} {device}", file=sys.stderr, flush=True)
    page = weigh(joints, list(dict.fromkeys(["nothing", *(options.rows or ROWS)])))
    page.print()
    if options.markdown:
        options.markdown.write_text(page.markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
