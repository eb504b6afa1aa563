"""Fallback to torch: if a decision of olla fails while a graph is compiled, torch's stands, with one warning."""

from __future__ import annotations

import contextlib
import logging
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

_log = logging.getLogger("olla.inductor")
_PACKAGE = Path(__file__).parents[2]
_warned: set[str] = set()


def warn(message: str, *, about: str | None = None) -> None:
    """Say something once in this process.

    Args:
        message: for a person.
        about: what counts as the same; the message itself where it is left out.
    """
    key = message if about is None else about
    if key in _warned:
        return
    _warned.add(key)
    warnings.warn(message, stacklevel=3)


def failed(consequence: str, error: Exception) -> None:
    """Warn once that torch's decision stands because olla failed, with the place, and how to report it.

    Args:
        consequence: what torch decides now.
        error: as it was caught.
    """
    place, name = _place(error), type(error).__name__
    _log.debug("%s", consequence, exc_info=error)
    warn(
        f"{consequence}: {place} failed with {name}: {error}. What is compiled computes the same. If torch "
        f"{torch.__version__} is a version olla supports, this is a defect of olla: please report it with this message "
        "and the traceback, which the logger 'olla.inductor' has at level DEBUG",
        about=f"{consequence}: {place} {name}",
    )


@contextlib.contextmanager
def tried(consequence: str) -> Iterator[None]:
    """Continue with a warning if a block fails: the compiled code is right without that step.

    Args:
        consequence: as of `failed`.
    """
    try:
        yield
    except Exception as error:
        failed(consequence, error)


def forget() -> None:
    """Forget the warnings given, so that they are given again."""
    _warned.clear()


def _place(error: Exception) -> str:
    """Return the innermost function of this package that an error went through: "olla.inductor.saving.joint.build"."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _PACKAGE in Path(frame.filename).parents]
    inner = frames[-1]
    module = ".".join(Path(inner.filename).relative_to(_PACKAGE).with_suffix("").parts)
    return f"olla.{module}.{inner.name}, line {inner.lineno},"
