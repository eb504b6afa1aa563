"""What the checks of rewritings share: values, known by what makes them, and the error."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from olla.errors import PlanError
from olla.graph import Graph


def fail(rule: str, message: str, *ids: int) -> NoReturn:
    """Raise the error for a broken rule."""
    raise PlanError(message, rule=rule, ids=tuple(map(int, ids)))


def residents(graph: Graph) -> NDArray[np.bool_]:
    """bool[num_tensors], whether no op writes tensor t: the step begins with it."""
    return graph.writer < 0


def used(graph: Graph, v: int, held: NDArray[np.int64]) -> list[int]:
    """Return the values that an op uses, each once: those that the tensors it reads, then changes, hold."""
    return list(dict.fromkeys(int(held[t]) for t in (*graph.reads.of(v).tolist(), *graph.mutates.of(v).tolist())))


def numbered(graph: Graph) -> tuple[list[list[int]], list[dict[int, int]], NDArray[np.int64]]:
    """Number the values of a graph in program order; at the start, tensor t holds value t.

    Returns:
        The values op v uses; tensor -> value it makes; int64[num_tensors], what each tensor holds at the end.
    """
    held = np.arange(graph.num_tensors, dtype=np.int64)
    num_values = graph.num_tensors
    inputs, results = [], []
    for v in range(graph.num_ops):
        inputs.append(used(graph, v, held))
        made = {}
        for t in dict.fromkeys((*graph.writes.of(v).tolist(), *graph.mutates.of(v).tolist())):
            held[t] = made[t] = num_values
            num_values += 1
        results.append(made)
    return inputs, results, held
