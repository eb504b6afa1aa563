"""
The C++ core of olla: arrays in, arrays out. Use the functions of the olla package instead.
"""

from typing import Annotated

import numpy
from numpy.typing import NDArray


class Graph:
    """Dataflow graph of a training step; see olla.Graph."""

    def __init__(self, tensor_bytes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], donated: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], reads_offset: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], reads: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], writes_offset: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], writes: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], mutates_offset: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], mutates: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], after_offset: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], after: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], workspace_bytes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], random: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], outputs: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    def constrained(self, before: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], after: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Graph:
        """The same graph with precedences before[i] -> after[i] added."""

    @property
    def num_ops(self) -> int: ...

    @property
    def num_tensors(self) -> int: ...

    @property
    def resident_bytes(self) -> int: ...

    def preds(self, op: int) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]:
        """Direct dependencies of an op, sorted."""

    def precedences(self) -> tuple:
        """
        Direct dependencies of all ops as (offset, item): op v comes after item[offset[v]:offset[v + 1]].
        """

    def is_order(self, order: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> bool:
        """
        Whether order is a permutation of the ops that respects every dependency.
        """

def profile(graph: Graph, order: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> tuple:
    """
    (first, last, live, peak, peak_step): half-open lifetime [first[t], last[t]) of tensor t, live bytes during step s, their maximum and where it is reached first.
    """

def spans(graph: Graph) -> tuple:
    """(earliest, latest) step of every op when one op runs per step."""
