"""A window of an order as a graph of its own, so that methods for small graphs can improve large ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from olla._core import Graph as CoreGraph
from olla._core import profile
from olla.graph.columns import lists_of

if TYPE_CHECKING:
    from olla.graph import Graph


def window_graph(graph: Graph, core: CoreGraph, order: NDArray[np.int32], lo: int, hi: int) -> CoreGraph:
    """Cut the steps [lo, hi) out of an order.

    Args:
        graph: the training step.
        core: its core graph, extra precedences included.
        order: int32[num_ops], a valid order.
        lo: first step of the window.
        hi: step after its last one, above lo.

    Returns:
        A graph whose op i is the op at step lo + i. What is live throughout the window is one resident tensor of it;
        what dies inside is donated, what is needed later is an output. Any order of it can replace those steps, and
        its live bytes are those of the whole order.

    Complexity:
        O(num_tensors + num_ops + dependencies), plus the lists of the window's ops.
    """
    lives = profile(core, order)
    first, last = lives.first, lives.last
    position = np.full(graph.num_ops, -1, dtype=np.int64)
    position[order[lo:hi]] = np.arange(hi - lo)
    offset, preds = core.precedences()

    local: dict[int, int] = {}  # tensor -> its id in the window
    reads, writes, after = [], [], []
    for op in order[lo:hi].tolist():
        used = np.union1d(graph.reads.of(op), graph.mutates.of(op)).tolist()
        reads.append([local.setdefault(t, len(local)) for t in used])
        writes.append([local.setdefault(t, len(local)) for t in np.unique(graph.writes.of(op)).tolist()])
        before = position[preds[offset[op] : offset[op + 1]]]
        after.append(before[before >= 0].tolist())

    tensors = np.fromiter(local, dtype=np.int64, count=len(local))
    written_inside = np.zeros(len(local), dtype=np.bool_)
    written_inside[[t for row in writes for t in row]] = True
    planned = graph.donated[tensors] | (graph.writer[tensors] >= 0)
    needed_later = np.isin(tensors, graph.outputs) | (last[tensors] > hi)
    throughout = (first <= lo) & (last >= hi)
    throughout[tensors] = False

    return CoreGraph(
        tensor_bytes=np.append(graph.tensor_bytes[tensors], graph.tensor_bytes[throughout].sum()).astype(np.int64),
        donated=np.append(planned & ~written_inside & ~needed_later, False).astype(np.uint8),
        reads=lists_of(reads),
        writes=lists_of(writes),
        mutates=lists_of([[]] * (hi - lo)),
        after=lists_of(after),
        workspace_bytes=graph.workspace_bytes[order[lo:hi]],
        random=np.zeros(hi - lo, dtype=np.uint8),
        outputs=np.flatnonzero(written_inside & needed_later).astype(np.int32),
    )
