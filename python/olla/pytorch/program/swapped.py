"""The copies of a plan that swaps: between which ops they run, and where they lie in host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from olla.layout import LayoutOptions, place
from olla.plan import Swapped, Swaps

_ALIGNMENT = 512  # bytes, of places in host memory
_LAYOUT_SECONDS = 5.0  # the node limit ends it earlier
_LAYOUT_NODES = 20_000  # the same places whenever they are asked for


class Transfers(NamedTuple):
    """The copies of a plan that swaps; item i of every list belongs to swap i.

    Attributes:
        tensor: that goes out: of the graph with swaps.
        num_bytes: its size.
        places: first byte of its copy in host memory.
        after: the swap whose copy back must be over before the place is written; -1: none.
        host_bytes: of all places.
        starts: op -> swaps whose copy out starts right before it.
        waits: op -> swaps whose copy back must be over before it.
        outs, backs: op -> its swap, of the swap-outs and the swap-ins.
    """

    tensor: Sequence[int]
    num_bytes: Sequence[int]
    places: Sequence[int]
    after: Sequence[int]
    host_bytes: int
    starts: Mapping[int, Sequence[int]]
    waits: Mapping[int, Sequence[int]]
    outs: Mapping[int, int]
    backs: Mapping[int, int]


def transfers(swapped: Swapped) -> Transfers:
    """Return the copies of a plan.

    A copy out is issued when the ops reach the point at which the timeline starts it, so that its place in host memory
    can be free by then.

    Complexity: O(ops + swaps^2).
    """
    swaps, graph = swapped.swaps, swapped.graph
    own = np.flatnonzero(swapped.origin >= 0)  # the op at step s of the order without swaps is op own[s]
    num = len(swaps.tensor)
    first_handle = graph.num_tensors - 2 * num  # handle and new tensor of every swap follow the others
    swap_of = {first_handle + 2 * i: i for i in range(num)}
    outs, backs, tensor = {}, {}, [0] * num
    for i in np.flatnonzero(swapped.origin < 0).tolist():
        written, read = int(graph.writes.of(i)[0]), int(graph.reads.of(i)[0])
        if written in swap_of:
            outs[i] = swap_of[written]
            tensor[outs[i]] = read
        else:
            backs[i] = swap_of[read]
    issued = _issued(swaps)
    starts: dict[int, list[int]] = {}
    waits: dict[int, list[int]] = {}
    for i in range(num):
        starts.setdefault(int(own[issued[i] - 1]) + 1, []).append(i)
        waits.setdefault(int(own[swaps.next[i]]), []).append(i)
    num_bytes = graph.tensor_bytes[np.array(tensor, dtype=np.int64)]
    places, after, host_bytes = _places(swaps, num_bytes, issued)
    return Transfers(
        tensor, num_bytes.tolist(), places.tolist(), after.tolist(), host_bytes, starts, waits, outs, backs
    )


def _issued(swaps: Swaps) -> NDArray[np.int64]:
    """Return the step before whose op each copy out starts: int64[k]."""
    running = np.searchsorted(swaps.start, swaps.out_start, side="right") - 1
    earliest = swaps.ready.astype(np.int64) + 1
    back: dict[int, int] = {}  # tensor -> the step at which its swap before is over
    for i in np.argsort(swaps.next).tolist():
        t = int(swaps.tensor[i])
        earliest[i] = max(earliest[i], back.get(t, 0))
        back[t] = int(swaps.next[i]) + 1
    return np.clip(running, earliest, swaps.freed).astype(np.int64)


def _places(
    swaps: Swaps, num_bytes: NDArray[np.int64], issued: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Return places in host memory, the swap each has to wait for, and the bytes of all.

    A copy lasts from the step at which it is issued to the first one that starts after the copy back has ended.
    """
    num = len(num_bytes)
    after = np.full(num, -1, dtype=np.int64)
    if num == 0:
        return np.zeros(0, dtype=np.int64), after, 0
    ended = np.searchsorted(swaps.start, swaps.in_end, side="left")
    over = np.minimum(np.maximum(ended, swaps.issue + 1), swaps.next + 1).astype(np.int64)
    options = LayoutOptions(alignment=_ALIGNMENT, max_nodes=_LAYOUT_NODES)
    found = place(issued, over, num_bytes, options, _LAYOUT_SECONDS)
    places = found.offsets
    rank = np.empty(num, dtype=np.int64)  # in the queue of copies back: the last one ends after those before it
    rank[np.lexsort((swaps.next, swaps.issue))] = np.arange(num)
    for i in range(num):
        shares = (places < places[i] + num_bytes[i]) & (places[i] < places + num_bytes)
        before = np.flatnonzero(shares & (over <= issued[i]))
        if len(before):
            after[i] = before[np.argmax(rank[before])]
    return places, after, found.height_bytes
