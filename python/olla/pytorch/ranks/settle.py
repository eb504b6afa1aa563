"""Until a collective lets go of its tensors: on a CPU a thread of the group may hold them a moment beyond the wait."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

_MOST_SECONDS = 0.2  # a view that was made meanwhile holds its tensor, too: the memory is then freed a moment late


def uses(*tensors: torch.Tensor) -> list[int]:
    """Return how many hold each tensor: what a collective that is begun next adds to is let go of later."""
    return [t._use_count() for t in tensors]  # type: ignore[attr-defined]


def settled(before: Sequence[int], given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
    """Return once the group holds none of the tensors of a collective that has been waited for.

    Until then their memory is not free where the plan says so. Nothing is computed here: it gives up after a moment.

    Args:
        before: what `uses` said of the tensors it was given, before it began.
        given: those tensors.
        made: its results; of one in place, these are tensors it was given.

    Example:
        >>> x = torch.ones(3)
        >>> settled(uses(x), [x], [])
    """
    end = 0.0
    fresh = [t for t in made if not any(t is other for other in given)]
    for tensor, most in zip((*given, *fresh), (*before, *[1] * len(fresh)), strict=True):
        while tensor._use_count() > most:  # type: ignore[attr-defined]
            end = end or time.perf_counter() + _MOST_SECONDS
            if time.perf_counter() > end:
                return
            time.sleep(1e-5)  # lets the other thread run
