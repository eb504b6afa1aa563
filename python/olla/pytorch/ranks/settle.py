"""End of collectives on a CPU: a thread of the group may hold their tensors beyond the wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

_MOST_SECONDS = 1.0  # a view that was made meanwhile holds its tensor, too: the memory is then freed a moment late


def ended(results: Sequence[torch.Tensor]) -> None:
    """Wait for a functional collective right where it began; the step's own waits for it return at once."""
    for t in results:
        torch.ops._c10d_functional.wait_tensor(t)


def uses(*tensors: torch.Tensor) -> list[int]:
    """Return how many hold each tensor: what a collective that is begun next adds to is let go of later."""
    return [_uses(t) for t in tensors]


def settled(
    before: Sequence[int],
    given: Sequence[torch.Tensor],
    made: Sequence[torch.Tensor],
    live: Callable[[int], int] | None = None,
    op: int = -1,
) -> None:
    """Return once the group holds none of the tensors of a collective that has been waited for.

    Until then their memory is not free where the plan says so. Nothing is computed here: it gives up after a moment.

    Args:
        before: what `uses` said of the tensors it was given, before it began.
        given: those tensors.
        made: its results; of one in place, these are tensors it was given.
        live: tells how many blocks that an op asked for are in use; None: nobody knows. A collective may have asked
            for more than its results.
        op: that began it.

    Example:
        >>> x = torch.ones(3)
        >>> settled(uses(x), [x], [])
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
