"""Memory requests and times of every op of a step, recorded in one order and valid for all."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from olla.graph import Graph
from olla.layout import rounded_up
from olla.pytorch.memory.replay import Allocations, Int32, Int64, Replay


class Recorder:
    """The hooks of a program that is recorded; see compile_program.

    Args:
        replay: the planned memory, which records; None: only time is measured.
        num_ops: of the step.
        device: where the step runs; on an accelerator every op is waited for.

    Attributes:
        seconds: float64[num_ops], of the last time that each op ran.
        addresses: tensor of the graph -> address of its storage right after the op that writes it.
    """

    def __init__(self, replay: Replay | None, num_ops: int, device: str) -> None:
        self.seconds = np.zeros(num_ops)
        self.addresses: dict[int, int] = {}
        self._replay = replay
        self._wait: Callable[[], None] = (lambda: None) if device == "cpu" else torch.accelerator.synchronize
        self._op = 0
        self._start = 0.0

    def begin(self, op: int) -> None:
        """Open the window of an op."""
        self._op = op
        self._wait()
        if self._replay is not None:
            self._replay.begin(op)
        self._start = time.perf_counter()

    def end(self) -> None:
        """Close it."""
        self._wait()
        self.seconds[self._op] = time.perf_counter() - self._start
        if self._replay is not None:
            self._replay.end()

    def live(self, op: int) -> int:
        """Return how many blocks that an op asked for are in use."""
        return self._replay.live(op) if self._replay is not None else 0

    def note(self, tensor: int, value: torch.Tensor) -> None:
        """Keep where a tensor of the graph lives."""
        if not value._is_zerotensor():  # it has no memory
            self.addresses[tensor] = value.untyped_storage().data_ptr()


@dataclass(frozen=True)
class Requests:
    """The requests for memory of all ops, those of an op one after the other: request i belongs to op[i].

    Attributes:
        op: int32[m], rising.
        index: int32[m], it is the op's request of this number.
        num_bytes: int64[m].
        ends: int64[m], how many requests its op has made when it is freed within the op; -1: it outlives its op.
        tensor: int64[m], the tensor of the graph that lives in it; -1: none: beyond its op it is never freed.
    """

    op: Int32
    index: Int32
    num_bytes: Int64
    ends: Int64
    tensor: Int64

    @classmethod
    def of(cls, recorded: Allocations, addresses: dict[int, int], graph: Graph) -> Requests:
        """Sort the requests of a recorded step by op, and find the tensors that live in them."""
        starts, ends = _runs(recorded.op)
        inside = (recorded.freed_in == recorded.op) & (recorded.freed_at <= ends)
        own = np.where(inside, recorded.freed_at - starts, -1)
        tensor = np.full(len(own), -1, dtype=np.int64)
        lives = np.flatnonzero(~inside & (recorded.address != 0))
        # An op may reuse addresses, but a block that outlives it is the last one at its address.
        last = {(int(recorded.op[i]), int(recorded.address[i])): int(i) for i in lives}
        for op in np.unique(recorded.op[lives]).tolist():
            for t in graph.writes.of(op).tolist():
                request = last.get((op, addresses.get(t, 0)))
                if request is not None:
                    tensor[request] = t
        by_op = np.argsort(recorded.op, kind="stable")
        op, index, num_bytes = recorded.op[by_op], recorded.index[by_op], recorded.num_bytes[by_op]
        return cls(op, index, num_bytes, own[by_op], tensor[by_op])

    @classmethod
    def of_graph(cls, graph: Graph) -> Requests:
        """Return what ops ask for as far as a graph knows: the tensors they write, and no workspaces."""
        op = graph.writes.owner.astype(np.int32)
        tensor = graph.writes.item.astype(np.int64)
        asked = graph.tensor_bytes[tensor] > 0
        op, tensor = op[asked], tensor[asked]
        index = np.arange(len(op)) - _runs(op)[0]
        return cls(op, index.astype(np.int32), graph.tensor_bytes[tensor], np.full(len(op), -1, dtype=np.int64), tensor)

    def in_order(self, graph: Graph, order: Sequence[int] | Int32) -> Allocations:
        """Return the allocations and frees when the ops run in an order."""
        order = np.asarray(order, dtype=np.int64)
        count = np.bincount(self.op, minlength=graph.num_ops)
        made = np.concatenate([[0], np.cumsum(count[order])])  # before each step
        start = made[np.argsort(order)[self.op]]
        dies = np.append(last_steps(graph, order), -1)[self.tensor]  # tensor -1 has no last step
        freed_at = np.where(self.ends >= 0, start + self.ends, np.where(dies >= 0, made[dies + 1], -1))
        freed_in = np.where(self.ends >= 0, self.op, np.where(dies >= 0, order[dies], -1))
        comes = np.argsort(start + self.index)
        return Allocations(
            self.op[comes],
            self.index[comes],
            self.num_bytes[comes],
            freed_in[comes].astype(np.int32),
            freed_at[comes],
            np.zeros(len(comes), dtype=np.int64),
        )


def without_caches(recorded: Allocations, results: Sequence[torch.Tensor]) -> Allocations:
    """Leave out what libraries took in a recorded step and keep, as cuBLAS its workspace: later steps do not ask.

    Args:
        recorded: the step.
        results: what it returned; nothing else of its own outlives it.

    Example:
        >>> op, index, size = np.zeros(3, np.int32), np.arange(3, dtype=np.int32), np.full(3, 64)
        >>> freed_at, address = np.array([3, -1, -1]), np.array([64, 128, 192])
        >>> recorded = Allocations(op, index, size, np.array([0, -1, -1], np.int32), freed_at, address)
        >>> without_caches(recorded, []).freed_at.tolist()
        [1]
    """
    given = [result.untyped_storage().data_ptr() for result in results if not result._is_zerotensor()]
    kept = (recorded.freed_at < 0) & (recorded.address != 0) & ~np.isin(recorded.address, given)
    if not kept.any():
        return recorded
    num_before = np.cumsum(np.append(0, ~kept))  # of the others
    freed_at = np.where(recorded.freed_at < 0, -1, num_before[recorded.freed_at])
    others = Allocations(*(column[~kept] for column in recorded._replace(freed_at=freed_at)))
    return others._replace(index=(np.arange(len(others.op)) - _runs(others.op)[0]).astype(np.int32))


def with_costs(graph: Graph, recorded: Allocations, seconds: NDArray[np.float64], alignment: int) -> Graph:
    """Return a graph with the workspaces and the seconds of a recorded step.

    The workspace of an op is the most that its own requests hold at once, less the tensors that it writes.

    Args:
        graph: of the step.
        recorded: the step, in any order.
        seconds: float64[n], of each op.
        alignment: bytes; sizes are rounded up to it.
    """
    requested = rounded_up(recorded.num_bytes, alignment)
    starts, ends = _runs(recorded.op)
    inside = (recorded.freed_at >= 0) & (recorded.freed_at < ends)
    change = requested.copy()
    np.subtract.at(change, recorded.freed_at[inside], requested[inside])
    held = np.cumsum(change)
    held -= (held - change)[starts]
    most = np.zeros(graph.num_ops, dtype=np.int64)
    np.maximum.at(most, recorded.op, held)
    np.subtract.at(most, graph.writes.owner, rounded_up(graph.tensor_bytes[graph.writes.item], alignment))
    return dataclasses.replace(graph, workspace_bytes=most.clip(min=0), seconds=seconds)


def _runs(op: Int32) -> tuple[Int64, Int64]:
    """Return, for each request, begin and end of its op's requests, which are contiguous."""
    first = np.flatnonzero(np.diff(op, prepend=-1))
    count = np.diff(np.append(first, len(op)))
    return np.repeat(first, count), np.repeat(first + count, count)


def last_steps(graph: Graph, order: Sequence[int] | Int32 | Int64) -> Int64:
    """Return the step of an order after which each tensor is freed: int64[T]; -1: it outlives the step."""
    step = np.argsort(np.asarray(order, dtype=np.int64))
    last = np.full(graph.num_tensors, -1, dtype=np.int64)
    for lists in (graph.reads, graph.writes, graph.mutates):
        np.maximum.at(last, lists.item, step[lists.owner])
    last[[kind != "temporary" for kind in graph.tensor_kinds]] = -1
    last[graph.outputs] = -1
    return last
