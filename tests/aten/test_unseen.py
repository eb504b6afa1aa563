"""What Dynamo has no guards for is seen around a wrapped model, and costs no plan where nothing has changed."""

from __future__ import annotations

import collections
import logging
import os
import re
from collections.abc import Callable
from typing import Any

import pytest

import olla
from tests.aten.loops import fresh  # noqa: F401
from tests.support.pytorch.steps import TORCH, nn, torch

pytestmark = pytest.mark.torch


class Reads(nn.Module):
    """Multiplies by what a function says of the layer."""

    def __init__(self, factor: Callable[[Any], Any]) -> None:
        super().__init__()
        self.factor, self.zero, self.order = factor, 0.0, collections.OrderedDict(a=2.0, b=3.0)

    def forward(self, x: Any) -> Any:
        return x * self.factor(self)


FACTORS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    "environment": (
        lambda layer: float(os.getenv("OLLA_TEST_FACTOR", "1")),
        lambda layer, patch: patch.setenv("OLLA_TEST_FACTOR", "2"),
    ),
    "sign of zero": (
        lambda layer: 1.0 if str(layer.zero) == "0.0" else 2.0,
        lambda layer, patch: setattr(layer, "zero", -0.0),
    ),
    "order of keys": (
        lambda layer: next(iter(layer.order.values())),
        lambda layer, patch: layer.order.move_to_end("a"),
    ),
    "method of tensors": (
        lambda layer: torch.ones(()).exp2(),
        lambda layer, patch: patch.setattr(torch.Tensor, "exp2", torch.Tensor.exp),
    ),
    "forward of the class": (
        lambda layer: 1.0,
        lambda layer, patch: patch.setattr(Reads, "forward", lambda layer, x: x * 2.0),
    ),
}


@pytest.mark.parametrize("what", FACTORS)
def test_what_a_model_reads_is_compared_at_every_call(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    factor, change = FACTORS[what]
    model = Reads(factor)
    plain = model._call_impl
    olla.wrap(model, max_slowdown=0.5, time_limit=0.1)
    x = torch.randn(4, requires_grad=True)
    before = [model(x) for _ in range(3)][-1]
    report = olla.report_of(model)
    num_graphs = len(report.graphs)
    assert torch.equal(before, plain(x))
    change(model, monkeypatch)
    after = [model(x) for _ in range(3)][-1]
    assert torch.equal(after, plain(x))
    assert not torch.equal(after, before)
    assert num_graphs == 1  # nothing is followed twice before the change, and all of it once after that
    assert len(report.graphs) == 2


def test_other_kernels_of_attention_get_a_plan_of_their_own_and_keep_it() -> None:
    model = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
    olla.wrap(model, max_slowdown=0.5, time_limit=0.1)
    x = torch.randn(2, 5, 16)
    for i in range(6):
        with torch.nn.attention.sdpa_kernel(
            [torch.nn.attention.SDPBackend.MATH] if i % 2 else [torch.nn.attention.SDPBackend.FLASH_ATTENTION]
        ):
            model(x).sum().backward()
    assert len(olla.report_of(model).planned) == 2


class Doubled(torch.overrides.TorchFunctionMode):
    """Doubles what relu returns."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is torch.nn.functional.relu else result


def test_what_runs_in_a_mode_of_functions_runs_as_it_is() -> None:
    model, x = nn.Linear(4, 4), torch.randn(8, 4)

    def loss(model: Any, x: Any) -> Any:
        found = []
        for _ in range(2):  # Dynamo takes nothing of a loop with a break in it, but may follow the mode by itself
            found.append(nn.functional.relu(model(x)).square().mean())
            if found[-1] < 0:
                break
        return sum(found)

    wrapped = olla.wrap(loss, time_limit=0.1)
    assert torch.equal(wrapped(model, x), loss(model, x))
    for _ in range(3):
        with Doubled():
            assert torch.equal(wrapped(model, x), loss(model, x))
    assert olla.report_of(wrapped).num_unplanned_calls == 4


def test_a_layer_without_shape_runs_as_it_is_until_it_has_one() -> None:
    model = olla.wrap(nn.Sequential(nn.LazyLinear(4), nn.Tanh()), time_limit=0.1)
    for _ in range(3):
        model(torch.randn(2, 3)).sum().backward()
    report = olla.report_of(model)
    assert (report.num_calls, report.num_unplanned_calls) == (3, 1)


def test_an_error_of_the_model_is_all_that_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    handler = logging.StreamHandler()
    logging.getLogger("torch").addHandler(handler)
    try:
        model = olla.wrap(nn.Sequential(nn.Linear(3, 3)), time_limit=0.1)
        model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            model(torch.ones(2, 4))
    finally:
        logging.getLogger("torch").removeHandler(handler)
    assert "".join(capfd.readouterr()) == ""
    (line,) = olla.report_of(model).breaks
    assert "Error" in line


class Chooses(nn.Module):
    """Has experts whose rows depend on values, in a loop: Dynamo takes nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Any) -> Any:
        chosen, result = self.gate(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            if len(rows):
                result = result.index_add(0, rows, expert(x[rows]))
        return result


@pytest.mark.parametrize(
    ("model", "reason"), [(nn.LSTM(4, 4), "LSTM|DelayGraphBreak"), (Chooses(), "aten.nonzero")], ids=["LSTM", "experts"]
)
def test_the_report_says_why_nothing_is_planned(model: Any, reason: str) -> None:
    olla.wrap(model, time_limit=0.1)
    for _ in range(2):
        model(torch.randn(5, 4))
    report = olla.report_of(model)
    assert report.num_unplanned_calls == report.num_calls == 2
    (line,) = report.breaks
    assert re.search(reason, line)  # in the words of the torch that is there


@pytest.mark.skipif(TORCH < (2, 13), reason="Dynamo does not follow a copy of a configuration")
def test_a_model_of_transformers_is_one_graph() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    configuration = transformers.T5Config(vocab_size=32, decoder_start_token_id=0, **sizes)
    model = transformers.T5ForConditionalGeneration(configuration)
    olla.wrap(model, time_limit=0.2)
    tokens = torch.randint(1, 32, (2, 6))
    model(input_ids=tokens, labels=tokens).loss.backward()
    report = olla.report_of(model)
    assert report.breaks == []
    assert report.graph_count == 1


class Asserts(nn.Module):
    """Takes numbers above zero only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        assert (x > 0).all(), "positive numbers only"
        return self.layer(x)


def test_an_assert_of_a_tensor_raises_what_python_raises() -> None:
    model = olla.wrap(Asserts(), time_limit=0.1)
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(AssertionError, match="positive numbers only"):
        model(-torch.ones(2, 3))
    assert len(olla.report_of(model).planned) == 1
