"""Bodies of training loops of many kinds: the planned step does what the loop does, to the bit, or is refused."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
from torch.nn.utils import clip_grad_norm_

import olla
from tests.support.pytorch.bodies import BODIES, batch_for, clipped_by_norm, ordinary, scaling, under_autocast, world_of
from tests.support.pytorch.steps import STEPS, World, agree, images, models, nn, same, square, tensors, torch

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("body", BODIES)
def test_bodies_of_loops_are_planned_and_equal_the_loop(body: Any) -> None:
    assert agree(world_of(body, batch_for(body)))


def test_an_ordinary_body_is_the_graph_of_its_loss() -> None:
    world = world_of(ordinary)
    graph = olla.capture(world.model, world.batch, optimizer=world.optimizer, step=ordinary).graph
    assert graph.digest == olla.capture(world.model, world.batch, optimizer=world.optimizer, loss=square).graph.digest


def test_clipping_works_on_transformers_with_several_groups_of_parameters() -> None:
    def body(model: Any, optimizer: Any, batch: Any) -> Any:
        output = model(**batch)
        output.loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return output.loss, output.logits

    torch.manual_seed(0)
    example = models.build("gpt2", 2, tiny=True, device="cpu")
    decayed = [p for p in example.model.parameters() if p.ndim > 1]
    others = [p for p in example.model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 1e-2}]
    assert agree(World(example.model, torch.optim.AdamW(groups, lr=1e-3), example.batch, None, body))


def test_what_the_body_holds_from_outside_is_what_it_is_given() -> None:
    """A body may use parameters, the model and the optimizer of the enclosing scope: planned and eager agree."""
    results = []
    for planned in (True, False):
        world = world_of(None)
        model, optimizer = world.model, world.optimizer
        parameters, average = list(model.parameters()), [p.detach().clone() for p in model.parameters()]

        def body(_: Any, __: Any, x: Any) -> Any:
            optimizer.zero_grad()  # noqa: B023
            loss = square(model, x) + 0.01 * sum(p.square().sum() for p in parameters)  # noqa: B023
            loss.backward()
            clip_grad_norm_(parameters, 0.1)  # noqa: B023
            optimizer.step()  # noqa: B023
            with torch.no_grad():
                for a, p in zip(average, parameters, strict=True):  # noqa: B023
                    a.lerp_(p, 0.5)
            return loss

        world.body = body
        step = world.compiled() if planned else lambda x: body(None, None, x)
        torch.manual_seed(7)
        losses = [step(world.batch).detach() for _ in range(STEPS)]
        results.append([*losses, *world.values(), *average])
    assert same(*results)


def test_micro_batches_add_up_in_grad_and_the_user_steps() -> None:
    worlds = [world_of(None), world_of(None)]
    batches = [images(), images() + 1]
    step = olla.compile(worlds[0].model, loss=lambda model, x: square(model, x) / 2, time_limit=0.3)
    for world, is_planned in zip(worlds, (True, False), strict=True):
        torch.manual_seed(7)
        for _ in range(STEPS):
            for x in batches:
                if is_planned:
                    step(x)
                else:
                    (square(world.model, x) / 2).backward()
            clip_grad_norm_(world.model.parameters(), 0.1)
            world.optimizer.step()
            world.optimizer.zero_grad()
    assert same(worlds[0].values(), worlds[1].values())


def test_two_models_in_one_body_are_one_module() -> None:
    def body(both: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad()
        with torch.no_grad():
            wanted = both["teacher"](x)
        loss = (both["student"](x) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    torch.manual_seed(0)
    both = nn.ModuleDict({"teacher": nn.Linear(4, 3).requires_grad_(False), "student": nn.Linear(4, 3)})
    world = World(both, torch.optim.SGD(both["student"].parameters(), 0.1), torch.randn(5, 4), None, body)
    assert agree(world)


def test_autocast_inside_the_loss_and_around_the_step_is_planned() -> None:
    for world in under_autocast("cpu", torch.bfloat16):
        assert agree(world)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("kind", ["LambdaLR", "CosineAnnealingLR", "OneCycleLR", "CyclicLR", "ReduceLROnPlateau"])
def test_schedules_of_learning_rate_and_momentum_need_one_capture(kind: str, optimizer: str) -> None:
    arguments: dict[str, Any] = {
        "LambdaLR": {"lr_lambda": lambda n: 1 / (1 + n)},
        "CosineAnnealingLR": {"T_max": 5},
        "OneCycleLR": {"max_lr": 0.1, "total_steps": 10},
        "CyclicLR": {"base_lr": 0.001, "max_lr": 0.1, "step_size_up": 2},
        "ReduceLROnPlateau": {"patience": 0},
    }[kind]
    worlds = [world_of(clipped_by_norm), world_of(clipped_by_norm)]
    if optimizer == "SGD":
        for world in worlds:
            world.optimizer = torch.optim.SGD(world.model.parameters(), lr=0.01, momentum=0.9)
    step = worlds[0].compiled()
    for world, run in zip(
        worlds, (step, lambda x: clipped_by_norm(worlds[1].model, worlds[1].optimizer, x)), strict=True
    ):
        schedule = getattr(torch.optim.lr_scheduler, kind)(world.optimizer, **arguments)
        torch.manual_seed(7)
        for _ in range(5):
            loss = run(world.batch)["loss"].detach()
            schedule.step(*([loss] if kind == "ReduceLROnPlateau" else []))
    assert same(worlds[0].values(), worlds[1].values())
    assert step.report().num_captures == 1


def test_averages_outside_the_step_follow_the_parameters() -> None:
    averages = []
    for planned in (True, False):
        world = world_of(ordinary)
        average = torch.optim.swa_utils.AveragedModel(world.model)
        step = world.compiled() if planned else lambda x: ordinary(world.model, world.optimizer, x)  # noqa: B023
        torch.manual_seed(7)
        for _ in range(STEPS):
            step(world.batch)
            average.update_parameters(world.model)
        averages.append(tensors(average.state_dict()))
    assert same(*averages)


def scheduling(model: Any, optimizer: Any, x: Any) -> Any:
    ordinary(model, optimizer, x)
    optimizer.param_groups[0]["lr"] = 0.5


def seeding(model: Any, optimizer: Any, x: Any) -> Any:
    torch.manual_seed(3)
    return ordinary(model, optimizer, x)


def drawing(model: Any, optimizer: Any, x: Any) -> Any:
    return ordinary(model, optimizer, x * random.random())


def drawing_numpy(model: Any, optimizer: Any, x: Any) -> Any:
    return ordinary(model, optimizer, x * np.random.rand())  # noqa: NPY002


def reading(model: Any, optimizer: Any, x: Any) -> Any:
    return ordinary(model, optimizer, x).item()


def telling_the_rate(model: Any, optimizer: Any, x: Any) -> Any:
    return ordinary(model, optimizer, x), optimizer.param_groups[0]["lr"]


def deciding(model: Any, optimizer: Any, x: Any) -> Any:
    optimizer.zero_grad()
    loss = square(model, x)
    loss.backward()
    if clip_grad_norm_(model.parameters(), 1.0) < 10:
        optimizer.step()


def second_optimizer(model: Any, optimizer: Any, x: Any) -> Any:
    ordinary(model, optimizer, x)
    torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1).step()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (scheduling, r"changes settings of the optimizer \(lr\).*schedule.step\(\) after"),
        (seeding, r"seeds a random number generator: seed it before"),
        (drawing, r"Python's random or from numpy.*Draw them with torch"),
        (drawing_numpy, r"Python's random or from numpy.*Draw them with torch"),
        (reading, r"returns a number read from a tensor.*Return the tensor"),
        (telling_the_rate, r"returns a number read from a tensor"),
        (deciding, r"needs the values of tensors.*test_coverage_loops.py"),
        (second_optimizer, r"steps a second optimizer \(SGD\)"),
        (scaling, r"GradScaler.*bfloat16"),
    ],
)
def test_bodies_that_cannot_be_captured_are_refused_and_nothing_is_changed(body: Any, message: str) -> None:
    world = world_of(body)
    before = copy.deepcopy(world.values())
    settings = copy.deepcopy(world.optimizer.state_dict())
    state = torch.get_rng_state()
    with pytest.raises(olla.CaptureError, match=message):
        world.compiled()(world.batch)
    assert same(world.values(), before)
    assert world.optimizer.state_dict() == settings
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in world.model.parameters())
    ordinary(world.model, world.optimizer, world.batch)  # the model and its optimizer still work


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss": square, "step": ordinary, "optimizer": True}, r"both loss and step"),
        ({"step": ordinary}, r"a step function needs an optimizer"),
        ({"step": 3, "optimizer": True}, r"step is a int, expected a function of model, optimizer and batch"),
    ],
)
def test_wrong_combinations_are_refused(arguments: dict[str, Any], message: str) -> None:
    world = world_of(None)
    if "optimizer" in arguments:
        arguments["optimizer"] = world.optimizer
    with pytest.raises(olla.CaptureError, match=message):
        olla.capture(world.model, world.batch, **arguments)
