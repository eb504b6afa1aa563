"""The CTC loss without a tensor whose shape depends on values: the backward pass recomputes the table of alphas.

Importing this module registers its two operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_NONE, _MEAN, _SUM = range(3)  # torch's numbers of reductions
_ARGUMENTS = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, bool infinity"
_library: Any = torch.library.Library("olla", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(f"ctc_loss({_ARGUMENTS}) -> Tensor")
_library.define(f"ctc_loss_backward(Tensor gradient, {_ARGUMENTS}) -> Tensor")


def _run(log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, blank: int, infinity: bool) -> Any:
    lengths = (input_lengths.tolist(), target_lengths.tolist())
    return torch.ops.aten._ctc_loss.default(log_probs, targets, *lengths, blank, infinity)


def _run_backward(gradient: Any, *args: Any) -> Any:
    log_probs, targets, input_lengths, target_lengths, *settings = args
    lengths = (input_lengths.tolist(), target_lengths.tolist())
    return torch.ops.aten._ctc_loss_backward.default(gradient, log_probs, targets, *lengths, *_run(*args), *settings)


_library.impl("ctc_loss", lambda *args: _run(*args)[0], "CompositeExplicitAutograd")
_library.impl("ctc_loss_backward", _run_backward, "CompositeExplicitAutograd")
_library._register_fake("ctc_loss", lambda log_probs, *_: log_probs.new_empty(log_probs.shape[1]))
_library._register_fake("ctc_loss_backward", lambda _, log_probs, *rest: log_probs.new_empty(log_probs.shape))


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        ctx.save_for_backward(*args[:4])
        ctx.rest = args[4:]
        return torch.ops.olla.ctc_loss(*args)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient = torch.ops.olla.ctc_loss_backward(*gradients, *ctx.saved_tensors, *ctx.rest)
        return gradient, None, None, None, None, None


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor | Sequence[int],
    target_lengths: torch.Tensor | Sequence[int],
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Return what torch.ctc_loss returns, to the bit, for lengths that are not known while a step is traced.

    Source: the composite form of torch's aten/src/ATen/native/LossCTC.cpp, without cuDNN.
    """
    batched = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
    lengths = [torch.as_tensor(n, dtype=torch.long) for n in (input_lengths, target_lengths)]
    function: Any = _Losses.apply
    losses = function(batched, targets.to(log_probs.device, torch.long), *lengths, blank, zero_infinity)
    if zero_infinity:
        losses = torch.where(losses == float("inf"), torch.zeros_like(losses), losses)
    if reduction == _MEAN:
        counts = lengths[1].to(losses.device, losses.dtype).clamp_min(1)
        return torch.as_tensor(losses / counts).mean()
    if reduction == _SUM:
        return torch.as_tensor(losses).sum()
    return torch.as_tensor(losses if log_probs.dim() == 3 else losses.squeeze(0))
