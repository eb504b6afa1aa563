"""Shared parts of the checks of rewritings: values, identified by the op that makes them, and the error."""

from __future__ import annotations

from collections.abc import Sequence
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


def used(reads: list[int], changed: list[int], held: Sequence[int]) -> list[int]:
    """Return the values that an op uses, each once: those that the tensors it reads, then changes, hold."""
    return list(dict.fromkeys([held[t] for t in reads + changed]))


def numbered(graph: Graph) -> tuple[list[list[int]], list[dict[int, int]], NDArray[np.int64]]:
    """Number the values of a graph in program order; at the start, tensor t holds value t.

    Returns:
        The values op v uses; tensor -> value it makes; int64[num_tensors], what each tensor holds at the end.
    """
    held = list(range(graph.num_tensors))
    num_values = graph.num_tensors
    inputs, results = [], []
    lists = (graph.reads.to_lists(), graph.writes.to_lists(), graph.mutates.to_lists())
    for reads, writes, changed in zip(*lists, strict=True):
        inputs.append(used(reads, changed, held))
        made = {}
        for t in dict.fromkeys(writes + changed):
            held[t] = made[t] = num_values
            num_values += 1
        results.append(made)
    return inputs, results, np.array(held, dtype=np.int64)
