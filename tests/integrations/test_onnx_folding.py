"""ONNX models whose sizes or branches are known once constants are folded: the sizes of a run, or the remedy."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import olla
from olla.cli import main
from olla.errors import CaptureError
from olla.integrations.onnx_folding import folded
from olla.integrations.onnx_inputs import KnownInputs, close

onnx = pytest.importorskip("onnx", reason="pip install onnx: models are read with it")
reference = pytest.importorskip("onnx.reference")

HEAD = '<ir_version: 10, opset_import: ["" : 21]> g '
BRANCHES = """
  y = If (large) <
    then_branch = t () => (float[a, b] p) { wide = Concat <axis = 1> (x, x) p = Relu (wide) },
    else_branch = e () => (float[c, d] q) { q = Neg (x) }
  >
}"""
# Name -> model, and the ops that are left. ONNX's own shape inference leaves a size or a branch of each open.
FOLDED: dict[str, tuple[str, list[str]]] = {
    "pads, as torch exports them": (
        HEAD
        + """(float[2, 8] x) => (float[a, b] y) <int64[1] four = {4}, int64[1] one = {1}>
        {
          twos = ConstantOfShape <value = int64[1] {2}> (four)
          product = Mul (twos, one)
          pads = Cast <to = 7> (product)
          padded = Pad (x, pads)
          y = Relu (padded)
        }""",
        ["onnx.Pad", "onnx.Relu"],
    ),
    "a size computed from a shape": (
        HEAD
        + """(float[2, 8] x) => (float[a] y)
        {
          shape = Shape (x)
          count = ReduceProd <keepdims = 1> (shape)
          flat = Reshape (x, count)
          y = Neg (flat)
        }""",
        ["onnx.Neg"],
    ),
    "a branch on a constant": (
        HEAD + "(float[2, 8] x) => (float[a, b] y) <bool large = {1}> {" + BRANCHES,
        ["onnx.Concat", "onnx.Relu"],
    ),
    "a branch on a shape": (
        HEAD
        + """(float[2, 8] x) => (float[a, b] y) <int64 limit = {9}>
        {
          size = Size (x)
          large = Greater (size, limit)"""
        + BRANCHES,
        ["onnx.Concat", "onnx.Relu"],
    ),
    "a branch in a branch": (
        HEAD
        + """(float[2, 8] x) => (float[a, b] y) <bool first = {0}, bool second = {1}>
        {
          y = If (first) <
            then_branch = t () => (float[c, d] p) { p = Exp (x) },
            else_branch = e () => (float[e, f] q) {
              q = If (second) <
                then_branch = u () => (float[g, h] r) { s = Relu (x) r = Concat <axis = 0> (s, x) },
                else_branch = v () => (float[i, j] z) { z = Neg (x) }
              >
            }
          >
        }""",
        ["onnx.Relu", "onnx.Concat"],
    ),
    "a model of opset 11": (
        """<ir_version: 6, opset_import: ["" : 11]> g (float[2, 8] x) => (float[a, b] y)
        <int64[1] first = {0}, int64[1] one = {1}, int64[1] rest = {-1}>
        {
          shape = Shape (x)
          rows = Gather (shape, first)
          doubled = Max (rows, one)
          target = Concat <axis = 0> (doubled, rest)
          h = Reshape (x, target)
          y = Relu (h)
        }""",
        ["onnx.Relu"],
    ),
}
RATE = (
    HEAD
    + """(float[2, 8] x, int64 rate) => (float[a, b] y) <int64 limit = {8000}>
    {
      large = Greater (rate, limit)"""
    + BRANCHES
)
FEED = {"x": np.arange(16, dtype=np.float32).reshape(2, 8) - 7}


def parse(text: str) -> Any:
    return onnx.parser.parse_model(text)


def assert_sizes_are_those_of_a_run(graph: olla.Graph, model: Any, values: dict[str, Any] | None = None) -> None:
    """Compare the bytes of all tensors, and the outputs of the folded model with those of the given one."""
    expected = reference.ReferenceEvaluator(model).run(None, FEED | (values or {}))
    outputs = [value.name for value in model.graph.output]
    close(model, {tensor.name: 0 for tensor in model.graph.initializer}, KnownInputs({}, values or {}))
    model, _ = folded(model)
    made = {key for node in model.graph.node for key in node.output}
    wanted = [key for key in graph.tensor_names if key in made]
    model.graph.output.extend(onnx.ValueInfoProto(name=key) for key in wanted if key not in outputs)
    results = dict(zip(wanted, reference.ReferenceEvaluator(model).run(wanted, FEED), strict=True))
    planned = dict(zip(graph.tensor_names, graph.tensor_bytes.tolist(), strict=True))
    assert {graph.tensor_names[t] for t in graph.writes.item} <= results.keys()
    assert {key: value.nbytes for key, value in results.items()} == {key: planned[key] for key in results}
    for key, value in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(results[key], value)


@pytest.mark.parametrize("case", FOLDED)
def test_what_is_known_before_the_run_gives_sizes_and_branches(case: str) -> None:
    pytest.importorskip("onnxscript", reason="pip install onnxscript: constants are folded by it")
    text, targets = FOLDED[case]
    graph = olla.from_onnx(parse(text))
    assert graph.targets == targets
    plan = olla.plan(graph)
    olla.check(graph, plan)
    assert_sizes_are_those_of_a_run(graph, parse(text))


@pytest.mark.parametrize("case", FOLDED)
def test_without_onnxscript_it_is_named(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript.optimizer", None)
    with pytest.raises(CaptureError, match=r'install onnxscript, .* \(pip install "olla-planner\[onnx\]"\), or export'):
        olla.from_onnx(parse(FOLDED[case][0]))


@pytest.mark.parametrize(("rate", "targets"), [(16000, ["onnx.Concat", "onnx.Relu"]), ([8000], ["onnx.Neg"])])
def test_the_value_of_an_input_takes_a_branch(rate: Any, targets: list[str], tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="pip install onnxscript: constants are folded by it")
    words = r"the If that makes 'y' has graphs inside: .*values={'rate': \.\.\.}\) or --value rate=\.\.\."
    with pytest.raises(CaptureError, match=words):
        olla.from_onnx(parse(RATE))
    graph = olla.from_onnx(parse(RATE), values={"rate": rate})
    assert graph.targets == targets
    assert_sizes_are_those_of_a_run(graph, parse(RATE), {"rate": np.array(np.ravel(rate)[0], np.int64)})
    path, option = str(tmp_path / "rate.onnx"), f"rate={np.ravel(rate)[0]}"
    onnx.save(parse(RATE), path)
    assert main(["plan", path]) == 2
    assert main(["plan", path, "--value", option, "-o", str(tmp_path / "plan.json")]) == 0
    assert main(["check", path, str(tmp_path / "plan.json"), "--value", option]) == 0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"sr": 1}, "values names 'sr', which is no input of the model: it has x, rate"),
        ({"limit": 1}, "values names 'limit', which is no input of the model"),
        ({"rate": 0.5}, r"values\['rate'\] is 0\.5, expected numbers that fit the model's int64"),
        ({"rate": "fast"}, r"values\['rate'\] is 'fast', expected numbers"),
        ({"rate": [1, 2]}, r"the shape of values\['rate'\] is \(2,\), but the model says \(\)"),
    ],
)
def test_a_value_that_does_not_belong_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        olla.from_onnx(parse(RATE), values=values)


def test_a_value_gives_an_open_input_its_shape() -> None:
    text = HEAD + "(float[2, 8] x, int64[n] target) => (float[a, b] y) { h = Reshape (x, target) y = Relu (h) }"
    with pytest.raises(CaptureError, match=r"input 'target' has shape \(n\), expected numbers"):
        olla.from_onnx(parse(text))
    graph = olla.from_onnx(parse(text), values={"target": [4, 4]})
    assert graph.shapes == [(4, 4)]
    assert dict(zip(graph.tensor_names, graph.tensor_kinds, strict=True)) == {
        "target": "constant",
        "x": "input",
        "y": "temporary",
    }


REFUSED = {
    "a loop": (
        """(float[2, 8] x, int64 n) => (float[2, 8] y) <bool go = {1}>
        {
          y = Loop (n, go, x) <body = b (int64 i, bool more, float[2, 8] s) => (bool again, float[2, 8] r)
            { again = Identity (more) r = Relu (s) }>
        }""",
        r"the Loop that makes 'y' has graphs inside: .*loops on values",
    ),
    "values of data": (
        "(float[4] x) => (int64[1, n] y) { y = NonZero (x) }",
        r"the NonZero that makes 'y': 'y' is of shape .*export the model with fixed sizes$",
    ),
    "a sequence": (
        "(float[4] x) => (float[4] y) { s = SequenceConstruct (x) zero = Constant <value_int = 0> () h = Relu (x) "
        "n = SequenceLength (s) f = Cast <to = 1> (n) y = Add (h, f) }",
        r"the SequenceConstruct that makes 's': 's' is a sequence_type, .*export the model without sequences",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_stays_open_with_constants_folded_names_the_node_and_the_remedy(case: str) -> None:
    pytest.importorskip("onnxscript", reason="pip install onnxscript: constants are folded by it")
    text, words = REFUSED[case]
    with pytest.raises(CaptureError, match=re.compile(words, re.DOTALL)):
        olla.from_onnx(parse(HEAD + text))


def test_a_model_that_onnxscript_fails_on_is_refused_by_what_is_open_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = pytest.importorskip("onnxscript.optimizer", reason="pip install onnxscript: constants are folded by it")

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("cannot evaluate Pad")

    monkeypatch.setattr(optimizer, "fold_constants", fail)
    words = r"the Pad that makes 'padded': 'padded' is of shape .*; onnxscript cannot fold .* \(cannot evaluate Pad\)"
    with pytest.raises(CaptureError, match=words):
        olla.from_onnx(parse(FOLDED["pads, as torch exports them"][0]))


def test_weights_of_a_branch_are_parameters_and_folded_numbers_constants() -> None:
    pytest.importorskip("onnxscript", reason="pip install onnxscript: constants are folded by it")
    text = (
        HEAD
        + """(float[2, 8] x) => (float[a, b] y) <float[8] scale = {1, 2, 3, 4, 5, 6, 7, 8}, int64[1] two = {2},
        float[8] unused = {1, 1, 1, 1, 1, 1, 1, 1}, bool large = {0}, int64[1] axis = {1}>
        {
          twos = ConstantOfShape <value = float[1] {2}> (two)
          column = Unsqueeze (twos, axis)
          y = If (large) <
            then_branch = t () => (float[c, d] p) { p = Mul (x, unused) },
            else_branch = e () => (float[e, f] q) { s = Mul (x, scale) q = Mul (s, column) }
          >
        }"""
    )
    graph = olla.from_onnx(parse(text))
    kinds = dict(zip(graph.tensor_names, graph.tensor_kinds, strict=True))
    assert {name for name, kind in kinds.items() if kind == "parameter"} == {"scale"}
    assert {name for name, kind in kinds.items() if kind == "constant"} == {"column"}
    assert_sizes_are_those_of_a_run(graph, parse(text))


def test_large_results_of_constants_stay_ops() -> None:
    pytest.importorskip("onnxscript", reason="pip install onnxscript: constants are folded by it")
    text = (
        HEAD
        + """(float[2, 8] x) => (float[a] y) <int64[2] large = {2048, 2048}>
        { shape = Shape (x) count = ReduceProd <keepdims = 1> (shape) flat = Reshape (x, count)
          zeros = ConstantOfShape (large) total = ReduceSum <keepdims = 0> (zeros) y = Add (flat, total) }"""
    )
    graph = olla.from_onnx(parse(text))
    assert graph.targets == ["onnx.ConstantOfShape", "onnx.ReduceSum", "onnx.Add"]
    assert max(graph.tensor_bytes) == 4 * 2048**2
