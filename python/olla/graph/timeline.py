"""Time of a step with collectives: one stream that computes, and one for each process group.

A collective begins once the op that issues it has run and the one before it in its group has ended. It runs beside the
ops that follow, until an op waits for it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from olla.graph.collectives import WAIT, under_way
from olla.graph.devices import DeviceProfile, profile_of
from olla.graph.graph import Graph


class Timeline(NamedTuple):
    """The estimated time of a step in one order.

    Attributes:
        seconds: of the whole step.
        compute_seconds: of all ops but what is on the link.
        link_seconds: of all collectives, one after the other.
        exposed_seconds: that the step waits for collectives: the rest of them runs beside other ops.

    Example:
        >>> Timeline(3.0, 2.0, 1.5, 1.0).exposed_seconds
        1.0
    """

    seconds: float
    compute_seconds: float
    link_seconds: float
    exposed_seconds: float


def collective_seconds(graph: Graph, device: DeviceProfile) -> NDArray[np.float64]:
    """Return how long the collective of every op takes, alone on the link.

    For a message of S bytes among n ranks, a link of B bytes per second and a latency of L seconds: a ring moves
    S (n - 1) / n in n - 1 messages, an all-reduce twice that; where latency counts, an all-reduce goes up and down a
    tree instead, 2 S in 2 log2(n) messages. A broadcast moves S through n - 1 ranks.

    Args:
        graph: a training step.
        device: whose link it is.

    Returns:
        float64[num_ops], seconds: of op i; 0 for one that issues no collective.

    Source:
        Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH" (2005), sections 4
        and 6.

    Example:
        >>> from olla.graph import PROFILES
        >>> b = Graph.builder("one")
        >>> flat = b.tensor(3_000_000_000)
        >>> _ = b.op("make", writes=[flat])
        >>> _ = b.op("sum", mutates=[flat], collective="all_reduce", group="0", ranks=2, message_bytes=3_000_000_000)
        >>> _ = b.op("wait", mutates=[flat], collective="wait", group="0", ranks=2)
        >>> collective_seconds(b.build(), PROFILES["a100"]).round(3).tolist()
        [0.0, 0.01, 0.0]
    """
    speed = device.peer_bytes_per_second or device.to_host_bytes_per_second
    latency = device.peer_latency_seconds
    found = np.zeros(graph.num_ops)
    for v in np.flatnonzero(graph.communicates).tolist():
        kind, n, size = graph.collectives[v], max(int(graph.ranks[v]), 1), float(graph.message_bytes[v])
        ring = (n - 1) / n * size / speed + (n - 1) * latency
        if kind == "all_reduce":
            found[v] = min(2 * ring, 2 * size / speed + 2 * np.ceil(np.log2(n)) * latency)
        elif kind == "broadcast":
            found[v] = (size / speed if n > 1 else 0.0) + (n - 1) * latency
        elif kind != WAIT:
            found[v] = ring
    return found


def issued_by(graph: Graph) -> dict[int, int]:
    """Return, of each op that waits, the op that issued what it waits for; none where the graph has no such op."""
    return {found.wait: found.issue for found in reversed(under_way(graph))}  # of several, the first


def timeline(graph: Graph, order: ArrayLike | None = None, device: str | DeviceProfile = "a100") -> Timeline:
    """Return the estimated time of a step in an order, with its collectives beside other ops.

    Args:
        graph: a training step.
        order: int32[num_ops], valid; the program order if not given.
        device: what seconds are estimated for, see `olla.plan`.

    Raises:
        ValueError: the device is unknown.

    Complexity:
        O(ops).

    Example:
        >>> b = Graph.builder("overlap")
        >>> a, c = b.tensor(300_000_000), b.tensor(8)
        >>> _ = b.op("make", writes=[a])
        >>> _ = b.op("sum", mutates=[a], collective="all_reduce", group="0", ranks=2, message_bytes=300_000_000)
        >>> _ = b.op("compute", writes=[c], seconds=0.02)
        >>> _ = b.op("wait", mutates=[a], collective="wait", group="0", ranks=2)
        >>> graph = b.build()
        >>> timeline(graph).exposed_seconds, timeline(graph, [0, 1, 3, 2]).exposed_seconds > 0.0009
        (0.0, True)
    """
    device = profile_of(device)
    order = np.arange(graph.num_ops) if order is None else np.asarray(order)
    own, link, issue = device.op_seconds(graph), collective_seconds(graph, device), issued_by(graph)
    free: dict[str, float] = {}  # group -> when its stream has ended what it was given
    ends: dict[int, float] = {}
    now = exposed = 0.0
    for v in order.tolist():
        now += float(own[v])
        if not graph.collectives[v]:
            continue
        if v in issue:
            stall = max(0.0, ends[issue[v]] - now)
            now, exposed = now + stall, exposed + stall
        elif link[v] > 0:
            group = graph.groups[v]
            ends[v] = free[group] = max(free.get(group, 0.0), now) + float(link[v])
        ends.setdefault(v, now)
    end = max([now, *free.values()])
    return Timeline(end, float(own.sum()), float(link.sum()), exposed + end - now)
