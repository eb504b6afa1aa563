"""Graphs out of ONNX models."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from olla.base import files
from olla.errors import CaptureError, GraphError
from olla.graph import Graph
from olla.graph.graph import Builder

if TYPE_CHECKING:
    import onnx

VIEWS = {"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"}  # the same bytes in order, as tensors are dense
SHAPES = {"Shape", "Size"}  # numbers that are known once all shapes are
RANDOM = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
_SMALL_BYTES = 4096  # initializers that shapes may be computed from; the values of others are not looked at
_BITS = {"FLOAT": 32, "DOUBLE": 64, "BOOL": 8}
_OWN_DOMAINS = ("", "ai.onnx")


class Value(NamedTuple):
    """What is known of a tensor before the model runs."""

    num_bytes: int
    shape: tuple[int, ...]


def from_onnx(
    model: str | os.PathLike[str] | onnx.ModelProto,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    name: str = "",
) -> Graph:
    """Return the graph of an ONNX model.

    Sizes come from ONNX's own shape inference. Initializers are parameters, inputs without a value are inputs, and what
    Constant and Shape nodes make are constants: all of them are resident. Flatten, Identity, Reshape, Squeeze and
    Unsqueeze are views of their input and no ops; every other node is an op that allocates its outputs and changes
    nothing in place. Nodes without effect on an output are left out, functions of the model are inlined.

    Args:
        model: a file, or a model. External data beside a file is not read, but for what is smaller than 4 KiB.
        shapes: of inputs by name, where the model leaves dimensions open.
        name: of the graph; by default the model's own, or the file's.

    Returns:
        The graph; its ops are named as the nodes. Flops are those of MatMul, Gemm, Conv and ConvTranspose.

    Raises:
        CaptureError: the package onnx is missing, a shape stays open, or a node has no place in a plan: a branch, a
            loop, a sequence, strings.
        GraphError: the file cannot be read as an ONNX model.
        ValueError: a shape does not belong to an input, or contradicts it.

    Complexity: one run of ONNX's shape inference; no tensor is computed.

    Example:
        >>> import olla, onnx
        >>> text = '<ir_version: 10, opset_import: ["" : 21]> tiny (float[2, 8] x, float[8, 4] w) => (float[2, 4] y)'
        >>> graph = olla.from_onnx(onnx.parser.parse_model(text + "{ h = MatMul (x, w) y = Relu (h) }"))
        >>> graph.targets, graph.resident_bytes, olla.plan(graph).peak_bytes
        (['onnx.MatMul', 'onnx.Relu'], 192, 256)
    """
    _require_onnx()
    if isinstance(model, str | os.PathLike):
        path = Path(model)
        with files.naming(str(path)):
            skeleton, parameters = _skeleton(_read(path), path.parent)
            return _graph(skeleton, parameters, dict(shapes or {}), name or skeleton.graph.name or path.stem)
    skeleton, parameters = _skeleton(model, None)
    return _graph(skeleton, parameters, dict(shapes or {}), name or skeleton.graph.name)


def _require_onnx() -> None:
    try:
        import onnx.parser  # noqa: F401  (the last of its modules: an incomplete package fails here)
    except ImportError as error:
        raise CaptureError(f'ONNX models need the package onnx ({error}): pip install "olla-planner[onnx]"') from error


def _read(path: Path) -> onnx.ModelProto:
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(path, load_external_data=False)
    except OSError as error:
        raise GraphError(f"cannot be read: {error.strerror or error}", rule="file") from error
    except (DecodeError, ValueError, onnx.parser.ParseError) as error:
        raise GraphError(f"is no ONNX model: {error}", rule="file") from error
    if not model.graph.node and not model.graph.output:
        raise GraphError("is no ONNX model: it has neither nodes nor outputs", rule="file")
    return model


def _skeleton(model: onnx.ModelProto, folder: Path | None) -> tuple[onnx.ModelProto, dict[str, int]]:
    """Return a copy whose large initializers are inputs: shapes need no weights; and the bytes of all initializers."""
    import onnx
    from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data

    skeleton = onnx.ModelProto()
    skeleton.ir_version = model.ir_version
    skeleton.opset_import.extend(model.opset_import)
    skeleton.functions.extend(model.functions)
    graph, copy = model.graph, skeleton.graph
    copy.name = graph.name
    copy.input.extend(graph.input)
    copy.output.extend(graph.output)
    copy.value_info.extend(graph.value_info)
    copy.node.extend(graph.node)
    parameters, inputs = dict[str, int](), {value.name for value in graph.input}
    for tensor in graph.initializer:
        num_bytes = _num_bytes(tensor.data_type, tensor.dims, f"initializer {tensor.name!r}")
        parameters[tensor.name] = num_bytes
        if num_bytes <= _SMALL_BYTES:
            small = copy.initializer.add()
            small.CopyFrom(tensor)
            if folder is not None and uses_external_data(small):
                load_external_data_for_tensor(small, str(folder))
        elif tensor.name not in inputs:
            copy.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    for sparse in graph.sparse_initializer:
        values, indices, what = sparse.values, sparse.indices, f"sparse initializer {sparse.values.name!r}"
        parameters[values.name] = sum(_num_bytes(part.data_type, part.dims, what) for part in (values, indices))
        copy.input.append(onnx.helper.make_tensor_value_info(values.name, values.data_type, sparse.dims))
    if skeleton.functions:
        from onnx.inliner import inline_local_functions

        skeleton = inline_local_functions(skeleton)
    return skeleton, parameters


def _graph(model: onnx.ModelProto, parameters: Mapping[str, int], shapes: dict[str, Any], name: str) -> Graph:
    """Return the graph of a skeleton, whose `parameters` are those of its inputs that have values, and their bytes."""
    _close(model, parameters, shapes)
    _refuse_control_flow(model.graph.node)
    values = _values(model, parameters)
    builder, place = Graph.builder(name), dict[str, int]()
    for key, num_bytes in parameters.items():
        place[key] = builder.tensor(num_bytes, kind="parameter", name=key)
    for value in model.graph.input:
        if value.name not in place:
            num_bytes = _value(values, value.name, "input").num_bytes
            place[value.name] = builder.tensor(num_bytes, kind="input", name=value.name)
    for node in _with_effect(model.graph):
        _add(builder, place, values, node)
    for output in dict.fromkeys(place[value.name] for value in model.graph.output if value.name in place):
        builder.output(output)
    return builder.build()


def _add(builder: Builder, place: dict[str, int], values: Mapping[str, Value | str], node: onnx.NodeProto) -> None:
    """Add what a node makes, by name to `place`: tensors and the op, constants, or another name of its input."""
    what, target = _called(node), _target(node)
    if missing := [key for key in node.input if key and key not in place]:
        raise CaptureError(f"{what} reads {missing[0]!r}, which no node before it makes: sort the nodes topologically")
    made = {key: _value(values, key, what) for key in node.output if key}
    if target in VIEWS:
        (output,) = made
        place[output] = place[node.input[0]]
        return
    is_constant = target == "Constant" or target in SHAPES
    for key, value in made.items():
        place[key] = builder.tensor(value.num_bytes, kind="constant" if is_constant else "temporary", name=key)
    if is_constant:
        return
    inputs = {key: _value(values, key, what) for key in node.input if key}
    name, first = next(iter(made.items()))
    builder.op(
        node.name or name,
        kind="forward",
        target=f"onnx.{target}",
        reads=dict.fromkeys(place[key] for key in inputs),
        writes=[place[key] for key in made],
        flops=_flops(node, target, inputs, first),
        moved_bytes=sum(value.num_bytes for value in (*inputs.values(), *made.values())),
        random=target in RANDOM or (target == "Dropout" and len(node.input) > 2),
        shape=first.shape,
    )


def _close(model: onnx.ModelProto, parameters: Mapping[str, int], shapes: dict[str, Any]) -> None:
    """Write shapes given by the caller into the inputs, and refuse what stays open."""
    inputs = {value.name: value for value in model.graph.input if value.name not in parameters}
    if unknown := shapes.keys() - inputs.keys():
        known = ", ".join(inputs) or "none"
        raise ValueError(f"shapes names {min(unknown)!r}, which is no input of the model: it has {known}")
    for key, value in inputs.items():
        if value.type.WhichOneof("value") != "tensor_type":
            raise CaptureError(f"input {key!r} is a {value.type.WhichOneof('value')}, expected a tensor of numbers")
        dims, seen = value.type.tensor_type.shape.dim, _dims(value)
        if key in shapes:
            given = [int(n) for n in shapes[key]]
            fits = seen is None or (
                len(seen) == len(given)
                and all(n >= 0 and (n == m or not isinstance(m, int)) for m, n in zip(seen, given, strict=True))
            )
            if not fits:
                raise ValueError(f"shapes[{key!r}] is {tuple(given)}, but the model says {_text(seen)}")
            del dims[:]
            for n in given:
                dims.add().dim_value = n
        elif seen is None or not all(isinstance(n, int) for n in seen):
            raise CaptureError(
                f"input {key!r} has shape {_text(seen)}, expected numbers: name its shape, "
                f"from_onnx(model, shapes={{{key!r}: (...)}}), or on the command line --shape {key}=N,N,..."
            )
    # What was written for open dimensions says nothing new.
    for value in (*model.graph.value_info, *model.graph.output):
        if any(not isinstance(n, int) for n in _dims(value) or ()):
            value.type.tensor_type.ClearField("shape")


def _refuse_control_flow(nodes: Iterable[onnx.NodeProto]) -> None:
    for node in nodes:
        if any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
            raise CaptureError(
                f"{_called(node)} has graphs inside: which of their nodes run, and how often, is not known before; "
                "export the model without branches and loops on values, or have constants folded (onnxsim)"
            )


def _values(model: onnx.ModelProto, parameters: Mapping[str, int]) -> dict[str, Value | str]:
    """Return what is known of every tensor by name, or in words why it has no size."""
    import onnx

    try:
        model = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    except onnx.shape_inference.InferenceError as error:
        raise CaptureError(f"ONNX's shape inference refuses the model: {error}") from error
    values = dict[str, Value | str]()
    for tensor in model.graph.initializer:
        values[tensor.name] = Value(parameters[tensor.name], tuple(tensor.dims))
    for value in (*model.graph.value_info, *model.graph.output, *model.graph.input):
        kind = value.type.WhichOneof("value")
        dims = _dims(value)
        if kind != "tensor_type":
            values.setdefault(value.name, f"a {kind}, expected a tensor of numbers")
        elif dims is None or not all(isinstance(n, int) for n in dims):
            values.setdefault(value.name, f"of shape {_text(dims)}, expected numbers")
        else:
            shape = tuple(int(n) for n in dims if n is not None)
            num_bytes = parameters.get(value.name)
            if num_bytes is None:
                num_bytes = _num_bytes(value.type.tensor_type.elem_type, shape, f"{value.name!r}")
            values[value.name] = Value(num_bytes, shape)
    for node in model.graph.node:
        if node.op_type == "Constant" and node.output[0] not in values:
            values[node.output[0]] = "a constant of no known type"
    return values


def _value(values: Mapping[str, Value | str], key: str, what: str) -> Value:
    found = values.get(key, "of a size that shape inference does not know")
    if isinstance(found, Value):
        return found
    raise CaptureError(
        f"{what}: {key!r} is {found}; where the shape depends on values, have constants folded (onnxsim) or export the "
        "model with fixed sizes; of an operator that is none of ONNX's own, add its outputs to the model's value_info"
    )


def _with_effect(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return the nodes that an output depends on, in the model's order."""
    needed = {value.name for value in graph.output}
    kept = []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(node.input)
            kept.append(node)
    return kept[::-1]


def _target(node: onnx.NodeProto) -> str:
    return node.op_type if node.domain in _OWN_DOMAINS else f"{node.domain}.{node.op_type}"


def _called(node: onnx.NodeProto) -> str:
    return (
        f"node {node.name!r} ({_target(node)})" if node.name else f"the {_target(node)} that makes {node.output[0]!r}"
    )


def _dims(value: onnx.ValueInfoProto) -> list[int | str | None] | None:
    """Return the shape of a tensor as far as it is known: sizes, names of open dimensions, or None."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    return [int(n.dim_value) if n.HasField("dim_value") else str(n.dim_param) or None for n in tensor.shape.dim]


def _text(shape: Sequence[int | str | None] | None) -> str:
    return "unknown" if shape is None else f"({', '.join('?' if n is None else str(n) for n in shape)})"


def _num_bytes(elem_type: int, shape: Iterable[int], what: str) -> int:
    """Return the bytes of a dense tensor; numbers of less than 8 bits are packed."""
    import onnx

    name = onnx.TensorProto.DataType.Name(elem_type)
    digits = re.search(r"\d+", name)
    bits = int(digits[0]) if digits else _BITS.get(name)
    if bits is None:
        raise CaptureError(f"{what} has elements of type {name}, whose size is not known: expected numbers")
    return math.ceil(math.prod(shape) * bits / 8)


def _flops(node: onnx.NodeProto, target: str, inputs: Mapping[str, Value], made: Value) -> int:
    """Return the arithmetic operations of a matrix product or convolution: two for every product."""
    if target not in ("MatMul", "Gemm", "Conv", "ConvTranspose"):
        return 0
    first, second = (inputs[key].shape for key in node.input[:2])
    if target == "ConvTranspose":
        return 2 * math.prod(first) * math.prod(second[1:])
    if target == "Conv":
        return 2 * math.prod(made.shape) * math.prod(second[1:])
    transposed = any(attribute.name == "transA" and attribute.i for attribute in node.attribute)
    return 2 * math.prod(made.shape) * first[0 if transposed else -1]
