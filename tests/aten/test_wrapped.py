"""What olla.wrap leaves as it was, what it reports, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

import olla
from tests.aten.loops import assert_same, fresh, peak_bytes, same  # noqa: F401
from tests.support.pytorch.steps import nn, torch

pytestmark = pytest.mark.torch
MIB = 2**20


def deep(layers: int = 6, width: int = 64) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh())))


def step(model: Any, rows: int = 1024) -> None:
    model(torch.ones(rows, 64)).square().mean().backward()


def test_a_wrapped_model_keeps_its_class_its_state_and_its_copies() -> None:
    plain, model = deep(), deep()
    assert olla.wrap(model) is model
    assert type(model) is nn.Sequential
    assert list(model.state_dict()) == list(plain.state_dict())
    step(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.zero_grad()
        step(other)
        assert same(other[0].weight.grad, model[0].weight.grad)
        with pytest.raises(ValueError, match=r"is not wrapped: call olla\.wrap"):
            olla.report_of(other)


def test_a_function_is_wrapped_with_its_loss() -> None:
    model = deep()

    def loss(model: Any, x: Any) -> Any:
        """Give the loss."""
        return model(x).square().mean()

    wrapped = olla.wrap(loss, max_slowdown=0.1)
    assert wrapped.__doc__ == loss.__doc__
    first, second = loss(model, torch.ones(8, 64)), wrapped(model, torch.ones(8, 64))
    assert torch.equal(first, second)
    assert olla.report_of(wrapped).planned[0].num_ops > 12


def test_the_report_tells_calls_graphs_and_peaks() -> None:
    model = olla.wrap(deep(), max_slowdown=0.1)
    for _ in range(3):
        step(model)
    report = olla.report_of(model)
    (graph,) = report.planned
    assert (report.num_calls, report.num_unplanned_calls, report.breaks) == (3, 0, [])
    assert graph.lower_bound_bytes <= graph.peak_bytes < graph.eager_peak_bytes
    assert graph.num_again > 0
    assert 0 < graph.added_seconds <= 0.1 * graph.base_seconds * (1 + 1e-9)
    text = str(report)
    assert "3 calls" in text
    assert "training" in text


@pytest.mark.parametrize("goal", [{}, {"max_slowdown": 0.05}, {"max_slowdown": 0.1}, {"minimise": "peak"}])
def test_a_step_allocates_what_was_planned(goal: dict[str, Any]) -> None:
    model = olla.wrap(deep(), **goal)
    step(model)
    model.zero_grad()
    x = torch.ones(1024, 64)
    measured = peak_bytes(lambda: model(x).sum().backward())
    (graph,) = olla.report_of(model).planned
    planned = graph.peak_bytes - graph.resident_bytes  # with results, which the loop lets go of during backward
    assert planned - 1024 * 64 * 4 <= measured <= 1.01 * planned


def test_a_step_allocates_less_than_eager() -> None:
    def measured(model: Any) -> int:
        step(model)
        model.zero_grad()
        return peak_bytes(lambda: step(model))

    eager = measured(deep())
    assert measured(olla.wrap(deep(), minimise="peak")) < 0.8 * eager
    assert measured(olla.wrap(deep())) <= eager


def test_a_budget_is_kept_and_the_least_is_used_with_a_warning_where_none_fits() -> None:
    model = olla.wrap(deep())
    step(model)
    peak = olla.report_of(model).planned[0].peak_bytes
    model = olla.wrap(deep(), budget=int(0.8 * peak))
    step(model)
    (graph,) = olla.report_of(model).planned
    assert graph.peak_bytes <= 0.8 * peak
    model = olla.wrap(deep(), budget="1MB")
    with pytest.warns(UserWarning, match=r"no way to fit forward and backward into budget=1000000 bytes") as caught:
        step(model)
    needed = int(str(caught[0].message).split("the least found is ")[1].split()[0])
    model = olla.wrap(deep(), budget=needed)
    step(model)
    assert olla.report_of(model).planned[0].peak_bytes <= needed


def test_options_that_mean_nothing_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="budget and max_slowdown are given"):
        olla.wrap(deep(), budget="1GB", max_slowdown=0.1)
    with pytest.raises(olla.BudgetError):
        olla.wrap(deep(), budget="a lot")
    with pytest.raises(TypeError, match="model is a Tensor"):
        olla.wrap(torch.ones(1))


def test_the_backend_takes_the_same_goals_as_options() -> None:
    model = deep()
    compiled = torch.compile(model, backend="olla", options={"kernels": "aten", "minimise": "peak"})
    assert torch.equal(compiled(torch.ones(4, 64)), model(torch.ones(4, 64)))
    for options, message in (
        ({"kernels": "fast"}, "kernels is 'fast', expected 'inductor' or 'aten'"),
        ({"kernels": "aten", "arena": True}, "arena is no option of kernels='aten'"),
    ):
        with pytest.raises(Exception, match=message):
            torch.compile(model, backend="olla", options=options)(torch.ones(2, 64))


def test_hooks_on_all_modules_are_called() -> None:
    model, seen = olla.wrap(deep(1)), []
    step(model, 4)
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))
    step(model, 4)
    hook.remove()
    step(model, 4)
    assert len(seen) == 3
    report = olla.report_of(model)
    assert (report.num_calls, report.num_unplanned_calls) == (3, 1)


class Twice(nn.Module):
    """A module of which Dynamo takes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(8, 8)

    def forward(self, x: Any) -> Any:
        return self.inner(x)[0]


def test_what_dynamo_does_not_take_runs_as_it_is_and_is_counted() -> None:
    def loop(model: Any) -> list[Any]:
        loss = model(torch.ones(3, 2, 8)).sum()
        loss.backward()
        return [loss.detach()]

    report = assert_same(Twice, loop, {}, planned=False)
    assert report.num_unplanned_calls == report.num_calls == 1
