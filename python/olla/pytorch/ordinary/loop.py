"""The ordinary step: gradients dropped, forward, backward, the optimizers' steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

_NO_BACKWARD = (
    "olla.compile(model) without a loss runs inference: its results carry no gradient. Pass loss=lambda model, batch: "
    "... (and optimizer=...), which make the backward pass part of the step"
)


def run_step(
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    loss: Callable[[Any, Any], Any] | None,
    body: Callable[[Any], Any] | None,
    batch: Any,
) -> Any:
    """Run a step as the ordinary loop does.

    Args:
        model, loss, batch: see olla.compile.
        optimizers: those of the step.
        body: the body of the user's own loop, of a batch; None: there is none.

    Returns:
        What the step returns, without gradients.
    """
    if body is not None:
        result = body(batch)
    elif loss is None:
        with torch.no_grad():
            result = inference(model, batch)
    else:
        found = []

        def forward_backward() -> Any:
            found.append(loss(model, batch))
            first = first_of(found[-1])
            first.backward()
            return first

        update(optimizers, forward_backward)
        result = found[0]
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)


def inferred(model: torch.nn.Module, result: Any) -> Any:
    """Return what a model returned; where the ordinary call would train, ``backward()`` of it says what to do."""
    if not (model.training and torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())):
        return result

    def refusing(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
            return value
        refuse = torch._C._functions.DelayedError(_NO_BACKWARD, 1)
        return refuse(value.detach().requires_grad_())

    return torch.utils._pytree.tree_map(refusing, result)


def update(optimizers: Sequence[torch.optim.Optimizer], forward_backward: Callable[[], Any]) -> None:
    """Drop gradients, make new ones and let the optimizers step, as the ordinary loop around a loss function does.

    Args:
        optimizers: those that evaluate the loss themselves are given a closure, one at most.
        forward_backward: leaves gradients in ``.grad`` and returns the loss.
    """

    def closure() -> Any:
        with torch.enable_grad():
            for optimizer in optimizers:
                optimizer.zero_grad()
            return forward_backward()

    evaluating = [optimizer for optimizer in optimizers if needs_closure(optimizer)]
    if not evaluating:
        closure()
    for optimizer in optimizers:
        step: Callable[..., Any] = optimizer.step
        if optimizer in evaluating:
            step(closure)
        else:
            step()


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step of an optimizer evaluates the loss, several times perhaps, as that of LBFGS does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def inference(model: Callable[..., Any], batch: Any) -> Any:
    """Call a model with the entries of a dict, a tuple or a list, or with a tensor."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def first_of(result: Any) -> Any:
    """Return the loss of what a loss function returned."""
    return result[0] if isinstance(result, tuple | list) else result
