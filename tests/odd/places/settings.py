"""A module of settings, which loops import and change."""

scale = 1.0


def read() -> float:
    return scale
