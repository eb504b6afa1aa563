"""Links to host memory, and what is swapped over one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from olla.errors import PlanError
from olla.graph import DeviceProfile
from olla.plan import fields


@dataclass(frozen=True, kw_only=True)
class Link:
    """How fast pinned host memory is reached, each way; both directions may be busy at once.

    Attributes:
        out_bytes_per_second, in_bytes_per_second: from the device to the host, and back.
        out_latency_seconds, in_latency_seconds: of one copy.

    Example:
        >>> Link.of(25e9).in_bytes_per_second
        25000000000.0
    """

    out_bytes_per_second: float
    in_bytes_per_second: float
    out_latency_seconds: float = 10e-6
    in_latency_seconds: float = 10e-6

    def __post_init__(self) -> None:
        for field, value in vars(self).items():
            lowest_allowed = "bytes" not in field and value == 0
            if not (0.0 < value < float("inf") or lowest_allowed):
                raise ValueError(f"{field} of a link is {value}, expected a finite number above 0")

    @classmethod
    def of(cls, link: Link | float | DeviceProfile) -> Link:
        """Return the link itself, one with that many bytes per second both ways, or the link of a device.

        Raises:
            ValueError: the speed is no finite number above 0.
        """
        if isinstance(link, Link):
            return link
        if isinstance(link, int | float):
            return cls(out_bytes_per_second=float(link), in_bytes_per_second=float(link))
        return cls(
            out_bytes_per_second=link.to_host_bytes_per_second, in_bytes_per_second=link.from_host_bytes_per_second
        )


# What Zhang et al. (arXiv 1903.06631) saw with pinned memory over PCIe 3 x16.
PCIE3 = Link(
    out_bytes_per_second=13.2e9, out_latency_seconds=47e-6, in_bytes_per_second=12.2e9, in_latency_seconds=10e-6
)


@dataclass(frozen=True, eq=False)
class Swaps:
    """Tensors that leave the device between two uses, in the order of their copies out. Steps are those of an order.

    Attributes:
        tensor: int32[k], which.
        ready, last: int32[k], the copy out starts when op `ready` has ended; op `last` uses it last before. -1: it is
            in host memory when the step starts.
        freed: int32[k], the first op that runs without it.
        issue, next: int32[k], the copy in is issued when this op is reached, and must have ended for op `next`. Number
            of ops: it stays in host memory to the end of the step.
        start: float64[n], seconds: when the op at step s starts.
        out_start, out_end, in_start, in_end: float64[k], seconds, of the copies.
        peak_bytes: most bytes live at once.
        stall_seconds: what the ops wait for copies.
        host_bytes: most host memory in use at once.
        swapped_bytes: copied out in all.
        base_seconds: what the ops themselves take.
    """

    tensor: NDArray[np.int32]
    ready: NDArray[np.int32]
    last: NDArray[np.int32]
    freed: NDArray[np.int32]
    issue: NDArray[np.int32]
    next: NDArray[np.int32]
    start: NDArray[np.float64]
    out_start: NDArray[np.float64]
    out_end: NDArray[np.float64]
    in_start: NDArray[np.float64]
    in_end: NDArray[np.float64]
    peak_bytes: int
    stall_seconds: float
    host_bytes: int
    swapped_bytes: int
    base_seconds: float

    @property
    def slowdown(self) -> float:
        """The stall as a share of the ops' own time."""
        return self.stall_seconds / self.base_seconds if self.base_seconds > 0 else 0.0


def read_swaps(key: str, value: object) -> Swaps:
    """Read swaps."""
    table = fields.readers(Swaps, {})
    columns = fields.from_object(fields.section(key, value, table), table, f"{key}.")
    lengths = {len(column) for name, column in columns.items() if np.ndim(column) and name != "start"}
    if len(lengths) > 1:
        raise PlanError(f"the columns of {key} have different lengths: was the file edited?", rule="type")
    return Swaps(**columns)
