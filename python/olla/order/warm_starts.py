"""List schedules that start the search for an order.

No single rule is safe: each of them alone ends far above the optimum on some step, so the search refines several.
Kernels are compiled by numba at first use and cached on disk where a cache folder is writable.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, no_type_check

import numpy as np
import numpy.typing as npt

from olla.graph import Lists
from olla.order.base_orders import bytes_per_op, freed_bytes

if TYPE_CHECKING:
    from olla.graph import Graph

Order = npt.NDArray[np.int32]


def schedules(graph: Graph, core: Any = None, program: Order | None = None) -> dict[str, Callable[[], Order]]:
    """Return what schedules the ops by hoisting, by least memory first and depth first.

    Args:
        graph: the training step.
        core: its core graph with extra precedences, where there are any (default: ``graph.core``).
        program: int32 array of shape ``(num_ops,)``, an order valid for ``core`` (default: the program order).

    Returns:
        By its name, what makes an order, int32 array of shape ``(num_ops,)``; item ``s`` is the op at step ``s``.

    Complexity:
        O((ops + dependencies + uses) * log(ops)).

    Source:
        Least peak memory first and depth first: the rules of torch/_inductor/memory.py; the heap is ours.

    Example:
        >>> import olla
        >>> builder = olla.Graph.builder("tiny")
        >>> x = builder.tensor(512)
        >>> _ = builder.op("make", writes=[x])
        >>> [schedule().tolist() for schedule in schedules(builder.build()).values()]
        [[0], [0], [0]]
    """
    core = graph.core if core is None else core
    program = np.arange(graph.num_ops, dtype=np.int32) if program is None else program

    @functools.cache
    def tables() -> _Tables:
        return _Tables(graph, *core.precedences())

    def hoist() -> Order:
        t = tables()
        return _kernels()[0](program, t.pred_offset, t.preds, t.succ_offset, t.succs, t.updates)

    def least_memory() -> Order:
        t = tables()
        uses = (t.use_offset, t.uses, t.num_users, t.user_xor, t.bytes, t.new_bytes)
        return _kernels()[1](t.num_preds, t.succ_offset, t.succs, *uses)

    def depth_first() -> Order:
        t = tables()
        return _kernels()[2](t.num_preds, t.succ_offset, t.succs)

    return {"hoisting": hoist, "least memory first": least_memory, "what became ready last first": depth_first}


class _Tables:
    """What the kernels read, as flat arrays."""

    def __init__(self, graph: Graph, pred_offset: npt.NDArray[np.int64], preds: Order) -> None:
        num_ops, num_tensors = graph.num_ops, graph.num_tensors
        self.pred_offset, self.preds = pred_offset, preds
        self.num_preds = np.diff(pred_offset)
        self.succ_offset, self.succs = Lists(pred_offset, preds).inverted(num_ops)
        self.updates = np.array([kind == "update" for kind in graph.op_kinds], dtype=np.bool_)

        # (op, tensor) pairs without repetition; the writer counts as a user, for a tensor nobody else uses.
        lists = graph.reads, graph.mutates, graph.writes
        pairs = np.unique(np.concatenate([each.owner * max(num_tensors, 1) + each.item for each in lists]))
        owner, used = np.divmod(pairs, max(num_tensors, 1))
        self.use_offset = np.concatenate(([0], np.cumsum(np.bincount(owner, minlength=num_ops)))).astype(np.int64)
        self.uses = used.astype(np.int32)
        self.num_users = np.bincount(used, minlength=num_tensors)
        # The xor of a tensor's users: once all but one have run, it is the one that is left.
        self.user_xor = np.zeros(num_tensors, dtype=np.int64)
        np.bitwise_xor.at(self.user_xor, used, owner)

        self.bytes = freed_bytes(graph)
        self.new_bytes = bytes_per_op(graph, graph.writes)


@functools.cache
def _kernels() -> tuple[Callable[..., Order], Callable[..., Order], Callable[..., Order]]:
    import numba

    def compiled(kernel: Callable[..., Order]) -> Callable[..., Order]:
        fast: Callable[..., Order]
        try:
            fast = numba.njit(cache=True)(kernel)
        except RuntimeError:  # no folder is writable for the cache
            fast = numba.njit(kernel)
        return fast

    return compiled(_hoist), compiled(_least_memory), compiled(_depth_first)


@no_type_check
def _hoist(program, pred_offset, preds, succ_offset, succs, updates):
    """Program order, but updates run as soon as they can and ops without predecessors as late as they can."""
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


@no_type_check
def _least_memory(num_preds, succ_offset, succs, use_offset, uses, num_users, user_xor, sizes, new_bytes):
    """Of the ready ops, run the one after which least memory is live; in program order among equals."""
    n = len(num_preds)
    waiting = num_preds.copy()
    users_left, last_user = num_users.copy(), user_xor.copy()
    change = new_bytes.copy()  # live bytes after the op minus before, as far as is known now
    for v in range(n):
        for i in range(use_offset[v], use_offset[v + 1]):
            if users_left[uses[i]] == 1:
                change[v] -= sizes[uses[i]]
    heap = [(np.int64(0), np.int64(0)) for _ in range(0)]
    for v in range(n):
        if waiting[v] == 0:
            heapq.heappush(heap, (change[v], np.int64(v)))
    done = np.zeros(n, np.bool_)
    order = np.empty(n, np.int32)
    num_done = 0
    while len(heap) > 0:
        key, v = heapq.heappop(heap)
        if done[v] or key != change[v]:
            continue  # a better entry of the same op was pushed later
        done[v] = True
        order[num_done] = v
        num_done += 1
        for i in range(use_offset[v], use_offset[v + 1]):
            t = uses[i]
            users_left[t] -= 1
            last_user[t] ^= v
            if users_left[t] == 1 and sizes[t] > 0:
                w = last_user[t]
                change[w] -= sizes[t]
                if waiting[w] == 0:
                    heapq.heappush(heap, (change[w], np.int64(w)))
        for i in range(succ_offset[v], succ_offset[v + 1]):
            w = succs[i]
            waiting[w] -= 1
            if waiting[w] == 0:
                heapq.heappush(heap, (change[w], np.int64(w)))
    return order


@no_type_check
def _depth_first(num_preds, succ_offset, succs):
    """Run what became ready last; in program order among equals."""
    n = len(num_preds)
    waiting = num_preds.copy()
    stack = np.empty(n, np.int32)
    top = 0
    for v in range(n - 1, -1, -1):
        if waiting[v] == 0:
            stack[top] = v
            top += 1
    order = np.empty(n, np.int32)
    num_done = 0
    while top > 0:
        top -= 1
        v = stack[top]
        order[num_done] = v
        num_done += 1
        for i in range(succ_offset[v + 1] - 1, succ_offset[v] - 1, -1):
            w = succs[i]
            waiting[w] -= 1
            if waiting[w] == 0:
                stack[top] = w
                top += 1
    return order
