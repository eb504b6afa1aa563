"""Small programs of many kinds compute the same with olla: to the bit op by op, and with Inductor's kernels."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from olla.inductor.compat import compat
from olla.inductor.settings import patches
from olla.inductor.simulate.step import replay
from tests.support.pytorch.compiling import LEAST, fresh, without_kernels  # noqa: F401
from tests.support.pytorch.programs import PROGRAMS, Compile, seeded
from tests.support.pytorch.steps import nn, torch

pytestmark = pytest.mark.torch

OPTIONS: dict[str, dict[str, Any]] = {
    "peak": LEAST,
    "time": {"max_slowdown": 0.05},
    "flops": {"max_recomputed": 0.0},
    "budget": {"budget": 5000},
}
# Forward changes an input whose former value backward needs: torch's own code is wrong there, or refuses to run.
CHANGED = {
    "a_buffer_used_changed_and_used",
    "a_changed_input",
    "a_changed_input_with_gradient",
    "a_changed_view_of_an_input",
}
LONG = {
    "a_recurrence",
    "autocast",
    "checkpoints",
    "derivatives_inside",
    "graph_breaks",
    "inference",
    "parameters_frozen_between_steps",
    "sizes_inside_that_change",
    "sizes_that_change",
}
# Inductor alone gets the shared storage itself wrong (torch 2.13), before anything is divided.
NOT_INDUCTORS = {"two_inputs_of_one_storage"}
QUICK = [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in PROGRAMS]


def run(name: str, compile: Compile) -> list[Any]:
    torch.compiler.reset()
    with seeded(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="olla found no way to fit")
        warnings.filterwarnings("ignore", message="olla leaves .*(draws random numbers|depends on data)")
        found = PROGRAMS[name](compile)
    return [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in found]


def eager(function: Any) -> Any:
    return function


def op_by_op(partition: Any) -> Compile:
    return lambda function: torch.compile(function, backend=without_kernels(partition))


def check(name: str, options: dict[str, Any]) -> None:
    found = run(name, op_by_op(patches(**options)["custom_partitioner_fn"]))
    if name in CHANGED:
        torch.testing.assert_close(found, run(name, eager), rtol=1e-5, atol=1e-5)
        return
    expected = run(name, op_by_op(compat.min_cut_partition))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", QUICK)
def test_programs_compute_the_same_to_the_bit(name: str) -> None:
    check(name, LEAST)


@pytest.mark.slow
@pytest.mark.parametrize("goal", [goal for goal in OPTIONS if goal != "peak"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_compute_the_same_for_every_goal(name: str, goal: str) -> None:
    check(name, OPTIONS[goal])


@pytest.mark.slow
@pytest.mark.parametrize("options", [LEAST, {"max_recomputed": 0.0}], ids=["peak", "no flops"])
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in NOT_INDUCTORS])
def test_programs_compute_the_same_with_kernels(name: str, options: dict[str, Any]) -> None:
    with compat.config.patch({"fallback_random": True}):
        found = run(name, lambda function: torch.compile(function, backend="olla", options=options))
        expected = run(name, eager if name in CHANGED else torch.compile)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_what_draws_runs_in_one_of_the_two_graphs() -> None:
    """Backward can compute what forward drew from: torch would keep the draw there too, whose numbers nobody reads."""
    torch.manual_seed(0)
    layers = nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8)
    with compat.config.patch({**patches(**LEAST), "fallback_random": True}):
        found = replay(nn.Sequential(*layers), torch.ones(16, 8), lambda model, x: model(x).square().mean())
    assert [source.count("aten.native_dropout.default(") for source in found.sources] == [1, 0]
