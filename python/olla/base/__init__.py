"""Shared helpers of all folders: files, numbers as text, progress, rivals of a search."""

from olla.base.progress import Progress, ended, watched
from olla.base.text import cells, figures, human_bytes, parse_bytes, percent, plain, visible

__all__ = [
    "Progress",
    "cells",
    "ended",
    "figures",
    "human_bytes",
    "parse_bytes",
    "percent",
    "plain",
    "visible",
    "watched",
]
