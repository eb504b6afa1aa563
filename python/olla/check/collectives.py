"""Collectives of a plan: those of each process group in the captured order, none twice, none left out.

Ranks that issue the collectives of a group in different orders wait for each other for ever.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from olla.check.values import fail
from olla.graph import Graph
from olla.graph.collectives import gathers, under_way

_RULE = "rewrite_collective"


def check_collectives(graph: Graph, order: NDArray[np.int32]) -> None:
    """Raise PlanError unless an order has the collectives of each group in program order.

    Args:
        graph: whose program order is the captured one.
        order: int32[num_ops], a permutation of its ops.

    Raises:
        PlanError: rule "collective_order", with the two ops in `ids`.

    Complexity:
        O(ops).

    Example:
        >>> b = Graph.builder()
        >>> t = b.tensor(8)
        >>> _ = b.op("make", writes=[t])
        >>> _ = b.op("sum", mutates=[t], collective="all_reduce", group="0", ranks=2)
        >>> check_collectives(b.build(), np.array([0, 1], dtype=np.int32))
    """
    last: dict[str, int] = {}
    for v in order[graph.communicates[order]].tolist():
        if not _issues(graph, v):
            continue
        before = last.get(graph.groups[v], -1)
        if before > v:
            fail(
                "collective_order",
                f"op {before} ({graph.op_names[before]}) runs before op {v} ({graph.op_names[v]}), both in group "
                f"{graph.groups[v]!r}: expected the order they were captured in, on which all ranks rely",
                before,
                v,
            )
        last[graph.groups[v]] = v


def check_kept(graph: Graph, rewritten: Graph, origin: NDArray[np.int32]) -> None:
    """Raise PlanError unless a rewriting keeps what communicates: each op once, in the same order.

    What gathers a parameter (`olla.graph.collectives.gathers`) may be recomputed behind its first run; each run is
    waited for. What a collective uses stays in its memory until the wait.

    Args:
        graph: that was rewritten.
        rewritten: what it became.
        origin: int32[ops of rewritten], the op that each stands for; below 0: none.

    Raises:
        PlanError: rule "rewrite_collective", with the op that differs in `ids`.

    Complexity:
        O(ops).
    """
    wanted = np.flatnonzero(graph.communicates)
    talks = np.flatnonzero(rewritten.communicates)
    stands_for = np.asarray(origin, dtype=np.int64)[talks]
    found, first, times = np.unique(stands_for, return_index=True, return_counts=True)
    again = set(np.flatnonzero(gathers(graph)).tolist())
    for u in (set(wanted.tolist()) ^ set(stands_for.tolist())) | (set(found[times > 1].tolist()) - again):
        name = graph.op_names[u] if 0 <= u < graph.num_ops else "no op of the graph"
        num_runs = int((stands_for == u).sum())
        fail(_RULE, f"op {u} ({name}) communicates, and runs {num_runs} times: expected once", u)
    _check_waited(rewritten, talks[np.isin(stands_for, list(again))].tolist())
    own, now = _issued(graph, wanted.tolist()), _issued(rewritten, talks[np.sort(first)].tolist())
    for name, ops in own.items():
        for u, v in zip(ops, now.get(name, ()), strict=False):  # a group that differs is found below
            if (w := int(origin[v])) != u:
                what = f"op {w} ({graph.op_names[w]}) communicates where op {u} ({graph.op_names[u]}) did"
                fail(_RULE, what, u, w)
    _check_held(graph, rewritten, origin)
    for v, u in zip(talks.tolist(), stands_for.tolist(), strict=True):
        facts = [(g.collectives[i], g.groups[i], int(g.ranks[i])) for g, i in ((graph, u), (rewritten, v))]
        if facts[0] != facts[1]:
            fail(_RULE, f"op {v} communicates as {facts[1]}, expected {facts[0]}", u)


def _check_waited(rewritten: Graph, ops: list[int]) -> None:
    """What gathers is waited for before anything else touches what arrives, and nothing is waited for twice."""
    arriving: dict[int, int] = {}  # tensor -> op that gathers into it
    waits = {v: int(rewritten.mutates.of(v)[0]) for v in ops if not _issues(rewritten, v)}
    gathered = {t: v for v in ops if v not in waits for t in rewritten.writes.of(v).tolist()}
    for v in range(rewritten.num_ops) if gathered else ():
        used = [*rewritten.reads.of(v).tolist(), *rewritten.mutates.of(v).tolist()]
        if v in waits:
            if waits[v] not in arriving:
                _refuse_wait(rewritten, v, "waits for what nothing gathers")
            del arriving[waits[v]]
        elif (early := next((t for t in used if t in arriving), None)) is not None:
            _refuse_wait(rewritten, v, f"uses what op {arriving[early]} gathers before it has arrived")
        arriving |= {t: v for t in rewritten.writes.of(v).tolist() if gathered.get(t) == v}
    for v in arriving.values():
        _refuse_wait(rewritten, v, "gathers what nothing waits for")


def _check_held(graph: Graph, rewritten: Graph, origin: NDArray[np.int32]) -> None:
    """What was sent, and what arrives, is in the same memory at the issue and at the wait."""
    expected = {found.wait: len(found.held) for found in under_way(graph)}
    held = {found.wait: len(found.held) for found in under_way(rewritten)}
    for v in np.flatnonzero(rewritten.communicates).tolist():
        if rewritten.collectives[v] == "wait" and held.get(v, 0) != expected.get(int(origin[v]), 0):
            _refuse_wait(rewritten, v, "waits for a collective whose memory was let go of meanwhile")


def _refuse_wait(rewritten: Graph, v: int, what: str) -> NoReturn:
    fail(_RULE, f"op {v} ({rewritten.op_names[v]}) {what}", v)


def _issues(graph: Graph, v: int) -> bool:
    return graph.collectives[v] not in ("", "wait")


def _issued(graph: Graph, ops: list[int]) -> dict[str, list[int]]:
    """Return the ops that begin a collective, by group."""
    found: dict[str, list[int]] = {}
    for v in ops:
        if _issues(graph, v):
            found.setdefault(graph.groups[v], []).append(v)
    return found
