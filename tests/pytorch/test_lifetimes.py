"""Nothing of a capture outlives it, and its batch not even the call: weak references, and objects of many captures."""

from __future__ import annotations

import collections
import contextvars
import functools
import gc
import logging
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import olla
from olla.pytorch.capture import exclusive
from tests.support.pytorch.bodies import BODIES, batch_for, world_of
from tests.support.pytorch.lifetimes import Lifetimes, collect
from tests.support.pytorch.steps import nn, square, torch

pytestmark = pytest.mark.torch
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True),
    "adagrad": torch.optim.Adagrad,
    "none": lambda _: None,
}


def linear(optimizer: str, **options: Any) -> Any:
    model = nn.Linear(6, 3)
    options = {"loss": square, "disk_cache": False, "time_limit": 0.1} | options
    return olla.compile(model, optimizer=OPTIMIZERS[optimizer](model.parameters()), **options)


def rows(number: int) -> Any:
    return torch.ones(number, 6)


@pytest.mark.parametrize("arena", [None, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_keeps_no_batch_and_all_else_ends_with_it(lifetimes: Lifetimes, optimizer: str, arena: bool) -> None:
    step = linear(optimizer, arena=arena)
    for number in (2, 3, 2):
        step(rows(number))
    assert lifetimes.alive("batch") == 0
    assert lifetimes.alive("graph") == 2
    del step
    assert lifetimes.alive("graph") == lifetimes.alive("mode of stand-ins") == 0


@pytest.mark.parametrize("body", BODIES)
def test_bodies_of_loops_leave_nothing_behind(lifetimes: Lifetimes, body: Any) -> None:
    world = world_of(body, batch_for(body))
    step = olla.compile(world.model, optimizer=world.optimizer, step=body, disk_cache=False, time_limit=0.1)
    step(world.batch)
    del world
    assert lifetimes.alive("batch") == 0
    del step
    assert lifetimes.alive("graph") == lifetimes.alive("mode of stand-ins") == 0


@pytest.mark.filterwarnings("ignore:the step needed more than:UserWarning")
def test_an_evicted_capture_is_gone_while_the_step_goes_on(lifetimes: Lifetimes) -> None:
    step = linear("adamw", cache_size=2)
    for number in range(1, 6):
        step(rows(number))
    assert lifetimes.alive("graph") == lifetimes.alive("mode of stand-ins") == 2


@pytest.mark.parametrize("optimizer", ["none", "sgd", "adamw"])
def test_a_graph_that_was_captured_alone_keeps_no_batch(optimizer: str) -> None:
    model, batch = nn.Linear(6, 3), rows(2)
    captured = olla.capture(model, batch, optimizer=OPTIMIZERS[optimizer](model.parameters()), loss=square)
    alive = [weakref.ref(batch), weakref.ref(captured.module.graph)]
    del batch
    collect()
    assert alive[0]() is None
    del captured
    collect()
    assert alive[1]() is None


def not_followed(model: Any, x: Any) -> Any:
    return square(types.SimpleNamespace(model=model).model, x)  # not by Dynamo: captured by running it


def not_captured(model: Any, x: Any) -> Any:
    loss = square(model, x)
    return loss if loss.item() > 0 else -loss


@pytest.mark.parametrize("arena", [None, False])
@pytest.mark.parametrize("loss", [square, not_followed, not_captured])
@pytest.mark.filterwarnings("ignore:the step :UserWarning")
def test_batches_and_results_are_freed_without_garbage_collection(loss: Any, arena: bool) -> None:
    """An exception that was caught holds the frames it went through, theirs what they hold: on a GPU, the arena."""
    step = linear("sgd", loss=loss, arena=arena)
    step(rows(3))
    collect()
    gc.disable()
    try:
        for number in (2, 3):
            batch = rows(number)
            result = step(batch)
            seen = [weakref.ref(batch), weakref.ref(result)]
            del batch, result
            assert [ref() for ref in seen] == [None, None], number
    finally:
        gc.enable()


@pytest.mark.parametrize("loss", [not_followed, not_captured])
@pytest.mark.filterwarnings("ignore:the step :UserWarning")
def test_an_exception_that_the_user_handles_stays_as_it_is(loss: Any) -> None:
    step = linear("sgd", loss=loss)
    kept = []
    try:
        raise KeyError("the user's")
    except KeyError as error:
        step(rows(2))
        step(rows(3))
        kept.append(error.__traceback__)
    assert kept != [None]


def test_a_capture_that_is_refused_leaves_nothing_behind() -> None:
    def loss(model: Any, x: Any) -> Any:
        value = square(model, x)
        value.backward()
        return value if value > 0 else -value

    batch = rows(2)
    alive = weakref.ref(batch)
    for _ in range(2):
        with pytest.raises(olla.CaptureError):
            olla.capture(nn.Linear(6, 3), batch, loss=loss)
    del batch
    collect()
    assert alive() is None


def test_a_module_that_a_step_imports_keeps_nothing_of_the_capture(
    lifetimes: Lifetimes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_by_a_loss.py").write_text("from random import choice\nfrom torch.autograd import backward\n")
    monkeypatch.syspath_prepend(tmp_path)

    def loss(model: Any, x: Any) -> Any:
        import imported_by_a_loss  # noqa: F401

        return square(model, x)

    try:
        step = olla.compile(nn.Linear(6, 3), loss=loss, disk_cache=False, time_limit=0.1)
        step(rows(2))
        step(rows(2))
        kept = sys.modules["imported_by_a_loss"]
        assert kept.choice([3]) == 3
        del step
        assert lifetimes.alive("graph") == 0
    finally:
        sys.modules.pop("imported_by_a_loss", None)


# For every graph: a way to its source, for tracebacks, and weak references to its code.
_KEPT_BY_TORCH = (types.MethodType, functools.partial, tuple, weakref.ReferenceType)


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
@pytest.mark.filterwarnings("ignore:the step needed more than:UserWarning")
def test_objects_do_not_add_up_over_captures_of_many_shapes(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("torch.__trace")  # pytest keeps what torch logs there of every stand-in
    monkeypatch.setattr(logger, "disabled", True)
    dynamo = pytest.importorskip("torch._dynamo.utils")
    fake_tensor = pytest.importorskip("torch._subclasses.fake_tensor")
    sympy = pytest.importorskip("sympy.core.cache")
    monkeypatch.setattr(dynamo, "_compilation_metrics", collections.deque(maxlen=1))  # torch keeps 64
    monkeypatch.setattr(dynamo.get_metrics_context(), "_edits", collections.deque(maxlen=1))  # torch keeps all
    counts = []
    step = linear(optimizer, cache_size=3)
    for number in range(1, 69):
        contextvars.copy_context().run(step, rows(number))  # torch leaves a context variable for every graph
        if number in (40, 68):  # caches of torch's own, of bounded length, are full by then
            fake_tensor.FakeTensorMode.cache_clear()  # bounded, but it grows and shrinks with every few captures
            exclusive._memos.clear()
            sympy.clear_cache()  # of 1,000 numbers
            collect()
            counts.append(sum(type(thing) not in _KEPT_BY_TORCH for thing in gc.get_objects()))
    assert counts[1] <= counts[0] + 28, counts  # less than one of each capture, which has hundreds


def test_the_report_says_what_stays_between_calls_and_what_the_process_had() -> None:
    step = linear("adamw")
    batch = rows(50_000)
    for _ in range(2):
        step(batch)
    report = step.report()
    assert report.kept_bytes >= report.arena_bytes > 0
    text = str(report)
    assert "kept between calls" in text
    if sys.platform.startswith("linux"):
        assert report.process_peak_bytes is not None
        assert report.process_peak_before_bytes is not None
        assert "most resident since" in text
    step.release()
    assert step.report().kept_bytes <= report.kept_bytes - report.arena_bytes
