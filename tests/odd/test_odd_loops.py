"""Odd but ordinary loops: equal to the bit, or a clear error, and nothing else. ``python tests/odd`` prints them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import olla
from tests.odd.catalogue import REGISTER
from tests.odd.loops import Loop, Odd, train
from tests.odd.runner import MODES, UNSEEN, UNSEEN_BY_STEPS, WRAPPED, in_two_processes, judge
from tests.support.pytorch.steps import IS_211, knows_generators, torch

pytestmark = pytest.mark.torch

NAMES = list(REGISTER)
SAMPLE = NAMES[::16]
UNLIKE_EAGER_WITH_211 = {  # with Dynamo of torch 2.11, under any backend; docs/capture.md says so
    "a_parameter_that_is_given_an_attribute_later": "it has no guards for attributes of parameters",
    "class_of_a_layer_replaced": "it has no guards for the class of a layer",
    "ema_updated_inside_the_loss_with_a_decay_of_python": "it rounds add_ with alpha otherwise",
    "number_in_a_class_attribute": "it has no guards for attributes of classes",
    "number_in_an_attribute_of_an_enumeration_member": "it has no guards for attributes of members",
    "number_in_the_defaults_of_a_function": "it has no guards for defaults of functions",
    "one_layer_made_double_with_a_cast_in_the_loss": "it has no guards for types of parameters",
}
WITH_GENERATORS = "a_generator_seeded_between_steps", "a_generator_that_stands_outside", "torchs_own_generator_by_name"
UNGUARDED = (  # by Dynamo
    "numpy_scalar_in_the_batch",
    "subclass_of_tensor",
    "efficient_kernel_of_attention_around_the_step",
    "another_default_type_in_the_loss",
    "lazy_layers_that_no_batch_has_shaped",
    "a_parameter_asked_how_often_it_was_changed",
    "interpolation_of_another_mode",
    "margin_of_a_loss_module_changed",
    "forward_of_the_class_replaced",
    "method_of_tensor_patched",
    "number_in_the_environment_by_getenv",
    "number_whose_sign_of_zero_changes",
    "number_in_the_order_of_an_ordered_dict",
    "history_in_a_deque_of_the_loss",
    "random_numbers_of_an_own_python_generator",
)
GOALS = [mode for mode in MODES if mode != "plain"]


def marked(name: str) -> Any:
    """Return a case for a loop, marked where steps, or a version of torch, do not do as it does."""
    marks = [pytest.mark.xfail(strict=True)] if name in UNSEEN_BY_STEPS else []
    if IS_211 and name in UNLIKE_EAGER_WITH_211:
        marks += [pytest.mark.skip(f"Dynamo of torch 2.11: {UNLIKE_EAGER_WITH_211[name]}")]
    marks += [knows_generators] if name in WITH_GENERATORS else []
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [marked(name) for name in NAMES])
def test_a_loop_is_equal_to_the_bit_or_refused(name: str) -> None:
    verdict = judge(REGISTER[name])
    assert not verdict.fails, verdict


@pytest.mark.parametrize("mode", GOALS)
@pytest.mark.parametrize("name", [marked(name) for name in SAMPLE])
def test_a_goal_changes_nothing_of_that(name: str, mode: str) -> None:
    verdict = judge(REGISTER[name], mode)
    assert not verdict.fails, verdict


@pytest.mark.parametrize("what", WRAPPED)
@pytest.mark.parametrize("name", [marked(name) for name in NAMES[5::24] if name not in UNSEEN])
def test_a_loop_around_what_is_wrapped_is_equal_to_the_bit(name: str, what: str) -> None:
    verdict = judge(REGISTER[name], what)
    assert not verdict.fails, verdict
    assert verdict.kind == "equal"


@pytest.mark.parametrize("name", UNGUARDED)
def test_a_wrapped_loss_sees_what_dynamo_has_no_guards_for(name: str) -> None:
    verdict = judge(REGISTER[name], "loss")
    assert verdict.kind == "equal", verdict


@pytest.mark.parametrize("name", UNSEEN)
def test_what_a_wrapped_loss_does_not_see_is_known(name: str) -> None:
    assert judge(REGISTER[name], "loss").kind == "WRONG"  # else docs/wrap.md says too much


def test_neither_does_the_cache_on_disk(tmp_path: Path) -> None:
    failing_or_cached(SAMPLE[::4], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(n, mode, marks=pytest.mark.xfail(strict=True) if n in unseen else ())
        for mode, unseen in (*((mode, UNSEEN_BY_STEPS) for mode in GOALS if mode != "run"), ("run", UNSEEN))
        for n in NAMES
    ],
)
def test_a_goal_changes_nothing_of_any_loop(name: str, mode: str) -> None:
    verdict = judge(REGISTER[name], mode)
    assert not verdict.fails, verdict


@pytest.mark.slow
def test_the_cache_on_disk_changes_nothing_of_any_loop(tmp_path: Path) -> None:
    failing_or_cached(NAMES, tmp_path)


def failing_or_cached(names: list[str], folder: Path) -> None:
    verdicts = in_two_processes(names, folder)
    assert len(verdicts) == 2 * len(names)
    failing = "\n".join(str(verdict) for verdict in verdicts if verdict.fails)
    assert not failing, failing
    assert any(verdict.cached for verdict in verdicts[len(names) :])  # or the second process showed nothing


def test_there_are_at_least_250_loops() -> None:
    assert len(NAMES) >= 250


class Planned:
    """Stands for a compiled step that goes wrong in some way at step 2."""

    def __init__(self, loop: Loop, wrong: Any) -> None:
        self.loop, self.wrong, self.number = loop, wrong, 0

    def __call__(self, batch: Any) -> Any:
        self.number += 1
        if self.number == 3 and self.wrong is refuse_at_once:
            refuse("the loss reads a file, which is not compared: read it before the step")
        result = self.loop.plain(batch)
        return self.wrong(self.loop, result) if self.number == 3 else result

    def report(self) -> Any:
        raise olla.ReplayError("the step has not run yet: call step(batch) once, then ask for its report")


def refuse(message: str) -> Any:
    raise olla.CaptureError(message)


def refuse_at_once(loop: Loop, result: Any) -> Any:
    """Stands for a step that is refused before it has changed anything."""


def add_to_a_parameter(loop: Loop, result: Any) -> Any:
    with torch.no_grad():
        next(loop.model.parameters()).view(-1)[0].add_(0.5)
    return result


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (lambda loop, result: result, "equal"),
        (lambda loop, result: result * (1 + 2**-22), "rounding"),
        (lambda loop, result: result * 1.01, "WRONG"),
        (lambda loop, result: (result,), "WRONG"),
        (lambda loop, result: result.double(), "WRONG"),
        (lambda loop, result: torch.rand(()) * 0 + result, "WRONG"),  # moves torch's random state
        (add_to_a_parameter, "WRONG"),
        (refuse_at_once, "error"),
        (lambda loop, result: refuse("the loss reads a file, which is not compared: read it before the step"), "WRONG"),
        (lambda loop, result: refuse("no"), "RAW"),
        (lambda loop, result: {}["gone"], "RAW"),
    ],
)
def test_the_judge_sees_what_is_wrong(wrong: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "compiled", lambda loop, **options: Planned(loop, wrong))
    monkeypatch.setitem(REGISTER, "judged", Odd("judged", train))
    verdict = judge(REGISTER["judged"])
    assert verdict.kind == kind
    assert verdict.fails == (kind in ("rounding", "WRONG", "RAW"))
