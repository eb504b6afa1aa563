"""Options of `olla.plan`, and the inputs it takes."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from olla.graph import Graph

METHODS = ("auto", "ilp", "joint", "model", "roam", "smartpool", "inductor", "program")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a caller of `olla.plan` can choose; see there for the meaning.

    Raises:
        ValueError: an option is out of its range.
    """

    method: str = "auto"
    time_limit: float = 15.0
    seed: int = 0
    alignment: int = 512
    layout: bool = True
    updates_may_move: bool = True
    precedences: tuple[tuple[int, int], ...] = ()
    order: NDArray[Any] | None = None
    max_work: int | None = None  # of the search for an order, in units of `_core.order`; None: as time allows

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method is {self.method!r}, expected one of {', '.join(METHODS)}")
        if not 0 <= self.time_limit < math.inf:
            raise ValueError(f"time_limit is {self.time_limit}, expected a finite number of seconds from 0 on")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed is {self.seed}, expected 0 to 2^31 - 1")
        if not 1 <= self.alignment <= 2**30:
            raise ValueError(f"alignment is {self.alignment}, expected 1 to 2^30 bytes")
        if self.order is not None and (self.order.ndim != 1 or (self.order.size and self.order.dtype.kind != "i")):
            raise ValueError(
                f"order is an array of {self.order.dtype} with shape {self.order.shape}, expected one op id per step"
            )

    def record(self) -> dict[str, Any]:
        """Return the options as a plan keeps them: numbers, text, true or false."""
        return {
            "method": self.method,
            "time_limit": float(self.time_limit),
            "seed": int(self.seed),
            "alignment": int(self.alignment),
            "layout": self.layout,
            "updates_may_move": self.updates_may_move,
            "num_precedences": len(self.precedences),
            "order_given": self.order is not None,
        }


class HasGraph(Protocol):
    """Anything that carries the graph of a training step."""

    @property
    def graph(self) -> Graph:
        """The graph of the whole step."""


Source = Graph | str | os.PathLike[str] | HasGraph


def graph_of(source: Source) -> Graph:
    """Return the graph: itself, loaded from its path, or of a captured step.

    Raises:
        GraphError: the file is no valid graph.
        TypeError: source is none of these.
    """
    if isinstance(source, Graph):
        return source
    if isinstance(source, str | os.PathLike):
        return Graph.load(source)
    graph = getattr(source, "graph", None)
    if isinstance(graph, Graph):
        return graph
    raise TypeError(
        f"cannot plan a {type(source).__name__}: expected an olla.Graph, the path of a graph file, "
        "or a captured step from olla.capture"
    )
