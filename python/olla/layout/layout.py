"""Offsets for buffers with given lifetimes, and the CSV files such buffers come in."""

from __future__ import annotations

import csv
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from olla._core import LayoutOptions, LayoutResult
from olla._core import layout as _core_layout
from olla.base import Progress, files
from olla.errors import GraphError, PlanError

Int64Array = npt.NDArray[np.int64]

_COLUMNS = ("id", "lower", "upper", "size")
_OPTIONAL = ("fixed", "preferred")
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")
_MAX_THREADS = 8
_NO_LIMIT = 2**60  # of effort: time is the limit
_INT64 = np.iinfo(np.int64)


@dataclass(frozen=True)
class Layout:
    """Offsets for buffers, and how good they are.

    Attributes:
        offsets: int64[m], bytes; first byte of buffer i in the arena. 0 where buffer i is never alive or has no bytes.
        height_bytes: size of the arena: the largest end of a buffer, sizes rounded up to the alignment.
        load_bytes: most bytes alive at once, of the same rounded sizes; no layout is lower.
        bound_bytes: proven lower bound on the height: the load, or more where the exact search proved it.
        cancelled: whether the progress callback stopped the search.
        seconds: wall time of the search.
    """

    offsets: Int64Array
    height_bytes: int
    load_bytes: int
    bound_bytes: int
    cancelled: bool
    seconds: float

    @property
    def status(self) -> str:
        """``"optimal"`` where the height equals the bound, ``"feasible"`` where a lower layout may exist."""
        return "optimal" if self.height_bytes == self.bound_bytes else "feasible"

    @property
    def fragmentation(self) -> float:
        """(height - load) / load; 0.0 when nothing is alive."""
        return (self.height_bytes - self.load_bytes) / self.load_bytes if self.load_bytes else 0.0


@dataclass(frozen=True)
class Buffers:
    """Buffers of a CSV file, in its order: buffer i is alive during [lower[i], upper[i]) and takes size[i] bytes.

    It must lie at fixed[i] and would best lie at preferred[i]; -1 is anywhere, as is None for all buffers. A layout has
    put it at offset[i].
    """

    ids: list[str]
    lower: Int64Array
    upper: Int64Array
    size: Int64Array
    fixed: Int64Array | None = None
    preferred: Int64Array | None = None
    offset: Int64Array | None = None


def layout(
    lower: npt.ArrayLike,
    upper: npt.ArrayLike,
    size: npt.ArrayLike,
    *,
    alignment: int = 1,
    fixed: npt.ArrayLike | None = None,
    preferred: npt.ArrayLike | None = None,
    capacity: int | None = None,
    num_threads: int | None = None,
    time_limit: float = 10.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Layout:
    """Place buffers so that those alive together do not overlap, as low as can be found.

    The search ends once the height is proved optimal, and else with the time limit or, where offsets are given, after a
    fixed effort. A layout is always made, whatever the limit: a first greedy pass has five seconds.

    Args:
        lower: integers[m], first time at which buffer i is alive.
        upper: integers[m], first time at which it no longer is; never alive where it equals lower.
        size: integers[m], bytes, rounded up to the alignment.
        alignment: bytes; every offset is a multiple of it.
        fixed: integers[m], bytes, where buffer i must lie; -1: anywhere.
        preferred: integers[m], bytes, where buffer i best lies; -1: anywhere. Once the height is found, all preferred
            offsets that can be had together are tried in it, and where that fails those that are free.
        capacity: bytes; the search ends with the first layout that fits. None: as low as can be found. Where none fits,
            ``bound_bytes > capacity`` says that this is proved, and otherwise the search was too short.
        num_threads: of the exact search and of the beam; None: one per core, at most 8. The layout may then depend on
            how they are scheduled, never so with 1.
        time_limit: seconds after which the best layout so far is returned.
        seed: of the random choices; the same input and seed give the same layout unless the clock or threads had a say.
        progress: called about ten times a second with ("layout", seconds, height, load); False stops the search.

    Returns:
        The layout; ``offsets[i]`` belongs to buffer i.

    Raises:
        PlanError: a buffer ends before it begins, a size is negative, the sizes sum to more than 2**62 bytes, two fixed
            offsets collide (``ids`` says which), an offset is no multiple of the alignment, or an argument is of the
            wrong kind.

    Complexity:
        O(m log m) for a greedy pass on lifetimes like those of training steps.

    Source:
        Skyline best fit: Burke, Kendall, Whitwell, Operations Research 52 (2004). Squeaky wheel: Joslin, Clements,
        Journal of Artificial Intelligence Research 10 (1999). One-machine bound: Carlier, European Journal of
        Operational Research 11 (1982).

    Example:
        >>> layout([0, 0, 1], [1, 2, 2], [4, 8, 2]).height_bytes
        12
    """
    if not time_limit >= 0:
        raise PlanError(f"layout: time_limit is {time_limit} seconds, expected 0 or more")
    if not 0 <= seed < 2**64:
        raise PlanError(f"layout: seed is {seed}, expected 0 to 2**64 - 1")
    if not 1 <= alignment <= 2**62:
        raise PlanError(f"layout: alignment is {alignment} bytes, expected 1 to 2**62", rule="alignment")
    if capacity is not None and not 1 <= capacity <= 2**62:
        raise PlanError(f"layout: capacity is {capacity} bytes, expected 1 to 2**62", rule="capacity")
    if num_threads is not None and num_threads < 1:
        raise PlanError(f"layout: num_threads is {num_threads}, expected 1 or more", rule="num_threads")
    threads = num_threads or min(os.cpu_count() or 1, _MAX_THREADS)
    first, last, sizes = _int64("lower", lower), _int64("upper", upper), _int64("size", size)
    if first.shape == last.shape and (reversed_ones := np.flatnonzero(last < first)).size:
        i = int(reversed_ones[0])
        raise PlanError(
            f"layout: buffer {i} is alive from lower = {first[i]} to upper = {last[i]}; upper must be lower or later",
            rule="lifetimes",
            ids=(i,),
        )
    must = None if fixed is None else _int64("fixed", fixed)
    wish = None if preferred is None else _int64("preferred", preferred)
    limited = partial(LayoutOptions, alignment=alignment, seed=seed, capacity=capacity or 0, num_threads=threads)
    is_free = must is None and wish is None
    options = limited(max_placements=_NO_LIMIT, max_nodes=_NO_LIMIT) if is_free else limited()
    start = time.perf_counter()
    found = place(first, last, sizes, options, time_limit, progress, fixed=must, preferred=wish)
    bytes_found = found.height_bytes, found.load_bytes, found.bound_bytes
    return Layout(found.offsets, *bytes_found, found.cancelled, time.perf_counter() - start)


def place(
    lower: Int64Array,
    upper: Int64Array,
    size: Int64Array,
    options: LayoutOptions,
    time_limit: float,
    progress: Progress | None = None,
    *,
    fixed: Int64Array | None = None,
    preferred: Int64Array | None = None,
) -> LayoutResult:
    """Place buffers as `layout` does, with the core's own options: every layout that olla makes comes from here.

    Args:
        lower, upper, size, fixed, preferred: int64[m], contiguous; what they mean, and the rest, is said there.
        options: the effort, and which searches take part; by default one thread, and an effort that is the same on
            every machine.
        time_limit: seconds after which the best layout so far is returned.
        progress: called about ten times a second with ("layout", seconds, height, load); False stops the search.

    Raises:
        PlanError: see `layout`.
    """
    return _core_layout(lower, upper, size, fixed, preferred, options, time_limit, progress)


def read_buffers(path: str | Path, *, offsets: bool = False) -> Buffers:
    """Read buffers from a CSV file with the columns id, lower, upper and size, in any order.

    The columns fixed and preferred may be there too, with empty cells or -1 for anywhere; others are ignored.

    Args:
        path: the file, UTF-8, plain or gzip. Its first line names the columns. Ids are any distinct strings, the rest
            integers.
        offsets: whether to read a column offset too, where there is one.

    Returns:
        The buffers in the order of the file.

    Raises:
        GraphError: the file cannot be read or breaks the format; the message names file and line.

    Source:
        The format of google/minimalloc.
    """
    with files.naming(str(path)):
        file = files.read_csv(path, GraphError)
    return _parse(path, file, offsets)


def _parse(path: str | Path, file: Iterable[str], offsets: bool) -> Buffers:
    """Return the buffers in the lines of a file, see `read_buffers`; the path is for messages."""
    ids: dict[str, int] = {}  # and the line each stands on
    rows: list[tuple[int, ...]] = []
    try:
        reader = csv.reader(file, strict=True)
        header = [name.strip() for name in next(reader, [])]
        wanted = (*_OPTIONAL, "offset") if offsets else _OPTIONAL
        optional = [name for name in wanted if name in header]
        places = [_column(path, header, name) for name in (*_COLUMNS, *optional)]
        for row in reader:
            if not row:
                continue
            where = f"{path}, line {reader.line_num}"
            if len(row) != len(header):
                raise GraphError(f"{where}: {len(row)} cells, but the header has {len(header)}", rule="file")
            key, *cells = (row[place] for place in places)
            if key in ids:
                raise GraphError(f"{where}: id {key[:40]!r} stands on line {ids[key]} already", rule="file")
            ids[key] = reader.line_num
            rows.append((*_numbers(where, cells[:3]), *map(partial(_place, where), optional, cells[3:])))
    except (ValueError, csv.Error) as error:  # no UTF-8, no CSV
        raise GraphError(f"{path}: cannot be read as a CSV file of buffers: {error}", rule="file") from error
    table = np.array(rows, dtype=np.int64).reshape(-1, 3 + len(optional))
    lower, upper, size, *rest = (np.ascontiguousarray(column) for column in table.T)
    return Buffers(list(ids), lower, upper, size, **dict(zip(optional, rest, strict=True)))


def write_offsets(path: str | Path, buffers: Buffers, offsets: npt.ArrayLike) -> None:
    """Write the buffers with a fifth column: offset; the file appears whole or not at all.

    Args:
        path: the file to write.
        buffers: as read_buffers returned them.
        offsets: int64[m], bytes; ``offsets[i]`` belongs to buffer i.

    Raises:
        PlanError: there are more or fewer offsets than buffers, or the file cannot be written.
    """
    places = _int64("offsets", offsets)
    if len(places) != len(buffers.ids):
        raise PlanError(f"{len(places)} offsets for {len(buffers.ids)} buffers", rule="lengths")
    columns = [column.tolist() for column in (buffers.lower, buffers.upper, buffers.size, places)]
    rows = zip(buffers.ids, *columns, strict=True)
    with files.naming(str(path)):
        files.write_csv(path, (*_COLUMNS, "offset"), rows, PlanError)


def _column(path: str | Path, header: list[str], name: str) -> int:
    if header.count(name) != 1:
        found = ",".join(header)[:200]
        expected = ",".join(_COLUMNS)
        raise GraphError(f"{path}, line 1: needs one column {name!r}, as in {expected}; found {found!r}", rule="file")
    return header.index(name)


def _numbers(where: str, cells: list[str]) -> tuple[int, int, int]:
    for name, cell in zip(_COLUMNS[1:], cells, strict=True):
        text = cell.strip()
        if not _INTEGER.fullmatch(text) or not _INT64.min <= int(text) <= _INT64.max:
            raise GraphError(f"{where}: {name} is {cell[:40]!r}, expected an integer of at most 64 bits", rule="file")
    lower, upper, size = map(int, cells)
    if size < 0:
        raise GraphError(f"{where}: size is {size}, expected 0 or more", rule="sizes")
    if upper < lower:
        wrong = f"{where}: the buffer is alive from lower = {lower} to upper = {upper}"
        raise GraphError(f"{wrong}; upper must be lower or later", rule="lifetimes")
    return lower, upper, size


def _place(where: str, name: str, cell: str) -> int:
    """The offset in a cell; -1, anywhere, where the cell is empty."""
    text = cell.strip() or "-1"
    if not _INTEGER.fullmatch(text) or not -1 <= int(text) <= 2**62:
        raise GraphError(f"{where}: {name} is {cell[:40]!r}, expected an offset in bytes, -1 or nothing", rule="file")
    return int(text)


def _int64(name: str, values: npt.ArrayLike) -> Int64Array:
    """The values as int64, or a PlanError: no rounding, no wrapping."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise PlanError(f"{name} has {array.ndim} dimensions, expected 1", rule="lengths")
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.dtype.kind not in "iu" or (array.dtype == np.uint64 and array.max() > _INT64.max):
        raise PlanError(f"{name} has values of type {array.dtype}, expected integers of at most 64 bits", rule="types")
    return np.ascontiguousarray(array, dtype=np.int64)
