"""The warm start of the search for an order: the program order, with updates early and pure allocations late."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from olla._core import hoisted_order

if TYPE_CHECKING:
    from olla._core import Graph as CoreGraph
    from olla.graph import Graph

Order = npt.NDArray[np.int32]


def hoist(graph: Graph, core: CoreGraph | None = None, program: Order | None = None) -> Order:
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
    updates = np.array([kind == "update" for kind in graph.op_kinds], dtype=np.uint8)
    return hoisted_order(graph.core if core is None else core, program, updates)
