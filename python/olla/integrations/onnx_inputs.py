"""Inputs of an ONNX model: shapes and values that the caller gives, written into it, and those still unknown."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np

from olla.errors import CaptureError

if TYPE_CHECKING:
    import onnx

_BITS = {"FLOAT": 32, "DOUBLE": 64, "BOOL": 8}
_FEW_ELEMENTS = 64  # of an input that a shape or a branch may depend on: a rate, a mode, sizes


class KnownInputs(NamedTuple):
    """What the caller says of inputs, by name."""

    shapes: Mapping[str, Sequence[int]]
    values: Mapping[str, Any]


def close(model: onnx.ModelProto, parameters: Mapping[str, int], given: KnownInputs) -> None:
    """Write what the caller says into the model, and refuse what stays open: `values` become initializers.

    Args:
        model: is changed.
        parameters: those of its inputs that have values already.
        given: by the caller.

    Raises:
        CaptureError: a shape stays open.
        ValueError: a shape or a value does not belong to an input, or contradicts it.
    """
    inputs = {value.name: value for value in model.graph.input if value.name not in parameters}
    for what, by_name in zip(KnownInputs._fields, given, strict=True):
        if unknown := by_name.keys() - inputs.keys():
            known = ", ".join(inputs) or "none"
            raise ValueError(f"{what} names {min(unknown)!r}, which is no input of the model: it has {known}")
    for key, value in inputs.items():
        if value.type.WhichOneof("value") != "tensor_type":
            raise CaptureError(f"input {key!r} is a {value.type.WhichOneof('value')}, expected a tensor of numbers")
        if key in given.shapes:
            _set_shape(value, given.shapes[key], f"shapes[{key!r}]")
        if key in given.values:
            _set_value(model.graph, value, given.values[key])
        elif not is_known(dims(value)):
            raise CaptureError(
                f"input {key!r} has shape {text(dims(value))}, expected numbers: name its shape, "
                f"from_onnx(model, shapes={{{key!r}: (...)}}), or on the command line --shape {key}=N,N,..."
            )
    # What was written for open dimensions says nothing new.
    for value in (*model.graph.value_info, *model.graph.output):
        if dims(value) is not None and not is_known(dims(value)):
            value.type.tensor_type.ClearField("shape")


def _set_shape(value: onnx.ValueInfoProto, shape: Sequence[int], place: str) -> None:
    given, seen = [int(n) for n in shape], dims(value)
    fits = seen is None or (
        len(seen) == len(given)
        and all(n >= 0 and (n == m or not isinstance(m, int)) for m, n in zip(seen, given, strict=True))
    )
    if not fits:
        raise ValueError(f"{place} is {tuple(given)}, but the model says {text(seen)}")
    value.type.tensor_type.shape.SetInParent()
    del value.type.tensor_type.shape.dim[:]
    for n in given:
        value.type.tensor_type.shape.dim.add().dim_value = n


def _set_value(graph: onnx.GraphProto, value: onnx.ValueInfoProto, given: object) -> None:
    """Make an input an initializer of a value."""
    import onnx

    place = f"values[{value.name!r}]"
    dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    try:
        raw = np.asarray(given)
        array = raw.astype(dtype)
        fits = raw.dtype.kind in "biuf" and bool(np.all(array == raw))
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        raise ValueError(f"{place} is {given!r}, expected numbers that fit the model's {dtype}")
    seen = dims(value)
    if is_known(seen) and array.size == math.prod(seen):
        array = array.reshape(seen)  # one number is as good as a list of it
    _set_shape(value, array.shape, f"the shape of {place}")
    graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
    graph.input.remove(value)


def settable(graph: onnx.GraphProto, names: Iterable[str]) -> list[str]:
    """Return the small inputs of whole numbers or truth values that tensors depend on, by name."""
    import onnx

    types = (onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.BOOL)
    maker = {key: node for node in graph.node for key in node.output if node.op_type not in ("Shape", "Size")}
    seen, waiting = set[str](), list(names)
    while waiting:
        key = waiting.pop()
        if key not in seen:
            seen.add(key)
            waiting += maker[key].input if key in maker else ()
    small = []
    for value in graph.input:
        shape, is_meant = dims(value), value.name in seen and value.type.tensor_type.elem_type in types
        if is_meant and is_known(shape) and math.prod(shape) <= _FEW_ELEMENTS:
            small.append(value.name)
    return small


def dims(value: onnx.ValueInfoProto) -> list[int | str | None] | None:
    """Return the shape of a tensor as far as it is known: sizes, names of open dimensions, or None.

    Sizes below zero are open: exporters write -1 for a dimension that they do not know.
    """
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    return [
        (int(n.dim_value) if n.dim_value >= 0 else None) if n.HasField("dim_value") else str(n.dim_param) or None
        for n in tensor.shape.dim
    ]


def is_known(shape: list[int | str | None] | None) -> TypeGuard[list[int]]:
    """Return whether all of a shape is numbers."""
    return shape is not None and all(isinstance(n, int) for n in shape)


def text(shape: Sequence[int | str | None] | None) -> str:
    """Return a shape for a message."""
    return "unknown" if shape is None else f"({', '.join('?' if n is None else str(n) for n in shape)})"


def num_bytes(elem_type: int, shape: Iterable[int], what: str) -> int:
    """Return the bytes of a dense tensor; numbers of less than 8 bits are packed."""
    import onnx

    name = onnx.TensorProto.DataType.Name(elem_type)
    digits = re.search(r"\d+", name)
    bits = int(digits[0]) if digits else _BITS.get(name)
    if bits is None:
        raise CaptureError(
            f"{what} has elements of type {name}, whose size is not known: expected numbers; "
            "leave text out of the model, with onnx.utils.extract_model"
        )
    return math.ceil(math.prod(shape) * bits / 8)
