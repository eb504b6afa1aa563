"""Waiting for collectives on a CPU to release their tensors: a thread of the group may hold them after the wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

_MOST_SECONDS = 1.0  # a view that was made meanwhile holds its tensor, too: the memory is then freed a moment late


def wait_now(results: Sequence[torch.Tensor]) -> None:
    """Wait for a functional collective where it begins; later waits for it return at once."""
    for t in results:
        torch.ops._c10d_functional.wait_tensor(t)


def use_counts(*tensors: torch.Tensor) -> list[int]:
    """Return the reference count of each tensor, to compare with once a collective on them is over."""
    return [_uses(t) for t in tensors]


def wait_until_released(
    before: Sequence[int],
    given: Sequence[torch.Tensor],
    made: Sequence[torch.Tensor],
    live: Callable[[int], int] | None = None,
    op: int = -1,
) -> None:
    """Wait until the group holds none of the tensors of a finished collective; give up after a second.

    Giving up is safe: results are there already, and only memory is freed later than planned.

    Args:
        before: use counts of its inputs before it began.
        given: its inputs.
        made: its results; those of an in-place collective are among its inputs.
        live: returns how many blocks allocated by an op are in use; None: unknown. A collective may allocate more
            than its results.
        op: the op that began it.

    Example:
        >>> x = torch.ones(3)
        >>> wait_until_released(use_counts(x), [x], [])
    """
    fresh = [t for t in made if not any(t is other for other in given)]
    most = [*before, *[1] * len(fresh)]
    end = 0.0
    while any(_uses(t) > n for t, n in zip((*given, *fresh), most, strict=True)) or (live and live(op) > len(fresh)):
        end = end or time.perf_counter() + _MOST_SECONDS
        if time.perf_counter() > end:
            return
        time.sleep(1e-5)  # lets the other thread run


def _uses(tensor: torch.Tensor) -> int:
    # Not of its storage: asking makes an object of Python's for that, while another thread may let go of it.
    return tensor._use_count()  # type: ignore[attr-defined,no-any-return]
