"""Interface of the methods of `olla.plan`: one module each, with `solve(problem) -> Answer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from olla._core import CoreGraph
    from olla.base import Progress
    from olla.graph import Graph
    from olla.layout import Placement
    from olla.plan import Options


class Problem(NamedTuple):
    """What a method is asked.

    Attributes:
        graph: the training step.
        core: its core graph, extra precedences included: orders must be valid for this one.
        order: int32[num_ops], the valid order to start from; an answer may not be worse.
        options: what the caller of `olla.plan` chose.
        left: seconds left of a share (0 to 1) of the time limit; layout included, where one is made.
        progress: as `olla.plan` takes it.
    """

    graph: Graph
    core: CoreGraph
    order: NDArray[np.int32]
    options: Options
    left: Callable[[float], float]
    progress: Progress | None


class Answer(NamedTuple):
    """What a method found and proved. The pipeline simulates the order again.

    Attributes:
        order: int32[num_ops], the op that runs at step i.
        lower_bound_bytes: no valid order has a lower peak; 0 where nothing was proved.
        placement: where everything lies; None leaves the layout to the pipeline.
        arena_lower_bound_bytes: no order and layout have a smaller arena; 0 where nothing was proved.
        seconds: stage -> wall-clock time.
        note: a sentence for the plan's message.
        details: lines for a reader who wants to know more, such as the status of every part that was solved.
        interrupted: Ctrl-C or the progress callback ended the search.
    """

    order: NDArray[np.int32]
    lower_bound_bytes: int = 0
    placement: Placement | None = None
    arena_lower_bound_bytes: int = 0
    seconds: Mapping[str, float] = MappingProxyType({})
    note: str = ""
    details: tuple[str, ...] = ()
    interrupted: bool = False
