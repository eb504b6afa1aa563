"""`olla.compile` on CUDA: numbers of the ordinary step bit for bit, planned bytes those of torch's own statistics."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import olla  # noqa: E402
from olla.pytorch import runner  # noqa: E402
from tests.cuda.standin import Standin  # noqa: E402
from tests.support.pytorch import models  # noqa: E402
from tests.support.pytorch.planned import require_costs, require_exact_requests, world_of  # noqa: E402
from tests.support.pytorch.steps import deep, square  # noqa: E402

Optimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "capturable": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, capturable=True, foreach=False),
}
MODELS = ("gpt2", "bert_base", "llama_1b", "vit_b16", "resnet18", "mobilenet_v2", "unet", "t5_small")


def ordinary(name: str, optimizer: str, num_steps: int = 3) -> tuple[list[float], list[torch.Tensor]]:
    """Train as one does without olla; return the losses and the state."""
    example = example_of(name)
    updates = OPTIMIZERS[optimizer](example.model.parameters())
    torch.manual_seed(5)
    losses = []
    for _ in range(num_steps):
        loss = example.loss(example.model, example.batch)
        loss.backward()
        updates.step()
        updates.zero_grad()
        losses.append(loss.item())
    return losses, state_of(example.model)


def example_of(name: str) -> models.Example:
    if name == "deep":
        model, batch = deep(2048, "cuda")
        return models.Example(model, {"x": batch}, lambda model, batch: square(model, batch["x"]))
    torch.manual_seed(0)
    return models.build(name, 2, tiny=True, device="cuda")


def state_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [value.detach().cpu() for value in model.state_dict().values()]


def equal(first: tuple[list[float], list[torch.Tensor]], second: tuple[list[float], list[torch.Tensor]]) -> bool:
    return first[0] == second[0] and all(map(torch.equal, first[1], second[1]))


class Trained(NamedTuple):
    """What training through olla gave, and what it took.

    Attributes:
        result: losses and state.
        report: of the step.
        peak_bytes: most that torch's allocator held in the last step, above what was there before the model.
        resident_bytes: of the model, its batch, and the state of the optimizer.
    """

    result: tuple[list[float], list[torch.Tensor]]
    report: Any
    peak_bytes: int
    resident_bytes: int


def planned(name: str, optimizer: str, num_steps: int = 3, **options: Any) -> Trained:
    """Train through olla."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    example = example_of(name)
    updates = OPTIMIZERS[optimizer](example.model.parameters())
    step = olla.compile(example.model, optimizer=updates, loss=example.loss, disk_cache=False, **options)
    torch.manual_seed(5)
    losses = [step(example.batch).item() for _ in range(num_steps - 1)]
    gc.collect()  # frames of what Dynamo traced may hold the loss of that step until then, in any compilation
    torch.cuda.reset_peak_memory_stats()
    losses.append(step(example.batch).item())
    peak, report = torch.cuda.max_memory_allocated() - before, step.report()
    state = [value for values in updates.state.values() for value in values.values()]
    kept = [*example.model.parameters(), *example.model.buffers(), *example.batch.values()]
    resident = models.device_bytes([*kept, *state])
    step.release()
    return Trained((losses, state_of(example.model)), report, peak, resident)


def as_planned(trained: Trained) -> bool:
    """Whether a step took what was planned: by its own count, and by that of torch's allocator, to the byte."""
    report = trained.report
    own = report.in_arena and report.num_misses == 0 and report.measured_peak_bytes == report.planned_peak_bytes
    return own and trained.peak_bytes == report.arena_bytes + report.output_bytes + trained.resident_bytes


@pytest.mark.parametrize("device", ["late"], indirect=True)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_planned_peak_is_the_peak_of_torchs_statistics(device: torch.device, name: str, optimizer: str) -> None:
    expected = ordinary(name, optimizer)
    trained = planned(name, optimizer)
    assert equal(trained.result, expected)
    assert as_planned(trained), trained.report


LAYERS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "convolution": (lambda: torch.nn.Conv2d(8, 8, 3, padding=1), (32, 8, 160, 160)),  # with workspaces of their own
    "linear": (lambda: torch.nn.Linear(512, 512), (20_000, 512)),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_what_the_recorded_step_took_is_given_back(faults: Standin, layer: str) -> None:
    """Torch's allocator would keep its segments beside the arena, and more would be reserved than without olla."""
    make, shape = LAYERS[layer]

    def taken(step_of: Callable[[torch.nn.Module, torch.optim.Optimizer], Callable[[], Any]]) -> tuple[int, int, int]:
        """Return the bytes reserved at most, reserved at the end, and allocated at most."""
        fresh()
        torch.cuda.reset_peak_memory_stats()
        reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        model = torch.nn.Sequential(*(make() for _ in range(8))).cuda()
        step = step_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            step()
        at_end, at_most = torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()
        return at_most - reserved, at_end - reserved, torch.cuda.max_memory_allocated() - allocated

    def fresh() -> None:
        gc.collect()
        torch.cuda.empty_cache()

    fresh()  # the batch would keep a segment of another test
    batch = torch.ones(shape, device="cuda")

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    def eager(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
        def step() -> None:
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()

        return step

    def planned(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
        step = olla.compile(model, optimizer=optimizer, loss=loss, disk_cache=False)
        return lambda: step(batch)

    most, at_end, allocated = taken(planned)
    assert most <= taken(eager)[0]
    assert at_end <= allocated + (4 << 20)  # the rest of the segments that small tensors share


GOALS: dict[str, dict[str, Any]] = {
    "recomputed": {"max_slowdown": 0.3},
    "least": {"minimise": "peak"},
    "swapped": {"minimise": "peak", "swap": True},
    "swaps alone": {"minimise": "peak", "swap": True, "recompute": False},
}


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("arena", [False, True])
def test_recomputed_and_swapped_steps_compute_the_same(device: torch.device, arena: bool, goal: str) -> None:
    name = "deep" if "swap" in GOALS[goal] else "gpt2"
    expected = ordinary(name, "adamw")
    trained = planned(name, "adamw", arena=arena, **GOALS[goal])
    assert equal(trained.result, expected)
    assert not arena or as_planned(trained), trained.report
    assert name == "gpt2" or trained.report.swap.num_swaps > 0


@pytest.mark.parametrize("arena", [False, True])
@pytest.mark.parametrize(("name", "optimizer"), [("gpt2", "capturable"), ("resnet18", "sgd")])
def test_a_cuda_graph_of_the_step_computes_the_same(
    device: torch.device, name: str, optimizer: str, arena: bool
) -> None:
    expected = ordinary(name, optimizer, 5)
    trained = planned(name, optimizer, 5, arena=arena, cuda_graph=True)
    assert equal(trained.result, expected)
    report = trained.report
    assert not arena or (report.num_misses, report.measured_peak_bytes) == (0, report.planned_peak_bytes)


@pytest.mark.parametrize("device", ["late"], indirect=True)
@pytest.mark.parametrize(
    ("arena", "in_arena", "said"),
    [
        (None, True, "1 requests of [0-9]+ bytes had no place"),
        (None, False, "torch's allocator gave [0-9]+ bytes more than planned"),
        (True, True, ""),
    ],
)
def test_a_step_that_takes_more_than_planned_leaves_the_arena_unless_it_was_asked_for(
    device: torch.device, arena: bool | None, in_arena: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ordinary("gpt2", "sgd", 9)
    arrange = runner.arrange.arrange

    def arranged_wrongly(*args: Any) -> Any:
        """Plan another size for the last request of the arena, or leave out the last of what outlives the step."""
        arranged = arrange(*args)
        table = arranged.table
        last = int(np.flatnonzero((table.offsets >= 0) == in_arena)[-1])
        if in_arena:
            num_bytes = table.num_bytes.copy()
            num_bytes[last] = 1
            return arranged._replace(table=table._replace(num_bytes=num_bytes))
        shorter = {name: np.delete(getattr(table, name), last) for name in ("num_bytes", "offsets")}
        return arranged._replace(table=table._replace(op_offset=table.op_offset - (table.op_offset > last), **shorter))

    monkeypatch.setattr(runner.arrange, "arrange", arranged_wrongly)
    with pytest.warns(UserWarning, match=f"no arena: .*{said}") if said else contextlib.nullcontext():
        trained = planned("gpt2", "sgd", 9, arena=arena)
    assert equal(trained.result, expected)
    assert trained.report.in_arena == (said == "")
    assert ("in no arena" in trained.report.note) == (said != "")
    assert said != "" or trained.report.num_misses > 0


def test_without_memory_for_the_arena_the_step_raises_torchs_error_and_runs_later(faults: Standin) -> None:
    def trained(fails: bool) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(512, 512).cuda()
        optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(4096, 512, device="cuda")
        step = olla.compile(model, optimizer=optimizer, loss=lambda m, x: m(x).square().mean(), disk_cache=False)
        losses = [step(batch).item()]
        step.release()
        if fails:
            torch.cuda.empty_cache()
            faults.fail_after(0)
            with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
                step(batch)
            faults.fail_after(-1)
        return losses + [step(batch).item() for _ in range(2)]

    assert trained(fails=True) == trained(fails=False)


@pytest.mark.parametrize("device", ["late", "random:7"], indirect=True)
@pytest.mark.parametrize("name", ["gpt2", "unet"])
def test_requests_recorded_once_are_exact_in_every_order(device: torch.device, name: str) -> None:
    require_exact_requests(world_of(name, "adamw", "cuda"))


def test_the_step_shows_its_graph_with_costs_and_a_plan_that_fits(device: torch.device) -> None:
    require_costs(world_of("resnet50", "momentum", "cuda"))
