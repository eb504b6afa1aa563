"""Swaps for one order: how given ones turn out, and which are best."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from olla import _core
from olla.graph import Graph
from olla.graph.collectives import under_way
from olla.plan import Link, Swaps

MIN_BYTES = 1 << 18  # smaller blocks take the link mostly for its latency
_NO_LIMIT = 1 << 62


class SwapSearch:
    """Swaps for one order: how given ones turn out, and which are best.

    Args:
        graph: the training step.
        order: int32[n], valid.
        seconds: float64[n], of op v.
        link: see `Link`.
        host_bytes: host memory there is; None: as much as it takes.
        min_bytes: smaller tensors stay.
        early_copies: copy out as soon as a value is made, not only once it is idle.
        lasting: int32[m], resident tensors that may wait in host memory from their last use to their first one in the
            next step.

    Attributes:
        blocks: tensors idle between two uses; item b of every column is block b.
        num_bytes: int64[m], of the tensor of block b.
    """

    def __init__(
        self,
        graph: Graph,
        order: NDArray[np.int32],
        seconds: NDArray[np.float64],
        link: Link,
        *,
        host_bytes: int | None = None,
        min_bytes: int = MIN_BYTES,
        early_copies: bool = True,
        lasting: NDArray[np.int32] | None = None,
    ) -> None:
        self.live: NDArray[np.int64] = _core.profile(graph.core, order).live_bytes
        self.seconds = np.ascontiguousarray(seconds[order])
        kept = np.zeros(0, dtype=np.int32) if lasting is None else lasting
        idle = _core.idle_blocks(graph.core, order, min_bytes, kept)
        made = idle.made if early_copies else idle.last
        free = _free(graph, order, idle)
        tensor = idle.tensor[free]
        self.num_bytes = graph.tensor_bytes[tensor]
        self.blocks = _core.IdleBlocks(
            tensor=tensor, num_bytes=self.num_bytes, made=made[free], last=idle.last[free], next=idle.next[free]
        )
        self._core = _core.CoreSwapSearch(
            live=self.live,
            seconds=self.seconds,
            blocks=self.blocks,
            link=_core.CoreLink(**vars(link)),
            host_bytes=_NO_LIMIT if host_bytes is None else host_bytes,
        )
        self.base_seconds = float(self.seconds.sum())

    def evaluate(self, blocks: NDArray[np.int32], limit: int | None = None, *, by_last: bool = True) -> Swaps:
        """Simulate the swaps of these blocks. With a limit, ops wait while more is live; blocks that cannot go stay."""
        bound = _NO_LIMIT if limit is None else limit
        return self._swaps(self._core.evaluate(blocks, bound, limit is not None, by_last))

    def fit(self, limit: int, most_stall_seconds: float, limits: _core.Limits) -> Swaps:
        """Choose swaps with which the peak is at most the limit, or the lowest that was found."""
        return self._swaps(self._core.fit(limit, most_stall_seconds, limits))

    def least_peak(
        self,
        most_stall_seconds: float,
        limits: _core.Limits,
        *,
        starts: Sequence[NDArray[np.int32]] = (),
        seed: int = 0,
        num_rounds: int = 30,
    ) -> Swaps:
        """Choose swaps of least peak for that stall, no worse than with the blocks of any of `starts`.

        The rounds are those of the local search; on large graphs, time ends it earlier.
        """
        return self._swaps(self._core.least_peak(most_stall_seconds, list(starts), seed, num_rounds, limits))

    def chosen(self, swaps: Swaps) -> NDArray[np.int32]:
        """Return the blocks of swaps that this search answered."""
        gaps = zip(self.blocks.tensor.tolist(), self.blocks.last.tolist(), strict=True)
        index = {gap: b for b, gap in enumerate(gaps)}
        pairs = zip(swaps.tensor.tolist(), swaps.last.tolist(), strict=True)
        return np.array([index[pair] for pair in pairs if pair[1] >= 0], dtype=np.int32)

    def _swaps(self, choice: _core.SwapChoice) -> Swaps:
        timeline, b = choice.timeline, self.blocks
        copies = {name: getattr(choice, name) for name in ("ready", "last", "issue", "next")}
        copies |= {name: getattr(timeline, name) for name in ("freed", "out_start", "out_end", "in_start", "in_end")}
        comes_back = copies["next"] < len(self.seconds)
        chosen = choice.block
        useless = (copies["freed"] >= copies["issue"]) & comes_back
        used = ~np.isin(chosen, chosen[useless])
        sizes = self.num_bytes[chosen][used & comes_back]
        return Swaps(
            tensor=b.tensor[chosen][used],
            start=timeline.start,
            **{name: values[used] for name, values in copies.items()},
            peak_bytes=timeline.peak_bytes,
            stall_seconds=timeline.stall_seconds,
            host_bytes=timeline.host_bytes,
            swapped_bytes=int(sizes.sum()),
            base_seconds=self.base_seconds,
        )


def _free(graph: Graph, order: NDArray[np.int32], idle: _core.IdleBlocks) -> NDArray[np.bool_]:
    """Return which blocks are idle with no collective under way that uses their tensor: others stay where they are."""
    found = np.ones(len(idle.tensor), dtype=np.bool_)
    spans: dict[int, list[tuple[int, int]]] = {}
    at = np.argsort(order)
    for issue, wait, held in under_way(graph):
        for t in held:
            spans.setdefault(t, []).append((int(at[issue]), int(at[wait])))
    for b in np.flatnonzero(np.isin(idle.tensor, list(spans))).tolist():
        last, following = idle.last[b], idle.next[b]
        found[b] = not any(begin <= last < following <= end for begin, end in spans[int(idle.tensor[b])])
    return found
