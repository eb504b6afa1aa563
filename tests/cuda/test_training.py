"""Training loops on CUDA: the bodies of tests/pytorch, mixed precision, optimizers of all kinds, distributed ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import olla  # noqa: E402
from tests.support.pytorch.bodies import BODIES, batch_for, ordinary, scaling, under_autocast, world_of  # noqa: E402
from tests.support.pytorch.steps import World, agree, images, nn, same, square  # noqa: E402


@pytest.mark.parametrize("body", BODIES)
def test_bodies_of_loops_are_planned_and_equal_the_loop(device: torch.device, body: Any) -> None:
    assert agree(world_of(body, batch_for(body), device="cuda"), arena=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast_inside_the_loss_and_around_the_step_is_planned(device: torch.device, dtype: torch.dtype) -> None:
    for world in under_autocast("cuda", dtype):
        assert agree(world, arena=True)


def test_a_scaler_of_gradients_is_refused_and_nothing_is_changed(device: torch.device) -> None:
    """It reads whether a gradient overflowed, and leaves the update out if so."""
    world = world_of(scaling, device="cuda")
    before = copy.deepcopy(world.values())
    with pytest.raises(olla.CaptureError, match=r"GradScaler.*bfloat16"):
        world.compiled(arena=True, on_unsupported="raise")(world.batch)
    assert same(world.values(), before)
    scaling(world.model, world.optimizer, world.batch)  # the model and its optimizer still work
    assert not same(world.values(), before)


def test_a_scaler_around_a_step_without_an_optimizer_trains_as_the_loop(device: torch.device) -> None:
    """What a GradScaler decides by values stays outside: the step leaves scaled gradients in .grad."""
    worlds = [world_of(None, device="cuda", foreach=False) for _ in range(2)]
    results = []
    for world, is_planned in zip(worlds, (True, False), strict=True):
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40, growth_interval=2)  # overflows at first

        def scaled(model: Any, x: Any) -> Any:
            with torch.autocast("cuda", torch.float16):
                return square(model, x["images"]) * x["scale"]

        step = olla.compile(world.model, loss=scaled, time_limit=0.3, arena=True)
        torch.manual_seed(7)
        for _ in range(8):
            batch = {"images": world.batch, "scale": scaler.scale(torch.ones((), device="cuda"))}
            if is_planned:
                step(batch)
            else:
                scaled(world.model, batch).backward()
            scaler.step(world.optimizer)
            scaler.update()
            world.optimizer.zero_grad()
        results.append([*world.values(), torch.tensor(scaler.get_scale())])
        if is_planned:
            assert (step.report().num_misses, step.report().num_captures) == (0, 1)
    assert same(*results)
    assert scaler.get_scale() < 2.0**40


SETTINGS = {
    "adamw": {},
    "for each": {"foreach": True},
    "fused": {"fused": True},
    "amsgrad": {"amsgrad": True},
    "capturable": {"capturable": True},
    "fused and capturable": {"fused": True, "capturable": True},
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_optimizers_of_any_kind_are_one_update_per_parameter(device: torch.device, kind: str) -> None:
    world = world_of(ordinary, device="cuda", **SETTINGS[kind])
    eager = world.copy()
    eager.optimizer = torch.optim.AdamW(
        eager.model.parameters(), lr=0.01, **SETTINGS[kind] | {"foreach": False, "fused": False}
    )
    assert same(world.planned(world.compiled(arena=True)), eager.eager())
    assert same(world.values(), eager.values())


@pytest.mark.parametrize("kind", ["for each", "fused"])
def test_a_loop_goes_on_without_olla_where_the_step_ended(device: torch.device, kind: str) -> None:
    """State made by a planned step is what the optimizer's own step takes, and the other way round."""
    world = world_of(ordinary, device="cuda", **SETTINGS[kind])
    step = world.compiled(arena=True)
    world.planned(step, 2)
    layout = {k: (v.shape, v.dtype, v.device) for k, v in next(iter(world.optimizer.state.values())).items()}
    world.eager(2)
    assert {k: (v.shape, v.dtype, v.device) for k, v in next(iter(world.optimizer.state.values())).items()} == layout
    world.planned(step, 2)
    assert (step.report().num_captures, step.report().num_misses) == (1, 0)
    assert {float(state["step"]) for state in world.optimizer.state.values()} == {6.0}


def test_hooks_of_gradients_are_part_of_the_step(device: torch.device) -> None:
    def halve(parameter: nn.Parameter) -> None:
        parameter.grad.mul_(0.5)

    def world() -> World:
        made = world_of(ordinary, device="cuda")
        first, second, *_ = made.model.parameters()
        first.register_hook(lambda gradient: gradient * 2)
        second.register_post_accumulate_grad_hook(halve)
        return made

    planned, plain = world(), world_of(ordinary, device="cuda", foreach=False)
    eager = world()
    for group in eager.optimizer.param_groups:
        group["foreach"] = False
    assert same(planned.planned(planned.compiled(arena=True)), eager.eager())
    assert same(planned.values(), eager.values())
    plain.eager()
    assert not same(planned.values(), plain.values())


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(192, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8)).cuda()


def trained(model: nn.Module, step: Any, num_steps: int = 6) -> list[Any]:
    return [*(step(images().flatten(1).cuda()).detach().cpu() for _ in range(num_steps)), *model.state_dict().values()]


def loop_of(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = square(model, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@pytest.mark.usefixtures("group")
def test_the_module_inside_a_distributed_one_trains_as_that_one(device: torch.device) -> None:
    """Buckets, their hooks and streams of communication belong to the wrapper."""
    wrapped = nn.parallel.DistributedDataParallel(layers(), device_ids=[0], bucket_cap_mb=0.1)
    expected = trained(wrapped, loop_of(wrapped))
    wrapped = nn.parallel.DistributedDataParallel(layers(), device_ids=[0], bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    step = olla.compile(wrapped.module, optimizer=optimizer, loss=square, time_limit=0.3, arena=True)
    assert same(trained(wrapped, step), expected)
    assert step.report().num_misses == 0


@pytest.mark.usefixtures("group")
def test_a_distributed_loop_in_a_pool_trains_as_without(device: torch.device) -> None:
    """Gradients are reduced on streams and threads of their own, whose requests are not planned."""
    wrapped = nn.parallel.DistributedDataParallel(layers(), device_ids=[0], bucket_cap_mb=0.1)
    expected = trained(wrapped, loop_of(wrapped), 8)
    wrapped = nn.parallel.DistributedDataParallel(layers(), device_ids=[0], bucket_cap_mb=0.1)
    inner = loop_of(wrapped)
    with olla.pool("cuda") as pool:

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = inner(x)
            pool.step()
            return loss

        found = trained(wrapped, step, 8)
        report = pool.report()
    assert same(found, expected)
    assert report.state == "planned"
    assert report.served_bytes >= 0.9 * report.requested_bytes
