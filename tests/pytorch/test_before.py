"""Compiled steps are measured against what was captured, in program order, the same tensors on both sides."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

import olla
from olla.picture.scene import peak_bytes
from olla.pytorch.reports import step_scene
from tests.support import oracle
from tests.support.pytorch.planned import planned, runner_of, world_of
from tests.support.pytorch.steps import World, nn, torch

pytestmark = pytest.mark.torch
GOALS: list[dict[str, Any]] = [{}, {"max_slowdown": 0.3}, {"minimise": "peak"}, {"max_slowdown": 0.3, "swap": True}]


def layers(num: int = 4, width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(num) for layer in (nn.Linear(width, width), nn.GELU())])


def mean_square(model: Any, x: Any) -> Any:
    return model(x).square().mean()


def rounded(graph: olla.Graph, alignment: int = 64) -> olla.Graph:
    """The graph with what its ops write in sizes that an allocator gives."""
    sizes = graph.tensor_bytes.copy()
    written = graph.writes.item
    sizes[written] = -(-sizes[written] // alignment) * alignment
    return dataclasses.replace(graph, tensor_bytes=sizes)


def program_order(graph: olla.Graph) -> int:
    return oracle.peak(graph, range(graph.num_ops))


@pytest.mark.parametrize(("num", "width", "rows"), [(4, 64, 128), (1, 256, 2), (3, 32, 1000)])
def test_gradients_that_a_step_gives_back_count_on_both_sides(num: int, width: int, rows: int) -> None:
    model = layers(num, width)
    step = olla.compile(model, loss=mean_square, time_limit=1.0, disk_cache=False)
    size = 4 * num * (width + 1) * width
    for held in (0, 0, size, size):  # the first call is recorded
        if not held:
            model.zero_grad()
        step(torch.rand(rows, width))
        report = step.report()
        assert report.held_gradient_bytes == held
        assert ("held gradients" in str(report)) == bool(held)
    assert report.output_bytes >= size
    assert report.measured_peak_bytes == report.planned_peak_bytes <= report.eager_peak_bytes
    assert report.planned_peak_bytes >= report.resident_bytes + report.output_bytes
    assert "saves -" not in str(report)


@pytest.mark.parametrize("arena", [True, False])
@pytest.mark.parametrize("goal", GOALS, ids=str)
def test_a_step_is_measured_against_its_captured_graph_whatever_the_goal(goal: dict[str, Any], arena: bool) -> None:
    world = world_of("gpt2", "adamw")
    step = olla.compile(
        world.model, optimizer=world.optimizer, loss=world.loss, time_limit=1.0, arena=arena, disk_cache=False, **goal
    )
    planned(world, step, 3)
    given, plan, report = runner_of(step)._planned.given(), step.plan, step.report()
    captured = olla.capture(world.model, world.batch, optimizer=world.optimizer, loss=world.loss).graph
    assert given.num_ops == captured.num_ops
    assert given.workspace_bytes.any() == arena  # what was recorded
    assert plan.program_peak_bytes == program_order(given)
    assert report.eager_peak_bytes == program_order(rounded(given) if arena else given)
    assert plan.peak_bytes <= plan.program_peak_bytes
    assert report.planned_peak_bytes <= report.eager_peak_bytes
    if goal:
        assert plan.rewrites
        assert report.planned_peak_bytes < report.eager_peak_bytes


def test_a_step_with_its_loss_in_chunks_is_measured_against_the_whole_one() -> None:
    torch.manual_seed(0)
    model, target = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4000)), torch.arange(64)
    world = World(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.randn(64, 16),
        lambda model, x: F.cross_entropy(model(x), target),
    )
    step = olla.compile(
        world.model, optimizer=world.optimizer, loss=world.loss, minimise="peak", chunked_loss=8, disk_cache=False
    )
    planned(world, step, 3)
    plan, report = step.plan, step.report()
    assert plan.chunked is not None
    given = runner_of(step)._planned.given()
    assert given.num_ops < plan.chunked.graph.num_ops
    assert plan.program_peak_bytes == program_order(given)
    assert report.eager_peak_bytes == program_order(rounded(given))
    assert report.planned_peak_bytes < report.eager_peak_bytes / 2
    require_drawn_as_reported(step)


@pytest.mark.parametrize("arena", [True, False])
@pytest.mark.parametrize("goal", GOALS, ids=str)
def test_the_page_of_a_step_draws_the_captured_step_beside_what_runs(goal: dict[str, Any], arena: bool) -> None:
    world = world_of("gpt2", "momentum")
    step = olla.compile(
        world.model, optimizer=world.optimizer, loss=world.loss, time_limit=1.0, arena=arena, disk_cache=False, **goal
    )
    planned(world, step, 2)
    require_drawn_as_reported(step)


def require_drawn_as_reported(step: Any) -> None:
    runner, report = runner_of(step), step.report()
    scene = step_scene(runner._planned, runner._arranged, report)
    captured = runner._captured.original or runner._captured
    assert scene.given.num_ops == captured.graph.num_ops
    assert peak_bytes(scene.before, scene.given.num_ops) == report.eager_peak_bytes
    assert peak_bytes(scene.after, scene.planned.num_ops) == report.planned_peak_bytes


def test_a_step_found_on_disk_is_measured_against_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLA_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("OLLA_DISK_CACHE", raising=False)
    reports, peaks = [], []
    for _ in range(2):
        world = world_of("gpt2", "adamw")
        step = olla.compile(
            world.model, optimizer=world.optimizer, loss=world.loss, time_limit=1.0, max_slowdown=0.3, arena=True
        )
        planned(world, step, 3)
        reports.append(step.report())
        peaks.append(step.plan.program_peak_bytes)
    assert [report.cached for report in reports] == [False, True]
    assert peaks[0] == peaks[1]
    assert reports[0].eager_peak_bytes == reports[1].eager_peak_bytes
    assert reports[0].planned_peak_bytes == reports[1].planned_peak_bytes == reports[1].measured_peak_bytes
