"""Collectives: which are under way between which ops, and which gather a parameter and so may be recomputed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from olla.graph.graph import Graph

WAIT = "wait"


class UnderWay(NamedTuple):
    """A collective that has been begun, up to one of the waits for it: what it reads and writes stays where it is.

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
        if graph.collectives[v] != WAIT:
            begun |= dict.fromkeys([*written, *changed], (v, used))
            continue
        issued = dict.fromkeys(begun[t] for t in changed if t in begun)
        found += [UnderWay(issue, v, used & held) for issue, held in issued]
    return found


def gathers(graph: Graph) -> NDArray[np.bool_]:
    """Return which ops gather a parameter, and may do so again: they begin an all-gather of one, or wait for it.

    Every rank can do so at the same place, from what it holds: a tensor of kind "parameter" that the step begins with,
    or a copy of it in another type; both ops are recomputable. That it holds the same value when it is gathered again
    is for whoever recomputes it to see to, as for any other op.

    Returns:
        bool[num_ops], of op i.

    Complexity:
        O(ops + uses of those that communicate).

    Example:
        >>> from olla.graph import Graph
        >>> b = Graph.builder("one shard of two")
        >>> shard, whole, x = b.tensor(8, kind="parameter"), b.tensor(16), b.tensor(16)
        >>> talk = {"group": "0", "ranks": 2}
        >>> _ = b.op("gather", reads=[shard], writes=[whole], collective="all_gather", message_bytes=16, **talk)
        >>> _ = b.op("wait", reads=[shard], mutates=[whole], collective="wait", **talk)
        >>> _ = b.op("use", reads=[whole], writes=[x])
        >>> gathers(b.build()).tolist()
        [True, True, False]
    """
    found = np.zeros(graph.num_ops, dtype=np.bool_)
    arriving: set[int] = set()  # what an all-gather of a parameter writes
    for v in np.flatnonzero(graph.communicates & graph.recomputable).tolist():
        read, written, changed = (lists.of(v).tolist() for lists in (graph.reads, graph.writes, graph.mutates))
        if graph.collectives[v] == "all_gather":
            found[v] = bool(read) and all(shard_of(graph, t) >= 0 for t in read) and len(written) == 1 and not changed
            arriving.update(written if found[v] else ())
        elif graph.collectives[v] == WAIT:
            found[v] = len(changed) == 1 and not written and changed[0] in arriving
    return found


def shard_of(graph: Graph, tensor: int) -> int:
    """Return the parameter, which a rank holds throughout, that a tensor is or is a copy of; -1: there is none."""
    op = int(graph.writer[tensor])
    if op >= 0:
        read = graph.reads.of(op).tolist()
        if len(read) != 1 or len(graph.mutates.of(op)) or graph.communicates[op] or graph.random[op]:
            return -1
        (tensor,) = read
    is_shard = graph.writer[tensor] < 0 and graph.tensor_kinds[tensor] == "parameter"
    return tensor if is_shard and (op < 0 or graph.recomputable[op]) else -1
