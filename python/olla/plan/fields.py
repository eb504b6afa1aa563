"""Dataclasses as JSON objects: every field has a reader of its JSON value, which says what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any

import numpy as np

from olla.errors import GraphError, PlanError
from olla.graph import Graph
from olla.graph.columns import shown

_MAX_SECONDS = 1e18

Reader = Callable[[str, Any], Any]  # (key, JSON value) -> value


def reject(key: str, value: object, expected: str, rule: str = "type") -> PlanError:
    """Return the error for a value that is not what its key needs."""
    return PlanError(f"{key} is {shown(value)}, expected {expected}", rule=rule)


def text(key: str, value: object) -> str:
    """Read text."""
    if not isinstance(value, str) or value.encode("utf-8", "replace").decode("utf-8") != value:
        raise reject(key, value, "text without lone surrogates")
    return value


def integer(key: str, value: object, *, least: int = -(2**63), most: int = 2**63 - 1) -> int:
    """Read a whole number within limits."""
    if type(value) is not int or not least <= value <= most:
        raise reject(key, value, f"a whole number from {least} to {most}")
    return value


count = partial(integer, least=0)


def number(key: str, value: Any, least: float = -_MAX_SECONDS, expected: str = "a finite number") -> float:
    """Read a finite number."""
    if type(value) not in (int, float) or not least <= value <= _MAX_SECONDS:
        raise reject(key, value, expected)
    return float(value)


seconds = partial(number, least=0, expected="a finite number of seconds from 0 on")


def items(key: str, value: object, expected: str, read: Reader) -> tuple[Any, ...]:
    """Read a list, item by item."""
    if not isinstance(value, list):
        raise reject(key, value, expected)
    return tuple(read(f"{key}[{i}]", item) for i, item in enumerate(value))


def array(dtype: type[np.generic], of: str, read: Reader) -> Reader:
    """Return a reader of a list, item by item."""
    return lambda key, value: np.array(items(key, value, f"a list of {of}", read), dtype=dtype)


def integers(dtype: type[np.integer[Any]]) -> Reader:
    """Return a reader of a list of whole numbers."""
    limits = np.iinfo(dtype)
    return array(dtype, "whole numbers", partial(integer, least=int(limits.min), most=int(limits.max)))


def section(key: str, value: object, names: Iterable[str]) -> dict[str, Any]:
    """Read an object that must hold these names."""
    if not isinstance(value, dict):
        raise PlanError(f"{key} is a JSON {type(value).__name__}, expected an object", rule="type")
    for name in names:
        if name not in value:
            raise PlanError(f"has no {name!r} in {key!r}: was the file cut or edited?", rule="missing")
    return value


def graph(key: str, value: object) -> Graph:
    """Read the graph of a section."""
    try:
        return Graph.from_dict(value)
    except GraphError as error:
        raise PlanError(f"the graph in {key!r} is invalid: {error}", rule="type") from error


def stage_seconds(key: str, value: object) -> dict[str, float]:
    """Read an object of seconds per stage."""
    if not isinstance(value, dict):
        raise reject(key, value, "an object of seconds per stage")
    return {stage: seconds(f"{key}[{text(key, stage)!r}]", spent) for stage, spent in value.items()}


def options(key: str, value: object) -> dict[str, Any]:
    """Read an object of numbers, text, true and false."""
    if not isinstance(value, dict):
        raise reject(key, value, "an object")
    for name, option in value.items():
        if not isinstance(option, bool | int | float | str) or (
            isinstance(option, float) and not math.isfinite(option)
        ):
            raise reject(f"{key}[{name!r}]", option, "a finite number, text, true or false")
    return value


_READERS: Mapping[Any, Reader] = {  # by the type of a field, as it is written there
    "str": text,
    "int": count,
    "float": seconds,
    "Graph": graph,
    "NDArray[np.uint8]": integers(np.uint8),
    "NDArray[np.int32]": integers(np.int32),
    "NDArray[np.int64]": integers(np.int64),
    "NDArray[np.float64]": array(np.float64, "seconds", seconds),
    "Mapping[str, float]": stage_seconds,
    "Mapping[str, Any]": options,
    "tuple[str, ...]": partial(items, expected="a list of lines", read=text),
}


def readers(kind: type, others: Mapping[str, Reader]) -> dict[str, Reader]:
    """Return the reader of every field of a dataclass, in their order.

    Args:
        kind: the dataclass.
        others: readers of fields whose type says too little.
    """
    return {field.name: others.get(field.name) or _READERS[field.type] for field in fields(kind)}


def to_object(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as what `json.dumps` takes; arrays are lists."""
    return {field.name: _json(getattr(value, field.name)) for field in fields(value)}


def _json(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Graph):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_json(item) for item in value]
    if is_dataclass(value):
        return value.to_object() if hasattr(value, "to_object") else to_object(value)
    return value.value if isinstance(value, Enum) else value


def from_object(content: Mapping[str, Any], table: Mapping[str, Reader], place: str = "") -> dict[str, Any]:
    """Return field -> value for an object that holds all fields of a table; other keys are ignored.

    Args:
        content: what `to_object` returned.
        table: see `readers`.
        place: where the object stands in its file, with a dot, for messages.

    Raises:
        PlanError: rule "type", naming the key and the value seen.
    """
    return {name: read(place + name, content[name]) for name, read in table.items()}
