"""Decision whether the losses of a step are computed in chunks, taken before any search and kept by all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from olla.base import Progress
from olla.chunk.losses import LossRegion
from olla.chunk.rewrite import chunked
from olla.graph import Graph
from olla.pipeline import find_order
from olla.plan import Chunked, Goal, Options

_BASE_SHARE = 0.1  # of the time limit, for the best order of the original


def chunk(
    graph: Graph,
    options: Options,
    goal: Goal,
    progress: Progress | None,
    suits: Callable[[LossRegion], bool] | None = None,
) -> tuple[Chunked, int] | str:
    """Put the losses of a step in chunks, or say why that does not serve the goal.

    Args:
        graph: the training step.
        options, progress: as in `olla.plan`.
        goal: says how many chunks.
        suits: see `olla.chunk.chunked`.

    Returns:
        The chunks, and the peak of the best order without them in bytes.
    """
    assert goal.chunked_loss is not None
    found = chunked(graph, goal.chunked_loss, suits)
    if found.num_losses == 0:
        return "none was found whose linear layer and mean or summed cross-entropy stand alone, with large logits"
    seconds = float(goal.device.op_seconds(graph).sum())
    added = float(goal.device.op_seconds(found.graph).sum()) - seconds
    if goal.max_slowdown is not None and added > goal.max_slowdown * seconds:
        return f"chunks alone add {added / seconds:.2%} to the time of the step"
    order_only = replace(options, layout=False, time_limit=_BASE_SHARE * options.time_limit)
    peak_bytes = find_order(graph, order_only, progress).peak_bytes
    if goal.budget_bytes is not None and peak_bytes <= goal.budget_bytes:
        return "the step fits without"
    return replace(found, added_seconds=added), peak_bytes
