"""Values of one field over all ops or tensors -> one typed column.

Types are checked in bulk; the culprit is searched for only once something is wrong. A place is written like
`ops[].reads[]`: the brackets take the position of the culprit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from olla.errors import GraphError

TENSOR_KINDS = ("parameter", "buffer", "optimizer_state", "input", "constant", "temporary")
OP_KINDS = ("forward", "backward", "update", "other")
# What an op that communicates does; "wait" ends what an earlier op of its group began. Empty: it does not communicate.
COLLECTIVES = ("", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "wait")
REQUIRED = object()  # default of a key that must be there
_COUNT = "a whole number from 0 to 2^63 - 1"
_MIN_INT64, _MAX_INT64 = -(2**63), 2**63 - 1


class Lists(NamedTuple):
    """Lists of ids, one after the other: list i is `item[offset[i]:offset[i + 1]]`.

    Example:
        >>> lists = Lists(np.array([0, 2, 2]), np.array([7, 8], dtype=np.int32))
        >>> lists.of(0).tolist(), lists.of(1).tolist()
        ([7, 8], [])
    """

    offset: NDArray[np.int64]
    item: NDArray[np.int32]

    def of(self, i: int) -> NDArray[np.int32]:
        """Return list i as a view."""
        return self.item[self.offset[i] : self.offset[i + 1]]

    @property
    def owner(self) -> NDArray[np.int64]:
        """int64[items], the list that item j is in."""
        return np.repeat(np.arange(len(self.offset) - 1), np.diff(self.offset))

    def inverted(self, num: int) -> Lists:
        """Return for every id below num the lists that hold it, in rising order."""
        counts = np.bincount(self.item, minlength=num)
        holder = self.owner[np.argsort(self.item, kind="stable")]
        return Lists(np.append(0, np.cumsum(counts)).astype(np.int64), holder.astype(np.int32))

    def to_lists(self) -> list[list[int]]:
        """Return all lists as plain Python lists."""
        items, ends = self.item.tolist(), self.offset.tolist()
        return [items[first:last] for first, last in pairwise(ends)]


def lists_of(rows: Sequence[Collection[int]]) -> Lists:
    """Return lists of ids, one after the other."""
    offset = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    return Lists(offset, np.array(list(chain.from_iterable(rows)), dtype=np.int32))


def shown(value: object) -> str:
    """Return a value for a message: on one line, shortened, never failing."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, dict | list | tuple | set):
        return f"a {type(value).__name__} of {len(value)}"  # contents may be nested deeper than repr can follow
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def reject(place: str, value: object, expected: str) -> NoReturn:
    """Raise GraphError: what stands at place is not what was expected."""
    raise GraphError(f"{place} is {shown(value)}, expected {expected}", rule="type")


def at(place: str, *positions: int) -> str:
    """Fill the empty brackets of a place, from the left."""
    for position in positions:
        place = place.replace("[]", f"[{position}]", 1)
    return place


def rows_of(value: object, place: str) -> list[dict[str, Any]]:
    """Return value if it is a list of objects."""
    if not isinstance(value, list | tuple):
        reject(place, value, "a list of objects")
    for i, row in enumerate(value):
        if not isinstance(row, dict):
            reject(f"{place}[{i}]", row, "an object")
    return list(value)


def column_of(rows: list[dict[str, Any]], key: str, default: object, place: str) -> list[Any]:
    """Return rows[i][key] for every row, or the default where the key is missing."""
    if default is not REQUIRED:
        return [row.get(key, default) for row in rows]
    try:
        return [row[key] for row in rows]
    except KeyError:
        culprit = next(i for i, row in enumerate(rows) if key not in row)
        raise GraphError(f"{place}[{culprit}] has no {key!r}, which every entry needs", rule="missing") from None


def num_rows(values: object, place: str) -> int:
    """Return how many rows a column has."""
    packed = _packed(values)
    if packed is not None:
        return max(len(packed.offset) - 1, 0)
    if isinstance(values, np.ndarray) and values.ndim == 1:
        return len(values)
    if isinstance(values, list | tuple):
        return len(values)
    reject(place, values, "a list or a one-dimensional array")


def _packed(values: object) -> Lists | None:
    """Return values as `Lists` where they are that, or a pair (offset, item) of arrays."""
    if isinstance(values, Lists):
        return values
    if isinstance(values, tuple) and len(values) == 2 and all(isinstance(part, np.ndarray) for part in values):
        return Lists(*values)
    return None


def _sequence(values: object, place: str, num: int | None) -> Sequence[Any] | NDArray[Any]:
    seen = num_rows(values, place)
    if num is not None and seen != num:
        raise GraphError(f"{place} has {seen:,} entries, expected {num:,}{_rows_counted(place)}", rule="lengths")
    if isinstance(values, np.ndarray) and values.dtype in (np.uint64, np.object_):
        return list(values.tolist())  # the numbers may not fit, and objects may be anything
    assert isinstance(values, list | tuple | np.ndarray)
    return values


def _rows_counted(place: str) -> str:
    """Return what gives a column its length, for a message."""
    if place.startswith("offset of "):
        return ": one more than there are ops, which are counted in reads"
    if place.startswith("tensors[]."):
        return ": one per tensor, as in tensor_bytes"
    return ": one per op, as in reads" if place.startswith("ops[].") else ""


def _refuse(values: Iterable[Any], good: Callable[[Any], bool], where: Callable[[int], str], expected: str) -> NoReturn:
    """Raise the error for the first value that is not good."""
    culprit, value = next((i, value) for i, value in enumerate(values) if not good(value))
    reject(where(culprit), value, expected)


def _require(
    values: Sequence[Any] | NDArray[Any],
    types: tuple[type, ...],
    kinds: str,
    where: Callable[[int], str],
    expected: str,
) -> None:
    """Check the type of every value; kinds are the numpy dtype kinds that need no look inside. bool is not a number."""
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in kinds:
            wanted = {"iu": "numpy.int64", "iuf": "numpy.float64", "b": "bool"}.get(kinds, "str")
            remedy = f"convert the array first, .astype({wanted})"
            raise GraphError(
                f"{where(0)} is from an array of {values.dtype}, expected {expected}: {remedy}", rule="type"
            )
        return

    def good(seen: type) -> bool:
        return issubclass(seen, types) and (bool in types or not issubclass(seen, bool))

    if not all(map(good, set(map(type, values)))):
        _refuse(values, lambda value: good(type(value)), where, expected)


def _whole_numbers(
    values: Sequence[Any] | NDArray[Any], where: Callable[[int], str], least: int, most: int, expected: str
) -> NDArray[np.int64]:
    _require(values, (int, np.integer), "iu", where, expected)
    with suppress(OverflowError):
        column = np.array(values if isinstance(values, np.ndarray) else list(map(int, values)), dtype=np.int64)
        if np.all((column >= least) & (column <= most)):
            return column
    _refuse(map(int, values), lambda value: least <= value <= most, where, expected)


def sizes(values: object, place: str, num: int | None = None) -> NDArray[np.int64]:
    """Bytes, int64. Their range is checked by the core."""
    found = _sequence(values, place, num)
    return _whole_numbers(found, partial(at, place), _MIN_INT64, _MAX_INT64, "a whole number of bytes up to 2^62")


def counts(values: object, place: str, num: int | None = None) -> NDArray[np.int64]:
    """Whole numbers from 0 on, int64."""
    return _whole_numbers(_sequence(values, place, num), partial(at, place), 0, _MAX_INT64, _COUNT)


def ids(values: object, place: str, num: int | None = None) -> NDArray[np.int32]:
    """Ids, int32. Whether they are known is checked by the core."""
    return _ids(_sequence(values, place, num), partial(at, place))


def _ids(values: Sequence[Any] | NDArray[Any], where: Callable[[int], str]) -> NDArray[np.int32]:
    return _whole_numbers(values, where, -(2**31), 2**31 - 1, "an id, a whole number below 2^31").astype(np.int32)


def seconds(values: object, place: str, num: int | None = None) -> NDArray[np.float64]:
    """Finite numbers from 0 on, float64."""
    found, where = _sequence(values, place, num), partial(at, place)
    expected = "a finite number of seconds from 0 on"
    _require(found, (int, float, np.integer, np.floating), "iuf", where, expected)
    with suppress(OverflowError):
        column = np.array(found, dtype=np.float64)
        if np.all(np.isfinite(column) & (column >= 0)):
            return column
    _refuse(found, lambda value: bool(0 <= value <= sys.float_info.max), where, expected)


def flags(values: object, place: str, num: int | None = None) -> NDArray[np.bool_]:
    """Booleans; 0 and 1 are not."""
    found = _sequence(values, place, num)
    _require(found, (bool, np.bool_), "b", partial(at, place), "true or false")
    return np.array(found, dtype=np.bool_)


def texts(values: object, place: str, num: int | None = None, *, allowed: Collection[str] = ()) -> list[str]:
    """Text that can be printed as UTF-8; one of `allowed` where that is given."""
    found, where = _sequence(values, place, num), partial(at, place)
    _require(found, (str,), "U", where, "text")
    column: list[str] = found.tolist() if isinstance(found, np.ndarray) else list(found)
    if not set(map(type, column)) <= {str}:  # of a class that derives from it
        column = list(map(str, column))
    if allowed:
        if not set(column) <= set(allowed):
            _refuse(column, lambda value: value in allowed, where, "one of " + ", ".join(allowed))
        return column
    try:
        "".join(column).encode("utf-8")
    except UnicodeEncodeError:
        whole = "text without lone surrogates"
        _refuse(column, lambda value: value == value.encode("utf-8", "replace").decode(), where, whole)
    return column


def _flat(values: object, place: str, num: int | None) -> tuple[list[Any], NDArray[np.int64], Callable[[int], str]]:
    """Put lists one after the other; the third result names the place of item i."""
    rows = _sequence(values, place, num)
    _require(rows, (list, tuple), "", lambda i: at(place, i).removesuffix("[]"), "a list")
    offset = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    return list(chain.from_iterable(rows)), offset, lambda i: _place_in(place, offset, i)


def _place_in(place: str, offset: NDArray[np.int64], i: int) -> str:
    owner = int(np.searchsorted(offset, i, side="right")) - 1
    return at(place, owner, i - int(offset[owner]))


def lists(values: object, place: str, num: int | None = None) -> Lists:
    """Lists of ids: a `Lists`, a pair (offset, item) of arrays, or one list per op."""
    packed = _packed(values)
    if packed is not None:
        offset = counts(packed.offset, f"offset of {place}", None if num is None else num + 1)
        item = _sequence(packed.item, place, None)
        return Lists(offset, _ids(item, lambda i: _place_in(place, offset, i)))
    flat, offset, where = _flat(values, place, num)
    return Lists(offset, _ids(flat, where))


def shapes(values: object, place: str, num: int | None = None) -> list[tuple[int, ...]]:
    """Shapes: one list of whole numbers from 0 on per op."""
    flat, offset, where = _flat(values, place, num)
    if not flat:
        return [()] * (len(offset) - 1)
    extents = _whole_numbers(flat, where, 0, _MAX_INT64, _COUNT).tolist()
    ends = offset.tolist()
    return [tuple(extents[first:last]) for first, last in pairwise(ends)]


class Field(NamedTuple):
    """One column: its attribute of a graph, its key in a file, how values are checked, what a missing one means."""

    column: str
    key: str
    convert: Callable[[object, str, int], Any]
    default: object

    def filled(self, num: int) -> Any:
        """Return a column of which all rows are the default."""
        one = self.convert([self.default], self.key, 1)
        if isinstance(one, Lists):
            return Lists(np.zeros(num + 1, dtype=np.int64), one.item)
        return np.repeat(one, num) if isinstance(one, np.ndarray) else one * num


TENSOR_FIELDS = (
    Field("tensor_bytes", "bytes", sizes, REQUIRED),
    Field("tensor_kinds", "kind", partial(texts, allowed=TENSOR_KINDS), "temporary"),
    Field("tensor_names", "name", texts, ""),
    Field("donated", "donated", flags, False),
)
OP_FIELDS = (
    Field("op_names", "name", texts, ""),
    Field("op_kinds", "kind", partial(texts, allowed=OP_KINDS), "other"),
    Field("reads", "reads[]", lists, REQUIRED),
    Field("writes", "writes[]", lists, REQUIRED),
    Field("mutates", "mutates[]", lists, ()),
    Field("after", "after[]", lists, ()),
    Field("workspace_bytes", "workspace_bytes", sizes, 0),
    Field("seconds", "seconds", seconds, 0.0),
    Field("flops", "flops", counts, 0),
    Field("moved_bytes", "moved_bytes", counts, 0),
    Field("launches", "launches", counts, 1),
    Field("random", "random", flags, False),
    Field("recomputable", "recomputable", flags, True),
    Field("targets", "target", texts, ""),
    Field("modules", "module", texts, ""),
    Field("sources", "source", texts, ""),
    Field("shapes", "shape[]", shapes, ()),
)
# Version 2 of a file has these, too.
COMMUNICATION_FIELDS = (
    Field("collectives", "collective", partial(texts, allowed=COLLECTIVES), ""),
    Field("groups", "group", texts, ""),
    Field("ranks", "ranks", counts, 0),
    Field("message_bytes", "message_bytes", counts, 0),
)
_OP_FIELDS = OP_FIELDS + COMMUNICATION_FIELDS
NAMES = {f.column for f in TENSOR_FIELDS + _OP_FIELDS}


def require_known(values: Mapping[str, object]) -> None:
    """Raise TypeError where a column is unknown, or one that is needed is missing."""
    if unknown := values.keys() - NAMES - {"writer"}:
        known = ", ".join(sorted(NAMES | {"writer"}))
        raise TypeError(f"unknown columns: {', '.join(sorted(unknown))}; known are {known}")
    if {"writes", "writer"} <= values.keys():
        raise TypeError("writes and writer say the same: give one of them")
    written = "writer" if "writer" in values else "writes"
    if missing := {"tensor_bytes", "reads", written} - values.keys():
        raise TypeError(f"missing columns: {', '.join(sorted(missing))}")


def converted(values: Mapping[str, object]) -> dict[str, Any]:
    """Return all columns, each checked and of its own type, from those that are given."""
    num_tensors = num_rows(values["tensor_bytes"], "tensor_bytes")
    num_ops = num_rows(values["reads"], "reads")
    if "writer" in values:
        values = {**values, "writes": _writes_of(values["writer"], num_ops, num_tensors)}
    found = {}
    for prefix, fields, num in (("tensors[].", TENSOR_FIELDS, num_tensors), ("ops[].", _OP_FIELDS, num_ops)):
        for f in fields:
            is_given = f.column in values
            found[f.column] = f.convert(values[f.column], prefix + f.key, num) if is_given else f.filled(num)
    return found


def _writes_of(writer: object, num_ops: int, num_tensors: int) -> Lists:
    """Return what each op writes.

    Args:
        writer: whole numbers[tensors], the op that writes tensor t; -1: none does.
        num_ops, num_tensors: how many there are.
    """
    column = ids(writer, "tensors[].writer", num_tensors)
    if num_tensors and not -1 <= column.min() <= column.max() < num_ops:
        expected = f"an op from 0 to {num_ops - 1}, or -1: no op writes it, the step begins with it"
        _refuse(column.tolist(), lambda op: -1 <= op < num_ops, partial(at, "tensors[].writer"), expected)
    written = np.flatnonzero(column >= 0)
    counted = np.bincount(column[written], minlength=num_ops)
    item = written[np.argsort(column[written], kind="stable")]
    return Lists(np.append(0, np.cumsum(counted)).astype(np.int64), item.astype(np.int32))
