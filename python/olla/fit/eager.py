"""Peak memory of an ordinary loop: the captured ops in program order, with gradients kept until `zero_grad`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from olla import _core
from olla.fit import caching
from olla.fit.caching import Request, most_bytes
from olla.graph import Graph


def eager_peak(graph: Graph, update: Sequence[Request] | None = None) -> int:
    """Return the most bytes an ordinary loop requests at once, the resident ones included.

    Tensors die after their last use, as autograd frees them; gradients live on until the next `zero_grad`. What kernels
    take while they run is counted where the graph knows it (`workspace_bytes`).

    Args:
        graph: the captured step, in program order.
        update: what the optimizer's step requests beside gradients and state, see `olla.fit.updates`; None: as it was
            captured, one parameter after the other.

    Example:
        >>> import olla
        >>> builder = olla.Graph.builder("two gradients, two updates")
        >>> weights = [builder.tensor(10, kind="parameter") for _ in range(2)]
        >>> gradients = [builder.tensor(10) for _ in range(2)]
        >>> _ = builder.op("first", writes=[gradients[0]]), builder.op("second", writes=[gradients[1]])
        >>> for w, g in zip(weights, gradients):
        ...     half = builder.tensor(10)
        ...     _ = builder.op("scale", reads=[g], writes=[half], kind="update")
        ...     _ = builder.op("update", reads=[half], mutates=[w], kind="update")
        >>> graph = builder.build()
        >>> at_once = [(0, 10), (1, 10), (0, -1), (1, -1)]
        >>> olla.plan(graph).program_peak_bytes, eager_peak(graph), eager_peak(graph, at_once)
        (50, 50, 60)
    """
    held = kept_tensors(graph)
    loop = dataclasses.replace(graph, outputs=held)
    order = np.arange(graph.num_ops, dtype=np.int32)
    live: NDArray[np.int64] = _core.profile(loop.core, order).live_bytes
    if update is not None:
        live = live[~_is_update(graph)]
        kept = int(graph.tensor_bytes[np.intersect1d(held, graph.writes.item)].sum())
        live = np.append(live, graph.resident_bytes + kept + most_bytes(update))
    return int(live.max(initial=graph.resident_bytes))


def reserved_bytes(graph: Graph, update: Sequence[Request] | None = None) -> int:
    """Return what torch's allocator reserves on a GPU for an ordinary loop, free blocks and rounding included.

    Args:
        graph, update: as of eager_peak().

    Example:
        >>> import olla
        >>> builder = olla.Graph.builder("step")
        >>> _ = builder.op("op", writes=[builder.tensor(3 << 20)])
        >>> graph = builder.build()
        >>> eager_peak(graph) >> 20, reserved_bytes(graph) >> 20
        (3, 20)
    """
    return caching.allocator_of_loop(graph, kept_tensors(graph).tolist(), update).reserved_bytes


def kept_tensors(graph: Graph) -> NDArray[np.int32]:
    """Return the tensors that an ordinary loop keeps until the next `zero_grad`: gradients and outputs."""
    return np.unique(np.concatenate([graph.outputs, _gradients(graph)])).astype(np.int32)


def _is_update(graph: Graph) -> NDArray[np.bool_]:
    return np.array([kind == "update" for kind in graph.op_kinds], dtype=bool)


def _gradients(graph: Graph) -> NDArray[np.int32]:
    """Return the tensors that updates use and other ops made."""
    update = _is_update(graph)
    made = graph.writes.item[~update[graph.writes.owner]]
    used = [lists.item[update[lists.owner]] for lists in (graph.reads, graph.mutates)]
    return np.intersect1d(made, np.concatenate(used))
