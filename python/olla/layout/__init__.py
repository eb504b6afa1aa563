"""Layout: offsets in one arena for buffers with given lifetimes."""

from olla._core import LayoutOptions, LayoutResult
from olla.layout.layout import Layout, place, read_buffers, write_offsets
from olla.layout.placement import ArenaBuffers, Placement, live_bytes, nothing_placed, rounded_up

__all__ = [
    "ArenaBuffers",
    "Layout",
    "LayoutOptions",
    "LayoutResult",
    "Placement",
    "live_bytes",
    "nothing_placed",
    "place",
    "read_buffers",
    "rounded_up",
    "write_offsets",
]
