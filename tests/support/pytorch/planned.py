"""Tiny models in training mode, the steps that olla.compile makes of them, and what they give."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import olla
from tests.support.pytorch.steps import World, models, nn, same, square, tensors, topological, torch

NUM_STEPS = 5


def mlp() -> World:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))
    return World(model, None, torch.randn(4, 6), square)


def world_of(name: str, optimizer: str, device: str = "cpu") -> World:
    """A tiny model in training mode, dropout on, with its optimizer."""
    torch.manual_seed(0)
    if name == "mlp":
        world = mlp()
    else:
        example = models.build(name, 2, tiny=True, device=device)
        world = World(example.model, None, example.batch, example.loss)
    world.optimizer = optimizer_of(optimizer, world.model)
    return world


def optimizer_of(name: str, model: nn.Module) -> Any:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def compiled(world: World, **options: Any) -> Any:
    return olla.compile(world.model, optimizer=world.optimizer, loss=world.loss, time_limit=1.0, **options)


def planned(world: World, step: Any, num_steps: int = NUM_STEPS) -> list[Any]:
    torch.manual_seed(7)
    return [step(world.batch) for _ in range(num_steps)]


def runner_of(step: Any) -> Any:
    """What runs the shapes that the step ran with last."""
    return step._latest


def reference(world: World, step: Any, num_steps: int = NUM_STEPS) -> list[Any]:
    """The graph that the step captured, in program order on torch's own allocator."""
    return world.captured(runner_of(step)._captured, None, num_steps)


def train(world: World, **options: Any) -> tuple[Any, list[Any]]:
    """Five steps; returns the step, and losses, parameters, buffers and optimizer state."""
    step = olla.compile(
        world.model, optimizer=world.optimizer, loss=world.loss, **{"time_limit": 10.0, "disk_cache": False} | options
    )
    torch.manual_seed(7)
    losses = [t for _ in range(NUM_STEPS) for t in tensors(step(world.batch))]
    return step, [*losses, *world.values()]


@functools.cache
def unbudgeted(name: str, optimizer: str) -> tuple[Any, list[Any]]:
    step, values = train(world_of(name, optimizer))
    return step.report(), values


def require_as_planned(report: Any) -> None:
    assert report.in_arena
    assert report.num_misses == 0, report.misses
    assert report.measured_peak_bytes == report.planned_peak_bytes


def require_exact_requests(world: World) -> None:
    """Train in random orders, at addresses that follow from one recording: no request is missed."""
    from olla.pytorch.binding import flatten
    from olla.pytorch.cache import Place
    from olla.pytorch.memory.requests import Requests

    other = world.copy()
    step = compiled(world, arena=True)
    losses = planned(world, step, 3)  # the first call may fill caches of libraries
    runner = runner_of(step)
    replay, graph = runner._replay, runner._captured.graph
    capture = step._captures.latest
    runner.__init__(runner._captured, runner.plan, replay, "", Place(""))  # record again
    seen: dict[str, Any] = {}
    arrange = runner._arrange
    runner._arrange = lambda replay, recorded: (seen.update(recorded=recorded), arrange(replay, recorded))
    leaves = flatten(world.batch)[0]
    losses += [runner.run(capture.gather(leaves))[0] for _ in range(2)]
    requests = Requests.of(seen["recorded"], runner._recorder.addresses, graph)
    rng = np.random.default_rng(0)
    for _ in range(3):
        order = topological(graph, lambda v: rng.random())
        runner._planned.plan = olla.plan(runner.graph, order=order, layout=False, time_limit=1.0)
        runner._lay_out(replay, requests.in_order(graph, order), None)
        runner.figures.seen = type(runner.figures.seen)()
        losses.append(runner.run(capture.gather(leaves))[0])
        report = runner.report(1)
        assert report.misses == ()
        assert report.measured_peak_bytes == report.planned_peak_bytes
    assert same(losses, reference(other, step, 8))
    assert same(world.values(), other.values())


def require_costs(world: World) -> None:
    """A step shows its graph with workspaces and seconds, and the plan of that graph."""
    step = compiled(world)
    with pytest.raises(olla.ReplayError, match="has not run yet"):
        _ = step.graph
    planned(world, step, 2)
    graph = step.graph
    assert graph.workspace_bytes.max() > 0
    assert (graph.seconds > 0).all()
    assert 0 < graph.seconds.sum() < step.report().record_seconds
    olla.check(graph, step.plan)
    assert step.report().slowest[0][1] == graph.seconds.max()
    assert "slowest when recorded" in str(step.report())
