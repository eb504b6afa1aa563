"""Request: everything that a plan is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from olla.base import Progress
from olla.graph import Graph, Rules
from olla.plan.chunks import Chunked
from olla.plan.goal import Goal, Swapping
from olla.plan.options import Options
from olla.plan.rewrite import Rewrite


class Costs(NamedTuple):
    """What was measured of the ops of a graph.

    Attributes:
        workspace_bytes: int64[n], of op v.
        seconds: float64[n], of op v.
    """

    workspace_bytes: NDArray[np.int64]
    seconds: NDArray[np.float64]

    @classmethod
    def of(cls, graph: Graph) -> Costs:
        """Return what a graph says."""
        return cls(graph.workspace_bytes, graph.seconds)

    def through(self, rewrite: Rewrite) -> Costs:
        """Return the costs of the ops behind a rewriting; a copy to host memory or back has none."""
        own, origin = rewrite.origin >= 0, rewrite.origin
        return Costs(np.where(own, self.workspace_bytes[origin], 0), np.where(own, self.seconds[origin], 0.0))

    def on(self, graph: Graph) -> Graph:
        """Return the graph with these costs."""
        return replace(graph, workspace_bytes=self.workspace_bytes, seconds=self.seconds)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a plan is asked for, checked once.

    Attributes:
        graph: the training step.
        options: of the order and the layout.
        goal: a budget, a slowdown or the least peak; None: the graph stays as it is.
        swapping: how tensors may be swapped to host memory; None: not at all.
        progress: as in `olla.plan`.
        suits: whether a loss may be chunked, where the graph alone does not say so; see `olla.chunk.chunked`.
        chunked: losses that are in chunks already; None: those that the goal asks for are sought.
        restrict: (rules, chunked) -> rules: takes away what whoever runs the plan cannot do with the graph that is
            rewritten, which is that of `chunked` where losses are in chunks.
        costs: measured, of the ops of that graph. The plan is chosen by these; its figures are those of the graph.
        seconds: wall-clock time that was spent already, per stage.
    """

    graph: Graph
    options: Options
    goal: Goal | None = None
    swapping: Swapping | None = None
    progress: Progress | None = None
    suits: Callable[[Any], bool] | None = None
    chunked: Chunked | None = None
    restrict: Callable[[Rules, Chunked | None], Rules] | None = None
    costs: Costs | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
