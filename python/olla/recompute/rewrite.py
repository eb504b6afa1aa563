"""Build the graph with recomputed ops and results written in place, from the decisions of a search."""

from __future__ import annotations

import math

import numpy as np

from olla._core import CoreRecomputeSearch
from olla.graph import Graph, Lists, Rerun, Rules
from olla.graph.collectives import WAIT
from olla.graph.columns import lists_of
from olla.plan import Recomputed


def _one_after_the_other(after: Lists, collectives: list[str], groups: list[str]) -> Lists:
    """Return the predecessors of each op, the collectives of a group chained in op order so that ranks agree on it."""
    issues = [v for v, kind in enumerate(collectives) if kind not in ("", WAIT)]
    if not issues:
        return after
    lists = [dict.fromkeys(after.of(v).tolist()) for v in range(len(collectives))]
    last: dict[str, int] = {}
    for v in issues:
        if groups[v] in last:
            lists[v][last[groups[v]]] = None
        last[groups[v]] = v
    return lists_of(lists)


def recomputed_graph(graph: Graph, rules: Rules, search: CoreRecomputeSearch) -> Recomputed:
    """Return the graph that the decisions of a search make.

    Args:
        graph: the training step.
        rules: what may be done with its ops.
        search: of the core, with its decisions in force.

    Complexity:
        O(ops + tensors + uses) of the graph that is made.
    """
    made = search.rewritten()
    origin, rerun, tensor_origin = made.origin, made.rerun, made.tensor_origin
    again = rerun != Rerun.NEVER
    share = np.divide(rules.rerun_seconds, rules.seconds, out=np.ones_like(rules.seconds), where=rules.seconds > 0)
    numbers = {
        name: getattr(graph, name)[origin] for name in ("flops", "launches", "recomputable", "ranks", "message_bytes")
    }
    kept = ("op_names", "op_kinds", "targets", "modules", "sources", "shapes", "collectives", "groups")
    texts = {name: [getattr(graph, name)[v] for v in origin] for name in kept}
    after = Graph.from_arrays(
        name=graph.name,
        tensor_bytes=made.tensor_bytes,
        donated=made.donated.astype(np.bool_),
        tensor_kinds=[graph.tensor_kinds[t] for t in tensor_origin],
        tensor_names=[graph.tensor_names[t] for t in tensor_origin],
        **{name: Lists(*getattr(made, name)) for name in ("reads", "writes", "mutates")},
        after=_one_after_the_other(Lists(*made.after), texts["collectives"], texts["groups"]),
        workspace_bytes=made.workspace_bytes,
        seconds=graph.seconds[origin] * np.where(again, share[origin], 1.0),
        moved_bytes=np.where(again, rules.rerun_moved_bytes[origin], graph.moved_bytes[origin]),
        random=made.random.astype(np.bool_),
        outputs=made.outputs,
        **numbers,
        **texts,
    )
    written = np.diff(graph.writes.offset)[origin]
    added = math.fsum((*rules.seconds[origin[~again]], *rules.rerun_seconds[origin[again]], *-rules.seconds))
    return Recomputed(
        graph=after,
        origin=origin,
        rerun=rerun,
        tensor_origin=tensor_origin,
        added_seconds=max(0.0, added),
        num_recomputed=after.num_ops - graph.num_ops,
        num_in_place=int(np.sum((np.diff(after.writes.offset) < written) & (rerun != Rerun.FIRST_RESULT))),
    )
