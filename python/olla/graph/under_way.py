"""Collectives between their issue and the wait for them: what they read and write stays where it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from olla.graph.graph import Graph


class UnderWay(NamedTuple):
    """A collective that has been begun, up to one of the waits for it.

    Attributes:
        issue, wait: ops.
        held: tensors that both of them use: the very memory must be there all the while.
    """

    issue: int
    wait: int
    held: frozenset[int]


def under_way(graph: Graph) -> list[UnderWay]:
    """Return the collectives of a graph, in program order of the waits for them.

    Complexity:
        O(uses of ops that communicate).

    Example:
        >>> from olla.graph import Graph
        >>> b = Graph.builder("one shard of two")
        >>> shard, whole = b.tensor(8, kind="parameter"), b.tensor(16)
        >>> talk = {"group": "0", "ranks": 2}
        >>> _ = b.op("gather", reads=[shard], writes=[whole], collective="all_gather", message_bytes=16, **talk)
        >>> _ = b.op("wait", reads=[shard], mutates=[whole], collective="wait", **talk)
        >>> under_way(b.build())
        [UnderWay(issue=0, wait=1, held=frozenset({0, 1}))]
    """
    found: list[UnderWay] = []
    begun: dict[int, tuple[int, frozenset[int]]] = {}  # what arrives -> the op that began it, and what that uses
    for v in np.flatnonzero(graph.communicates).tolist():
        read, written, changed = (lists.of(v).tolist() for lists in (graph.reads, graph.writes, graph.mutates))
        used = frozenset([*read, *written, *changed])
        if graph.collectives[v] != "wait":
            begun |= dict.fromkeys([*written, *changed], (v, used))
            continue
        issued = dict.fromkeys(begun[t] for t in changed if t in begun)
        found += [UnderWay(issue, v, used & held) for issue, held in issued]
    return found
