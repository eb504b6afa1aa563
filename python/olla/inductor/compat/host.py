"""Torch's operators that copy tensors to host memory and back, beside what computes."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from olla.errors import CaptureError
from olla.inductor.compat.compat import private

_NAMES = ("ao::offload", "ao::reload", "ao::wait_tensor")


class OffloadOperators(NamedTuple):
    """Torch's operators that copy to host memory and back on a stream of their own, and the one that waits for either.

    The waiting one takes the copy, a tensor whose storage it frees, and a tensor to keep alive until then.
    """

    offload: Any
    reload: Any
    wait: Any


@functools.cache
def offload_operators() -> OffloadOperators:
    """Return the operators.

    Raises:
        CaptureError: rule "torch_version"; before torch 2.13 there are none, or the one that waits takes less.
    """
    try:
        private("torch._functorch._activation_offloading.offload_ops", "pinned_memory_pool")  # as new as its argument
    except CaptureError as error:
        version = torch.__version__
        raise CaptureError(
            f"host_budget needs torch 2.13 or later, and this is {version}: leave it out, or install a later torch",
            rule="torch_version",
        ) from error
    ops = torch.ops.ao
    return OffloadOperators(ops.offload.default, ops.reload.default, ops.wait_tensor.default)


def is_copy(target: Any) -> bool:
    """Return whether an operator copies to host memory or back, or waits for that."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.name in _NAMES
