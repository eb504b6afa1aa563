"""Heuristics and rivals: one that fails, or returns no valid order, is left out with a note; the answer is the rest's.

Orders enter a search through here alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from olla.base.progress import Progress, RememberingProgress

if TYPE_CHECKING:
    from olla import _core

_logger = logging.getLogger("olla")
LEFT_OUT = "left out: "  # so begins every note

Order = NDArray[np.int32]


def failure(error: Exception, progress: Progress | None = None) -> str:
    """Say in one line how something failed; raise the error where the progress callback raised it."""
    if isinstance(progress, RememberingProgress) and progress.error is error:
        raise error
    return f"it failed with {type(error).__name__}: {' '.join(str(error).split())[:300]}"


def leave_out(what: str, why: str, notes: list[str]) -> None:
    """Note, and log, that the answer does without something."""
    notes.append(f"{LEFT_OUT}{what}: {why}")
    _logger.warning("%s was left out: %s", what, why)


@contextmanager
def optional(what: str, notes: list[str], progress: Progress | None = None) -> Iterator[list[Exception]]:
    """Do without what raises inside, with a note; collect the error.

    Args:
        what: names it in the note.
        notes: lines for the plan's details; one is added where it fails.
        progress: the callback that it asks; what that raises is raised.
    """
    failed: list[Exception] = []
    try:
        yield failed
    except Exception as error:
        leave_out(what, failure(error, progress), notes)
        failed.append(error)


def valid(core: _core.CoreGraph, found: object) -> Order | None:
    """Return what a heuristic found as an order of the graph's ops; None where it is none. O(ops + dependencies)."""
    order = np.ascontiguousarray(found)
    if order.ndim != 1 or (order.size and order.dtype.kind not in "iu"):
        return None
    order = order.astype(np.int32)
    return order if core.is_order(order) else None


def orders(core: _core.CoreGraph, schedules: Mapping[str, Callable[[], Any]], notes: list[str]) -> dict[str, Order]:
    """Run heuristics for orders; leave out those that fail or return no valid order.

    Args:
        core: the graph for which an order must be valid.
        schedules: what each is called -> returns int32[num_ops].
        notes: lines for the plan's details; one is added for each that is left out.

    Returns:
        What each is called -> its order, in the order of `schedules`.

    Complexity:
        O(ops + dependencies) for each, besides what it takes itself.

    Example:
        >>> import olla
        >>> builder = olla.Graph.builder("one op")
        >>> _ = builder.op("op")
        >>> notes = []
        >>> orders(builder.build().core, {"good": lambda: np.zeros(1, np.int32), "bad": lambda: [1]}, notes)
        {'good': array([0], dtype=int32)}
        >>> notes
        ['left out: bad: it returned no valid order of the ops']
    """
    found: dict[str, Order] = {}
    for name, schedule in schedules.items():
        with optional(name, notes):
            order = valid(core, schedule())
            if order is None:
                leave_out(name, "it returned no valid order of the ops", notes)
            else:
                found[name] = order
    return found
