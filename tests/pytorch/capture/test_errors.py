"""What cannot be captured is refused with one error that says what to change."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import olla
from tests.support.pytorch.steps import nn, square, torch

pytestmark = pytest.mark.torch


class Branching(nn.Linear):
    def forward(self, x: Any) -> Any:
        return super().forward(x) if x.sum() > 0 else x


class Selecting(nn.Linear):
    def forward(self, x: Any) -> Any:
        return super().forward(x)[x > 0]


class Resizing(nn.Linear):
    def forward(self, x: Any) -> Any:
        return super().forward(x) + x.clone().resize_(1)


def linear(cls: type = nn.Linear) -> nn.Module:
    module: nn.Module = cls(3, 3)
    return module


class Failing(nn.Linear):
    def forward(self, x: Any) -> Any:
        raise ValueError("wrong weather")


@pytest.mark.parametrize(
    ("model", "batch", "loss", "message"),
    [
        (
            linear(Branching),
            torch.ones(2, 3),
            square,
            r"forward pass needs the values of tensors.*test_errors.py.*torch.where",
        ),
        (linear(Selecting), torch.ones(2, 3), square, r"forward pass needs the values.*boolean mask"),
        (linear(Resizing), torch.ones(2, 3), None, r"aten.resize_.default.*Allocate a new tensor"),
        (
            linear(Failing),
            torch.ones(2, 3),
            square,
            r"forward pass failed \(.*test_errors.py.*ValueError: wrong weather\. Check",
        ),
        (
            linear(),
            torch.ones(2, 3),
            lambda m, x: m(x),
            r"shape \(2, 3\), expected one floating-point number.*\.mean\(\)",
        ),
        (linear(), torch.ones(2, 3), lambda m, x: float(3), r"returned a float, expected a scalar tensor"),
        (linear(), torch.ones(2, 3), lambda m, x: m(x).detach().sum(), r"does not depend on any parameter.*detach"),
        (linear().requires_grad_(False), torch.ones(2, 3), square, r"no parameter of the model requires a gradient"),
        (linear(), {"x": torch.ones(2, 3), "k": 3}, square, r"batch\[k\] is a int \(3\).*torch.tensor"),
        (linear(), torch.ones(2, 3).to_sparse(), square, r"batch is a torch.sparse_coo tensor: only plain dense"),
        (nn.Embedding(4, 3, sparse=True), torch.arange(3), square, r"gradient of weight is sparse|sparse"),
        (lambda x: x, torch.ones(2, 3), square, r"model is a function, expected a torch.nn.Module"),
        (linear(), torch.ones(2, 3), 3, r"loss is a int, expected a function"),
    ],
)
def test_what_cannot_be_captured_is_said_in_one_error(model: Any, batch: Any, loss: Any, message: str) -> None:
    with pytest.raises(olla.CaptureError, match=message):
        olla.capture(model, batch, loss=loss)


class Counting(torch.optim.SGD):
    """An optimizer whose state is a Python number."""


def _counting(model: nn.Module) -> Any:
    optimizer = Counting(model.parameters(), lr=0.1)
    for p in model.parameters():
        optimizer.state[p]["step"] = 1
    return optimizer


def _hooked(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


class Wrapper(torch.optim.Optimizer):
    """What trainers put around an optimizer; it has no hooks of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: Wrapper(torch.optim.SGD(m.parameters())), r"Wrapper wraps another optimizer.*pass its \.optimizer"),
        (lambda m: torch.optim.LBFGS(m.parameters()), r"LBFGS evaluates the loss several times"),
        (
            lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, dampening=0.5),
            r"dampening 0.5.*Take one ordinary step",
        ),
        (lambda m: torch.optim.SGD(linear().parameters(), 0.1), r"shape \(3, 3\) that the model does not have"),
        (lambda m: Counting(m.parameters(), 0.1, momentum=0.9), r"state Counting starts from is not known"),
        (lambda m: torch.optim.RAdam(m.parameters()), r"optimizer decides by values of its own state.*AdamW"),
        (_counting, r"keeps step of weight as a int"),
        (_hooked, r"SGD has 1 step hooks"),
    ],
)
def test_optimizers_that_cannot_be_captured_are_refused(make: Callable[[nn.Module], Any], message: str) -> None:
    model = linear()
    with pytest.raises(olla.CaptureError, match=message):
        olla.capture(model, torch.ones(2, 3), optimizer=make(model), loss=square)


def test_two_devices_are_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model, x = linear(), torch.empty(2, 3, device="cuda")
    with pytest.raises(olla.CaptureError, match=r"uses 2 devices \(weight on cpu, batch on cuda"):
        olla.capture(model, x, loss=square)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without accelerator")
def test_device_that_is_not_there_is_refused() -> None:
    with torch.device("meta"):
        model, x = linear(), torch.empty(2, 3)
    with pytest.raises(olla.CaptureError, match="meant for cuda, and PyTorch finds no such device"):
        olla.capture(model, x, loss=square, device="cuda")


def test_optimizer_without_loss_is_refused() -> None:
    model = linear()
    with pytest.raises(olla.CaptureError, match="an optimizer needs a loss"):
        olla.capture(model, torch.ones(2, 3), optimizer=torch.optim.SGD(model.parameters(), 0.1))


def test_a_failed_capture_leaves_the_model_usable() -> None:
    model = linear(Branching)
    before = [id(p) for p in model.parameters()]
    with pytest.raises(olla.CaptureError):
        olla.capture(model, torch.ones(2, 3), loss=square)
    assert [id(p) for p in model.parameters()] == before
    assert square(model, torch.ones(2, 3)).requires_grad


def test_without_torch_the_error_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import olla\n"
        "try: olla.capture(None, None)\n"
        "except ImportError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == 'torch is not installed: pip install "olla-planner[torch]"'


def test_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")
    with pytest.raises(olla.CaptureError, match=r"needs PyTorch 2\.11 or later, and 2\.4\.1\+cpu is installed"):
        olla.capture(linear(), torch.ones(2, 3))


def test_naming_capture_does_not_import_torch() -> None:
    program = "import sys, olla; olla.capture; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
