"""One request in, one plan out: every stage runs once."""

from bench.project.planning_flow import count
from tests.support.training import training_chain


def test_a_plan_with_two_budgets_lays_out_twice_checks_once_and_builds_no_graph_twice() -> None:
    plan, counts = count(training_chain(), time_limit=5.0)
    assert plan.recomputed is not None
    assert counts["pipeline"] <= 2 * counts["targets"]
    assert counts["check"] == 1
    assert counts["built"] == counts["distinct"] > 0
