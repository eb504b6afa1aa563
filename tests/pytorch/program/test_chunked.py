"""Losses in chunks of rows, run: the same loss and gradients but for rounding, in less memory, and as planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import olla
from olla.chunk import chunked
from olla.chunk.losses import regions
from olla.plan import Link
from olla.pytorch.program.chunks import suits, with_chunks
from tests.support.pytorch.steps import World, models, nn, printed_by_two_processes, same, square, tensors, torch

pytestmark = pytest.mark.torch

F = torch.nn.functional
ROWS, WIDTH, CLASSES, IGNORED = 24, 8, 50, 3


class Head(nn.Module):
    """A layer, and a linear one with a class for every word."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)

    def forward(self, x: Any) -> Any:
        return self.head(torch.tanh(self.body(x)))


def classifier(bias: bool = True, dtype: Any = torch.float64, **how: Any) -> World:
    """A step of it, without an optimizer; some rows do not count."""
    torch.manual_seed(0)
    model = Head(bias).to(dtype)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=dtype)
    target = torch.randint(CLASSES, (ROWS,), generator=generator)
    target[::5] = IGNORED

    def loss(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1], ignore_index=IGNORED, **how)

    return World(model, None, (x, target), loss)


def results(world: World, **options: Any) -> tuple[Any, list[Any]]:
    """A step, its loss and the gradients; of the ordinary loop where no options are given."""
    if options:
        step = olla.compile(world.model, loss=world.loss, disk_cache=False, time_limit=1.0, **options)
        for _ in range(2):
            world.model.zero_grad()
            loss = step(world.batch)
    else:
        step, loss = None, world.loss(world.model, world.batch)
        loss.backward()
    return step, [loss.detach(), *(p.grad for p in world.model.parameters())]


def close(left: list[Any], right: list[Any], tolerance: float) -> bool:
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("num_chunks", [1, 3, 8, 100])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("bias", [True, False])
def test_chunks_compute_the_loss_and_its_gradients(bias: bool, reduction: str, num_chunks: int) -> None:
    step, found = results(classifier(bias, reduction=reduction), minimise="peak", chunked_loss=num_chunks)
    _, expected = results(classifier(bias, reduction=reduction))
    assert step.report().budget.num_chunked_losses == 1
    assert close(found, expected, 1e-12)


def test_targets_that_all_do_not_count_give_what_torch_gives() -> None:
    for reduction in ("mean", "sum"):
        worlds = [classifier(reduction=reduction) for _ in range(2)]
        for world in worlds:
            world.batch[1].fill_(IGNORED)
        _, found = results(worlds[0], minimise="peak", chunked_loss=4)
        _, expected = results(worlds[1])
        assert all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(found, expected, strict=True))
        assert reduction == "mean" or close(found, expected, 0.0)


def test_a_scaled_loss_is_scaled_in_every_chunk() -> None:
    def halved(world: World) -> World:
        loss = world.loss
        assert loss is not None
        world.loss = lambda model, batch: loss(model, batch) / 2
        return world

    step, found = results(halved(classifier()), minimise="peak", chunked_loss=4)
    _, expected = results(halved(classifier()))
    assert step.report().budget.num_chunked_losses == 1
    assert close(found, expected, 1e-12)


@pytest.mark.parametrize(
    "how",
    [{"label_smoothing": 0.1}, {"weight": torch.ones(CLASSES, dtype=torch.float64)}, {"reduction": "none"}],
    ids=["label_smoothing", "weight", "none"],
)
def test_a_loss_of_another_kind_stays_whole_and_the_same_to_the_bit(how: dict[str, Any]) -> None:
    def world() -> World:
        found = classifier(**how)
        loss = found.loss
        assert loss is not None
        found.loss = lambda model, batch: loss(model, batch).sum()
        return found

    step, found = results(world(), minimise="peak", chunked_loss=4)
    _, expected = results(world())
    assert step.report().budget.num_chunked_losses == 0
    assert "No loss was chunked" in step.report().note
    assert same(found, expected)


def test_logits_that_are_not_in_rows_stay_whole() -> None:
    def loss(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]).t(), batch[1])

    torch.manual_seed(0)
    batch = (torch.randn(40, WIDTH), torch.randint(40, (CLASSES,)))
    captured = olla.capture(Head(False), batch, loss=loss)
    assert [suits(captured, region) for region in regions(captured.graph)] == [False]


def language_model(name: str, optimizer: str) -> World:
    torch.manual_seed(0)
    example = models.build(name, 2, tiny=True, device="cpu")
    return World(example.model, models.optimizer(optimizer, example.model), example.batch, example.loss)


def trained(world: World, **options: Any) -> tuple[Any, list[Any]]:
    step = olla.compile(world.model, optimizer=world.optimizer, loss=world.loss, disk_cache=False, **options)
    torch.manual_seed(7)
    return step, [t for _ in range(5) for t in tensors(step(world.batch))]


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("name", ["gpt2", "bert_base", "llama_100m", "t5_small"])
def test_a_chunked_step_of_a_language_model_is_what_its_graph_says_to_the_bit(name: str, optimizer: str) -> None:
    plain, losses = trained(language_model(name, optimizer), time_limit=1.0)
    world = language_model(name, optimizer)
    step, found = trained(world, time_limit=1.0, max_slowdown=0.2, chunked_loss=4)
    report = step.report()
    assert report.budget.num_chunked_losses == 1
    assert report.num_misses == 0, report.misses
    assert report.measured_peak_bytes == report.planned_peak_bytes < plain.report().planned_peak_bytes
    assert close(found, losses, 2e-3)
    other = language_model(name, optimizer)
    captured = olla.capture(other.model, other.batch, optimizer=other.optimizer, loss=other.loss)
    chunks = chunked(captured.graph, 4, lambda region: suits(captured, region))
    reference = other.captured(with_chunks(captured, chunks), steps=5)
    assert same(found, reference)
    assert same(world.values(), other.values())


def large_vocabulary() -> World:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4000))
    target = torch.arange(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return World(model, optimizer, torch.randn(64, 16), lambda model, x: F.cross_entropy(model(x), target))


def test_a_budget_that_only_chunks_can_meet_is_met_by_the_arena() -> None:
    least, losses = trained(large_vocabulary(), time_limit=1.0, minimise="peak")
    budget = least.report().planned_peak_bytes - 2**20
    with pytest.raises(olla.BudgetError, match="budget"):
        trained(large_vocabulary(), time_limit=1.0, budget=budget)
    step, found = trained(large_vocabulary(), time_limit=1.0, budget=budget, chunked_loss=8)
    report = step.report()
    assert report.resident_bytes + report.output_bytes + report.arena_bytes <= budget
    assert report.measured_peak_bytes == report.planned_peak_bytes
    assert report.budget.unbudgeted_peak_bytes > report.planned_peak_bytes + 2**20
    assert report.budget.num_chunked_losses == 1
    assert close(found, losses, 1e-5)


def test_a_budget_that_fits_without_chunks_changes_nothing() -> None:
    plain, losses = trained(language_model("gpt2", "momentum"), time_limit=1.0)
    budget = 2 * plain.report().planned_peak_bytes
    step, found = trained(language_model("gpt2", "momentum"), time_limit=1.0, budget=budget, chunked_loss=8)
    assert step.report().budget.num_chunked_losses == 0
    assert same(found, losses)


CHILD = """
import torch, olla
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4000))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
target = torch.arange(64)
loss = lambda model, x: nn.functional.cross_entropy(model(x), target)
step = olla.compile(model, optimizer=optimizer, loss=loss, minimise="peak", chunked_loss=4, time_limit=0.5)
batch = torch.randn(64, 16)
losses = [float(step(batch)).hex() for _ in range(5)]
report = step.report()
assert report.measured_peak_bytes == report.planned_peak_bytes and report.num_misses == 0
assert report.budget.num_chunked_losses == 1
assert (report.record_seconds == 0) == report.cached, report.note
print(report.cached, report.planned_peak_bytes, losses)
"""


def test_a_later_process_finds_the_chunked_plan_on_disk(tmp_path: Path) -> None:
    first, second = printed_by_two_processes(CHILD, tmp_path)
    assert (first[0], second[0]) == ("False", "True")
    assert first[1] == second[1]


def test_chunks_without_a_goal_are_refused() -> None:
    with pytest.raises(ValueError, match="chunked_loss is for a goal"):
        olla.compile(nn.Linear(2, 2), loss=square, chunked_loss=4)


def deep() -> World:
    """Layers with activations that are large enough to be swapped, and a loss over some classes."""
    torch.manual_seed(0)
    layers = [layer for _ in range(5) for layer in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(64, 100))
    target = torch.arange(8192) % 100
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return World(model, optimizer, torch.randn(8192, 64), lambda model, x: F.cross_entropy(model(x), target))


def test_chunks_go_with_swaps() -> None:
    link = Link(out_bytes_per_second=1e12, in_bytes_per_second=1e12, out_latency_seconds=0.0, in_latency_seconds=0.0)
    options: dict[str, Any] = {"time_limit": 1.0, "minimise": "peak", "recompute": False, "chunked_loss": 4}
    step, found = trained(deep(), **options, swap=True, link=link)
    report = step.report()
    assert report.num_misses == 0, report.misses
    assert report.measured_peak_bytes == report.planned_peak_bytes
    assert report.budget.num_chunked_losses == 1
    assert report.swap.num_swaps > 0
    assert same(found, trained(deep(), **options)[1])
