"""olla.compile: the planned step computes what the captured graph computes, and the user's tensors stay the user's."""

from __future__ import annotations

import gc
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import olla
from olla.pytorch.capture.inputs import gather
from olla.pytorch.memory import extension
from tests.support.pytorch.planned import NUM_STEPS, compiled, planned, reference, runner_of, world_of
from tests.support.pytorch.steps import images, models, net, nn, run, same, square, torch

pytestmark = pytest.mark.torch
ARENA = [True, False]


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("name", ["gpt2", "bert_base", "vit_b16", "resnet50", "mlp"])
def test_losses_parameters_buffers_and_optimizer_state_are_those_of_the_program_order(
    name: str, optimizer: str
) -> None:
    world = world_of(name, optimizer)
    other = world.copy()
    step = compiled(world)
    losses = planned(world, step)
    assert same(losses, reference(other, step))
    assert same(world.values(), other.values())
    assert len({float(x) for x in losses}) == NUM_STEPS
    report = step.report()
    assert (report.in_arena, report.num_steps) == (True, NUM_STEPS)
    assert report.resident_bytes < report.measured_peak_bytes == report.planned_peak_bytes <= report.eager_peak_bytes
    assert (report.num_misses, report.missed_bytes, report.misses) == (0, 0, ())


def test_without_an_arena_the_numbers_are_the_same() -> None:
    world = world_of("resnet50", "adamw")
    other = world.copy()
    step = compiled(world, arena=False)
    assert same(planned(world, step), planned(other, compiled(other)))
    assert same(world.values(), other.values())
    report = step.report()
    assert (report.in_arena, report.arena_bytes, report.measured_peak_bytes) == (False, 0, None)


def test_without_a_compiler_a_warning_says_what_to_install_and_the_step_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(extension, "_modules", {})
    monkeypatch.setenv("OLLA_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    world = world_of("mlp", "momentum")
    other = world.copy()
    step = compiled(world)
    with pytest.warns(UserWarning, match=r"in no arena.*Install one"):
        losses = planned(world, step)
    assert same(losses, reference(other, step))
    assert "no-such-compiler" in step.report().note


def test_requests_that_differ_from_the_recorded_ones_are_counted_and_recorded_again() -> None:
    world = world_of("mlp", "momentum")
    other = world.copy()
    step = compiled(world)
    losses = planned(world, step, 1)
    runner = runner_of(step)
    table = runner._arranged.table
    runner._arranged = runner._arranged._replace(
        table=table._replace(num_bytes=table.num_bytes + 1, offsets=table.offsets * 0 - 1)
    )
    losses.append(step(world.batch))
    report = step.report()
    assert report.num_misses == len(table.num_bytes)
    assert report.missed_bytes == table.num_bytes.sum()
    losses += [step(world.batch) for _ in range(3)]
    assert same(losses, reference(other, step))
    assert step.report().num_misses == 0
    assert step.report().measured_peak_bytes == step.report().planned_peak_bytes


def test_learning_rate_schedules_work_without_a_second_capture() -> None:
    world = world_of("mlp", "momentum")
    other = world.copy()
    step = compiled(world)
    schedule = torch.optim.lr_scheduler.ExponentialLR(world.optimizer, 0.5)
    torch.manual_seed(7)
    losses = []
    for _ in range(NUM_STEPS):
        losses.append(step(world.batch))
        schedule.step()
    schedule = torch.optim.lr_scheduler.ExponentialLR(other.optimizer, 0.5)
    torch.manual_seed(7)
    expected = []
    for _ in range(NUM_STEPS):
        other.optimizer.zero_grad()
        loss = other.loss(other.model, other.batch)
        loss.backward()
        other.optimizer.step()
        expected.append(loss.detach())
        schedule.step()
    assert same(losses, expected)
    assert same(world.values(), other.values())
    assert step.report().num_captures == 1


def test_state_dicts_loaded_between_steps_are_used() -> None:
    world = world_of("mlp", "adamw")
    step = compiled(world)
    planned(world, step, 2)
    saved = world.copy()
    first = planned(world, step, 3)
    after = [v.clone() for v in world.values()]
    world.model.load_state_dict(saved.model.state_dict())
    world.optimizer.load_state_dict(saved.optimizer.state_dict())
    assert same(planned(world, step, 3), first)
    assert same(world.values(), after)


def test_settings_that_are_equal_are_no_others() -> None:
    world = world_of("mlp", "momentum")
    step = compiled(world)
    group = world.optimizer.param_groups[0]
    for decay in ("0.25", "0.25", "0.5"):
        group["weight_decay"] = float(decay)  # a number of its own each time
        step(world.batch)
    assert step.report().num_captures == 2


def test_evaluation_in_between_sees_the_trained_parameters_and_changes_nothing() -> None:
    world = world_of("resnet50", "momentum")
    other = world.copy()
    step = compiled(world)
    losses = planned(world, step, 2)
    state = torch.get_rng_state()
    world.model.eval()
    with torch.no_grad():
        world.model(pixel_values=world.batch["pixel_values"])
    world.model.train()
    torch.set_rng_state(state)
    losses += [step(world.batch) for _ in range(2)]
    assert same(losses, reference(other, step, 4))
    assert step.report().num_captures == 1


def test_another_mode_of_a_module_and_a_frozen_parameter_are_captured_anew() -> None:
    world = world_of("mlp", "momentum")
    step = compiled(world)
    step(world.batch)
    world.model[2].eval()
    losses = {float(step(world.batch)) for _ in range(2)}
    assert len(losses) == 2
    world.model[0].weight.requires_grad_(False)
    before = world.model[0].weight.clone()
    step(world.batch)
    assert torch.equal(world.model[0].weight, before)
    assert step.report().num_captures == 3


def test_two_models_work_alternately() -> None:
    worlds = [world_of("mlp", "adamw"), world_of("gpt2", "momentum")]
    others = [w.copy() for w in worlds]
    steps = [compiled(w) for w in worlds]
    torch.manual_seed(7)
    losses = [step(w.batch) for _ in range(3) for step, w in zip(steps, worlds, strict=True)]
    captured = [runner_of(step)._captured for step in steps]
    torch.manual_seed(7)
    expected = [
        run(c, gather(c.inputs, w.model, w.batch, w.optimizer))[0]
        for _ in range(3)
        for c, w in zip(captured, others, strict=True)
    ]
    assert same(losses, expected)


def test_a_new_batch_size_is_captured_once_and_the_cache_is_bounded() -> None:
    world = world_of("mlp", "momentum")
    step = compiled(world, cache_size=2)
    for size in (4, 2, 4, 2):
        assert step(torch.randn(size, 6)).shape == ()
    assert step.report().num_captures == 2
    with pytest.warns(UserWarning, match="more than 2 captures"):
        step(torch.randn(3, 6))
    assert step.report().num_captures == 2


def test_one_tensor_twice_in_a_batch_is_another_capture_than_two_tensors() -> None:
    step = olla.compile(nn.Linear(2, 2), loss=lambda model, b: (model(b[0]) * b[1]).sum())
    one, two = torch.ones(2, 2), torch.zeros(2, 2)
    assert float(step((one, one))) != 0.0
    assert float(step((one, two))) == 0.0


def test_outputs_survive_the_next_step() -> None:
    step = olla.compile(net(), loss=lambda model, x: (square(model, x), {"logits": model(x), "name": "x"}))
    loss, metrics = step(images())
    kept = loss.clone(), metrics["logits"].clone()
    for _ in range(3):
        step(images())
    assert same([loss, metrics["logits"]], list(kept))
    assert metrics["name"] == "x"


def test_what_no_step_can_give_back_is_refused() -> None:
    step = olla.compile(net(), loss=lambda model, x: (square(model, x), object()), on_unsupported="raise")
    with pytest.raises(olla.CaptureError, match="returns a object"):
        step(images())


@pytest.mark.parametrize("arena", ARENA)
def test_without_optimizer_gradients_add_up_in_grad(arena: bool) -> None:
    ours, eager = net(), net()
    for model in (ours, eager):
        model[4].p = 0.0
    step = olla.compile(ours, loss=square, arena=arena)
    for _ in range(4):
        loss = step(images())
        expected = square(eager, images())
        expected.backward()
        assert torch.equal(loss, expected)
    assert same([p.grad for p in ours.parameters()], [p.grad for p in eager.parameters()])


def test_gradients_that_share_memory_are_kept_apart() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, x: Any) -> Any:
            return (self.a + self.b + x).sum()

    model = Sum()
    step = olla.compile(model, loss=lambda m, x: m(x))
    for _ in range(2):
        step(torch.ones(3))
    assert model.a.grad.tolist() == model.b.grad.tolist() == [2.0, 2.0, 2.0]
    assert model.a.grad.data_ptr() != model.b.grad.data_ptr()


def test_inference_returns_what_the_model_returns() -> None:
    example = models.build("bert_base", 2, tiny=True, device="cpu")
    model = example.model.eval()
    step = olla.compile(model)
    for _ in range(3):
        answer = step(example.batch)
    with torch.no_grad():
        expected = model(**example.batch)
    assert type(answer) is type(expected)
    assert torch.equal(answer.logits, expected.logits)
    assert torch.equal(answer.loss, expected.loss)


def test_an_exception_in_any_op_leaves_later_steps_correct() -> None:
    world = world_of("mlp", "adamw")
    step = compiled(world)
    planned(world, step, 2)
    runner = runner_of(step)
    constants = runner.program.__globals__
    operators = [name for name, value in constants.items() if name.startswith("c") and callable(value)]
    assert len(operators) > 10
    for name in operators[::2]:
        saved = world.copy()
        torch.manual_seed(7)
        original = constants[name]
        constants[name] = interrupt
        with pytest.raises(KeyboardInterrupt):
            step(world.batch)
        constants[name] = original
        world.model.load_state_dict(saved.model.state_dict())
        world.optimizer.load_state_dict(saved.copy().optimizer.state_dict())  # it takes over the tensors it is given
        assert same(planned(world, step, 2), reference(saved, step, 2))
        assert same(world.values(), saved.values())
    assert step.report().num_misses == 0


def interrupt(*args: Any, **kwargs: Any) -> None:
    raise KeyboardInterrupt


def test_a_step_that_calls_a_step_is_refused_and_stays_usable() -> None:
    world = world_of("mlp", "momentum")
    inner = olla.compile(world.model)
    outer = olla.compile(world.model, loss=lambda model, x: inner(x).sum(), on_unsupported="raise")
    with pytest.raises(olla.OllaError, match="while another one runs"):
        outer(world.batch)
    assert inner(world.batch).shape == (4, 3)


def test_threads_that_call_one_step_take_turns() -> None:
    world = world_of("mlp", "momentum")
    step = compiled(world)
    step(world.batch)
    with ThreadPoolExecutor(3) as pool:
        losses = list(pool.map(step, [world.batch] * 30))
    assert len({float(x) for x in losses}) == 30
    assert step.report().num_steps == 31
    assert step.report().num_misses == 0


def test_many_steps_leave_no_tensor_behind() -> None:
    world = world_of("mlp", "adamw")
    step = compiled(world)
    planned(world, step, 3)

    def num_tensors() -> int:
        while gc.collect():  # stand-ins of Dynamo's take two rounds
            pass
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())

    before = num_tensors()
    for _ in range(200):
        step(world.batch)
    assert num_tensors() == before


def test_report_is_a_table_and_needs_a_step() -> None:
    world = world_of("mlp", "momentum")
    step = compiled(world)
    with pytest.raises(olla.ReplayError, match="has not run yet"):
        step.report()
    planned(world, step, 3)
    text = str(step.report())
    assert "planned peak" in text
    assert "time per step" in text


def test_a_model_elsewhere_is_refused() -> None:
    with pytest.raises(olla.ReplayError, match="the model is on cpu"):
        olla.compile(net(), device="meta")
    assert olla.compile(net(), device="cpu")(images()).shape == (2, 5)
