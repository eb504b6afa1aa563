"""Which tensors to swap for an order: AutoSwap's choices, then a search from the best of them."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from olla import _core
from olla.base import rivals
from olla.graph import DeviceProfile, Graph
from olla.plan import Link, Swaps
from olla.swap.autoswap import SCORES, AutoSwap
from olla.swap.search import MIN_BYTES, SwapSearch

_ANY_WORK = 2**63 - 1
_AUTOSWAP_SHARE = 0.8  # of the time limit, after which no other of its scores is tried as a start
_FREE_SHARE = 0.25  # of the time limit, for swaps without stalls, if stalls are allowed


def plan_swaps(
    graph: Graph,
    order: NDArray[np.int32],
    seconds: NDArray[np.float64],
    link: Link | float | DeviceProfile,
    *,
    limit: int | None = None,
    max_slowdown: float = 0.0,
    host_bytes: int | None = None,
    lasting: NDArray[np.int32] | None = None,
    time_limit: float = 5.0,
    seed: int = 0,
    progress: Any = None,
    max_work: int | None = None,
) -> Swaps:
    """Choose which tensors to swap, for an order.

    Args:
        graph: the training step.
        order: int32[n], valid; item s is the op at step s.
        seconds: float64[n], of op v.
        link: to host memory: a `Link`, bytes per second both ways, or a device.
        limit: bytes; swaps are found for the least stall with which the peak is at most this. None: for the least peak.
        max_slowdown: share of the ops' time that they may wait for copies.
        host_bytes: host memory there is.
        lasting: int32[m], resident tensors that may wait in host memory from step to step.
        time_limit: seconds for the search.
        seed: for its random choices.
        progress: as in `olla.plan`.
        max_work: for the search, in steps of the order whose memory is simulated; a million take about 0.04 s. None: as
            time allows.

    Returns:
        The swaps; with a limit that was not reached, those of least peak.

    Source:
        The greedy, and why it is run again for every limit: Zhang et al. (arXiv 1903.06631) choose by scores alone.

    Example:
        >>> import olla
        >>> b = olla.Graph.builder("gap")
        >>> x, y, z, w = b.tensor(1 << 20), b.tensor(1 << 20), b.tensor(8), b.tensor(8)
        >>> _ = b.op("make", writes=[x], seconds=1.0), b.op("wait", writes=[z], seconds=1.0)
        >>> _ = b.op("large", reads=[z], writes=[y], seconds=1.0)
        >>> _ = b.op("rest", reads=[y], writes=[w], seconds=1.0), b.op("more", reads=[w], seconds=1.0)
        >>> _ = b.op("use", reads=[x], seconds=1.0)
        >>> g = b.build()
        >>> plan_swaps(g, np.arange(6, dtype=np.int32), g.seconds, 1e8, time_limit=0.1).peak_bytes
        1048584
    """
    speed = Link.of(link)
    search = SwapSearch(graph, order, seconds, speed, host_bytes=host_bytes, min_bytes=MIN_BYTES, lasting=lasting)
    most_stall = max_slowdown * search.base_seconds
    work = _ANY_WORK if max_work is None else max_work
    limits = partial(_core.Limits, progress=progress)
    if limit is not None:
        allowed = [share * most_stall for share in (0.0, 0.125, 0.25, 0.5, 1.0)] if most_stall > 0 else [0.0]
        each = limits(time_limit=time_limit / len(allowed), max_work=work // len(allowed))
        for stall in allowed:
            swaps = search.fit(limit, stall, each)
            if swaps.peak_bytes <= limit:
                break
        return swaps
    begin = time.perf_counter()
    deadline = begin + _AUTOSWAP_SHARE * time_limit
    method, found = AutoSwap(graph, order, seconds, speed, host_bytes, deadline), []
    for score in SCORES if max_work is None else SCORES[:-1]:  # the last one takes longer than all others
        if time.perf_counter() < deadline:
            with rivals.optional(f"AutoSwap by {score}", []):
                found.append(method.least_peak(score, max_slowdown))
    if most_stall > 0:
        part = int(_FREE_SHARE * work)
        found.append(search.least_peak(0.0, limits(time_limit=_FREE_SHARE * time_limit, max_work=part), seed=seed))
        work -= part
    starts = [search.chosen(swaps) for swaps in found]
    left = max(0.0, time_limit - (time.perf_counter() - begin))
    found.append(search.least_peak(most_stall, limits(time_limit=left, max_work=work), starts=starts, seed=seed))
    return min(reversed(found), key=lambda swaps: swaps.peak_bytes)
