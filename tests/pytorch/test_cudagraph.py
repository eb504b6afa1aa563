"""Steps behind a CUDA graph. Without a GPU, a stand-in that calls the program again shows what is around the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import olla
from tests.support.pytorch.planned import compiled, planned, reference, runner_of, world_of

torch = pytest.importorskip("torch")
from olla.pytorch.memory.extension import load_module  # noqa: E402
from olla.pytorch.program import cudagraph  # noqa: E402
from tests.support.pytorch.steps import World, same  # noqa: E402

pytestmark = pytest.mark.torch


def test_a_model_on_the_cpu_is_refused() -> None:
    with pytest.raises(olla.ReplayError, match="cuda_graph=True needs CUDA, and the model is on cpu"):
        compiled(world_of("mlp", "momentum"), cuda_graph=True)


class Stand:
    """Stands in for cudagraph.capture: nothing runs while capturing, and every replay writes the same results."""

    def __init__(self) -> None:
        self.num_captures = 0

    def __call__(self, run: Callable[[], list[Any]], device: Any) -> tuple[Callable[[], None], list[Any]]:
        self.num_captures += 1
        results: list[Any] = []

        def replay() -> None:
            results[:] = run()

        return replay, results


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    stand = Stand()
    monkeypatch.setattr(cudagraph, "capture", stand)
    return stand


def graphed(world: World, arena: bool) -> Any:
    """A step that has run once and is to replay a graph."""
    step = compiled(world, arena=arena)
    planned(world, step, 1)
    runner_of(step)._cuda_graph = True
    return step


def losses_of(step: Any) -> list[Any]:
    torch.manual_seed(7)
    return [step(torch.full((4, 6), float(i))) for i in range(6)]


@pytest.mark.parametrize("arena", [True, False])
def test_replays_take_new_batches_and_outputs_survive_them(arena: bool, stand: Stand) -> None:
    world = world_of("mlp", "adamw")
    other = world.copy()
    step, other_step = graphed(world, arena), graphed(other, arena)
    runner_of(other_step)._cuda_graph = False
    assert same(losses_of(step), losses_of(other_step))
    assert same(world.values(), other.values())
    assert stand.num_captures == 1
    report = step.report()
    assert report.num_misses == 0
    assert report.measured_peak_bytes == (report.planned_peak_bytes if arena else None)


@pytest.mark.filterwarnings("ignore:the CUDA graph is captured anew")
def test_replaced_tensors_and_learning_rates_are_captured_again(stand: Stand) -> None:
    world = world_of("mlp", "momentum")
    step = graphed(world, True)
    planned(world, step, 3)
    assert stand.num_captures == 1
    world.optimizer.param_groups[0]["lr"] = 0.5
    world.model[0].weight.data = world.model[0].weight.data.clone()
    other = world.copy()
    assert same(planned(world, step, 3), reference(other, step, 3))
    assert same(world.values(), other.values())
    assert stand.num_captures == 2


def test_a_tensor_at_another_address_is_seen() -> None:
    values = [torch.empty(4) for _ in range(3)]
    there, others = cudagraph.Addresses(values, [0, 1, 2]), cudagraph.Addresses(values, [0, 1])
    assert there.are_those_of(values)
    values[2].data = torch.empty(4)
    assert not there.are_those_of(values)
    assert others.are_those_of(values)


@pytest.mark.slow  # torch's headers for Python objects take some time to compile
def test_what_compares_addresses_in_cpp_looks_at_tensors_alone() -> None:
    are_at = load_module("addresses").are_at
    values = [
        torch.empty(4),
        torch.nn.Parameter(torch.empty(4)),
        torch.ones(3).to_sparse(),
        "no tensor",
        torch.empty(0),
    ]
    addresses = np.array([values[0].data_ptr(), values[1].data_ptr()])
    both, one = np.array([0, 1]), np.array([0])
    assert are_at(values, both, addresses)
    assert not are_at(values, both[::-1].copy(), addresses)
    torch.utils.swap_tensors(values[0], torch.empty(4))  # the object is that of before
    assert not are_at(values, both, addresses)
    for i in (2, 3):
        assert not are_at(values, np.array([i]), addresses[:1])
    assert are_at(values, np.array([4]), np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="an address for each position"):
        are_at(values, one, addresses)
    with pytest.raises(IndexError, match="no such value"):
        are_at(values, np.array([5]), addresses[:1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("arena", [True, False])
@pytest.mark.parametrize("cuda_graph", [True, False])
def test_on_a_gpu_the_numbers_are_those_of_the_program_order(arena: bool, cuda_graph: bool) -> None:
    world = world_of("mlp", "momentum")
    world.model.cuda()
    world.batch = world.batch.cuda()
    world.optimizer = torch.optim.AdamW(world.model.parameters(), lr=1e-2, capturable=True)
    other = world.copy()
    step = compiled(world, arena=arena, cuda_graph=cuda_graph)
    assert same(planned(world, step, 6), reference(other, step, 6))
    assert same(world.values(), other.values())
    report = step.report()
    assert (report.in_arena, report.num_misses) == (arena, 0)
