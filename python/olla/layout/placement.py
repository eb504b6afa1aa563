"""Contents of the arena for an order: the buffers of the layout problem, and the offsets of the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from olla import _core

if TYPE_CHECKING:
    from olla.graph import Graph

Int64Array = NDArray[np.int64]
Bytes = TypeVar("Bytes", int, Int64Array)


class Placement(NamedTuple):
    """Where everything lies; see the attributes of `Plan`."""

    offsets: Int64Array
    workspace_offsets: Int64Array
    arena_bytes: int = 0
    load_bytes: int = 0


class ArenaBuffers:
    """The tensors that ops write and the workspaces of ops, as buffers with lifetimes under one order.

    Attributes:
        tensors: int64[k], ids of the written tensors that have bytes: buffers 0 to k - 1.
        ops: int64[l], ids of the ops with a workspace: the buffers after them.
        lower: int64[k + l], step at which buffer i begins to live.
        upper: int64[k + l], step after its last one.
        size: int64[k + l], bytes, rounded up to the alignment.
    """

    def __init__(self, graph: Graph, core: _core.CoreGraph, order: NDArray[np.int32], alignment: int) -> None:
        lives = _core.profile(core, order)
        step = np.argsort(order)
        self._graph = graph
        self._written = np.unique(graph.writes.item)
        self.tensors = self._written[graph.tensor_bytes[self._written] > 0].astype(np.int64)
        self.ops = np.flatnonzero(graph.workspace_bytes)
        self.lower = np.concatenate([lives.first[self.tensors], step[self.ops]]).astype(np.int64)
        self.upper = np.concatenate([lives.last[self.tensors], step[self.ops] + 1]).astype(np.int64)
        size = np.concatenate([graph.tensor_bytes[self.tensors], graph.workspace_bytes[self.ops]])
        self.size = rounded_up(size, alignment)

    def placed(self, places: Int64Array) -> Placement:
        """Return the buffers at their places; what has no bytes lies at offset 0.

        Args:
            places: int64[k + l], bytes: the offset of buffer i.
        """
        offsets = np.full(self._graph.num_tensors, -1, dtype=np.int64)
        workspace_offsets = np.full(self._graph.num_ops, -1, dtype=np.int64)
        offsets[self._written] = 0
        offsets[self.tensors] = places[: len(self.tensors)]
        workspace_offsets[self.ops] = places[len(self.tensors) :]
        return Placement(offsets, workspace_offsets, int(np.max(places + self.size, initial=0)), self.load_bytes())

    def load_bytes(self) -> int:
        """Return the most bytes alive at once. O(num_ops + buffers)."""
        return int(live_bytes(self.lower, self.upper, self.size, self._graph.num_ops).max(initial=0))


def nothing_placed(graph: Graph) -> Placement:
    """Return the placement of a plan without an arena."""
    return Placement(np.full(graph.num_tensors, -1, dtype=np.int64), np.full(graph.num_ops, -1, dtype=np.int64))


def live_bytes(lower: Int64Array, upper: Int64Array, size: Int64Array, num_steps: int) -> Int64Array:
    """Return int64[num_steps]: the bytes alive at every step, of buffers alive from lower to before upper."""
    change = np.zeros(num_steps + 1, dtype=np.int64)
    np.add.at(change, lower, size)
    np.subtract.at(change, upper, size)
    return np.cumsum(change[:-1])


def rounded_up(size: Bytes, alignment: int) -> Bytes:
    """Round sizes up to multiples of the alignment."""
    return -(-size // alignment) * alignment
