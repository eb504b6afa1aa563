"""Tensors live at the peak of a plan."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from olla.plan import fields


class LiveTensor(NamedTuple):
    """A tensor, or the workspace of the op itself (id -1), that is live at the peak."""

    id: int
    name: str
    bytes: int
    kind: str  # as in the graph file, or "workspace"
    producer: str  # name of the op that writes it; empty if none does


# The readers of its fields.
_TENSOR: list[fields.Reader] = [partial(fields.integer, least=-1), fields.text, fields.count, fields.text, fields.text]


class OpAt(NamedTuple):
    """An op by position and name."""

    id: int
    name: str


def read_op(key: str, value: object) -> OpAt | None:
    """Read an op by position and name."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise fields.reject(key, value, "[id, name] or null")
    return OpAt(fields.count(f"{key}[0]", value[0]), fields.text(f"{key}[1]", value[1]))


def read_tensors(key: str, value: object) -> tuple[LiveTensor, ...]:
    """Read the tensors that are live at a peak."""
    return fields.items(key, value, "a list", _tensor)


def _tensor(key: str, row: object) -> LiveTensor:
    if not isinstance(row, list) or len(row) != len(_TENSOR):
        raise fields.reject(key, row, "[id, name, bytes, kind, producer]")
    return LiveTensor(*(read(key, item) for read, item in zip(_TENSOR, row, strict=True)))
