"""Constants of ONNX models, folded by onnxscript: what is known before a model runs becomes a constant in it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from olla.errors import CaptureError

if TYPE_CHECKING:
    import onnx

_MOST_ELEMENTS = 2**18  # of a constant that is made: what is larger stays an op
_MOST_ROUNDS = 6  # of folding and shape inference, each of which may let the other know more


def is_installed() -> bool:
    """Return whether an onnxscript is there that can fold constants."""
    try:
        from onnxscript.optimizer import FOLDED_FROM_KEY  # noqa: F401  (since onnxscript 0.6)
    except ImportError:
        return False
    return True


def folded(model: onnx.ModelProto) -> tuple[onnx.ModelProto, set[str]]:
    """Return a copy with constants folded, branches on constants taken, and the names of initializers made so.

    Args:
        model: with closed shapes; initializers whose values matter to shapes are in it, all others are inputs.

    Raises:
        CaptureError: onnxscript fails on the model.
    """
    import onnx
    from onnxscript import ir
    from onnxscript.optimizer import FOLDED_FROM_KEY, fold_constants

    held = {tensor.name for tensor in model.graph.initializer}
    made = set[str]()
    for _ in range(_MOST_ROUNDS):
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
        inputs = [value for value in model.graph.input if value.name not in held]  # onnxscript takes no input as known
        del model.graph.input[:]
        model.graph.input.extend(inputs)
        try:
            with _quiet():
                graph = ir.serde.deserialize_model(model)
                result = fold_constants(graph, onnx_shape_inference=True, should_fold=_is_foldable)
                made.update(key for key, value in graph.graph.initializers.items() if FOLDED_FROM_KEY in value.meta)
                model = ir.serde.serialize_model(graph)
        except Exception as error:  # of many kinds: whatever an operator's evaluation raises
            raise CaptureError(
                f"onnxscript cannot fold the model's constants ({error}); fold them by another tool, such as onnxslim"
            ) from error
        _make_tensors(model.graph)
        if not result.modified:
            break
    return model, made


def _make_tensors(graph: onnx.GraphProto) -> None:
    """Write constants of plain numbers as tensors, which every opset knows: onnxscript writes those of opset 12."""
    import onnx

    for node in graph.node:
        (kind,) = [attribute.name for attribute in node.attribute] if node.op_type == "Constant" else [""]
        if kind.startswith(("value_int", "value_float")):
            numbers = onnx.helper.get_attribute_value(node.attribute[0])
            array = np.array(numbers, dtype=np.int64 if kind.startswith("value_int") else np.float32)
            value = onnx.helper.make_attribute("value", onnx.numpy_helper.from_array(array))
            node.attribute[0].CopyFrom(value)


def _is_foldable(node: Any) -> bool | None:
    """Return whether a node of constant inputs is to be evaluated; None: onnxscript's own rules decide."""
    shape = node.outputs[0].shape
    if shape is None or not all(isinstance(n, int) for n in shape):
        return None
    if math.prod(shape) > _MOST_ELEMENTS:
        return False
    return True if node.op_type == "ConstantOfShape" else None  # which onnxscript keeps, but which shapes come from


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep onnxscript's warnings of what it does not fold to itself: the caller is told of what matters."""
    logger = logging.getLogger("onnxscript")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
