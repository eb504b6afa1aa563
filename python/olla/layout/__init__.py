"""Where everything lies: offsets for given lifetimes."""

from olla.layout.layout import Layout, read_buffers, write_offsets
from olla.layout.placement import ArenaBuffers, Placement, nothing_placed

__all__ = [
    "ArenaBuffers",
    "Layout",
    "Placement",
    "nothing_placed",
    "read_buffers",
    "write_offsets",
]
