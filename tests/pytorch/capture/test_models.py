"""Kinds of models, batches, losses and optimizers a step is captured from."""

from __future__ import annotations

from typing import Any

import pytest

import olla
from olla.pytorch.capture import optimizers
from olla.pytorch.capture.inputs import gather
from tests.support.pytorch.steps import STEPS, World, capture, images, net, nn, run, same, square, torch

pytestmark = pytest.mark.torch


def test_tied_weights_are_one_tensor_and_unused_and_frozen_parameters_have_no_state() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.embedding.weight
            self.frozen, self.unused = nn.Linear(4, 4).requires_grad_(False), nn.Linear(3, 3)

        def forward(self, x: Any) -> Any:
            return self.head(self.frozen(self.embedding(x)))

    torch.manual_seed(0)
    world = World(Tied(), None, torch.arange(5), square)
    world.optimizer = torch.optim.AdamW(world.model.parameters())
    step = capture(world)
    parameters = [i.name for i in step.inputs if i.kind == "parameter"]
    assert parameters == ["embedding.weight", "frozen.weight", "frozen.bias", "unused.weight", "unused.bias"]
    assert {i.key for i in step.inputs if i.kind == "optimizer_state"} == {"embedding.weight"}
    eager, captured = world.copy(), world.copy()
    assert same(captured.captured(step), eager.eager())
    assert same(captured.values(), eager.values())


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        ("SGD", {"lr": 0.1, "maximize": True}),
        ("Adam", {"amsgrad": True, "weight_decay": 0.01}),
        ("AdamW", {"lr": torch.tensor(0.01)}),
        ("AdamW", {"fused": True}),
    ],
)
def test_settings_of_the_optimizer_are_kept(kind: str, settings: dict[str, Any]) -> None:
    model = net()
    world = World(model, getattr(torch.optim, kind)(model.parameters(), **settings), images(), square)
    step = capture(world)
    eager, captured = world.copy(), world.copy()
    eager.optimizer.param_groups[0]["fused"] = False
    assert same(captured.captured(step), eager.eager())
    assert same(captured.values(), eager.values())


def test_learning_rate_follows_a_schedule() -> None:
    model = net()
    world = World(model, torch.optim.AdamW(model.parameters(), lr=0.1), images(), square)
    step = capture(world)
    results = []
    for take_step in (World.eager, lambda w, steps: w.captured(step, None, steps)):
        other = world.copy()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(other.optimizer, 0.5)
        for _ in range(STEPS):
            take_step(other, steps=1)
            other.optimizer._opt_called = True  # what scheduler.step() looks at
            scheduler.step()
        results.append(other.values())
    assert same(*results)
    unscheduled = world.copy()
    for _ in range(STEPS):
        unscheduled.eager(1)
    assert not same(results[0], unscheduled.values())


@pytest.mark.parametrize("settings", [{}, {"amsgrad": True}, {"capturable": True}, {"fused": True}])
@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_first_state_is_the_one_torch_creates(kind: str, settings: dict[str, Any]) -> None:
    parameter = nn.Parameter(torch.zeros(3, 2))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = getattr(torch.optim, kind)([parameter], weight_decay=0, **settings)
    ours = optimizers.first_state(optimizer, optimizer.param_groups[0], parameter)
    if not settings.get("capturable"):  # refuses to run on a CPU
        optimizer.step()
        theirs = optimizer.state[parameter]
        assert {k: (v.shape, v.dtype, v.device) for k, v in ours.items()} == {
            k: (v.shape, v.dtype, v.device) for k, v in theirs.items()
        }
        theirs["step"] -= 1
        assert same([ours[k] for k in sorted(ours)], [theirs[k] for k in sorted(theirs)])
    assert not any(v.any() for v in ours.values())


def test_gradients_are_outputs_without_an_optimizer() -> None:
    model = net()
    step = olla.capture(model, images(), loss=square)
    assert step.outputs == ["loss", *(f"gradient of {name}" for name, _ in model.named_parameters())]
    torch.manual_seed(7)
    loss, *gradients = run(step, gather(step.inputs, model, images(), None))
    twin = net()
    torch.manual_seed(7)
    expected = square(twin, images())
    expected.backward()
    assert same([loss, *gradients], [expected, *(p.grad for p in twin.parameters())])


def test_inference_takes_batches_of_any_structure_and_returns_all_tensors() -> None:
    class Two(nn.Module):
        def forward(self, x: Any, y: Any = None, flag: bool = False) -> Any:
            return {"sum": x + y["z"], "rest": (x * 2 if flag else None, "text")}

    batch = {"x": torch.ones(2), "y": {"z": torch.ones(2)}, "flag": True}
    step = olla.capture(Two(), batch)
    assert sorted(step.outputs) == ["output[rest][0]", "output[sum]"]
    assert set(step.graph.op_kinds) == {"forward"}
    assert [i.name for i in step.inputs] == ["batch[x]", "batch[y][z]"]
    results = dict(zip(step.outputs, run(step, gather(step.inputs, Two(), batch, None)), strict=True))
    assert results["output[sum]"].tolist() == [2, 2]


def test_loss_may_come_with_metrics_and_constants_are_tensors_of_the_graph() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.scale = torch.tensor([1.0, 2.0, 3.0])

        def forward(self, x: Any) -> Any:
            return self.linear(x) * self.scale + torch.tensor([0.5, 0.25, 0.125])

    def loss(model: nn.Module, x: Any) -> Any:
        y = model(x)
        return y.sum(), {"mean": y.mean()}

    torch.manual_seed(0)
    model, x = Scaled(), torch.ones(2, 3)
    step = olla.capture(model, x, loss=loss)
    assert step.outputs[:2] == ["loss", "output[0][mean]"]
    assert "constant" in step.graph.tensor_kinds
    result = run(step, gather(step.inputs, model, x, None))
    assert same(result[:2], [loss(model, x)[0].detach(), loss(model, x)[1]["mean"].detach()])


def test_number_read_from_a_tensor_is_part_of_the_step() -> None:
    def loss(model: nn.Module, x: Any) -> Any:
        y = model(x)
        return (y * y.detach().abs().max().item()).sum()

    torch.manual_seed(0)
    model, x = nn.Linear(3, 3), torch.ones(2, 3)
    step = olla.capture(model, x, loss=loss)
    for factor in (1, 2):
        values = gather(step.inputs, model, factor * x, None)
        assert torch.equal(run(step, values)[0], loss(model, factor * x))


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_layers_run_without_the_workspace_of_onednn(kind: str) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = getattr(nn, kind)(4, 8, batch_first=True)

        def forward(self, x: Any) -> Any:
            return self.layer(x)[0]

    torch.manual_seed(0)
    model = Recurrent()
    world = World(model, torch.optim.SGD(model.parameters(), 0.1), torch.randn(2, 5, 4), square)
    step = capture(world)
    eager, captured = world.copy(), world.copy()
    torch.testing.assert_close(captured.captured(step), eager.eager())
    torch.testing.assert_close(captured.values(), eager.values())
    assert torch.backends.mkldnn.enabled
