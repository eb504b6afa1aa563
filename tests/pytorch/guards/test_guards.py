"""Guards: a change of what a step read from Python captures it anew, and the message says what changed."""

from __future__ import annotations

import argparse
import collections
import copy
import pickle
import sys
import types
from typing import Any

import pytest

import olla
from olla.pytorch.guards.code import named, origin
from olla.pytorch.guards.values import MISSING, same
from tests.support.pytorch.steps import nn, square, torch

pytestmark = pytest.mark.torch


def compiled(model: nn.Module, loss: Any = square, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"time_limit": 0.05, "arena": False, "disk_cache": False}
    return olla.compile(model, optimizer=optimizer, loss=loss, **({"on_unsupported": "raise"} | settings | options))


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))


def rows() -> Any:
    return torch.ones(3, 4)


def reason(step: Any) -> str:
    """Why the latest capture would not be used for another call."""
    latest = step._captures.latest
    return str(latest.values(step._call(rows()))[1])


def test_the_change_is_named_with_both_values() -> None:
    model = layers()
    step = compiled(model)
    step(rows())
    assert reason(step) == ""
    model[1].p = 0.25
    assert reason(step) == "model.1.p was 0.5 and is 0.25"
    model[1].p = 0.5
    assert reason(step) == ""
    model[1].eval()
    assert reason(step) == "model.1.training was True and is False"


def test_a_closure_a_global_and_the_environment_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    weight = 1.0
    scope = types.ModuleType("settings_of_a_test")
    scope.SCALE = 1.0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "settings_of_a_test", scope)
    monkeypatch.setenv("SCALE", "1")

    def loss(model: nn.Module, x: Any) -> Any:
        import settings_of_a_test

        return square(model, x) * weight * settings_of_a_test.SCALE * float(os.environ["SCALE"])

    step = compiled(layers(), loss)
    step(rows())
    weight = 2.0
    assert "weight of the loss function changed: it was 1.0 and is 2.0" in reason(step)
    weight = 1.0
    scope.SCALE = 3.0  # type: ignore[attr-defined]
    assert reason(step) == "settings_of_a_test.SCALE was 1.0 and is 3.0"
    scope.SCALE = 1.0  # type: ignore[attr-defined]
    monkeypatch.setenv("SCALE", "2")
    assert "environment variable SCALE" in reason(step)


def test_more_captures_than_are_kept_are_warned_of_with_what_changed() -> None:
    model = layers()
    step = compiled(model, cache_size=1)
    step(rows())
    model[1].p = 0.25
    with pytest.warns(UserWarning, match=r"model\.1\.p was 0\.5 and is 0\.25"):
        step(rows())


def test_a_step_that_changes_what_it_reads_is_refused_and_undone() -> None:
    history: list[Any] = []
    count = {"calls": 0}

    def appends(model: nn.Module, x: Any) -> Any:
        history.append(model(x).mean())
        return history[-1].square() * len(history)

    def counts(model: nn.Module, x: Any) -> Any:
        count["calls"] += 1
        return square(model, x) / count["calls"]

    for loss, name in ((appends, "history"), (counts, "calls")):
        with pytest.raises(olla.CaptureError, match=f"itself changes what it reads from Python: .*{name}"):
            compiled(layers(), loss)(rows())
    assert history == []
    assert count == {"calls": 0}


class Remembers(nn.Module):
    """Sets attributes in its forward pass: one before it reads it, one that it made itself from nothing, one state."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind, self.last, self.mask, self.total = nn.Linear(4, 4), kind, None, None, 0.0

    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        if self.kind == "set first":
            self.last = y.mean()
            return y + self.last
        if self.kind == "constant":
            if self.mask is None:
                self.mask = torch.ones(4, 4).tril()
            return y @ self.mask
        self.total = self.total * 0.9 + y.mean().detach()
        return y + self.total


@pytest.mark.parametrize("kind", ["set first", "constant"])
def test_attributes_that_carry_nothing_from_step_to_step_are_taken(kind: str) -> None:
    torch.manual_seed(0)
    model = Remembers(kind)
    other = copy.deepcopy(model)
    step, optimizer = compiled(model), torch.optim.SGD(other.parameters(), lr=0.1, foreach=False)
    for _ in range(3):
        optimizer.zero_grad()
        value = square(other, rows())
        value.backward()
        optimizer.step()
        assert torch.equal(step(rows()), value.detach())
    assert len(step._captures) == 1


def test_an_attribute_that_carries_something_is_refused() -> None:
    with pytest.raises(olla.CaptureError, match=r"model\.total was 0\.0"):
        compiled(Remembers("state"))(rows())


def test_constants_that_a_trace_computes_with_keep_their_values() -> None:
    model, teacher = layers(), nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    before = copy.deepcopy(teacher.state_dict())

    def loss(model: nn.Module, x: Any) -> Any:
        with torch.no_grad():
            teacher[0].weight.mul_(0.9)
            target = teacher(x)
        return (model(x) - target).square().mean()

    olla.capture(model, rows(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
    assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())


def test_clocks_and_files_are_refused_where_they_are_read(tmp_path: Any) -> None:
    import time

    path = tmp_path / "scale"
    path.write_text("2.0")

    def opened() -> str:
        with open(path) as file:
            return file.read()

    for read in (time.time, path.read_text, opened):
        with pytest.raises(olla.CaptureError, match="would be frozen into the captured step"):
            compiled(layers(), lambda model, x, read=read: square(model, x) * float(read()))(rows())


def test_a_clock_that_is_not_reached_is_no_matter() -> None:
    import time

    verbose = False

    def loss(model: nn.Module, x: Any) -> Any:
        if verbose:
            print(time.time())
        return square(model, x)

    assert compiled(layers(), loss)(rows()).isfinite()


def test_a_capture_leaves_tracing_and_modules_as_they_were() -> None:
    called = []

    def trace(frame: Any, event: str, argument: Any) -> None:
        called.append(frame.f_code.co_name)

    sys.settrace(trace)
    try:
        compiled(layers())(rows())
        assert sys.gettrace() is trace
    finally:
        sys.settrace(None)
    assert "square" in called
    assert "__getattribute__" not in vars(nn.Module)
    assert nn.Module.__setattr__.__qualname__ == "Module.__setattr__"


def test_batch_and_parameters_that_come_to_share_memory_are_refused() -> None:
    model = nn.Linear(4, 3)
    step = compiled(model)
    step(rows())
    with pytest.raises(olla.CaptureError, match="share memory but are two tensors, and the step changes it"):
        step(model.weight.detach())


def test_model_optimizer_and_loss_of_a_step_are_read_only() -> None:
    step = compiled(layers())
    for name in ("model", "optimizer", "loss"):
        with pytest.raises(AttributeError):
            setattr(step, name, None)


@pytest.mark.parametrize("make", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_step_that_is_copied_or_pickled_says_what_to_do(make: Any) -> None:
    with pytest.raises(olla.ReplayError, match="copy or save the model and the optimizer"):
        make(compiled(layers()))


def test_values_are_the_same_only_with_their_types_and_signs() -> None:
    assert same((1, "a", 2.0), (1, "a", 2.0))
    assert not same(1, 1.0)
    assert not same(0, False)
    assert not same(0.0, -0.0)
    assert same(float("nan"), float("nan"))
    assert not same([1], [1])  # either may change later


def test_names_of_code_are_those_it_may_read() -> None:
    def code(self: Any) -> Any:
        self.written = len(self.read)
        return getattr(self, "by_text"), MISSING  # noqa: B009

    found = named(code.__code__)
    assert {"len", "getattr", "MISSING"} == set(found.variables)
    assert {"read", "by_text"} <= found.loaded
    assert "written" not in found.loaded
    assert not found.is_open
    assert named((lambda self, name: getattr(self, name)).__code__).is_open
    assert origin(__file__) == "user"
    assert origin(torch.__file__) == "torch"


def losses(loss: Any, changes: dict[int, Any], is_compiled: bool, model: nn.Module | None = None) -> list[float]:
    """The losses of four steps; what is to change before step i is called there."""
    model = layers()[::2] if model is None else model
    step = compiled(model, loss)
    optimizer, found = step.optimizer, []
    for i in range(4):
        changes.get(i, lambda: None)()
        batch = torch.full((3, 4), 1.0 + i)
        if is_compiled:
            found.append(float(step(batch)))
        else:
            optimizer.zero_grad()
            value = loss(model, batch)
            value.backward()
            optimizer.step()
            found.append(float(value.detach()))
    return found


def test_an_object_whose_dict_of_attributes_is_replaced_is_captured_anew() -> None:
    def run(is_compiled: bool) -> list[float]:
        config = argparse.Namespace(scale=1.0)

        def replace() -> None:
            config.__dict__ = {"scale": 3.0}

        return losses(lambda model, x: square(model, x) * config.scale, {2: replace}, is_compiled)

    assert run(True) == run(False)


def test_an_ordered_dict_in_another_order_is_captured_anew() -> None:
    def run(is_compiled: bool) -> list[float]:
        weights = collections.OrderedDict(a=1.0, b=3.0)

        def loss(model: nn.Module, x: Any) -> Any:
            return square(model, x) * next(iter(weights.values()))

        return losses(loss, {2: lambda: weights.move_to_end("a")}, is_compiled)

    assert run(True) == run(False)


def test_an_attribute_that_a_function_is_given_later_is_captured_anew() -> None:
    def run(is_compiled: bool) -> list[float]:
        def loss(model: nn.Module, x: Any) -> Any:
            return square(model, x) * getattr(loss, "scale", 1.0)

        return losses(loss, {2: lambda: setattr(loss, "scale", 3.0)}, is_compiled)

    assert run(True) == run(False)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # raised half-way, it would leave oneDNN switched off
def test_a_setting_that_the_step_changes_for_a_while_is_as_it_was_after_the_capture() -> None:
    def loss(model: nn.Module, x: Any) -> Any:
        with torch.backends.mkldnn.flags(enabled=False):
            return square(model, x)

    before = torch.backends.mkldnn.enabled
    with pytest.raises(olla.CaptureError, match="changes settings of torch that its kernels read"):
        compiled(layers(), loss)(rows())
    assert torch.backends.mkldnn.enabled == before


class Lazy(nn.Module):
    """Makes a table at its first use, and writes into it: numbers, or something of the batch."""

    def __init__(self, takes_batch: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.table, self.takes_batch = nn.Linear(4, 4), None, takes_batch

    def forward(self, x: Any) -> Any:
        if self.table is None:
            self.table = torch.zeros(4)
            self.table[0] = x.detach().mean() if self.takes_batch else 1.5
            self.table.mul_(2)
        return self.layer(x) + self.table


def test_a_table_made_of_numbers_at_first_use_is_taken_and_one_that_a_batch_was_written_into_is_refused() -> None:
    assert losses(square, {}, True, Lazy(False)) == losses(square, {}, False, Lazy(False))
    with pytest.raises(olla.CaptureError, match="table was None"):
        losses(square, {}, True, Lazy(True))
