"""One allocation for what a compiled graph makes and uses up itself, at addresses of olla's layout."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from olla.inductor.compat import codegen, fallback
from olla.inductor.kernels import scheduler as inductor
from olla.layout import LayoutOptions, place

_ALIGNMENT = {"cpu": 64}
_OTHER_ALIGNMENT = 512  # of addresses on accelerators, as their allocators give them
_MAX_NODES = 200_000  # of the layout's search, so that it is the same on every machine
_MAX_PLACEMENTS = 200_000
_TIME_LIMIT = 5.0  # a guard
_KEPT_RECORDS = 1000
_ONE_BY_ONE = "compiled code allocates its buffers one by one"

_log = logging.getLogger("olla.inductor")


@dataclass(frozen=True, kw_only=True)
class ArenaRecord:
    """The arena of one compiled graph on one device.

    Attributes:
        name: the graph, and whether it is a forward, a backward or an inference graph.
        device: where it lies.
        arena_bytes: its size.
        load_bytes: most bytes in use at once; no arena is smaller.
        num_buffers: allocations it stands for.
    """

    name: str
    device: torch.device
    arena_bytes: int
    load_bytes: int
    num_buffers: int

    def __str__(self) -> str:
        """Say it on one line."""
        mib = [f"{value / 2**20:.1f}" for value in (self.arena_bytes, self.load_bytes)]
        return f"{self.name}: arena of {mib[0]} MiB for {self.num_buffers} buffers, {mib[1]} MiB in use at once"


_records: deque[ArenaRecord] = deque(maxlen=_KEPT_RECORDS)


def records() -> list[ArenaRecord]:
    """Return the arenas of the graphs compiled so far in this process, oldest first."""
    return list(_records)


def forget() -> None:
    """Forget these records."""
    _records.clear()


def install(name: str) -> None:
    """Let the wrapper of the graph that is being compiled have an arena; a warning says where that cannot be.

    What the graph returns or saves for backward, and what its kernels allocate themselves, stays outside.

    Args:
        name: what the graph is called.
    """
    with fallback.tried(_ONE_BY_ONE):  # torch's own allocations are always right
        codegen.before_reuse(inductor.wrapper(), lambda lines: _planned(lines, name), _ONE_BY_ONE)


def _planned(lines: Sequence[Any], name: str) -> list[Any]:
    """Return the lines of a wrapper with buffers taken from arenas."""
    planner = codegen.memory_planner(inductor.wrapper(), inductor.output_names())
    planned = list(lines)
    planner.convert_to_pool_lines(planned)
    planner.compute_live_ranges(planned)
    by_device: dict[torch.device, list[Any]] = {}
    for group in planner.buffer_groups:
        by_device.setdefault(group.node.get_device(), []).append(group)
    for i, (device, members) in enumerate(by_device.items()):
        lower = np.array([group.live_range.begin for group in members], dtype=np.int64)
        upper = np.array([max(group.live_range.end, group.live_range.begin + 1) for group in members], dtype=np.int64)
        size = np.array([codegen.static_bytes(group) for group in members], dtype=np.int64)
        alignment = _ALIGNMENT.get(device.type, _OTHER_ALIGNMENT)
        options = LayoutOptions(alignment=alignment, max_nodes=_MAX_NODES, max_placements=_MAX_PLACEMENTS)
        found = place(lower, upper, size, options, _TIME_LIMIT)
        arena_bytes, load_bytes = found.height_bytes, found.load_bytes
        codegen.place_groups(members, found.offsets.tolist(), arena_bytes, f"arena{i}", int(upper.max()))
        record = ArenaRecord(
            name=name, device=device, arena_bytes=arena_bytes, load_bytes=load_bytes, num_buffers=len(members)
        )
        _records.append(record)
        _log.info("%s", record)
    if by_device:
        planner.mark_first_last_usage(planned)
    return planned
