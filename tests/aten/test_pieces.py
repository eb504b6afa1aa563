"""Steps of olla.compile that are no single graph: the user's own step, with its passes planned in pieces."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import olla
from tests.aten.loops import fresh, peak_bytes, same  # noqa: F401
from tests.support.pytorch.steps import nn, torch

pytestmark = pytest.mark.torch
NUM_STEPS = 4
GOALS = [{}, {"max_slowdown": 0.3}, {"minimise": "peak"}]


def mlp(*widths: int) -> Any:
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*(m for a, b in pairs for m in (nn.Linear(a, b), nn.GELU(), nn.Dropout(0.1))))


class Branch(nn.Module):
    """Goes another way by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = mlp(16, 256, 256, 8), mlp(8, 32, 4), mlp(8, 64, 4)

    def forward(self, x: Any) -> Any:
        x = self.trunk(x)
        return self.left(x) if x.mean() > 0.01 else self.right(x)


class Chosen(nn.Module):
    """Computes with the rows that a mask leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = mlp(16, 256, 256, 8), mlp(8, 64, 4)

    def forward(self, x: Any) -> Any:
        x = self.trunk(x)
        return self.head(x[x[:, 0] > 0])


class Gan(nn.Module):
    """Two models, and no call of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.judge = mlp(16, 128, 128, 16), mlp(16, 128, 1)


def square(model: Any, x: Any) -> Any:
    return model(x).square().mean()


def clipped(model: Any, optimizer: Any, x: Any) -> Any:
    optimizer.zero_grad()
    loss = square(model, x)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if norm.isfinite():
        optimizer.step()
    return loss.detach() + norm.item()


def in_turn(model: Any, optimizers: Any, x: Any) -> Any:
    fake = model.generator(torch.randn_like(x))
    optimizers[1].zero_grad()
    judged = nn.functional.softplus(model.judge(fake.detach())) + nn.functional.softplus(-model.judge(x))
    judged.mean().backward()
    optimizers[1].step()
    optimizers[0].zero_grad()
    loss = nn.functional.softplus(-model.judge(fake)).mean()
    loss.backward()
    optimizers[0].step()
    return loss.detach()


def adamw(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), 1e-2)


def two(model: Any) -> Any:
    return [torch.optim.Adam(model.generator.parameters()), torch.optim.SGD(model.judge.parameters(), 0.1)]


def ordinary(model: Any, optimizer: Any, x: Any, of: Callable[[Any, Any], Any] = square) -> Any:
    optimizer.zero_grad()
    loss = of(model, x)
    loss.backward()
    optimizer.step()
    return loss.detach()


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], dict[str, Any]]] = {
    "branch": (Branch, adamw, {"loss": square}),
    "mask": (Chosen, adamw, {"loss": square}),
    "body": (Branch, adamw, {"step": clipped}),
    "two optimizers": (Gan, two, {"step": in_turn}),
}


def steps(case: str, goal: dict[str, Any] | None) -> tuple[list[Any], Any]:
    """Train; return what was seen, and the step: of the ordinary loop without a goal."""
    make, optimizer_of, what = CASES[case]
    torch.manual_seed(0)
    model = make()
    optimizer = optimizer_of(model)
    body = what.get("step", ordinary)
    step: Any = lambda x: body(model, optimizer, x)  # noqa: E731
    if goal is not None:
        step = olla.compile(model, optimizer=optimizer, disk_cache=False, time_limit=0.2, **what, **goal)
    seen: list[Any] = []
    for i in range(NUM_STEPS):
        seen.append(step(torch.randn(32 if i != 2 else 20, 16)))
    return [*seen, *model.state_dict().values(), torch.get_rng_state()], step


@contextlib.contextmanager
def one_warning() -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert len([w for w in caught if "planned in pieces" in str(w.message)]) == 1


@pytest.mark.parametrize("goal", GOALS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_step_that_is_no_single_graph_is_planned_in_pieces(case: str, goal: dict[str, Any]) -> None:
    expected, _ = steps(case, None)
    with one_warning():
        found, step = steps(case, goal)
    assert all(map(same, expected, found))
    report = step.report()
    assert report.num_ordinary_steps == NUM_STEPS
    assert "planned in pieces" in report.note
    assert " in place of " in report.note
    if case in ("branch", "mask"):
        assert "Graph break: " in report.note
        assert __file__ in report.note


def test_it_takes_less_memory_than_as_it_is() -> None:
    model, x = Branch(), torch.randn(2048, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    step = olla.compile(model, optimizer=optimizer, loss=square, disk_cache=False, minimise="peak")
    with one_warning():
        step(x)
    optimizer.zero_grad()
    in_pieces = peak_bytes(lambda: step(x))
    optimizer.zero_grad()
    as_it_is = peak_bytes(lambda: ordinary(model, optimizer, x))
    assert in_pieces < 0.8 * as_it_is


def test_a_budget_of_pieces_is_without_the_state_of_the_optimizer() -> None:
    model = Branch()
    optimizer = torch.optim.AdamW(model.parameters())
    needed = 2 * sum(p.nbytes for p in model.parameters())
    state = needed
    x = torch.randn(1024, 16)
    ordinary(model, optimizer, x)  # state is there from now on
    budget = needed + state + 4_000_000
    step = olla.compile(model, optimizer=optimizer, loss=square, disk_cache=False, budget=budget)
    with one_warning():
        step(x)
    largest = max(graph.peak_bytes for graph in step._unplanned.pieces.report.planned)
    assert largest + state <= budget


def test_models_of_a_body_are_as_they_were_behind_it() -> None:
    model = Gan()
    model.judge.compile(backend="eager")
    own = model.judge._compiled_call_impl
    step = olla.compile(model, optimizer=two(model), step=in_turn, disk_cache=False, time_limit=0.2)
    with one_warning():
        step(torch.randn(8, 16))
    assert model.judge._compiled_call_impl is own  # the user's own stays in place
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        step(torch.randn(8, 15))
    assert model.generator._compiled_call_impl is None
    assert len(step._unplanned.pieces.report.planned) > 0


def test_what_has_no_graph_runs_as_it_is() -> None:
    model = nn.LSTM(4, 4)
    loss = lambda m, x: m(x)[0].square().mean() * (2 if x.mean() > 0 else 1)  # noqa: E731
    step = olla.compile(model, optimizer=adamw(model), loss=loss, disk_cache=False, time_limit=0.2)
    with pytest.warns(UserWarning, match="planned in pieces where that can be done"):
        step(torch.randn(3, 2, 4))
    step(torch.randn(3, 2, 4))
    assert "2 steps ran as the ordinary one, unplanned" in step.report().note


def until_small(model: Any, x: Any) -> Any:
    for _ in range(3):  # Dynamo leaves a function that leaves a loop by a value
        loss = square(model, x)
        if loss < 1:
            break
    return loss


def test_a_loss_of_which_dynamo_follows_nothing_has_its_model_planned() -> None:
    def losses(planned: bool) -> list[Any]:
        torch.manual_seed(0)
        model = mlp(16, 64, 64, 4)
        optimizer = adamw(model)
        step: Any = lambda x: ordinary(model, optimizer, x, until_small)  # noqa: E731
        if planned:
            step = olla.compile(model, optimizer=optimizer, loss=until_small, disk_cache=False, time_limit=0.2)
        with contextlib.nullcontext() if not planned else one_warning():
            found = [step(torch.randn(8, 16)) for _ in range(NUM_STEPS)]
        assert not planned or "1 graphs of forward and backward are planned" in step.report().note
        return found

    assert all(map(same, losses(False), losses(True)))


def test_so_many_kinds_of_batches_are_planned_and_no_more() -> None:
    model = Branch()
    step = olla.compile(model, optimizer=adamw(model), loss=square, disk_cache=False, time_limit=0.1, cache_size=2)
    with one_warning():
        for rows in (3, 4, 5, 6, 7):
            step(torch.randn(rows, 16))
    pieces = step._unplanned.pieces.report
    assert pieces.num_calls == 2
    assert step.report().num_ordinary_steps == 5


def test_recapture_plans_anew() -> None:
    model = Branch()
    step = olla.compile(model, optimizer=adamw(model), loss=square, disk_cache=False, time_limit=0.1)
    with one_warning():
        step(torch.randn(3, 16))
    first = step._unplanned.pieces
    step.recapture()
    with one_warning():
        step(torch.randn(3, 16))
    assert step._unplanned.pieces is not first
