"""The peak of Inductor's code for a divided graph, before it is compiled, and budgets that are held by it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

from olla.inductor.compat.compat import config
from olla.inductor.saving import saving
from olla.inductor.saving.partition import Partitioner
from olla.inductor.settings import patches
from olla.inductor.simulate import halves
from olla.inductor.simulate.step import replay
from tests.support.pytorch import models
from tests.support.pytorch.compiling import LEAST, blocks, fresh, square  # noqa: F401
from tests.support.pytorch.steps import torch

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")]


def chosen(foresee: Callable[..., int | None] | None = None, **goal: Any) -> tuple[saving.SavedChoice, int]:
    """What was chosen for a small network, and what the replayed step needs."""
    settings = patches(**goal)
    given: Partitioner = settings["custom_partitioner_fn"]
    partitioner = Partitioner(given.goal, max_recomputed=given.max_recomputed, foresee=foresee or given.foresee)
    partitioner.choices = []
    with config.patch({**settings, "custom_partitioner_fn": partitioner}):
        found = replay(blocks(3), torch.ones(64, 32), square)
    (choice,) = partitioner.choices
    return choice, found.peak_bytes


@pytest.mark.parametrize(("name", "goal"), [("gpt2", LEAST), ("resnet18", {"max_recomputed": 0.0})])
def test_the_code_of_both_halves_needs_what_the_step_does(name: str, goal: dict[str, Any]) -> None:
    example = models.build(name, 8, tiny=True, device="cpu")
    settings = patches(**goal)
    partitioner: Partitioner = settings["custom_partitioner_fn"]
    seen: list[int | None] = []
    divide = partitioner._divide

    def watched(gm: Any, static: Any, num_forward: int) -> Any:
        found = divide(gm, static, num_forward)
        assert found is not None
        seen.append(halves.peak_bytes(found.forward, found.backward, num_forward))
        return found

    partitioner._divide = watched  # type: ignore[method-assign]
    with config.patch(settings):
        found = replay(example.model, example.batch, example.loss)
    assert seen == [found.peak_bytes]


def test_a_budget_is_held_by_the_code_or_refused() -> None:
    least, _ = chosen(**LEAST)
    for share in (0.0, 0.2, 0.5):
        budget = round(least.peak_bytes + share * (least.saved_peak_bytes - least.peak_bytes))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            choice, peak = chosen(budget=budget)
        assert choice.code_peak_bytes == peak
        refused = [str(w.message) for w in caught if f"into budget={budget} bytes" in str(w.message)]
        assert len(refused) == (peak > budget)
        assert all(f"Ask for budget={peak}" in text for text in refused)


def test_where_the_code_needs_more_than_planned_the_next_plan_is_for_as_much_less() -> None:
    budget = 800_000
    free, _ = chosen(lambda *_: None, budget=budget)
    assert free.code_peak_bytes is None
    answers = iter([budget + 100_000, budget + 1, budget - 1])
    choice, _ = chosen(lambda *_: next(answers), budget=budget)
    assert choice.code_peak_bytes == budget - 1
    assert choice.peak_bytes < free.peak_bytes - 100_000


def test_where_another_plan_needs_less_as_code_than_the_least_it_is_taken_and_kept_when_asked_for() -> None:
    planned, _ = chosen(lambda *_: None, **LEAST)
    needed: dict[int, int] = {}  # the least plan needs half as much again as code, others what they are planned for

    def code(*halves: Any) -> int:
        saved_bytes = sum(n.meta["val"].nbytes for n in halves[0].graph.output_node().args[0] if hasattr(n, "meta"))
        lowest = needed.setdefault(saved_bytes, len(needed))
        return planned.peak_bytes * 3 // 2 if lowest == 0 else planned.peak_bytes + 1000 * lowest

    choice, _ = chosen(code, **LEAST)
    assert choice.peak_bytes > planned.peak_bytes
    least = choice.known_peak_bytes
    assert planned.peak_bytes < least < planned.peak_bytes * 3 // 2
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="olla")
        kept, _ = chosen(code, budget=least)
    assert kept.known_peak_bytes <= least


def test_without_the_code_a_plan_is_taken_at_its_word() -> None:
    def failing(*_: Any) -> int:
        raise RuntimeError("no such lowering")

    with pytest.warns(UserWarning, match="whether a plan fits the budget is told from the plan"):
        choice, _ = chosen(failing, budget="1MB")
    assert (choice.code_peak_bytes, choice.peak_bytes <= 10**6) == (None, True)


def test_no_plan_is_judged_by_its_code_twice() -> None:
    seen: list[tuple[str, str]] = []

    def code(forward: Any, backward: Any, _: int) -> int:
        seen.append((forward.code, backward.code))
        return 10**9

    with pytest.warns(UserWarning, match="found no way to fit"):
        chosen(code, budget=1000)
    assert len(seen) == len(set(seen)) > 1
