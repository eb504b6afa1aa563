"""What the graph of a captured step says: tensors, mutations, random ops, costs, names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import olla
from olla.pytorch.capture.inputs import gather
from tests.support.pytorch.steps import images, net, nn, run, square, torch

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def small() -> Any:
    model = net()
    return olla.capture(model, images(), optimizer=torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), loss=square)


def test_views_are_no_ops(small: Any) -> None:
    views = {"aten.view.default", "aten.t.default", "aten.detach.default", "aten.expand.default", "getitem"}
    assert views.isdisjoint(small.graph.targets)
    assert any(str(n.target) in views for nodes in small.nodes for n in nodes[1:])


def test_running_statistics_are_mutated_although_their_operator_does_not_say_so(small: Any) -> None:
    graph = small.graph
    norm = graph.targets.index("aten.native_batch_norm.default")
    assert [graph.tensor_names[t] for t in graph.mutates.of(norm)] == ["1.running_mean", "1.running_var"]
    assert not graph.recomputable[norm]


def test_running_statistics_are_read_only_in_evaluation() -> None:
    graph = olla.capture(net().eval(), images()).graph
    assert {graph.tensor_kinds[t] for t in graph.mutates.item} == {"temporary"}
    assert not graph.random.any()


def test_state_is_changed_in_place_and_gradients_die_with_their_update(small: Any) -> None:
    graph = small.graph
    assert {k for t, k in enumerate(graph.tensor_kinds) if t in graph.mutates.item} == {
        "parameter",
        "buffer",
        "optimizer_state",
        "temporary",
    }
    written = [t for v, k in enumerate(graph.op_kinds) if k == "update" for t in graph.writes.of(v)]
    assert sum(graph.tensor_bytes[written]) == 0  # SGD with momentum needs no memory of its own
    assert graph.op_kinds == sorted(graph.op_kinds, key=["forward", "backward", "update"].index)
    assert [graph.tensor_kinds[t] for t in graph.outputs] == ["temporary"]


def test_only_ops_that_draw_numbers_are_random(small: Any) -> None:
    graph = small.graph
    assert [graph.targets[v] for v in np.flatnonzero(graph.random)] == ["aten.bernoulli_.float"]


def test_costs_are_those_of_the_operators(small: Any) -> None:
    graph = small.graph
    product, convolution = graph.targets.index("aten.addmm.default"), graph.targets.index("aten.convolution.default")
    assert graph.flops[product] == 2 * 2 * 144 * 5
    assert graph.flops[convolution] == 2 * 2 * 4 * 36 * 27
    assert graph.moved_bytes[product] == 4 * (2 * 144 + 144 * 5 + 5 + 2 * 5)
    assert graph.shapes[convolution] == (2, 4, 6, 6)
    assert graph.launches[product] == 1


def test_tensors_have_the_names_of_the_model(small: Any) -> None:
    names = dict(zip(small.graph.tensor_names, small.graph.tensor_kinds, strict=True))
    assert names["0.weight"] == "parameter"
    assert names["1.num_batches_tracked"] == "buffer"
    assert names["momentum_buffer of 5.bias"] == "optimizer_state"
    assert names["batch"] == "input"
    assert small.outputs == ["loss"]
    assert set(small.seconds) == {"trace", "fold"}


def test_views_of_a_constant_are_the_constant() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = torch.arange(10.0)

        def forward(self, x: Any) -> Any:
            return x + self.positions[: len(x)]

    step = olla.capture(Positions(), torch.ones(2))
    assert step.graph.tensor_kinds == ["input", "constant", "temporary"]
    assert step.graph.tensor_bytes.tolist() == [8, 40, 8]
    assert run(step, gather(step.inputs, nn.Identity(), torch.ones(2), None))[0].tolist() == [1, 2]


def test_lookups_move_rows_not_the_table() -> None:
    graph = olla.capture(nn.Embedding(10_000, 4), torch.arange(3)).graph
    assert graph.moved_bytes.tolist() == [3 * 8 + 2 * 3 * 16]


def test_dead_code_is_dropped_and_random_numbers_are_kept() -> None:
    class Wasteful(nn.Module):
        def forward(self, x: Any) -> Any:
            x.exp().add_(1)
            torch.rand(2)
            return x.sin()

    assert olla.capture(Wasteful(), torch.ones(2)).graph.targets == ["aten.rand.default", "aten.sin.default"]


def test_in_place_changes_of_shape_are_views() -> None:
    class Squeezing(nn.Module):
        def forward(self, x: Any) -> Any:
            y = x * 2
            z = y.view(-1)
            y.unsqueeze_(0).mul_(3)
            return y + z.sum()

    model, x = Squeezing(), torch.ones(2)
    step = olla.capture(model, x)
    assert step.graph.targets == ["aten.mul.Tensor", "aten.mul_.Tensor", "aten.sum.default", "aten.add.Tensor"]
    assert torch.equal(run(step, gather(step.inputs, model, x, None))[0], model(x))
