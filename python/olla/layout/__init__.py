"""Where everything lies: offsets for given lifetimes."""

from olla._core import LayoutOptions, LayoutResult
from olla.layout.layout import Layout, place, read_buffers, write_offsets
from olla.layout.placement import ArenaBuffers, Placement, nothing_placed

__all__ = [
    "ArenaBuffers",
    "Layout",
    "LayoutOptions",
    "LayoutResult",
    "Placement",
    "nothing_placed",
    "place",
    "read_buffers",
    "write_offsets",
]
