"""The oracles themselves, against answers that need no thought."""

from itertools import product

from hypothesis import example, given
from hypothesis import strategies as st

from olla import Graph
from tests.support import oracle
from tests.support.strategies import graphs


@given(graphs(max_ops=6))
def test_dynamic_programming_and_permutations_find_the_same_best_peak(graph: Graph) -> None:
    assert oracle.best_peak(graph) == oracle.best_peak_by_permutations(graph)


def test_the_best_peak_runs_the_freeing_op_first() -> None:
    b = Graph.builder("two branches")
    start = b.tensor(8)
    big, small = b.tensor(100), b.tensor(1)
    b.op("start", writes=[start])
    b.op("big", reads=[start], writes=[big])
    b.op("other", reads=[start], writes=[small], workspace_bytes=50)
    b.op("use big", reads=[big])
    b.op("use small", reads=[small])
    graph = b.build()
    assert oracle.peak(graph, [0, 1, 2, 3, 4]) == 100 + 8 + 1 + 50
    assert oracle.best_peak(graph) == oracle.best_peak_by_permutations(graph) == 100 + 8


def best_height_of_all_offsets(buffers: list[tuple[int, int, int]], alignment: int) -> int:
    """Return the least height, by trying all offsets up to that of a plain stack: for 4 buffers or fewer."""
    alive = [(lower, upper, size) for lower, upper, size in buffers if lower < upper and size]
    collide = [
        (a, b) for a in range(len(alive)) for b in range(a) if alive[a][0] < alive[b][1] and alive[b][0] < alive[a][1]
    ]

    def valid(offsets: tuple[int, ...]) -> bool:
        return all(offsets[a] + alive[a][2] <= offsets[b] or offsets[b] + alive[b][2] <= offsets[a] for a, b in collide)

    stack = sum(size + alignment for _, _, size in alive)
    return min(
        max((offset + size for offset, (_, _, size) in zip(offsets, alive, strict=True)), default=0)
        for offsets in product(range(0, stack, alignment), repeat=len(alive))
        if valid(offsets)
    )


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=3),
    st.integers(1, 3),
)
@example([(0, 3, 1), (1, 2, 2), (0, 1, 3), (2, 3, 2)], 1)
@example([(0, 3, 1), (1, 2, 2), (0, 1, 3), (2, 3, 2)], 2)
@example([(0, 2, 2), (2, 4, 2), (1, 3, 1), (3, 5, 3)], 1)
@example([(0, 2, 2), (2, 4, 2), (1, 3, 1), (3, 5, 3)], 2)
@example([(0, 1, 0), (0, 1, 3), (1, 1, 9)], 1)
def test_best_height_equals_the_best_of_all_offsets(buffers: list[tuple[int, int, int]], alignment: int) -> None:
    assert oracle.best_height(*zip(*buffers, strict=True), alignment) == best_height_of_all_offsets(buffers, alignment)


def test_best_height_finds_a_layout_that_no_greedy_order_by_size_finds() -> None:
    # Largest first puts 3 and 2 on one level and the two tall pairs above them; the best layout fills the load exactly.
    buffers = [(0, 3, 2), (2, 6, 2), (5, 8, 4), (0, 2, 4), (3, 5, 4)]
    assert max(sum(size for a, b, size in buffers if a <= step < b) for step in range(8)) == 6
    assert oracle.best_height(*zip(*buffers, strict=True)) == 6


def test_best_height_of_no_buffers_is_zero() -> None:
    assert oracle.best_height([], [], []) == 0
