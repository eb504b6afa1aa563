"""Plans with chunked losses: the goal of the original step, as a goal of its chunked graph, and back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from olla import pipeline
from olla.check.check import check
from olla.chunk.losses import Region
from olla.chunk.rewrite import chunked
from olla.graph import DeviceProfile, Graph
from olla.plan import BudgetPlan, Chunked, Goal, Options, SwapPlan

if TYPE_CHECKING:
    from olla.base import Progress

_BASE_SHARE = 0.1  # of the time limit, for the best order of the original

AnyPlan = TypeVar("AnyPlan", BudgetPlan, SwapPlan, BudgetPlan | SwapPlan)


@dataclass(frozen=True, kw_only=True)
class Chunking:
    """A step whose losses were put in chunks before any search.

    Attributes:
        chunks: its graph.
        source_digest: of the original.
        base_peak_bytes: of the best order of the original.
        base_seconds: of the original, as estimated.
        chunked_seconds: of the chunked graph.
    """

    chunks: Chunked
    source_digest: str
    base_peak_bytes: int
    base_seconds: float
    chunked_seconds: float

    @classmethod
    def of_plan(cls, plan: BudgetPlan | SwapPlan, device: DeviceProfile) -> Chunking | None:
        """Return the chunks below a plan; None where it has none."""
        if plan.chunked is None:
            return None
        return cls(
            chunks=plan.chunked,
            source_digest=plan.source_digest,
            base_peak_bytes=plan.base_peak_bytes,
            base_seconds=plan.base_seconds,
            chunked_seconds=float(device.op_seconds(plan.chunked.graph).sum()),
        )

    @property
    def extra_seconds(self) -> float:
        """What the chunks add; below 0 where they save passes over the logits."""
        return self.chunked_seconds - self.base_seconds

    def goal(self, goal: Goal) -> Goal:
        """Return a goal of the original step as one of the chunked graph."""
        if goal.max_slowdown is None:
            return replace(goal, chunked_loss=None)
        left = goal.max_slowdown * self.base_seconds - self.extra_seconds
        return replace(goal, chunked_loss=None, max_slowdown=left / self.chunked_seconds)

    def told(self, found: AnyPlan, goal: Goal) -> AnyPlan:
        """Return a plan of the chunked graph as one of the original."""
        below = found if isinstance(found, BudgetPlan) else found.recomputation
        assert below is not None

        def later(seconds: float) -> float:
            return max(0.0, seconds + self.extra_seconds)

        def of_original(plan: BudgetPlan | SwapPlan) -> dict[str, Any]:
            return {
                "source_digest": self.source_digest,
                "base_peak_bytes": self.base_peak_bytes,
                "goal": {**plan.goal, **goal.record()},
                "added_seconds_lower_bound": later(plan.added_seconds_lower_bound),
            }

        is_estimated = below.base_seconds == self.chunked_seconds
        base_seconds = self.base_seconds if is_estimated else below.base_seconds - self.extra_seconds
        times: dict[str, Any] = {"base_seconds": base_seconds, "added_seconds": later(below.added_seconds)}
        below = replace(below, **of_original(below), **times, chunked=self.chunks)
        return below if isinstance(found, BudgetPlan) else replace(found, **of_original(found), recomputation=below)


def chunk(
    graph: Graph,
    options: Options,
    goal: Goal,
    progress: Progress | None,
    suits: Callable[[Region], bool] | None = None,
) -> Chunking | str:
    """Put the losses of a step in chunks, or say why that does not serve the goal.

    Args:
        graph, options, goal, progress: as in `run`.
        suits: see `olla.chunk.chunked`.
    """
    assert goal.chunked_loss is not None
    chunks = chunked(graph, goal.chunked_loss, suits)
    base_seconds = float(goal.device.op_seconds(graph).sum())
    chunked_seconds = float(goal.device.op_seconds(chunks.graph).sum())
    extra_seconds = chunked_seconds - base_seconds
    if chunks.num_losses == 0:
        return "none was found whose linear layer and mean or summed cross-entropy stand alone, with large logits"
    if goal.max_slowdown is not None and extra_seconds > goal.max_slowdown * base_seconds:
        return f"chunks alone add {extra_seconds / base_seconds:.2%} to the time of the step"
    order_only = replace(options, layout=False, time_limit=_BASE_SHARE * options.time_limit)
    base_peak = pipeline.run(graph, order_only, progress).peak_bytes
    if goal.budget_bytes is not None and base_peak <= goal.budget_bytes:
        return "the step fits without"
    return Chunking(
        chunks=chunks,
        source_digest=graph.digest,
        base_peak_bytes=base_peak,
        base_seconds=base_seconds,
        chunked_seconds=chunked_seconds,
    )


def run(
    graph: Graph,
    options: Options,
    goal: Goal,
    progress: Progress | None,
    search: Callable[[Graph, Options, Goal], AnyPlan],
) -> AnyPlan:
    """Plan a graph towards a goal with its losses in chunks; without, where that is of no use to the goal.

    The chunks are made before the search and stay: added times count from the original step, bounds hold for all
    rewritings of the chunked graph.

    Args:
        graph: the training step.
        options, goal, progress: as `olla.planner` makes them; the goal says how many chunks.
        search: plans a graph towards a goal without chunks.
    """
    start = time.perf_counter()
    chunking = chunk(graph, options, goal, progress)
    left = replace(options, time_limit=max(0.0, options.time_limit - (time.perf_counter() - start)))
    if isinstance(chunking, str):
        found = search(graph, left, replace(goal, chunked_loss=None))
        asked = {**found.goal, **goal.record()}
        return replace(found, goal=asked, message=f"No loss was chunked: {chunking}. {found.message}")
    plan = chunking.told(search(chunking.chunks.graph, left, chunking.goal(goal)), goal)
    plan = replace(plan, seconds={**plan.seconds, "total": time.perf_counter() - start})
    check(graph, plan)
    return plan
