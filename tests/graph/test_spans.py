from hypothesis import given

from olla import Graph, _core
from tests.support import oracle, strategies


@given(strategies.graphs(min_ops=1, max_ops=6))
def test_spans_are_the_first_and_last_position_over_all_orders(graph: Graph) -> None:
    positions: list[set[int]] = [set() for _ in range(graph.num_ops)]
    for order in oracle.orders(graph):
        for step, v in enumerate(order):
            positions[v].add(step)
    earliest, latest = _core.spans(graph.core)
    assert earliest.tolist() == [min(steps) for steps in positions]
    assert latest.tolist() == [max(steps) for steps in positions]


def test_a_graph_without_ops_has_no_spans() -> None:
    earliest, latest = _core.spans(Graph.builder().build().core)
    assert len(earliest) == len(latest) == 0
