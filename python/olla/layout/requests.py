"""The requests for memory that every iteration of a loop makes: laid out in one arena, and the files they come in."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from olla.base import files
from olla.errors import PlanError
from olla.layout.layout import layout, read_buffers
from olla.layout.placement import live_bytes, rounded_up

Int64 = npt.NDArray[np.int64]
NEVER = -1


@dataclass(frozen=True, eq=False)
class Trace:
    """The requests for memory of one iteration, which repeat in every iteration.

    Attributes:
        num_bytes: int64[m], size of request k, at least 1.
        freed_at: int64[m], how many requests the iteration had made when the block of request k was freed; m more if
            the next iteration freed it; NEVER if it outlived the same request of the next iteration.

    Example:
        >>> trace = Trace(np.array([100, 50]), np.array([1, 2]))
        >>> trace.load_bytes(64), trace.place(64, 1.0, 0).offsets.tolist()
        (128, [0, 0])
    """

    num_bytes: Int64
    freed_at: Int64

    @property
    def num_requests(self) -> int:
        """Requests of an iteration."""
        return len(self.num_bytes)

    @property
    def planned(self) -> npt.NDArray[np.bool_]:
        """bool[m]: whether one place serves the request in all iterations: it is free again when it is needed again."""
        span = self.freed_at - np.arange(self.num_requests)
        result: npt.NDArray[np.bool_] = (self.freed_at != NEVER) & (span <= self.num_requests)
        return result

    def load_bytes(self, alignment: int) -> int:
        """Most planned bytes alive at once, in the long run of iterations; sizes are rounded up to the alignment."""
        return int(self._alive(alignment, 0).max(initial=0))

    def lifetimes(self) -> tuple[Int64, Int64]:
        """Return when every request is alive within an iteration, for a layout in which it has one place.

        Time begins where the fewest bytes are alive. What is alive even there, from one iteration to the next, keeps
        its place throughout, as in SmartPool (arXiv 1903.06631, "blocks that cross iterations").

        Returns:
            lower and upper: int64[m], half-open; both 0 where a request is not planned.
        """
        m = self.num_requests
        start = int(np.argmin(self._alive(1, 1))) if m else 0
        span = np.where(self.planned, self.freed_at - np.arange(m), 0)
        lower = (np.arange(m) - start) % max(m, 1)
        upper = lower + span
        crossing = upper > m
        lower[crossing], upper[crossing] = 0, m
        lower[span == 0] = upper[span == 0] = 0
        return lower, upper

    def place(
        self,
        alignment: int,
        time_limit: float,
        seed: int,
        taken: Int64 | None = None,
        fixed: Int64 | None = None,
    ) -> Placed:
        """Lay the requests out in one arena.

        Args:
            alignment: bytes; every offset is a multiple of it.
            time_limit: seconds for the layout.
            seed: for its random choices.
            taken: int64[n, 2], disjoint rows of begin and end in bytes: held by other iterations throughout.
            fixed: int64[m], bytes, where request k must lie if it collides with none before it; -1: anywhere.
        """
        lower, upper = self.lifetimes()
        m = self.num_requests
        begin, held = (np.zeros(0, np.int64),) * 2 if taken is None else (taken[:, 0], taken[:, 1] - taken[:, 0])
        fixed = np.full(m, -1) if fixed is None else np.where(upper > lower, fixed, -1)
        first, last = np.append(np.zeros_like(held), lower), np.append(np.full_like(held, m), upper)
        size = np.append(held, rounded_up(self.num_bytes, alignment))
        must = _possible(first, last, size, np.append(begin, fixed))
        found = layout(
            first,
            last,
            size,
            alignment=alignment,
            fixed=must if np.any(must >= 0) else None,
            time_limit=time_limit,
            seed=seed,
        )
        offsets = np.where(upper > lower, found.offsets[len(held) :], -1)
        return Placed(self.num_bytes, lower, upper, offsets, alignment, self.load_bytes(alignment) + int(held.sum()))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the requests as buffers: a CSV file that `olla layout` plans. Ids are positions in the iteration.

        Raises:
            PlanError: the file cannot be written.
        """
        lower, upper = self.lifetimes()
        _write(path, {"lower": lower, "upper": upper, "size": self.num_bytes})

    def _alive(self, alignment: int, from_request: int) -> Int64:
        """Planned bytes alive at request t of a long run, without those that it (1) or an earlier one (0) asks for."""
        m = self.num_requests
        kept = np.flatnonzero(self.planned)
        lower = kept + from_request
        upper = np.maximum(self.freed_at[kept], lower)
        alive = live_bytes(lower, upper, rounded_up(self.num_bytes[kept], alignment), 2 * m)
        return alive[:m] + alive[m:]


@dataclass(frozen=True, eq=False)
class Placed:
    """The requests of an iteration with their places.

    Attributes:
        num_bytes: int64[m], size of request k.
        lower: int64[m], see Trace.lifetimes.
        upper: int64[m].
        offsets: int64[m], bytes; -1: the request goes to the default allocator.
        alignment: bytes.
        load_bytes: most planned bytes alive at once; no arena is smaller.
    """

    num_bytes: Int64
    lower: Int64
    upper: Int64
    offsets: Int64
    alignment: int
    load_bytes: int

    @property
    def arena_bytes(self) -> int:
        """Size of the arena: the largest end of a request, rounded up to the alignment."""
        ends = (self.offsets + self.num_bytes)[self.offsets >= 0]
        return rounded_up(int(ends.max(initial=0)), self.alignment)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the requests as a CSV file with their offsets, as `olla layout` does.

        Raises:
            PlanError: the file cannot be written.
        """
        _write(path, {"lower": self.lower, "upper": self.upper, "size": self.num_bytes, "offset": self.offsets})


def load(path: str | os.PathLike[str], alignment: int) -> Placed:
    """Read requests with their offsets: a file that Placed.save wrote, or `olla layout` made of one of Trace.save.

    Args:
        path: the file.
        alignment: bytes; every offset must be a multiple of it.

    Raises:
        GraphError: the file cannot be read or breaks the format.
        PlanError: it is no plan of a trace: ids are not positions, lifetimes not within the iteration, sizes below 1 or
            too large; offsets are missing, not aligned, or overlap.

    Complexity:
        O(m log m).
    """
    buffers = read_buffers(os.fspath(path), offsets=True)
    m = len(buffers.ids)
    if sorted(buffers.ids) != sorted(map(str, range(m))):
        raise PlanError(f"{path}: ids must be the positions 0 to {m - 1} of an iteration's requests", rule="file")
    by_id = np.argsort(np.array(buffers.ids, dtype=np.int64))
    if buffers.offset is None:
        remedy = f"olla layout {path} -o PLANNED.csv --alignment {alignment}"
        raise PlanError(f"{path}: needs a column offset, where the requests lie: {remedy}", rule="file")
    columns = (buffers.lower, buffers.upper, buffers.size, buffers.offset)
    lower, upper, size, offsets = (column[by_id] for column in columns)
    outside = (upper > lower) & ((lower < 0) | (upper > m))
    if outside.any():
        k = int(np.argmax(outside))
        raise PlanError(
            f"{path}: request {k} is alive from {lower[k]} to {upper[k]}, expected a time within 0 to {m}",
            rule="lifetimes",
            ids=(k,),
        )
    if m and size.min() < 1:
        raise PlanError(f"{path}: a size is {size.min()}, expected 1 or more", rule="sizes")
    offsets[upper <= lower] = -1
    if np.any(offsets[upper > lower] < 0) or np.any(offsets[offsets >= 0] % alignment):
        raise PlanError(
            f"{path}: offsets must be multiples of {alignment} from 0 on: "
            f"plan with olla layout --alignment {alignment}",
            rule="alignment",
        )
    with files.naming(os.fsdecode(path)):  # where two overlap, or sizes are beyond what can be added up
        found = layout(lower, upper, size, alignment=alignment, fixed=offsets, time_limit=0.0)
    return Placed(size, lower, upper, offsets, alignment, found.load_bytes)


def _possible(lower: Int64, upper: Int64, size: Int64, fixed: Int64) -> Int64:
    """Return the fixed offsets without those that collide with one before them. O(m squared)."""
    kept = fixed.copy()
    for i in np.flatnonzero(fixed >= 0):
        j = np.flatnonzero(kept[:i] >= 0)
        together = (lower[j] < upper[i]) & (lower[i] < upper[j])
        if np.any(together & (kept[j] < kept[i] + size[i]) & (kept[i] < kept[j] + size[j])):
            kept[i] = -1
    return kept


def _write(path: str | os.PathLike[str], columns: dict[str, Int64]) -> None:
    rows = zip(itertools.count(), *(column.tolist() for column in columns.values()), strict=False)
    with files.naming(os.fspath(path)):
        files.write_csv(path, ["id", *columns], rows, PlanError)
