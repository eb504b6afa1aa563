"""One training step of a model, recorded as a graph."""

from olla.pytorch.capture.capture import Captured, require_choice

__all__ = [
    "Captured",
    "require_choice",
]
