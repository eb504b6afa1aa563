"""The page of a compiled step: what was captured beside what runs, and the arena as it is at run time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import olla
from olla.picture.blocks import Block
from olla.picture.scene import Scene, peak_bytes
from olla.pytorch.reports import step_scene
from tests.support.pytorch.planned import compiled, planned, runner_of, world_of
from tests.support.pytorch.steps import nn, torch

pytestmark = pytest.mark.torch


def scene_of_step(step: Any) -> Scene:
    runner = runner_of(step)
    return step_scene(runner._planned, runner._arranged, step.report())


def overlaps(blocks: list[Block]) -> list[tuple[Block, Block]]:
    """Return the pairs that lie in the same bytes at the same time."""
    first, last, low, size = (np.array([getattr(b, n) for b in blocks]) for n in ("first", "last", "offset", "size"))
    found = []
    for i, block in enumerate(blocks):
        both = (
            (first < block.last)
            & (last > block.first)
            & (low < block.offset + block.size)
            & (low + size > block.offset)
        )
        found += [(block, blocks[j]) for j in np.flatnonzero(both) if j > i]
    return found


@pytest.mark.parametrize("options", [{}, {"minimise": "peak"}, {"minimise": "peak", "chunked_loss": 2}])
def test_the_page_shows_what_was_captured_and_what_runs(options: dict[str, Any]) -> None:
    world = world_of("gpt2", "adamw")
    step = compiled(world, **options)
    planned(world, step)
    scene, report = scene_of_step(step), step.report()
    assert report.in_arena
    assert peak_bytes(scene.before, scene.given.num_ops) == report.eager_peak_bytes
    assert peak_bytes(scene.after, scene.planned.num_ops) == report.planned_peak_bytes
    assert scene.arena_bytes == report.arena_bytes > 0
    inside = [b for b in scene.after if b.offset < scene.arena_bytes]
    assert max(b.offset + b.size for b in inside) <= scene.arena_bytes
    assert overlaps(inside) == []
    assert {b.kind for b in scene.after} > {"parameter", "optimizer_state", "temporary", "workspace"}
    written = {b.label for b in inside if b.kind == "temporary"}
    assert len(written & {*scene.planned.tensor_names}) > 0.9 * len(written)  # some in chunks have no name
    if options:
        assert report.planned_peak_bytes < report.eager_peak_bytes


def test_a_step_found_on_disk_is_drawn_as_it_was_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLA_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("OLLA_DISK_CACHE")
    blocks = []
    for _ in range(2):
        world = world_of("mlp", "adamw")
        step = compiled(world, disk_cache=True)
        planned(world, step)
        blocks.append(scene_of_step(step).after)
    assert step.report().cached
    assert blocks[0] == blocks[1]


def test_a_step_without_an_arena_is_drawn_and_says_so(tmp_path: Path) -> None:
    world = world_of("mlp", "momentum")
    step = compiled(world, arena=False)
    with pytest.raises(olla.ReplayError):
        step.plot(tmp_path / "page.html")
    planned(world, step)
    scene = scene_of_step(step)
    assert dict(scene.figures)["arena"] == "none"
    assert "arena=False" in scene.no_arena
    assert peak_bytes(scene.after, scene.planned.num_ops) == step.report().planned_peak_bytes
    assert peak_bytes(scene.before, scene.given.num_ops) == step.report().eager_peak_bytes
    step.plot(tmp_path / "page.html")
    step.memory_viz(tmp_path / "step.pickle")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "step.pickle"]


def test_modules_and_lines_of_the_user_are_on_the_page(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = olla.compile(model, optimizer=optimizer, loss=lambda model, x: model(x).square().mean(), minimise="peak")
    for _ in range(3):
        step(torch.ones(256, 64))
    step.plot(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    for name in ("test_drawing.py:", '"0"', '"3"'):
        assert name in page
