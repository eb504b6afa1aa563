"""Rows of a graph file: one for each tensor and each op, without the entries that equal their default.

Version 1 is for graphs whose ops do not communicate, version 2 for the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from olla.errors import GraphError
from olla.graph import columns
from olla.graph.columns import COMMUNICATION_FIELDS, OP_FIELDS, TENSOR_FIELDS, Field, Lists, reject, shown

FORMAT = "olla-graph"
VERSION, OF_COLLECTIVES = 1, 2


def read(content: object) -> tuple[object, dict[str, object], object]:
    """Return the columns of a file's content; only their form is checked.

    Returns:
        The name of the graph, a value per row of every column by its name, and the outputs.

    Raises:
        GraphError: it is not of this format.
    """
    if not isinstance(content, dict):
        reject("the content", content, f'an object with "format": "{FORMAT}"')
    if content.get("format") != FORMAT:
        reject('"format"', content.get("format"), repr(FORMAT))
    version = content.get("version")
    if type(version) is not int or version not in (VERSION, OF_COLLECTIVES):
        expected = f"{VERSION} or {OF_COLLECTIVES}, which this olla reads"
        raise GraphError(f'"version" is {shown(version)}, expected {expected}', rule="version")
    values: dict[str, object] = {}
    op_fields = OP_FIELDS if version == VERSION else OP_FIELDS + COMMUNICATION_FIELDS
    for place, fields in (("tensors", TENSOR_FIELDS), ("ops", op_fields)):
        if place not in content:
            raise GraphError(f"has no {place!r}, expected a list of objects", rule="missing")
        rows = columns.rows_of(content[place], place)
        present = set[str]().union(*rows)
        for f in fields:
            key = f.key.removesuffix("[]")
            if key in present or f.default is columns.REQUIRED:
                values[f.column] = columns.column_of(rows, key, f.default, place)
    return content.get("name", ""), values, content.get("outputs", ())


def written(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of the file of a graph.

    Args:
        name: of the graph.
        values: its columns, by the names of its attributes.
    """
    communicates = any(values["collectives"])
    op_fields = OP_FIELDS + COMMUNICATION_FIELDS if communicates else OP_FIELDS
    return {
        "format": FORMAT,
        "version": OF_COLLECTIVES if communicates else VERSION,
        "name": name,
        "tensors": _rows(TENSOR_FIELDS, values, len(values["tensor_bytes"])),
        "ops": _rows(op_fields, values, len(values["workspace_bytes"])),
        "outputs": values["outputs"].tolist(),
    }


def _rows(fields: Iterable[Field], all_columns: Mapping[str, Any], num: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{} for _ in range(num)]
    for f in fields:
        values = all_columns[f.column]
        if isinstance(values, Lists):
            values = values.to_lists()
        elif isinstance(values, np.ndarray):
            values = values.tolist()
        elif f.default == ():
            values = list(map(list, values))
        default = [] if f.default == () else f.default
        key = f.key.removesuffix("[]")
        for row, value in zip(rows, values, strict=True):
            if value != default:
                row[key] = value
    return rows
