"""Turn whatever goes wrong while a step is traced into one CaptureError that says what to change."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from olla.errors import CaptureError

_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


def check_loss(loss: Any, parameters: dict[Any, torch.Tensor]) -> None:
    """Raise a CaptureError unless autograd can start from ``loss``."""
    if not parameters:
        raise CaptureError(
            "no parameter of the model requires a gradient: nothing to train. Pass loss=None to capture inference."
        )
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(
            f"loss(model, batch) returned a {type(loss).__name__}, expected a scalar tensor. "
            "For a transformers model: loss=lambda model, batch: model(**batch).loss"
        )
    if loss.numel() != 1 or not loss.dtype.is_floating_point:
        raise CaptureError(
            f"loss(model, batch) returned a {loss.dtype} tensor of shape {tuple(loss.shape)}, "
            "expected one floating-point number. Reduce it with .mean() or .sum()."
        )
    if not loss.requires_grad:
        raise CaptureError(
            "the loss does not depend on any parameter that requires a gradient: "
            "look for torch.no_grad(), .detach() or .item() on the way to it."
        )


def check_gradients(grads: dict[Any, torch.Tensor | None]) -> None:
    """Raise a CaptureError for gradients that no captured update can use."""
    for name, grad in grads.items():
        if grad is not None and grad.layout != torch.strided:
            raise CaptureError(f"the gradient of {name} is sparse. Use a dense gradient (sparse=False).")
    if all(grad is None for grad in grads.values()):
        raise CaptureError("no parameter that requires a gradient gets one: the loss does not depend on them.")


@contextlib.contextmanager
def explained(phase: Callable[[], str]) -> Iterator[None]:
    """Wrap a trace: every exception leaves as a CaptureError that names the phase, the place and the remedy."""
    try:
        yield
    except CaptureError:
        raise
    except _DATA_DEPENDENT as error:
        raise CaptureError(
            f"the {phase()} pass needs the values of tensors, which are not there while a step is captured"
            f"{_place(error)}: a branch, a loop or a shape depends on them (if tensor, .nonzero(), a boolean mask as "
            "an index). Use torch.where or masking by multiplication, or take that part out of the step."
        ) from error
    except Exception as error:
        message = (str(error).strip().splitlines() or [""])[0]
        raise CaptureError(
            f"tracing the {phase()} pass failed{_place(error)}: {type(error).__name__}: "
            f"{message.rstrip('.')[:300]}. "
            "Check that the same step runs ordinarily on this model and batch."
        ) from error


def _place(error: BaseException) -> str:
    """Name the last line outside torch that the exception passed through."""
    inside = ("/torch/", "/olla/pytorch/", "/contextlib.py", "<string>")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(part in frame.filename.replace("\\", "/") for part in inside):
            return f" ({frame.filename}:{frame.lineno}, {frame.line})"
    return ""
