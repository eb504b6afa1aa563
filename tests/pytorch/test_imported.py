"""Graphs out of fx modules and exported programs: those that olla captures itself, and errors that name the cause."""

from __future__ import annotations

import pytest

import olla
from olla.errors import CaptureError
from tests.support.pytorch.steps import nn, torch

make_fx = pytest.importorskip("torch.fx.experimental.proxy_tensor").make_fx
pytestmark = pytest.mark.torch


def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def convnet() -> nn.Module:
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(4 * 6 * 6, 2))


@pytest.mark.parametrize(
    ("model", "batch"),
    [(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)), (4, 8)), (convnet(), (2, 3, 8, 8))],
)
def test_a_captured_module_gives_the_captured_graph(model: nn.Module, batch: tuple[int, ...]) -> None:
    captured = olla.capture(model, torch.ones(batch), loss=square)
    placeholders = captured.module.graph.find_nodes(op="placeholder")
    kinds = {node.name: entry.kind for node, entry in zip(placeholders, captured.inputs, strict=True)}
    before = str(captured.module.graph)
    graph = olla.from_fx(captured.module, kinds=kinds)
    assert graph.digest == captured.graph.digest
    assert (graph.op_names, graph.op_kinds) == (captured.graph.op_names, captured.graph.op_kinds)
    assert str(captured.module.graph) == before


def test_views_share_a_storage_and_changes_are_seen() -> None:
    def step(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        halves = (x * 2).view(2, -1)
        state.add_(halves[0])
        return halves.t().contiguous()

    module = make_fx(step)(torch.ones(8), torch.ones(4))
    graph = olla.from_fx(module, kinds={"state_1": "optimizer_state"})
    assert graph.targets == ["aten.mul.Tensor", "aten.add_.Tensor", "aten.clone.default"]
    assert graph.tensor_kinds.count("temporary") == 2
    assert graph.mutates.of(1).tolist() == [graph.tensor_kinds.index("optimizer_state")]


def test_constants_of_a_module_are_resident() -> None:
    table = torch.arange(6.0)
    graph = olla.from_fx(make_fx(lambda x: x + table)(torch.ones(6)))
    assert graph.tensor_kinds == ["input", "constant", "temporary"]
    assert graph.resident_bytes == 48


def test_an_exported_program_is_planned() -> None:
    model = convnet().eval()
    program = torch.export.export(model, (torch.ones(2, 3, 8, 8),))
    graph = olla.from_export(program, name="convnet")
    plan = olla.plan(graph)
    olla.check(graph, plan)
    kinds = [graph.tensor_kinds.count(kind) for kind in ("parameter", "buffer", "input")]
    assert kinds == [6, 3, 1]
    state = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert graph.resident_bytes == state + 2 * 3 * 8 * 8 * 4


class Tied(nn.Module):
    """A head that shares its weight with the embedding, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.head = nn.Linear(16, 100, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.head(self.embedding(tokens))  # type: ignore[no-any-return]


def test_a_parameter_that_modules_share_counts_once() -> None:
    program = torch.export.export(Tied(), (torch.zeros(2, dtype=torch.long),))
    num_placeholders = len(program.graph.find_nodes(op="placeholder"))
    graph = olla.from_export(program)
    assert graph.tensor_kinds.count("parameter") == 1
    assert graph.resident_bytes == 100 * 16 * 4 + 2 * 8
    assert len(program.graph.find_nodes(op="placeholder")) == num_placeholders  # the program stays as it is


def test_modules_are_refused() -> None:
    module = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    for node in module.graph.find_nodes(op="placeholder"):
        node.meta["val"] = torch.ones(1, 2)
    with pytest.raises(
        CaptureError, match=r"_0 is a call_module of 0, expected operators: trace it with torch\.export"
    ):
        olla.from_fx(module)


def test_placeholders_of_other_values_are_left_out() -> None:
    """Such as device meshes: a shard of GraphTrainer's has one beside its tensor, and the step returns it."""
    graph = torch.fx.Graph()
    x, mesh, _, scale = map(graph.placeholder, ("x", "mesh", "unused", "scale"))
    x.meta["val"], mesh.meta["val"], scale.meta["val"] = torch.ones(4), object(), 2.0
    graph.output([graph.call_function(torch.ops.aten.mul.Tensor, (x, scale)), mesh])
    found = olla.from_fx(torch.fx.GraphModule({}, graph))
    assert found.op_names == ["mul_tensor"]
    assert found.tensor_names[:1] == ["x"]
    assert "unused" not in found.tensor_names
    assert [node.name for node in graph.nodes][:4] == ["x", "mesh", "unused", "scale"]  # the module stays as it is


def test_placeholders_without_values_are_named() -> None:
    with pytest.raises(CaptureError, match=r"placeholder x has no tensor in meta\['val'\]"):
        olla.from_fx(torch.fx.symbolic_trace(lambda x: x + 1))


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ({"x_1": "weight"}, "is 'weight', expected one of parameter"),
        ({"y": "input"}, "names 'y', which is no placeholder"),
    ],
)
def test_wrong_kinds_are_named(kinds: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        olla.from_fx(make_fx(lambda x: x + 1)(torch.ones(2)), kinds=kinds)
