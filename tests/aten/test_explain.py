"""What olla.explain says of a model before it trains."""

from __future__ import annotations

from typing import Any

import pytest

import olla
from tests.aten.loops import fresh  # noqa: F401
from tests.support.pytorch.steps import nn, torch

pytestmark = pytest.mark.torch


class Broken(nn.Module):
    """Has a graph break in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        """Break the graph behind the norm."""
        y = self.norm(self.first(x)).relu()
        torch._dynamo.graph_break()  # type: ignore[no-untyped-call]
        return self.last(torch.dropout(y, 0.5, self.training))


def test_graphs_and_breaks_are_named_with_their_lines() -> None:
    report = olla.explain(Broken(), torch.randn(4, 6))
    assert (report.graph_count, report.graph_break_count) == (2, 1)
    assert report.op_count == sum(graph.num_ops for graph in report.planned)
    assert "test_explain.py:" in report.breaks[0]
    assert "graph count 2, graph break count 1" in str(report)
    assert all(graph.saved_bytes > 0 for graph in report.planned)


def test_it_leaves_model_and_random_numbers_as_they_are() -> None:
    model, x = Broken(), torch.randn(4, 6)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    olla.explain(model, (x,), minimise="peak")
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(ValueError, match="not wrapped"):
        olla.report_of(model)


def test_a_loss_is_part_of_the_graph_where_it_is_given() -> None:
    model = nn.Linear(6, 3)
    alone = olla.explain(model, {"input": torch.randn(4, 6)})
    whole = olla.explain(model, torch.randn(4, 6), loss=lambda model, x: model(x).square().mean())
    assert whole.op_count > alone.op_count
    wrapped = olla.wrap(nn.Linear(6, 3))
    wrapped(torch.randn(4, 6)).sum().backward()
    assert olla.report_of(wrapped).graphs[0].peak_bytes == alone.graphs[0].peak_bytes


def test_a_graph_that_only_views_what_it_is_given_is_said_to_need_no_plan() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.weight, self.last = nn.Linear(8, 8), nn.Parameter(torch.ones(8, 1, 4)), nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            x = self.first(x)
            torch._dynamo.graph_break()
            (a, b), weight = x.chunk(2, 1), self.weight.squeeze(1)
            torch._dynamo.graph_break()
            return self.last(a) * b + weight.sum()

    model = olla.wrap(Halves(), time_limit=0.2)
    model(torch.randn(3, 8)).sum().backward()
    reasons = [graph.reason for graph in olla.report_of(model).graphs]
    assert reasons == ["", "there is nothing to plan: forward returns views of what it is given", ""]
