"""What a recorded step tells about other orders: requests, workspaces, seconds."""

from __future__ import annotations

import numpy as np
import pytest

import olla
from olla.pytorch.memory import arrange
from olla.pytorch.memory.replay import Allocations
from olla.pytorch.memory.requests import Requests, with_costs
from tests.support.pytorch.planned import require_costs, require_exact_requests, world_of

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch


def allocations(*rows: tuple[int, int, int, int, int, int]) -> Allocations:
    op, index, num_bytes, freed_in, freed_at, address = np.array(rows, dtype=np.int64).T.copy()
    return Allocations(
        op.astype(np.int32), index.astype(np.int32), num_bytes, freed_in.astype(np.int32), freed_at, address
    )


def chain() -> olla.Graph:
    """a writes x; b reads x, writes y; c reads x; d reads y."""
    builder = olla.Graph.builder("chain")
    x, y = builder.tensor(100), builder.tensor(50)
    builder.op("a", writes=[x])
    builder.op("b", reads=[x], writes=[y])
    builder.op("c", reads=[x])
    builder.op("d", reads=[y])
    return builder.build()


RECORDED = allocations(
    (0, 0, 100, 2, 4, 4096),  # x, freed after c
    (1, 0, 300, 1, 2, 8192),  # a workspace of b, freed inside
    (1, 1, 50, 3, 4, 8192),  # y, in the same place, freed after d
    (2, 0, 70, 2, 4, 1024),  # a workspace of c
)


def test_lifetimes_follow_the_order() -> None:
    graph = chain()
    requests = Requests.of(RECORDED, {0: 4096, 1: 8192}, graph)
    assert requests.tensor.tolist() == [0, -1, 1, -1]
    assert requests.ends.tolist() == [-1, 1, -1, 1]
    for ours, recorded in zip(requests.in_order(graph, [0, 1, 2, 3])[:5], RECORDED[:5], strict=True):
        assert ours.tolist() == recorded.tolist()
    moved = requests.in_order(graph, [0, 1, 3, 2])
    assert moved.op.tolist() == [0, 1, 1, 2]
    assert moved.freed_in.tolist() == [2, 1, 3, 2]
    assert moved.freed_at.tolist() == [4, 2, 3, 4]


def test_workspaces_are_what_an_op_holds_above_what_it_writes() -> None:
    exact, aligned = (with_costs(chain(), RECORDED, np.zeros(4), alignment) for alignment in (1, 64))
    assert exact.workspace_bytes.tolist() == [0, 250, 70, 0]
    assert aligned.workspace_bytes.tolist() == [0, 320 - 64, 128, 0]


def test_load_is_what_the_layout_finds() -> None:
    assert arrange.arrange(RECORDED, 4, 64, 1.0, 0).load_bytes == 128 + 320


def test_an_order_is_planned_again_where_workspaces_matter_and_never_gets_worse() -> None:
    # Two branches of two ops each; without workspaces the one with the larger result comes first.
    builder = olla.Graph.builder("branches")
    wide, small = builder.tensor(1000), builder.tensor(10)
    builder.op("wide", writes=[wide])
    builder.op("small", writes=[small])
    builder.op("join", reads=[wide, small])
    graph = builder.build()
    before = olla.plan(graph, layout=False)
    assert before.order.tolist() == [0, 1, 2]
    seconds = np.arange(3.0)
    none = arrange.planned_again(
        with_costs(graph, allocations((0, 0, 1000, 2, 2, 64), (1, 0, 10, 2, 2, 128)), seconds, 1), before
    )
    assert (none.order.tolist(), none.status) == ([0, 1, 2], olla.Status.OPTIMAL)
    recorded = allocations((0, 0, 1000, 2, 3, 64), (1, 0, 5000, 1, 2, 128), (1, 1, 10, 2, 3, 128))
    costly = with_costs(graph, recorded, seconds, 1)
    assert costly.workspace_bytes.tolist() == [0, 4990, 0]
    after = arrange.planned_again(costly, before)
    assert after.order.tolist() == [1, 0, 2]
    assert after.peak_bytes == 5000 < olla.plan(costly, order=[0, 1, 2], layout=False).peak_bytes
    olla.check(costly, after)


@pytest.mark.parametrize("name", ["gpt2", "resnet50", "unet", "mlp", "llama_100m"])
def test_requests_recorded_once_are_exact_in_every_order(name: str) -> None:
    require_exact_requests(world_of(name, "adamw"))


def test_the_step_shows_its_graph_with_costs_and_a_plan_that_fits() -> None:
    require_costs(world_of("resnet50", "momentum"))
