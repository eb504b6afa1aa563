"""A graph that is worth swapping, and a link that is slow."""

import numpy as np

from olla.graph import Graph
from olla.plan import Link

MB = 1_000_000
SLOW = Link.of(10 * MB)


def chain(depth: int = 6, num_bytes: int = 4 << 20) -> Graph:
    """Forward and backward through `depth` layers of a second each: the first activations are idle longest."""
    b = Graph.builder("chain")
    made = []
    for i in range(depth):
        made.append(b.tensor(num_bytes))
        b.op(f"forward{i}", reads=made[-2:-1], writes=[made[-1]], kind="forward", seconds=1.0)
    grad = b.tensor(num_bytes)
    b.op("loss", reads=[made[-1]], writes=[grad], seconds=1.0)
    for i in reversed(range(depth)):
        before, grad = grad, b.tensor(num_bytes)
        b.op(f"backward{i}", reads=[before, made[i]], writes=[grad], kind="backward", seconds=1.0)
    return b.build()


def program(graph: Graph) -> np.ndarray:
    return np.arange(graph.num_ops, dtype=np.int32)
