"""Torch's operators that copy tensors to host memory and back, beside what computes."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from olla.inductor.compat.compat import private


class OffloadOperators(NamedTuple):
    """Torch's operators that copy to host memory and back on a stream of their own, and the one that waits for either.

    The one that waits takes what was copied, a tensor whose storage it frees, and one that only lives until then.
    """

    offload: Any
    reload: Any
    wait: Any


@functools.cache
def offload_operators() -> OffloadOperators:
    """Return the operators (torch 2.13).

    Raises:
        CaptureError: rule "torch_version".
    """
    private("torch._functorch._activation_offloading.offload_ops", "wait_tensor")  # which brings them along
    ops = torch.ops.ao
    return OffloadOperators(ops.offload.default, ops.reload.default, ops.wait_tensor.default)


def waits_for_host() -> tuple[Any, ...]:
    """Return the operator that waits for a copy; none where this torch has none, or has not loaded it yet."""
    return (torch.ops.ao.wait_tensor.default,) if hasattr(torch.ops.ao, "wait_tensor") else ()
