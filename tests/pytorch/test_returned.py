"""What a step returns holds no more memory than itself, and no plan is worse than the program order for it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch.nn.functional as F

import olla
from tests.support.pytorch.steps import nn, same, torch

pytestmark = pytest.mark.torch
LOSSES: dict[str, Any] = {
    "mean": lambda y, x: F.mse_loss(y, x),
    "sum": lambda y, x: F.binary_cross_entropy(torch.sigmoid(y), x, reduction="sum"),
    "sum of two": lambda y, x: F.binary_cross_entropy(torch.sigmoid(y), x, reduction="sum") + 0.5 * y.pow(2).sum(),
    "smooth": lambda y, x: F.smooth_l1_loss(y, x) + F.huber_loss(y, x),
    "soft margin": lambda y, x: F.soft_margin_loss(y, (x > 0.5).float() * 2 - 1),
    "one of many": lambda y, x: F.mse_loss(y, x, reduction="none").mean(1)[3],
    "cross entropy": lambda y, x: F.cross_entropy(y, x.argmax(1)),
    "divergence": lambda y, x: F.kl_div(F.log_softmax(y, 1), x, reduction="batchmean"),
}
OPTIONS: list[dict[str, Any]] = [{}, {"max_slowdown": 0.1}, {"minimise": "peak"}, {"arena": False}]


def layers(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_holds_its_own_bytes_and_its_step_needs_no_more_than_the_program_order(
    name: str, options: dict[str, Any]
) -> None:
    model = layers(64)
    other = copy.deepcopy(model)
    x = torch.rand(512, 64)

    def loss(model: Any, x: Any) -> Any:
        return LOSSES[name](model(x), x)

    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    step = olla.compile(model, optimizer=optimizer, loss=loss, time_limit=1.0, disk_cache=False, **options)
    losses = [step(x) for _ in range(3)]
    assert [value.untyped_storage().nbytes() for value in losses] == [4, 4, 4]
    report = step.report()
    assert report.planned_peak_bytes <= report.eager_peak_bytes
    if options.get("arena", True):
        assert report.measured_peak_bytes == report.planned_peak_bytes
        assert report.output_bytes == 64
    again = torch.optim.Adam(other.parameters(), foreach=False)
    for value in losses:
        again.zero_grad()
        expected = loss(other, x)
        expected.backward()
        again.step()
        assert same([value], [expected.detach()])
    assert same(list(model.parameters()), list(other.parameters()))


def storage(tensor: Any) -> int:
    return int(tensor.untyped_storage().nbytes())


def test_a_part_of_a_result_is_returned_without_the_rest() -> None:
    model, x = layers(64), torch.rand(512, 64)

    def loss(model: Any, x: Any) -> Any:
        y, z = model(x), model(2 * x)
        return y.square().mean(), {"first": y[:2], "turned": z[:, :3].t(), "wide": torch.zeros(3).expand(5, 3)}

    step = olla.compile(model, loss=loss, time_limit=1.0, disk_cache=False)
    for _ in range(3):
        _, parts = step(x)
    expected = loss(model, x)[1]
    assert same(list(parts.values()), [part.detach() for part in expected.values()])
    assert [storage(part) for part in parts.values()] == [2 * 64 * 4, 3 * 512 * 4, 12]
    report = step.report()
    assert report.measured_peak_bytes == report.planned_peak_bytes <= report.eager_peak_bytes


def test_parts_of_what_the_caller_has_and_parts_that_share_memory_stay_so() -> None:
    model, x = layers(64), torch.rand(512, 64)

    def loss(model: Any, x: Any) -> Any:
        y = model(x)
        return y.square().mean(), y[:2], y[1:], x[:3], model[0].weight[0]

    step = olla.compile(model, loss=loss, time_limit=1.0, disk_cache=False)
    for _ in range(2):
        _, head, tail, batch, weight = step(x)
    assert batch.data_ptr() == x.data_ptr()
    assert weight.data_ptr() == model[0].weight.data_ptr()
    assert head[1].data_ptr() == tail[0].data_ptr()
    inference = olla.compile(model, disk_cache=False)
    assert storage(inference(x)) == 512 * 64 * 4
