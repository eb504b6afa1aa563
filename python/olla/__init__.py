"""olla: the memory planner for PyTorch training."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from olla.pytorch.capture import capture as capture


def __getattr__(name: str) -> object:
    if name == "capture":
        from olla.pytorch.capture import capture

        return capture
    raise AttributeError(f"module 'olla' has no attribute {name!r}")
