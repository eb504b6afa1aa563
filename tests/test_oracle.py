"""The oracles themselves, against answers that need no thought."""

from itertools import product

import oracle
import pytest

from olla import Graph


@pytest.mark.parametrize("alignment", [1, 2])
@pytest.mark.parametrize(
    ("lower", "upper", "size"),
    [
        ([0, 0, 0], [1, 1, 1], [1, 2, 3]),
        ([0, 1, 2], [2, 3, 4], [2, 1, 2]),
        ([0, 1, 0, 2], [3, 2, 1, 3], [1, 2, 3, 2]),
        ([0, 2, 1, 3], [2, 4, 3, 5], [2, 2, 1, 3]),
        ([0, 0], [1, 1], [0, 3]),
    ],
)
def test_best_height_equals_the_best_of_all_offsets(
    lower: list[int], upper: list[int], size: list[int], alignment: int
) -> None:
    def valid(offsets: tuple[int, ...]) -> bool:
        return all(
            upper[a] <= lower[b]
            or upper[b] <= lower[a]
            or offsets[a] + size[a] <= offsets[b]
            or offsets[b] + size[b] <= offsets[a]
            for a in range(len(size))
            for b in range(a)
        )

    grid = product(range(0, 9, alignment), repeat=len(size))
    heights = [max(map(sum, zip(offsets, size, strict=True))) for offsets in grid if valid(offsets)]
    assert oracle.best_height(lower, upper, size, alignment) == min(heights)


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
