"""Every request for memory of a step that was recorded, as blocks: where it lies in the arena, and when."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from olla.graph import Graph
from olla.picture.blocks import Block, blocks_of, op_label, tensor_label, workspace_label


class PlacedRequests(NamedTuple):
    """What the ops of a step ask for. The requests of op v are op_offset[v] to op_offset[v + 1] - 1.

    Attributes:
        op_offset: int64[num_ops + 1], rising from 0 to m.
        num_bytes: int64[m], what was asked for.
        taken_bytes: int64[m], what it takes.
        offsets: int64[m], its first byte in the arena; -1: it lies elsewhere.
        freed_in: int32[m], the op that runs, or ran last, when it is freed; -1: it outlives the step.
        freed_after: int64[m], how many requests that op has made by then.
        arena_bytes: size of the arena.
    """

    op_offset: NDArray[np.int64]
    num_bytes: NDArray[np.int64]
    taken_bytes: NDArray[np.int64]
    offsets: NDArray[np.int64]
    freed_in: NDArray[np.int32]
    freed_after: NDArray[np.int64]
    arena_bytes: int


def requested_blocks(graph: Graph, order: NDArray[np.int32], asked: PlacedRequests) -> list[Block]:
    """Return what is there before a step, and all its requests.

    The requests of an op divide its step: the second of four begins at a quarter of it.

    Args:
        graph: of the step.
        order: int32[num_ops], the op that runs at step i.
        asked: its requests.

    Complexity:
        O(m log m) for m = ops + tensors + uses + requests.
    """
    found, end = [], asked.arena_bytes
    for block in blocks_of(graph, order):
        if block.op < 0:
            found.append(block._replace(offset=end))
            end += block.size
    first, last = _lives(order, asked)
    owner = np.repeat(np.arange(graph.num_ops), np.diff(asked.op_offset)).tolist()
    waiting = {op: graph.writes.of(op).tolist() for op in set(owner)}
    columns = (asked.num_bytes, asked.taken_bytes, asked.offsets, asked.freed_in, first, last)
    for op, *values in zip(owner, *(column.tolist() for column in columns), strict=True):
        num_bytes, size, offset, freed_in, begin, stop = values
        kind, label = "workspace", workspace_label(graph, op)
        if freed_in != op:  # of the tensors that the op writes, it is one of this size
            t = next((t for t in waiting[op] if graph.tensor_bytes[t] == num_bytes), None)
            kind, label = "temporary", op_label(graph, op) if t is None else tensor_label(graph, t, op)
            waiting[op] = [other for other in waiting[op] if other != t]
        if offset < 0:
            offset, end = end, end + size
        found.append(Block(label, kind, op, size, begin, stop, offset))
    return found


def _lives(order: NDArray[np.int32], asked: PlacedRequests) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return when each request is made and freed, in steps."""
    num_ops, count = len(order), np.diff(asked.op_offset)
    step = np.append(np.argsort(order), num_ops)  # what is freed in no op outlives the step
    owner = np.repeat(np.arange(num_ops), count)
    index = np.arange(len(owner)) - asked.op_offset[:-1][owner]
    num = np.append(count, 0)[asked.freed_in]
    share = np.where(num > 0, asked.freed_after / np.maximum(num, 1), asked.freed_in >= 0)
    return step[owner] + index / count[owner], step[asked.freed_in] + share
