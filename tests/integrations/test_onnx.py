"""Graphs out of ONNX models: what the nodes compute at planned addresses, and errors that name the remedy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import olla
from olla.cli import main
from olla.errors import CaptureError, GraphError
from olla.integrations.onnx import VIEWS

onnx = pytest.importorskip("onnx", reason="pip install onnx: models are read with it")
reference = pytest.importorskip("onnx.reference")

BLOCK = """
<ir_version: 10, opset_import: ["" : 21]>
block (float[2, 8, 16] x) => (float[2, 8, 16] y, float[2] total)
<float[16, 16] w = {}, float[1, 1, 16] b = {}, int64[3] heads = {{2, 32, 4}}, int64[1] last = {{-1}}>
{{
  product = MatMul (x, w)
  shifted = Add (product, b)
  split = Reshape (shifted, heads)
  same = Identity (split)
  probability = Softmax <axis = -1> (same)
  shape = Shape (x)
  merged = Reshape (probability, shape)
  unused = Relu (merged)
  y = Add (merged, x)
  flat = Flatten (y)
  total2 = ReduceSum <keepdims = 1> (flat, last)
  total = Squeeze (total2, last)
}}
"""
OPEN = '<ir_version: 10, opset_import: ["" : 21]> open (float[batch, 8] x) => (float[batch, m] y) { y = Relu (x) }'


def numbers(*shape: int) -> str:
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return "{" + ", ".join(map(repr, map(float, values.ravel()))) + "}"


def parse(text: str) -> Any:
    return onnx.parser.parse_model(text)


def block() -> Any:
    return parse(BLOCK.format(numbers(16, 16), numbers(1, 1, 16)))


def convnet() -> Any:
    """A residual convnet with two branches; large weights, so that their values play no part in the shapes."""
    return parse(
        f"""<ir_version: 10, opset_import: ["" : 21]> net (float[1, 3, 16, 16] x) => (float[1, 10] y)
        <float[32, 3, 3, 3] w1 = {numbers(32, 3, 3, 3)}, float[32, 32, 3, 3] w2 = {numbers(32, 32, 3, 3)},
         float[32, 10] w3 = {numbers(32, 10)}>
        {{
          a = Conv <pads = [1, 1, 1, 1]> (x, w1)
          b = Relu (a)
          c = Conv <pads = [1, 1, 1, 1]> (b, w2)
          d = Add (b, c)
          e, f = Split <axis = 1, num_outputs = 2> (d)
          g = Concat <axis = 1> (f, e)
          h = GlobalAveragePool (g)
          i = Flatten (h)
          y = Gemm (i, w3)
        }}"""
    )


def run_as_planned(model: Any, graph: olla.Graph, plan: olla.Plan, feed: dict[str, np.ndarray]) -> dict[str, Any]:
    """Run the nodes in planned order, what ops make at its planned place in one arena; views by numpy."""
    arena = np.zeros(plan.arena_bytes, dtype=np.uint8)
    initializers = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    values = {**initializers, **feed}
    tensor_of = {name: i for i, name in enumerate(graph.tensor_names)}
    nodes = {node.output[0]: node for node in model.graph.node}
    made_by = {graph.tensor_names[int(graph.writes.of(v)[0])]: v for v in range(graph.num_ops)}

    def compute(name: str) -> list[Any]:
        node = nodes[name]
        session = reference.ReferenceEvaluator(node, opsets={"": 21})
        return session.run(None, {key: value_of(key) for key in node.input if key})

    def value_of(name: str) -> Any:
        if name in values:
            return values[name]
        node = nodes[name]
        if node.op_type in VIEWS:  # the bytes of its input, as they are now
            return value_of(node.input[0]).reshape(compute(name)[0].shape)
        assert node.op_type in ("Constant", "Shape")
        return compute(name)[0]

    for v in plan.order:
        (first,) = [name for name, op in made_by.items() if op == v]
        for key, result in zip(nodes[first].output, compute(first), strict=True):
            offset, num_bytes = int(plan.offsets[tensor_of[key]]), int(graph.tensor_bytes[tensor_of[key]])
            assert num_bytes == result.nbytes
            place = arena[offset : offset + num_bytes].view(result.dtype).reshape(result.shape)
            place[...] = result
            values[key] = place
    return {value.name: value_of(value.name).copy() for value in model.graph.output}


@pytest.mark.parametrize("make", [block, convnet])
def test_a_model_run_at_planned_places_computes_the_same(make: Any) -> None:
    model = make()
    graph = olla.from_onnx(model)
    plan = olla.plan(graph, alignment=64)
    olla.check(graph, plan)
    (value,) = model.graph.input
    shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
    feed = {value.name: np.random.default_rng(1).standard_normal(shape).astype(np.float32)}
    expected = reference.ReferenceEvaluator(model).run(None, feed)
    found = run_as_planned(model, graph, plan, feed)
    for (name, got), wanted in zip(found.items(), expected, strict=True):
        np.testing.assert_array_equal(got, wanted, err_msg=name)


def test_initializers_are_parameters_and_views_and_shapes_are_no_ops() -> None:
    graph = olla.from_onnx(block())
    assert graph.targets == ["onnx.MatMul", "onnx.Add", "onnx.Softmax", "onnx.Add", "onnx.ReduceSum"]
    kinds = dict(zip(graph.tensor_names, graph.tensor_kinds, strict=True))
    assert {name for name, kind in kinds.items() if kind == "parameter"} == {"w", "b", "heads", "last"}
    assert (kinds["x"], kinds["shape"]) == ("input", "constant")
    assert not {"split", "same", "merged", "flat", "unused"} & kinds.keys()
    assert [graph.tensor_names[t] for t in graph.outputs] == ["y", "total2"]
    assert graph.mutates.item.tolist() == []


def test_flops_are_those_of_products_and_convolutions() -> None:
    graph = olla.from_onnx(convnet())
    flops = {target: int(n) for target, n in zip(graph.targets, graph.flops, strict=True) if n}
    assert flops == {"onnx.Conv": 2 * 32 * 256 * 32 * 9, "onnx.Gemm": 2 * 32 * 10}
    assert int(graph.flops[0]) == 2 * 32 * 256 * 3 * 9
    assert int(graph.moved_bytes[0]) == 4 * (3 * 256 + 32 * 27 + 32 * 256)


@pytest.mark.parametrize(
    ("elements", "num_bytes"), [("float16", 14), ("int4", 4), ("bool", 7), ("double", 56), ("float8e4m3fn", 7)]
)
def test_bytes_follow_the_type_of_the_elements(elements: str, num_bytes: int) -> None:
    text = f'<ir_version: 10, opset_import: ["" : 21]> g ({elements}[7] x) => ({elements}[7, 1] y, float[7] z)'
    axes = "{ one = Constant <value_ints = [1]> () y = Unsqueeze (x, one) z = Cast <to = 1> (x) }"
    graph = olla.from_onnx(parse(text + axes))
    assert int(graph.tensor_bytes[graph.tensor_names.index("x")]) == num_bytes


def test_open_dimensions_are_refused_until_they_are_named() -> None:
    with pytest.raises(
        CaptureError, match=r"input 'x' has shape \(batch, 8\), expected numbers: name its shape"
    ) as error:
        olla.from_onnx(parse(OPEN))
    assert "--shape x=N,N" in str(error.value)
    graph = olla.from_onnx(parse(OPEN), shapes={"x": (4, 8)})
    assert graph.tensor_bytes.tolist() == [128, 128]


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"z": (4, 8)}, "shapes names 'z', which is no input of the model: it has x"),
        ({"x": (4, 9)}, r"shapes\['x'\] is \(4, 9\), but the model says \(batch, 8\)"),
        ({"x": (4,)}, r"shapes\['x'\] is \(4,\), but the model says"),
        ({"x": (-1, 8)}, r"shapes\['x'\] is \(-1, 8\), but the model says"),
    ],
)
def test_a_shape_that_does_not_belong_is_refused(shapes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        olla.from_onnx(parse(OPEN), shapes=shapes)


HEAD = '<ir_version: 10, opset_import: ["" : 21, "mine" : 1]> g '
REFUSED = {
    "values": (
        HEAD + "(float[4] x) => (int64[1, n] y) { y = NonZero (x) }",
        r"the NonZero that makes 'y': 'y' is of shape \(1, \w+\), expected numbers; .*with fixed sizes",
    ),
    "custom": (
        HEAD + "(float[4] x) => (float[4] y) { h = mine.Odd (x) y = Relu (h) }",
        r"the mine.Odd that makes 'h': 'h' is of a size that shape inference does not know; .*value_info",
    ),
    "branch": (
        HEAD + "(bool x, float[4] a) => (float[4] y) { y = If (x) <then_branch = t () => (float[4] p) { p = Relu (a) },"
        " else_branch = e () => (float[4] q) { q = Neg (a) }> }",
        r"the If that makes 'y' has graphs inside: .*export the model without branches",
    ),
    "strings": (
        HEAD + "(string[4] x) => (string[4] y) { y = Identity (x) }",
        r"'y' has elements of type STRING, whose size is not known",
    ),
    "sequence": (
        HEAD + "(seq(float[4]) x) => (float[4] y) { zero = Constant <value_int = 0> () y = SequenceAt (x, zero) }",
        r"input 'x' is a sequence_type, expected a tensor",
    ),
    "wrong": (
        HEAD + "(float[4] x, float[3] z) => (float[4] y) { y = Add (x, z) }",
        r"ONNX's shape inference refuses the model: .*Incompatible dimensions",
    ),
    "unsorted": (
        HEAD + "(float[4] x) => (float[4] y) <float[4] h> { y = Relu (h) h = Neg (x) }",
        r"the Relu that makes 'y' reads 'h', which no node before it makes: sort",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_place_in_a_plan_is_refused_with_the_remedy(case: str) -> None:
    text, words = REFUSED[case]
    with pytest.raises(CaptureError, match=re.compile(words, re.DOTALL)):
        olla.from_onnx(parse(text))


def test_an_output_that_nobody_reads_needs_no_size() -> None:
    old = '<ir_version: 3, opset_import: ["" : 9]> old (float[4] x) => (float[4] y) '
    graph = olla.from_onnx(parse(old + "{ h, mask = Dropout (x) y = Relu (h) }"))
    assert graph.targets == ["onnx.Dropout", "onnx.Relu"]
    assert graph.tensor_names == ["x", "h", "y"]
    with pytest.raises(CaptureError, match=r"the Dropout that makes 'h': 'mask' is of"):
        olla.from_onnx(parse(old.replace("float[4] y", "bool[n] y") + "{ h, mask = Dropout (x) y = Not (mask) }"))


def test_an_unread_output_of_known_size_is_made_all_the_same() -> None:
    text = HEAD + "(float[2, 4] x) => (float[2, 1] y) { y, places = TopK <axis = 1> (x, k) }"
    model = parse(text.replace(" { y", " <int64[1] k = {1}> { y"))
    assert olla.from_onnx(model).writes.to_lists() == [[2, 3]]


@pytest.mark.parametrize("open_output", [True, False])
def test_a_dimension_of_minus_one_is_open(open_output: bool) -> None:
    def tensor(name: str, *shape: int) -> Any:
        return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)

    nodes = [onnx.helper.make_node("Relu", ["x"], ["h"]), onnx.helper.make_node("Neg", ["h"], ["y"])]
    output = tensor("y", -1 if open_output else 4, 3)
    made = onnx.helper.make_graph(nodes, "g", [tensor("x", -1, 3)], [output], value_info=[tensor("h", -1, 3)])
    model = onnx.helper.make_model(made)
    with pytest.raises(
        CaptureError, match=r"input 'x' has shape \(\?, 3\), .*shapes={'x': \(\.\.\.\)}\), .*--shape x=N"
    ):
        olla.from_onnx(model)
    graph = olla.from_onnx(model, shapes={"x": (4, 3)})
    assert graph.tensor_bytes.tolist() == [48, 48, 48]
    with pytest.raises(ValueError, match=r"shapes\['x'\] is \(4, 5\), but the model says \(\?, 3\)"):
        olla.from_onnx(model, shapes={"x": (4, 5)})


def test_a_custom_operator_is_taken_once_its_outputs_are_described() -> None:
    text = HEAD + "(float[4] x) => (float[4] y) <float[4] h> { h = mine.Odd (x) y = Relu (h) }"
    assert olla.from_onnx(parse(text)).targets == ["onnx.mine.Odd", "onnx.Relu"]


def test_functions_of_the_model_are_inlined() -> None:
    function = '<opset_import: ["" : 21], domain: "mine"> Twice (a) => (c) { b = Relu (a) c = Add (b, b) }'
    text = HEAD + "(float[4] x) => (float[4] y) { y = mine.Twice (x) }" + function
    assert olla.from_onnx(parse(text)).targets == ["onnx.Relu", "onnx.Add"]


def test_sparse_and_repeated_initializers_count_once() -> None:
    model = parse(
        '<ir_version: 3, opset_import: ["" : 21]> old (float[4] x, float[4] w) => (float[4] y) { y = Add(x, w) }'
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(4, np.float32), "w"))
    values = onnx.numpy_helper.from_array(np.ones(2, np.float32), "s")
    indices = onnx.numpy_helper.from_array(np.array([0, 2]), "s_indices")
    model.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, indices, [4]))
    graph = olla.from_onnx(model)
    assert dict(zip(graph.tensor_names, graph.tensor_bytes.tolist(), strict=True)) == {
        "w": 16,
        "s": 24,
        "x": 16,
        "y": 16,
    }
    assert graph.tensor_kinds == ["parameter", "parameter", "input", "temporary"]


def test_random_nodes_keep_their_order() -> None:
    body = "{ a = RandomNormalLike (x) d = Constant <value = float {0.5}> () t = Constant <value = bool {1}> ()"
    text = HEAD + "(float[4] x) => (float[4] y) " + body + " b = Dropout (x, d, t) y = Add (a, b) }"
    assert olla.from_onnx(parse(text)).random.tolist() == [True, True, False]


def test_weights_in_external_files_are_not_read(tmp_path: Path) -> None:
    path, model = tmp_path / "net.onnx", convnet()
    digest = olla.from_onnx(model).digest
    onnx.save(model, path, save_as_external_data=True, location="weights", size_threshold=0)
    (tmp_path / "weights").write_bytes(b"")  # of the large ones no byte is needed; "small" ones hold shapes
    for tensor in (loaded := onnx.load(path, load_external_data=False)).graph.initializer:
        if tensor.dims == [32, 3, 3, 3] or tensor.dims == [32, 10]:
            tensor.CopyFrom(next(t for t in model.graph.initializer if t.name == tensor.name))
    onnx.save(loaded, path)
    assert olla.from_onnx(path).digest == digest


def test_small_initializers_in_external_files_give_shapes(tmp_path: Path) -> None:
    path = tmp_path / "block.onnx"
    digest = olla.from_onnx(block()).digest
    onnx.save(block(), path, save_as_external_data=True, location="weights", size_threshold=0)
    assert olla.from_onnx(path).digest == digest


def test_the_command_plans_checks_and_shows_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, plan = str(tmp_path / "open.onnx"), str(tmp_path / "plan.json")
    onnx.save(parse(OPEN), path)
    assert main(["plan", path]) == 2
    assert "input 'x' has shape (batch, 8)" in capsys.readouterr().err
    assert main(["plan", path, "--shape", "x=4,8", "-o", plan]) == 0
    assert main(["check", path, plan, "--shape", "x=4,8"]) == 0
    assert main(["show", plan, "--graph", path, "--shape", "x=4,8", "--html", str(tmp_path / "plan.html")]) == 0
    assert main(["check", path, plan, "--shape", "x=5,8"]) == 2


@pytest.mark.parametrize("given", ["x", "x=", "=4", "x=4,b"])
@pytest.mark.parametrize(("option", "form"), [("--shape", "NAME=N,N,..."), ("--value", "NAME=NUMBER or")])
def test_numbers_that_cannot_be_read_are_refused(
    option: str, form: str, given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main(["plan", "open.onnx", option, given])
    assert error.value.code == 2
    assert f"{given!r} is not {form}" in capsys.readouterr().err


def test_a_file_that_is_no_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "odd.onnx"
    with pytest.raises(GraphError, match=r"odd\.onnx: cannot be read: No such file"):
        olla.from_onnx(path)
    for content in (b"", b"not a model at all"):
        path.write_bytes(content)
        with pytest.raises(GraphError, match=r"odd\.onnx: is no ONNX model: "):
            olla.from_onnx(path)
    assert main(["plan", str(path)]) == 2
    assert "is no ONNX model" in capsys.readouterr().err
