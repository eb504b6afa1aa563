"""Random inputs for property tests (hypothesis)."""

from __future__ import annotations

from hypothesis import strategies as st

from olla import Graph
from tests.support import oracle

sizes = st.one_of(st.just(0), st.integers(0, 12), st.integers(0, 10_000))


def some_of(draw: st.DrawFn, num: int, most: int) -> list[int]:
    """Draw up to most numbers below num, repeats and any order allowed."""
    return draw(st.lists(st.integers(0, num - 1), max_size=most)) if num else []


@st.composite
def graphs(draw: st.DrawFn, min_ops: int = 0, max_ops: int = 8, max_resident: int = 3, max_writes: int = 2) -> Graph:
    """Valid graphs: mutations, extra predecessors, random ops, workspaces; donated, unread, empty tensors; outputs."""
    builder = Graph.builder("random")
    num_tensors = 0
    for _ in range(draw(st.integers(0, max_resident))):
        builder.tensor(draw(sizes), kind="parameter", donated=draw(st.booleans()))
        num_tensors += 1
    for v in range(draw(st.integers(min_ops, max_ops))):
        reads = some_of(draw, num_tensors, 3)
        mutates = some_of(draw, num_tensors, 1)
        writes = [builder.tensor(draw(sizes)) for _ in range(draw(st.integers(0, max_writes)))]
        num_tensors += len(writes)
        builder.op(
            f"op_{v}",
            reads=reads,
            writes=writes,
            mutates=mutates if draw(st.booleans()) else (),
            after=some_of(draw, v, 1) if draw(st.booleans()) else (),
            workspace_bytes=draw(sizes) if draw(st.booleans()) else 0,
            random=draw(st.integers(0, 3)) == 3,
        )
    for t in some_of(draw, num_tensors, 2):
        builder.output(t)
    return builder.build()


@st.composite
def orders(draw: st.DrawFn, graph: Graph) -> list[int]:
    """Any valid order of the graph's ops."""
    before = oracle.dependencies(graph)
    order: list[int] = []
    while len(order) < graph.num_ops:
        ready = [v for v in range(graph.num_ops) if v not in order and before[v] <= set(order)]
        order.append(draw(st.sampled_from(ready)))
    return order


@st.composite
def graphs_with_order(draw: st.DrawFn, max_ops: int = 8) -> tuple[Graph, list[int]]:
    """A graph and any valid order of its ops."""
    graph = draw(graphs(max_ops=max_ops))
    return graph, draw(orders(graph))


@st.composite
def buffers(draw: st.DrawFn, max_buffers: int = 6, max_step: int = 8) -> tuple[list[int], list[int], list[int]]:
    """Lower and upper ends (half-open, never empty) and sizes of a few buffers."""
    spans = draw(st.lists(st.tuples(st.integers(0, max_step), st.integers(1, max_step), sizes), max_size=max_buffers))
    return (
        [lower for lower, _, _ in spans],
        [lower + length for lower, length, _ in spans],
        [size for _, _, size in spans],
    )
