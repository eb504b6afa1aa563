"""The warm start of the search for an order: the program order, with updates early and pure allocations late.

It is compiled by numba at first use and cached on disk where a cache folder is writable.
"""

from __future__ import annotations

import functools
import heapq
import threading
from typing import TYPE_CHECKING, Any, no_type_check

import numpy as np
import numpy.typing as npt

from olla.graph import Lists

if TYPE_CHECKING:
    from olla.graph import Graph

Order = npt.NDArray[np.int32]

_has_run = threading.Event()
LOAD_SECONDS = 5.0  # to import numba and compile, 4.1 s of a processor measured; 0.8 s once it is cached on disk


def hoist(graph: Graph, core: Any = None, program: Order | None = None) -> Order:
    """Return the program order, but updates run as soon as they can and ops without predecessors as late as they can.

    Args:
        graph: the training step.
        core: its core graph with extra precedences, where there are any (default: ``graph.core``).
        program: int32 array of shape ``(num_ops,)``, an order valid for ``core`` (default: the program order).

    Returns:
        int32 array of shape ``(num_ops,)``; item ``s`` is the op at step ``s``.

    Complexity:
        O((ops + dependencies) * log(updates)).

    Example:
        >>> import olla
        >>> builder = olla.Graph.builder("tiny")
        >>> x, y = builder.tensor(512), builder.tensor(512)
        >>> _ = builder.op("make", writes=[x]), builder.op("make", writes=[y]), builder.op("read", reads=[x])
        >>> hoist(builder.build()).tolist()
        [1, 0, 2]
    """
    program = np.arange(graph.num_ops, dtype=np.int32) if program is None else program
    offset, preds = (graph.core if core is None else core).precedences()
    updates = np.array([kind == "update" for kind in graph.op_kinds], dtype=np.bool_)
    order: Order = _kernel()(program, offset, preds, *Lists(offset, preds).inverted(graph.num_ops), updates)
    _has_run.set()
    return order


def is_loaded() -> bool:
    """Return whether hoist() runs at once: it has run in this process before."""
    return _has_run.is_set()


@functools.cache
def _kernel() -> Any:
    import numba

    try:
        return numba.njit(cache=True)(_hoist)
    except RuntimeError:  # no folder is writable for the cache
        return numba.njit(_hoist)


@no_type_check
def _hoist(program, pred_offset, preds, succ_offset, succs, updates):
    n = len(updates)
    waiting = np.zeros(n, np.int64)  # predecessors that have not run, those without predecessors of their own left out
    late = np.zeros(n, np.bool_)
    for v in range(n):
        late[v] = pred_offset[v] == pred_offset[v + 1]
    for v in range(n):
        for i in range(pred_offset[v], pred_offset[v + 1]):
            waiting[v] += not late[preds[i]]
    done = np.zeros(n, np.bool_)
    order = np.empty(n, np.int32)
    num_done = 0
    eager = [(np.int64(0), np.int64(0)) for _ in range(0)]  # heap of (position, op): updates that can run
    position = np.empty(n, np.int64)
    for s in range(n):
        position[program[s]] = s
    for s in range(n):
        next_op = np.int64(program[s])
        if late[next_op] and succ_offset[next_op] < succ_offset[next_op + 1]:
            continue
        while next_op >= 0:
            if not done[next_op]:
                for i in range(pred_offset[next_op], pred_offset[next_op + 1]):
                    u = preds[i]
                    if not done[u]:  # an op without predecessors, held back until now
                        done[u] = True
                        order[num_done] = u
                        num_done += 1
                done[next_op] = True
                order[num_done] = next_op
                num_done += 1
                for i in range(succ_offset[next_op], succ_offset[next_op + 1]):
                    w = succs[i]
                    if not late[next_op]:
                        waiting[w] -= 1
                    if updates[w] and waiting[w] == 0 and not done[w]:
                        heapq.heappush(eager, (position[w], np.int64(w)))
            next_op = heapq.heappop(eager)[1] if len(eager) > 0 else -1
    return order
