"""olla: the memory planner for PyTorch training."""


def __getattr__(name: str) -> object:
    if name == "capture":
        from olla.pytorch.capture import capture

        return capture
    raise AttributeError(f"module 'olla' has no attribute {name!r}")
