"""The captured step of a model of very many embedding tables is ordered, with a proof, at once."""

import time

import olla
from tests.support.order.many_tables import captured_step


def test_the_step_of_200_tables_is_proved() -> None:
    graph = captured_step(200)
    start = time.process_time()
    plan = olla.plan(graph)
    assert time.process_time() - start < 5
    assert plan.peak_bytes == plan.lower_bound_bytes
    olla.check(graph, plan)
