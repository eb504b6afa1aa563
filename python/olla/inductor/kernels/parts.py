"""Fused kernels as the parts they were fused from, so that the memory of other fusions can be computed quickly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from olla.graph import Graph, Lists
from olla.inductor.kernels import scheduler as inductor
from olla.inductor.kernels.fused import Storages
from olla.layout import live_bytes

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class KernelParts:
    """What a graph's kernels consist of.

    Attributes:
        nodes: scheduler nodes; part i is `nodes[i]`.
        kernel: int64[num_parts], the fused node a part came from.
        movable: bool[num_parts], whether it may leave that.
        graph: parts as ops.
        readers: of every tensor, the parts that need it.
        before, behind: of every part, the parts that must run before, and after it.
        inner: bool[num_tensors], whether a tensor needs no memory if one kernel holds all parts that use it.
        kept: bool[num_tensors], whether the graph returns it.
    """

    nodes: list[Any]
    kernel: Ints
    movable: NDArray[np.bool_]
    graph: Graph
    readers: Lists
    before: list[set[int]]
    behind: list[set[int]]
    inner: NDArray[np.bool_]
    kept: NDArray[np.bool_]

    def live_bytes(self, step: Ints) -> Ints:
        """Return the bytes alive at every step.

        Args:
            step: int64[num_parts], when the kernel runs that a part is in: kernels have steps of their own.

        Complexity:
            O(parts + reads), vectorized.
        """
        first, last, num_bytes = self.lifetimes(step)
        return live_bytes(first, last + 1, num_bytes, int(step.max()) + 1)

    def lifetimes(self, step: Ints) -> tuple[Ints, Ints, Ints]:
        """Return the first and last step of every tensor, and its bytes: none where it is never in memory."""
        first = np.where(self.graph.writer >= 0, step[self.graph.writer], 0)
        last = first.copy()
        read = np.flatnonzero(np.diff(self.readers.offset))
        if read.size:
            starts = self.readers.offset[:-1][read]
            last[read] = np.maximum(first[read], np.maximum.reduceat(step[self.readers.item], starts))
        last[self.kept] = step.max()
        return first, last, np.where(self.inner & (first == last), 0, self.graph.tensor_bytes)


def parts_of(fused: Sequence[Any], storages: Storages) -> KernelParts:
    """Take the kernels of a graph apart.

    Args:
        fused: scheduler nodes, in an order they can run in.
        storages: what is known of them.
    """
    nodes: list[Any] = []
    kernel: list[int] = []
    movable: list[bool] = []
    mutable = inductor.mutable_names()
    for i, node in enumerate(fused):
        parts = inductor.parts_of(node)
        nodes += parts
        kernel += [i] * len(parts)
        movable += [len(parts) > 1 and not inductor.is_rigid(part, mutable) for part in parts]
    overwrites = {new: old for old, new in storages.taken.items()}

    def overwritten(node: Any, _: object) -> Iterator[tuple[str, str]]:
        """Yield the same as of the kernels: where another reader comes later, the plan of what is fused again says."""
        names = [buffer.get_name() for buffer in node.get_outputs()]
        return ((overwrites[new], new) for new in names if new in overwrites)

    unfused = Storages(nodes, overwritten)
    graph = unfused.graph("parts")
    writer = graph.writer
    before: list[set[int]] = []
    behind: list[set[int]] = [set() for _ in nodes]
    for i, (reads, after) in enumerate(zip(graph.reads.to_lists(), graph.after.to_lists(), strict=True)):
        before.append({*writer[reads].tolist(), *after} - {-1, i})
        for other in before[i]:
            behind[other].add(i)
    inner = np.zeros(graph.num_tensors, dtype=bool)
    for name, buffer in unfused.buffers.items():
        tensor = unfused.tensor.get(name)
        if tensor is not None and writer[tensor] >= 0 and name not in storages.tensor:
            inner[tensor] = inductor.is_inside(fused[kernel[int(writer[tensor])]], buffer)
    kept = np.zeros(graph.num_tensors, dtype=bool)
    kept[graph.outputs] = True
    return KernelParts(
        nodes=nodes,
        kernel=np.array(kernel, dtype=np.int64),
        movable=np.array(movable, dtype=bool),
        graph=graph,
        readers=graph.reads.inverted(graph.num_tensors),
        before=before,
        behind=behind,
        inner=inner,
        kept=kept,
    )
