"""Graphs out of ONNX models."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from olla.base import files
from olla.errors import CaptureError, GraphError
from olla.graph import Graph
from olla.graph.graph import Builder
from olla.integrations import onnx_folding
from olla.integrations.onnx_inputs import KnownInputs, close, dims, is_known, settable, text
from olla.integrations.onnx_inputs import num_bytes as num_bytes_of

if TYPE_CHECKING:
    import onnx

VIEWS = {"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"}  # the same bytes in order, as tensors are dense
SHAPES = {"Shape", "Size"}  # numbers that are known once all shapes are
RANDOM = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
_SMALL_BYTES = 4096  # initializers that shapes may be computed from; the values of others are not looked at
_OWN_DOMAINS = ("", "ai.onnx")


class Value(NamedTuple):
    """What is known of a tensor before the model runs."""

    num_bytes: int
    shape: tuple[int, ...]


def from_onnx(
    model: str | os.PathLike[str] | onnx.ModelProto,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    values: Mapping[str, Any] | None = None,
    name: str = "",
) -> Graph:
    """Return the graph of an ONNX model.

    Sizes come from ONNX's own shape inference. Initializers are parameters, inputs without a value are inputs, and what
    Constant and Shape nodes make are constants: all of them are resident. Flatten, Identity, Reshape, Squeeze and
    Unsqueeze are views of their input and no ops; every other node is an op that allocates its outputs and changes
    nothing in place. Nodes without effect on an output are left out, functions of the model are inlined. Where sizes or
    branches stay open so, constants and shapes are folded first, by onnxscript if it is installed; a branch on a
    constant is then the nodes inside.

    Args:
        model: a file, or a model. External data beside a file is not read, but for what is smaller than 4 KiB.
        shapes: of inputs by name, where the model leaves dimensions open.
        values: of inputs by name, where a branch or a shape depends on them, such as a sampling rate: numbers, or
            arrays of them. They are constants of the graph.
        name: of the graph; by default the model's own, or the file's.

    Returns:
        The graph; its ops are named as the nodes. Flops are those of MatMul, Gemm, Conv and ConvTranspose.

    Raises:
        CaptureError: the package onnx is missing, a shape stays open, or a node has no place in a plan: a branch on
            values, a loop, a sequence, strings.
        GraphError: the file cannot be read as an ONNX model.
        ValueError: a shape or a value does not belong to an input, or contradicts it.

    Complexity: one run of ONNX's shape inference, which computes no tensor; where that is not enough, a few more with
        onnxscript in between, which evaluates what depends on small constants alone.

    Example:
        >>> import olla, onnx
        >>> text = '<ir_version: 10, opset_import: ["" : 21]> tiny (float[2, 8] x, float[8, 4] w) => (float[2, 4] y)'
        >>> graph = olla.from_onnx(onnx.parser.parse_model(text + "{ h = MatMul (x, w) y = Relu (h) }"))
        >>> graph.targets, graph.resident_bytes, olla.plan(graph).peak_bytes
        (['onnx.MatMul', 'onnx.Relu'], 192, 256)
    """
    _require_onnx()
    given = KnownInputs(shapes or {}, values or {})
    if isinstance(model, str | os.PathLike):
        path = Path(model)
        with files.naming(str(path)):
            skeleton, parameters = _skeleton(_read(path), path.parent)
            return _graph(skeleton, parameters, given, name or skeleton.graph.name or path.stem)
    skeleton, parameters = _skeleton(model, None)
    return _graph(skeleton, parameters, given, name or skeleton.graph.name)


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
        num_bytes = num_bytes_of(tensor.data_type, tensor.dims, f"initializer {tensor.name!r}")
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
        parameters[values.name] = sum(num_bytes_of(part.data_type, part.dims, what) for part in (values, indices))
        copy.input.append(onnx.helper.make_tensor_value_info(values.name, values.data_type, sparse.dims))
    if skeleton.functions:
        from onnx.inliner import inline_local_functions

        skeleton = inline_local_functions(skeleton)
    return skeleton, parameters


def _graph(model: onnx.ModelProto, parameters: Mapping[str, int], given: KnownInputs, name: str) -> Graph:
    """Return the graph of a skeleton, whose `parameters` are those of its inputs that have values, and their bytes."""
    close(model, parameters, given)
    known, constants = {**_sizes(model.graph.initializer), **parameters}, set(given.values)
    values, failure = _values(model, known), ""
    if _first_open(model.graph, values) and onnx_folding.is_installed():
        try:
            model, made = onnx_folding.folded(model)
        except CaptureError as error:
            failure = f"; {error}"
        else:
            constants |= made
            known = {**_sizes(model.graph.initializer), **parameters}
            values = _values(model, known)
            read = _names_read(model.graph, _with_effect(model.graph))
            known = {key: num_bytes for key, num_bytes in known.items() if key in read}  # others were folded
    if unknown := _first_open(model.graph, values):
        _refuse(model.graph, *unknown, values, failure)
    builder, place = Graph.builder(name), dict[str, int]()
    for key, num_bytes in known.items():
        place[key] = builder.tensor(num_bytes, kind="constant" if key in constants else "parameter", name=key)
    for value in model.graph.input:
        if value.name not in parameters:
            num_bytes = _value(values, value.name, "input").num_bytes
            place[value.name] = builder.tensor(num_bytes, kind="input", name=value.name)
    for node in _with_effect(model.graph):
        made_by_node = {key: found for key in node.output if isinstance(found := values.get(key), Value)}
        _add(builder, place, values, node, made_by_node)
    for output in dict.fromkeys(place[value.name] for value in model.graph.output if value.name in place):
        builder.output(output)
    return builder.build()


def _add(
    builder: Builder,
    place: dict[str, int],
    values: Mapping[str, Value | str],
    node: onnx.NodeProto,
    made: Mapping[str, Value],
) -> None:
    """Add what a node makes, by name to `place`: tensors and the op, constants, or another name of its input."""
    what, target = _called(node), _target(node)
    if missing := [key for key in node.input if key and key not in place]:
        raise CaptureError(f"{what} reads {missing[0]!r}, which no node before it makes: sort the nodes topologically")
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


def _first_open(graph: onnx.GraphProto, values: Mapping[str, Value | str]) -> tuple[onnx.NodeProto, str] | None:
    """Return the first node of no known place in a plan: with graphs inside, or with an output that has no known size.

    Returns:
        The node and the output, empty for graphs; None where there is none. What nobody reads needs no size.
    """
    nodes = _with_effect(graph)
    read = _names_read(graph, nodes)
    for node in nodes:
        if any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
            return node, ""
        for key in node.output:
            if key in read and not isinstance(values.get(key), Value):
                return node, key
    return None


def _refuse(
    graph: onnx.GraphProto, node: onnx.NodeProto, key: str, values: Mapping[str, Value | str], failure: str
) -> NoReturn:
    """Raise the error for what `_first_open` found."""
    if not key:
        seen = " has graphs inside: which of their nodes run, and how often, is not known before"
        remedy = _remedy(graph, node, "export the model without branches and loops on values")
        raise CaptureError(f"{_called(node)}{seen}; {remedy}{failure}")
    found = str(values.get(key, "of a size that shape inference does not know"))
    if "expected a tensor" in found:
        remedy = "export the model without sequences, optionals and maps"
    elif node.domain in _OWN_DOMAINS:
        remedy = _remedy(graph, node, "export the model with fixed sizes")
    else:
        remedy = "the operator is none of ONNX's own: add its outputs, with their shapes, to the model's value_info"
    raise CaptureError(f"{_called(node)}: {key!r} is {found}; {remedy}{failure}")


def _remedy(graph: onnx.GraphProto, node: onnx.NodeProto, last: str) -> str:
    """Return what to do where a node depends on values; `last` is what is left to do."""
    if not onnx_folding.is_installed():
        return f'install onnxscript, which folds constants (pip install "olla-planner[onnx]"), or {last}'
    if inputs := settable(graph, node.input):
        values = ", ".join(f"{key!r}: ..." for key in inputs)
        options = " ".join(f"--value {key}=..." for key in inputs)
        return f"give the values it may depend on, from_onnx(model, values={{{values}}}) or {options}; or {last}"
    return last


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
        found = dims(value)
        if kind != "tensor_type":
            values.setdefault(value.name, f"a {kind}, expected a tensor of numbers")
        elif not is_known(found):
            values.setdefault(value.name, f"of shape {text(found)}, expected numbers")
        else:
            shape = tuple(found)
            num_bytes = parameters.get(value.name)
            if num_bytes is None:
                num_bytes = num_bytes_of(value.type.tensor_type.elem_type, shape, f"{value.name!r}")
            values[value.name] = Value(num_bytes, shape)
    for node in model.graph.node:
        if node.op_type == "Constant" and node.output[0] not in values:
            values[node.output[0]] = "a constant of no known type"
    return values


def _value(values: Mapping[str, Value | str], key: str, what: str) -> Value:
    found = values[key]
    if isinstance(found, Value):
        return found
    raise CaptureError(f"{what}: {key!r} is {found}")


def _with_effect(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return the nodes that an output depends on, in the model's order."""
    needed = {value.name for value in graph.output}
    kept = []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(node.input)
            kept.append(node)
    return kept[::-1]


def _names_read(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> set[str]:
    """Return the tensors that a node reads or that are outputs, without the empty name of one left out."""
    return {key for node in nodes for key in node.input if key} | {value.name for value in graph.output}


def _sizes(initializers: Iterable[onnx.TensorProto]) -> dict[str, int]:
    """Return the bytes of initializers by name."""
    return {
        tensor.name: num_bytes_of(tensor.data_type, tensor.dims, f"initializer {tensor.name!r}")
        for tensor in initializers
    }


def _target(node: onnx.NodeProto) -> str:
    return node.op_type if node.domain in _OWN_DOMAINS else f"{node.domain}.{node.op_type}"


def _called(node: onnx.NodeProto) -> str:
    return (
        f"node {node.name!r} ({_target(node)})" if node.name else f"the {_target(node)} that makes {node.output[0]!r}"
    )


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
