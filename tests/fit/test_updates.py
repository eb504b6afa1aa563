"""What the step of an optimizer takes: as the real one makes it, for those whose step cannot be captured too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import olla
from olla.fit.caching import most_bytes
from olla.fit.eager import eager_peak
from tests.support.pytorch.steps import nn, torch

if torch is not None:
    from olla.fit.updates import update_of, with_update


class Counted(torch.optim.Optimizer):
    """Keeps its moments for matrices alone, and how often it was called in a number."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.num_calls = 0

    def step(self, closure: Any = None) -> None:
        self.num_calls += 1
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and p.ndim == 2:
                self.state[p].setdefault("moment", torch.zeros_like(p)).add_(p.grad * p.grad.norm().item())


MAKERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps),
    "amsgrad": lambda ps: torch.optim.Adam(ps, amsgrad=True, foreach=False),
    "fused": lambda ps: torch.optim.AdamW(ps, fused=True),
    "adafactor": lambda ps: torch.optim.Adafactor(ps),
    "adagrad": lambda ps: torch.optim.Adagrad(ps),
    "nadam": lambda ps: torch.optim.NAdam(ps),
    "muon": lambda ps: torch.optim.Muon([p for p in ps if p.ndim == 2]),
    "own": Counted,
}


def model() -> Any:
    return nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 16))


def loss(model: Any, batch: Any) -> Any:
    return model(batch).square().mean()


@pytest.mark.parametrize("kind", MAKERS)
def test_the_state_is_what_a_real_step_makes(kind: str) -> None:
    net = model()
    optimizer = MAKERS[kind](list(net.parameters()))
    before = {name: value for name, value in vars(optimizer).items() if name != "state"}
    state = {p: set(entries) for p, entries in optimizer.state.items()}
    found = update_of(optimizer, on_gpu=False)
    assert found is not None
    assert {p: set(entries) for p, entries in optimizer.state.items()} == state
    assert before == {name: value for name, value in vars(optimizer).items() if name != "state"}
    loss(net, torch.ones(8, 64)).backward()
    optimizer.step()
    made = [t.nbytes for entries in optimizer.state.values() for t in entries.values() if isinstance(t, torch.Tensor)]
    numbers = 8  # counts of steps and the like are on the CPU; a fused step has them where the parameters are
    assert sorted(n for n in found.state_bytes if n > numbers) == sorted(n for n in made if n > numbers)


class Around(torch.optim.Optimizer):
    """Another optimizer does its steps."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.history = inner, list[int]()
        super().__init__(inner.param_groups, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Noted(torch.optim.SGD):
    """Writes down its steps where others see them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.history: list[int] = []
        self.param_groups[0]["seen"] = []

    def step(self, closure: Any = None) -> None:
        self.history.append(1)
        self.param_groups[0]["seen"].append(1)
        super().step()


def test_nothing_of_the_optimizer_is_changed() -> None:
    net = model()
    loss(net, torch.ones(8, 64)).backward()
    before = [p.detach().clone() for p in net.parameters()]
    noted = Noted(net.parameters())
    noted.register_step_post_hook(lambda *_: pytest.fail("a hook was run"))
    assert update_of(noted, on_gpu=True) == update_of(torch.optim.SGD(net.parameters()), on_gpu=True)
    assert (noted.history, noted.param_groups[0]["seen"]) == ([], [])
    assert update_of(Around(torch.optim.SGD(net.parameters(), lr=0.1)), on_gpu=True) is None
    assert all(map(torch.equal, before, net.parameters()))


def test_parameters_are_updated_together_where_torch_does_so() -> None:
    parameters = list(model().parameters())
    size = sum(p.nbytes for p in parameters)
    most = {
        (kind, on_gpu): most_bytes(update_of(MAKERS[kind](parameters), on_gpu=on_gpu).requests)
        for kind in ("adamw", "fused", "adafactor", "sgd")
        for on_gpu in (False, True)
    }
    assert most["adamw", True] == size
    assert most["fused", True] == most["fused", False] == most["sgd", True] == most["sgd", False] == 0
    assert most["adafactor", True] == most["adafactor", False]
    assert most["adamw", False] == 2 * max(p.nbytes for p in parameters)  # a square root, and what it is divided by


def test_a_step_that_needs_a_closure_is_not_known() -> None:
    assert update_of(torch.optim.LBFGS(model().parameters()), on_gpu=True) is None


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adamw", "adagrad"])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_step_captured_without_its_optimizer_needs_as_much(kind: str, on_gpu: bool) -> None:
    net, batch = model(), torch.ones(8, 64)
    optimizer = MAKERS[kind](list(net.parameters()))
    update = update_of(optimizer, on_gpu=on_gpu)
    assert update is not None
    whole = olla.capture(net, batch, optimizer=optimizer, loss=loss).graph
    behind = with_update(olla.capture(net, batch, loss=loss), update)
    numbers = sum(n for n in whole.tensor_bytes[whole.writer < 0].tolist() if n <= 8)  # learning rate, counts of steps
    numbers -= sum(n for n in update.state_bytes if n <= 8)
    assert eager_peak(behind, update.requests) == eager_peak(whole, update.requests) - numbers


def test_parameters_that_are_not_trained_are_not_updated() -> None:
    net = model()
    net[0].weight.requires_grad_(False)
    update = update_of(torch.optim.Adafactor([p for p in net.parameters() if p.requires_grad]), on_gpu=True)
    assert update is not None
    graph = with_update(olla.capture(net, torch.ones(8, 64), loss=loss), update)
    changed = {graph.tensor_names[int(t)] for t in graph.mutates.of(graph.num_ops - 1)}
    assert {"0.bias", "2.weight", "2.bias"} == {name for name in changed if not name.startswith("state")}


@pytest.mark.parametrize("kind", ["adafactor", "own"])
def test_sizes_of_a_step_whose_update_cannot_be_captured(kind: str) -> None:
    def make_step(n: int) -> tuple[Any, ...]:
        net = model()
        return net, torch.ones(n, 64), MAKERS[kind](list(net.parameters())), loss

    (row,) = olla.fit(make_step, memory="1MB", device="a100", sizes=[64]).rows
    update = update_of(MAKERS[kind](list(model().parameters())), on_gpu=True)
    parameters = sum(p.nbytes for p in model().parameters())
    assert update is not None
    assert row.resident_bytes == parameters + sum(update.state_bytes) + 64 * 64 * 4
    assert row.ways["eager"].peak_bytes >= row.resident_bytes + parameters + most_bytes(update.requests)
    assert row.ways["least"].peak_bytes <= row.ways["planned"].peak_bytes <= row.ways["eager"].peak_bytes


def test_reserved_is_said_of_the_ordinary_loop_on_a_gpu() -> None:
    def make_step(n: int) -> tuple[Any, ...]:
        net = model()
        return net, torch.ones(n, 64), torch.optim.AdamW(net.parameters()), loss

    found = olla.fit(make_step, memory="100MB", device="a100", sizes=[8])
    ways = found.rows[0].ways
    assert ways["eager"].reserved_bytes == 2 << 20
    assert [ways[name].reserved_bytes for name in found.names[1:]] == [None] * (len(found.names) - 1)
    assert "reserved 2.00 MiB" in str(found)
    on_cpu = olla.fit(make_step, memory="100MB", device="cpu", sizes=[8])
    assert on_cpu.rows[0].ways["eager"].reserved_bytes is None
    assert "reserved 2" not in str(on_cpu)
