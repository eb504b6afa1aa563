"""Plans as JSON objects: which key holds what, and what is wrong with one that does not fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from olla.columns import shown
from olla.errors import PlanError

if TYPE_CHECKING:
    from olla.graph import Graph
    from olla.plan import Plan

FORMAT = "olla-plan"
VERSION = 1
_MAX_SECONDS = 1e18


class LiveTensor(NamedTuple):
    """A tensor, or the workspace of the op itself (id -1), that is live at the peak."""

    id: int
    name: str
    bytes: int
    kind: str  # as in the graph file, or "workspace"
    producer: str  # name of the op that writes it; empty if none does


class OpAt(NamedTuple):
    """An op by position and name."""

    id: int
    name: str


def _reject(key: str, value: object, expected: str, rule: str = "type") -> PlanError:
    return PlanError(f"{key} is {shown(value)}, expected {expected}", rule=rule)


def text(key: str, value: object) -> str:
    """Read text."""
    if not isinstance(value, str) or value.encode("utf-8", "replace").decode("utf-8") != value:
        raise _reject(key, value, "text without lone surrogates")
    return value


def _integer(key: str, value: object, *, least: int = -(2**63), most: int = 2**63 - 1) -> int:
    if type(value) is not int or not least <= value <= most:
        raise _reject(key, value, f"a whole number from {least} to {most}")
    return value


def count(key: str, value: object) -> int:
    """Read a whole number from 0 on."""
    return _integer(key, value, least=0)


def integers(dtype: type[np.integer[Any]]) -> Callable[[str, object], NDArray[Any]]:
    """Return a reader of a list of whole numbers."""
    limits = np.iinfo(dtype)

    def read(key: str, value: object) -> NDArray[Any]:
        if not isinstance(value, list):
            raise _reject(key, value, "a list of whole numbers")
        if not all(type(item) is int and limits.min <= item <= limits.max for item in value):
            for i, item in enumerate(value):
                _integer(f"{key}[{i}]", item, least=int(limits.min), most=int(limits.max))
        return np.array(value, dtype=dtype)

    return read


def seconds(key: str, value: object) -> float:
    """Read a finite number of seconds from 0 on."""
    if type(value) not in (int, float) or not 0 <= value <= _MAX_SECONDS:  # type: ignore[operator]
        raise _reject(key, value, "a finite number of seconds from 0 on")
    return float(value)  # type: ignore[arg-type]


def seconds_list(key: str, value: object) -> NDArray[np.float64]:
    """Read a list of seconds."""
    if not isinstance(value, list):
        raise _reject(key, value, "a list of seconds")
    return np.array([seconds(f"{key}[{i}]", item) for i, item in enumerate(value)], dtype=np.float64)


def section(key: str, value: object, names: tuple[str, ...]) -> dict[str, Any]:
    """Read an object that must hold these names."""
    if not isinstance(value, dict):
        raise PlanError(f"{key} is a JSON {type(value).__name__}, expected an object", rule="type")
    for name in names:
        if name not in value:
            raise PlanError(f"has no {name!r} in {key!r}: was the file cut or edited?", rule="missing")
    return value


def graph(key: str, value: object) -> Graph:
    """Read the graph of a section."""
    from olla.errors import GraphError
    from olla.graph import Graph

    try:
        return Graph.from_dict(value)
    except GraphError as error:
        raise PlanError(f"the graph in {key!r} is invalid: {error}", rule="type") from error


def _seconds(key: str, value: object) -> dict[str, float]:
    if not isinstance(value, dict):
        raise _reject(key, value, "an object of seconds per stage")
    return {stage: seconds(f"{key}[{text(key, stage)!r}]", spent) for stage, spent in value.items()}


def options(key: str, value: object) -> dict[str, Any]:
    """Read an object of numbers, text, true and false."""
    if not isinstance(value, dict):
        raise _reject(key, value, "an object")
    for name, option in value.items():
        if not isinstance(option, bool | int | float | str) or (
            isinstance(option, float) and not math.isfinite(option)
        ):
            raise _reject(f"{key}[{name!r}]", option, "a finite number, text, true or false")
    return value


def _peak_op(key: str, value: object) -> OpAt | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise _reject(key, value, "[id, name] or null")
    return OpAt(count(f"{key}[0]", value[0]), text(f"{key}[1]", value[1]))


def _lines(key: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise _reject(key, value, "a list of lines")
    return tuple(text(f"{key}[{i}]", line) for i, line in enumerate(value))


def _peak_tensors(key: str, value: object) -> tuple[LiveTensor, ...]:
    if not isinstance(value, list):
        raise _reject(key, value, "a list")
    tensors = []
    for i, row in enumerate(value):
        place = f"{key}[{i}]"
        if not isinstance(row, list) or len(row) != 5:
            raise _reject(place, row, "[id, name, bytes, kind, producer]")
        tensor = LiveTensor(
            _integer(place, row[0], least=-1),
            text(place, row[1]),
            count(place, row[2]),
            text(place, row[3]),
            text(place, row[4]),
        )
        tensors.append(tensor)
    return tuple(tensors)


# Field of the plan -> what turns its JSON value into the field's. The status is read by its caller.
_FIELDS: dict[str, Callable[[str, Any], Any]] = {
    "graph_name": text,
    "graph_digest": text,
    "num_ops": count,
    "num_tensors": count,
    "method": text,
    "status": text,
    "message": text,
    "order": integers(np.int32),
    "offsets": integers(np.int64),
    "workspace_offsets": integers(np.int64),
    "alignment": count,
    "peak_bytes": count,
    "lower_bound_bytes": count,
    "program_peak_bytes": count,
    "resident_bytes": count,
    "arena_bytes": count,
    "load_bytes": count,
    "arena_lower_bound_bytes": count,
    "before": integers(np.int32),
    "after": integers(np.int32),
    "seconds": _seconds,
    "peak_op": _peak_op,
    "peak_tensors": _peak_tensors,
    "options": options,
    "details": _lines,
}
_OPTIONAL = ("arena_lower_bound_bytes", "details")  # files made before these keys existed do without


def to_object(plan: Plan) -> dict[str, Any]:
    """Return the plan as what `json.dumps` takes.

    Returns:
        "format" and "version", then one key per field of `Plan`; arrays are lists.
    """
    values = {name: getattr(plan, name) for name in _FIELDS}
    lists = {name: value.tolist() for name, value in values.items() if isinstance(value, np.ndarray)}
    return {"format": FORMAT, "version": VERSION, **values, **lists, "status": plan.status.value}


def fields_of(content: object) -> dict[str, Any]:
    """Return the fields of `Plan` from an object of a plan file; unknown keys are ignored.

    Args:
        content: what `json.loads` returned.

    Returns:
        Field name -> value of its type; only "status" is still text.

    Raises:
        PlanError: rule "format", "version", "missing" or "type", naming the key and the value seen.
    """
    if not isinstance(content, dict):
        raise PlanError(f"is a JSON {type(content).__name__}, expected an object", rule="format")
    if content.get("format") != FORMAT:
        raise _reject("format", content.get("format"), f"{FORMAT!r}: this is no plan", rule="format")
    version = content.get("version")
    if type(version) is not int or version != VERSION:
        raise _reject("version", version, f"{VERSION}: make the plan again, or update olla", rule="version")
    for name in _FIELDS:
        if name not in content and name not in _OPTIONAL:
            raise PlanError(f"has no {name!r}, which every plan needs: was the file cut or edited?", rule="missing")
    return {name: read(name, content[name]) for name, read in _FIELDS.items() if name in content}
