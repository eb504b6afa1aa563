"""Losses that Dynamo follows: equal to the ordinary loop, with all that it does to Python; what guards do not see."""

from __future__ import annotations

import collections
import copy
import gc
import logging
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import olla
from olla.pytorch.dynamo import follow
from tests.support.pytorch.steps import nn, square, torch

pytestmark = pytest.mark.torch
SETTINGS = {"disk_cache": False, "time_limit": 0.05, "arena": False}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout(0.5)
        self.scale, self.last, self.calls = 1.0, None, 0

    def forward(self, x: Any) -> Any:
        return self.second(self.drop(self.first(x))) * self.scale


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def rows(i: int = 0) -> Any:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(i))


def pair(make_loss: Callable[[Any], Any], change: Callable[[Any, int], None], **options: Any) -> tuple[list[Any], Any]:
    """Train four steps as an ordinary loop does, and planned; the losses of both, equal parameters, and the step."""
    found, models, step = [], [], None
    for planned in (False, True):
        model = net()
        loss = make_loss(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        if planned:
            step = olla.compile(model, optimizer=optimizer, loss=loss, **{**SETTINGS, **options})
        torch.manual_seed(7)
        random.seed(7)
        losses = []
        for i in range(4):
            change(model, i)
            if step is not None and planned:
                losses.append(step(rows(i)))
                continue
            optimizer.zero_grad()
            value = loss(model, rows(i))
            value.backward()
            optimizer.step()
            losses.append(value.detach())
        found.append(losses)
        models.append(model)
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in models), strict=True))
    return found, step


def nothing(model: Any, i: int) -> None:
    pass


def same(found: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_names_and_places_are_those_of_the_users_code() -> None:
    model = net()
    step = olla.compile(model, loss=lambda m, b: square(m, b["x"]), **SETTINGS)
    step({"x": rows()})
    graph = step.graph
    assert "batch[x]" in graph.tensor_names
    assert {"first", "drop", "second"} <= set(graph.modules)
    assert any(source.startswith("tests/pytorch/dynamo/test_follow.py:") for source in graph.sources)


def test_what_the_code_does_to_python_is_done_at_every_step() -> None:
    def make(model: Any) -> Any:
        history: list[Any] = []
        model.history = history

        def loss(model: Any, x: Any) -> Any:
            y = square(model, x)
            model.calls += 1
            model.last = y.detach() if model.last is None else 0.5 * model.last + 0.5 * y.detach()
            history.append(model.calls)
            return y * len(history) + model.last

        return loss

    found, step = pair(make, nothing)
    assert same(found)
    assert step.model.history == [1, 2, 3, 4]
    assert step.model.calls == 4
    assert step.report().num_ordinary_steps == 0


@pytest.mark.parametrize("number", [0.25, True])
def test_numbers_of_the_batch_are_guarded(number: Any) -> None:
    model = net()
    step = olla.compile(model, loss=lambda m, b: square(m, b[0]) * b[1], **SETTINGS)
    for weight in (number, 3.0, number):
        torch.manual_seed(1)
        found = step((rows(), weight))
        torch.manual_seed(1)
        assert torch.equal(found, square(model, rows()) * weight)
    assert step.report().num_captures == 2


def patched(model: Any, i: int) -> None:
    nn.Linear.forward = lambda self, x, i=i: linear_forward(self, x) * (i + 1)  # type: ignore[method-assign, assignment]


linear_forward = nn.Linear.forward


def hooked(model: Any, i: int) -> None:
    if i == 2:
        model.first.register_forward_hook(lambda module, args, result: result * 2)


def swapped(model: Any, i: int) -> None:
    if i == 2:
        model.first, model.second = model.second, model.first


def by_attribute(model: Any, i: int) -> None:
    model.scale = -0.0 if i == 2 else 0.0 if i == 1 else 1.0


def by_sign(model: Any, x: Any) -> Any:
    return square(model, x) + (1 if str(model.scale)[0] == "-" else 2)


UNSEEN = {
    "the forward of a class": (lambda model: square, patched),
    "a hook of a module": (lambda model: square, hooked),
    "layers that change places": (lambda model: square, swapped),
    "a number that changes": (lambda model: square, lambda model, i: setattr(model, "scale", float(i // 2))),
    "the sign of a zero": (lambda model: by_sign, by_attribute),
}


@pytest.mark.parametrize("case", UNSEEN)
def test_a_change_is_seen(case: str) -> None:
    make, change = UNSEEN[case]
    try:
        found, step = pair(make, change)
    finally:
        nn.Linear.forward = linear_forward  # type: ignore[method-assign]
    assert same(found)
    assert step.report().num_ordinary_steps == 0


def test_a_variable_of_the_environment_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    def make(model: Any) -> Any:
        return lambda m, x: square(m, x) * float(os.getenv("OLLA_TEST_SCALE", "1"))

    assert same(pair(make, lambda model, i: monkeypatch.setenv("OLLA_TEST_SCALE", str(i)))[0])


def test_the_order_of_keys_is_seen() -> None:
    def make(model: Any) -> Any:
        model.table = collections.OrderedDict(a=1.0, b=2.0)
        return lambda m, x: square(m, x) * next(iter(m.table.values()))

    assert same(pair(make, lambda model, i: model.table.move_to_end("a" if i % 2 else "b"))[0])


def bounded(model: Any) -> Any:
    model.latest = collections.deque(maxlen=2)

    def loss(model: Any, x: Any) -> Any:
        model.latest.append(1)
        return square(model, x) * len(model.latest)

    return loss


def drawn(model: Any) -> Any:
    return lambda m, x: square(m, x) * random.random()


def leaving_a_hook(model: Any) -> Any:
    def loss(model: Any, x: Any) -> Any:
        model.first.weight.register_hook(lambda gradient: gradient * 0.5)
        return square(model, x)

    return loss


@pytest.mark.parametrize("make", [bounded, drawn, leaving_a_hook], ids=lambda make: make.__name__)
@pytest.mark.filterwarnings("ignore:the step runs as the ordinary one:UserWarning")
def test_what_dynamo_does_in_another_way_runs_as_it_is(make: Any) -> None:
    found, step = pair(make, nothing)
    assert same(found)
    assert step.report().num_ordinary_steps == 4


@pytest.mark.filterwarnings("ignore:the step runs as the ordinary one:UserWarning")
def test_hooks_on_all_modules_run() -> None:
    handles: list[Any] = []

    def change(model: Any, i: int) -> None:
        if i == 1:
            handles.append(nn.modules.module.register_module_forward_hook(lambda module, args, result: result * 2))
        if i == 3:
            handles.pop().remove()

    found = []
    for _ in range(2):
        try:
            found.append(pair(lambda model: square, change)[0])
        finally:
            while handles:
                handles.pop().remove()
    assert all(map(same, found))


def test_a_model_that_asks_hears_that_it_is_not_compiled() -> None:
    def make(model: Any) -> Any:
        return lambda m, x: square(m, x) * (2 if torch.compiler.is_compiling() else 1)

    before = torch.compiler.is_compiling
    assert same(pair(make, nothing)[0])
    assert torch.compiler.is_compiling is before


def test_what_decides_nothing_needs_no_capture_of_its_own() -> None:
    def make(model: Any) -> Any:
        def loss(model: Any, x: Any) -> Any:
            if model.last is None:
                model.last = "seen"
            return square(model, x)

        return loss

    found, step = pair(make, nothing)
    assert same(found)
    assert step.report().num_captures == 1


def test_too_many_captures_are_warned_of_with_the_guard() -> None:
    model = net()
    step = olla.compile(model, loss=square, cache_size=1, **SETTINGS)
    step(rows())
    model.drop.p = 0.25
    with pytest.warns(UserWarning, match=r"of Dynamo's guards, model\.drop\.p == 0\.5"):
        step(rows())


@pytest.mark.filterwarnings("ignore:the step needed more than:UserWarning")
def test_graphs_do_not_add_up_and_end_with_the_step() -> None:
    from olla.pytorch.dynamo.graph import LossGraph

    def alive() -> int:
        gc.collect()
        return sum(type(o) is LossGraph for o in gc.get_objects())

    before, model = alive(), net()
    step = olla.compile(model, loss=square, cache_size=2, **SETTINGS)
    for i in range(12):
        model.scale = float(i)
        step(rows())
        assert alive() - before <= 5
    kept = weakref.ref(model)
    del step, model
    assert alive() == before
    assert kept() is None


def test_a_copy_of_what_runs_is_another_step() -> None:
    model = net()
    other = copy.deepcopy(model)
    steps = [olla.compile(m, loss=square, **SETTINGS) for m in (model, other)]
    found = []
    for step in steps:
        torch.manual_seed(2)
        found.append(step(rows()))
    assert torch.equal(*found)


def test_steps_are_followed_after_one_that_was_made_while_torch_compile_was_switched_off() -> None:
    child = """
import torch, olla
loss = lambda model, x: model(x).square().mean()
def step():
    made = olla.compile(torch.nn.Linear(4, 4), loss=loss, disk_cache=False, arena=False)
    made(torch.ones(2, 4))
    return made.report().note
with torch.compiler.set_stance("force_eager"):
    assert "switched off" in step()
assert "Dynamo" not in step()
"""
    subprocess.run([sys.executable, "-c", child], check=True)


def test_clocks_are_not_frozen_and_the_warning_is_where_the_step_is_called() -> None:
    model = net()
    step = olla.compile(model, loss=lambda m, x: square(m, x) + time.perf_counter(), **SETTINGS)
    with pytest.warns(UserWarning, match=r"the step calls time\.perf_counter|the step reads a clock") as caught:
        first = step(rows())
    assert [str(w.filename) for w in caught] == [__file__]
    assert float(step(rows())) > float(first)


def test_an_error_of_the_model_is_all_that_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """Torch would print thirty lines for each way in which the step is tried."""
    handler = logging.StreamHandler()
    logging.getLogger("torch").addHandler(handler)
    model = nn.Linear(6, 3)
    step = olla.compile(model, optimizer=torch.optim.SGD(model.parameters()), loss=square, disk_cache=False)
    try:
        step(torch.ones(2, 6))
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            step(torch.ones(2, 5))
    finally:
        logging.getLogger("torch").removeHandler(handler)
    assert "".join(capfd.readouterr()) == ""


def test_whether_a_cuda_graph_is_captured_is_still_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [True, False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", answers.pop)
    follow.say_eager(1)
    try:
        assert [torch.cuda.is_current_stream_capturing() for _ in range(2)] == [False, True]
    finally:
        follow.say_eager(-1)
    assert torch.cuda.is_current_stream_capturing == answers.pop


def test_threads_wait_until_dynamo_has_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[threading.Thread] = []
    compiled = torch.compile

    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(0.3)
        made.append(threading.current_thread())
        return compiled(*args, **options)

    monkeypatch.setattr(torch, "compile", slow)
    follow._begin.cache_clear()
    seen: list[int] = []

    def begin() -> None:
        follow.begin()
        seen.append(len(made))

    threads = [threading.Thread(target=begin) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [1, 1, 1]
