"""The graph in which swaps are ordinary ops."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from olla.graph import Graph
from olla.plan import Swapped, Swaps
from olla.plan.rewrite import COPY
from olla.plan.swapped import SWAP_IN, SWAP_OUT


def swapped_graph(graph: Graph, order: NDArray[np.int32], swaps: Swaps) -> Swapped:
    """Return the graph in which the swaps are ordinary ops; its program order is the order they were chosen for.

    Args:
        graph: the training step.
        order: int32[n], valid.
        swaps: of that order.

    A swap-out reads a tensor and writes a handle of no bytes: the copy in host memory. It stands where the copy has
    ended. A swap-in reads the handle and writes a new tensor, which later ops use; it stands where the copy is issued.
    Both are kept there by `after`. Tensors of the graph keep their ids; handles and new tensors follow.

    A resident tensor that waits in host memory from step to step is its own handle, of no bytes: the swap-in reads it,
    the swap-out changes it.

    Complexity:
        O(graph + swaps).
    """
    n, content = graph.num_ops, graph.to_dict()
    tensors, ops, origin = content["tensors"], list[dict[str, Any]](), list[int]()
    outs: list[list[int]] = [[] for _ in range(n + 1)]
    ins: list[list[int]] = [[] for _ in range(n + 1)]
    for i in np.flatnonzero(swaps.last >= 0).tolist():
        outs[swaps.freed[i]].append(i)
    for i in np.lexsort((swaps.next, swaps.issue)).tolist():
        ins[swaps.issue[i]].append(i)
    handle, device = _new_tensors(graph, swaps, tensors)
    now = list(range(graph.num_tensors))  # id of the tensor that holds what tensor t would
    place: dict[int, int] = {}  # op of the graph -> new position

    def add(v: int, op: dict[str, Any], **lists: list[int]) -> int:
        ops.append({**op, "reads": [], "writes": [], "mutates": [], **lists})
        origin.append(v)
        return len(ops) - 1

    def leave(s: int, before: list[int]) -> None:
        for i in outs[s]:
            t = int(swaps.tensor[i])
            lasts = bool(swaps.next[i] == n)
            result = {"mutates": [t]} if lasts else {"writes": [handle[i]]}
            add(COPY, _copy(SWAP_OUT, graph.tensor_names[t] or t), reads=[now[t]], after=before, **result)
            now[t] = t if lasts else now[t]

    for s, v in enumerate(order.tolist()):
        before = [place[int(order[s - 1])]] if s else []
        leave(s, before)
        issued = []
        for i in ins[s]:
            t = int(swaps.tensor[i])
            now[t] = device[i]
            copy = _copy(SWAP_IN, graph.tensor_names[t] or t)
            issued.append(add(COPY, copy, reads=[handle[i]], writes=[now[t]], after=before))
        after = [place[u] for u in graph.after.of(v).tolist()]
        used, changed = ([now[t] for t in column.of(v).tolist()] for column in (graph.reads, graph.mutates))
        place[v] = add(
            v, content["ops"][v], reads=used, writes=graph.writes.of(v).tolist(), mutates=changed, after=after + issued
        )
    if n and len(swaps.tensor):
        leave(n, [place[int(order[n - 1])]])
    outputs = [now[t] for t in graph.outputs.tolist()]
    return Swapped(
        graph=Graph.from_dict({**content, "ops": ops, "outputs": outputs}),
        origin=np.array(origin, dtype=np.int32),
        added_seconds=swaps.stall_seconds,
        swaps=swaps,
    )


def _copy(target: str, of: object) -> dict[str, Any]:
    return {"name": f"{target.removeprefix('olla::')} {of}", "target": target, "launches": 0, "recomputable": False}


def _new_tensors(graph: Graph, swaps: Swaps, tensors: list[dict[str, Any]]) -> tuple[dict[int, int], dict[int, int]]:
    """Add handles and what is brought back to the tensors; return both by the number of the swap."""
    handle: dict[int, int] = {}
    device: dict[int, int] = {}
    for i, t in enumerate(swaps.tensor.tolist()):
        if swaps.last[i] < 0 or swaps.next[i] == graph.num_ops:  # its own handle
            handle[i] = t
            tensors[t] = {**tensors[t], "bytes": 0}
        else:
            handle[i] = len(tensors)
            tensors.append({"bytes": 0})
        if swaps.next[i] < graph.num_ops:
            device[i] = len(tensors)
            size, kind, name = int(graph.tensor_bytes[t]), graph.tensor_kinds[t], graph.tensor_names[t]
            tensors.append({"bytes": size, "kind": kind, "name": name})
    return handle, device
