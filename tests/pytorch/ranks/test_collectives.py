"""Collectives in captured steps: with the fake process group, of 8 and of 64 ranks in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import olla
from olla.pytorch.capture.inputs import gather
from olla.pytorch.program.program import compile_program
from tests.support.pages import ROOT, blocks
from tests.support.ranks.steps import summed

pytestmark = pytest.mark.torch


@pytest.fixture(params=[8, 64])
def world_size(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(nn.functional.gelu(self.wide(self.norm(x))))


def captured(step: Any, num_blocks: int = 3) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(num_blocks)])
    optimizer = torch.optim.AdamW(model.parameters())
    return olla.capture(model, torch.ones(64, 16), optimizer=optimizer, step=step)


def issues(graph: olla.Graph) -> list[int]:
    return [v for v, kind in enumerate(graph.collectives) if kind not in ("", "wait")]


def test_collectives_of_a_group_keep_their_captured_order_in_every_plan(world_size: int) -> None:
    graph = captured(summed).graph
    assert len(issues(graph)) == 18
    for options in ({}, {"minimise": "peak"}, {"max_slowdown": 0.1}):
        plan = olla.plan(graph, **options)
        olla.check(graph, plan)
        last = plan.graph if plan.graph is not None else graph
        order = [last.op_names[v] for v in plan.order.tolist() if last.collectives[v] not in ("", "wait")]
        assert order == [graph.op_names[v] for v in issues(graph)]
        assert last.communicates.sum() == graph.communicates.sum()  # none is recomputed


def test_a_collective_says_its_group_and_bytes_and_what_it_sends_lives_until_the_wait(world_size: int) -> None:
    graph = captured(summed).graph
    for v in issues(graph):
        (sent,), (made,) = graph.reads.of(v), graph.writes.of(v)
        (wait,) = [u for u in range(graph.num_ops) if made in graph.mutates.of(u)]
        assert (graph.collectives[v], graph.collectives[wait]) == ("all_reduce", "wait")
        assert set(graph.reads.of(wait).tolist()) == {sent, made}
        assert (graph.ranks[v], graph.groups[v], graph.groups[wait]) == (world_size, "0", "0")
        assert graph.message_bytes[v] == graph.tensor_bytes[sent]
        assert not graph.recomputable[[v, wait]].any()
        assert all(u == wait or u > wait for u in range(graph.num_ops) if made in graph.reads.of(u))


def test_every_collective_of_whole_groups_is_captured(world_size: int) -> None:
    ops = torch.ops._c10d_functional

    def step(model: Any, optimizer: Any, batch: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        x = loss.detach().reshape(1, 1).expand(world_size, 4).contiguous()
        gathered = ops.wait_tensor(ops.all_gather_into_tensor(x, world_size, "0"))
        scattered = ops.wait_tensor(ops.reduce_scatter_tensor(gathered, "sum", world_size, "0"))
        sent = ops.wait_tensor(ops.all_to_all_single(scattered, [1] * world_size, [1] * world_size, "0"))
        told = ops.wait_tensor(ops.broadcast(sent, 0, "0"))
        both = [ops.wait_tensor(t) for t in ops.all_reduce_coalesced([told, told + 1], "sum", "0")]
        changed = ops.wait_tensor(ops.all_reduce_(both[0] * 2, "sum", "0"))
        optimizer.step()
        return loss.detach(), changed, both[1]

    graph = captured(step, 1).graph
    kinds = [graph.collectives[v] for v in issues(graph)]
    assert kinds == ["all_gather", "reduce_scatter", "all_to_all", "broadcast", "all_reduce", "all_reduce"]
    assert graph.collectives.count("wait") == 7
    in_place = issues(graph)[-1]
    assert len(graph.mutates.of(in_place)) == 1
    assert len(graph.writes.of(in_place)) == 0
    assert graph.message_bytes[issues(graph)[0]] == 16 * world_size**2
    olla.check(graph, olla.plan(graph))


class Talks(TorchDispatchMode):
    """Writes down functional collectives, and waits for them, as they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def test_no_two_all_gathers_are_under_way_at_once(world_size: int) -> None:
    ops = torch.ops._c10d_functional

    def step(model: Any, optimizer: Any, batch: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        x = [loss.detach().reshape(1) + i for i in range(4)]
        under_way = [ops.all_gather_into_tensor(t, world_size, "0") for t in x[:2]]
        under_way += ops.all_gather_into_tensor_coalesced(x[2:], world_size, "0")
        return [ops.wait_tensor(t) for t in under_way]

    model, batch = nn.Linear(4, 1), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters())
    found = olla.capture(model, batch, optimizer=optimizer, step=step)
    program = compile_program(found, range(found.graph.num_ops))
    with torch.no_grad(), Talks() as talks:
        program(gather(found.inputs, model, batch, optimizer))
    single, several = "all_gather_into_tensor", "all_gather_into_tensor_coalesced"
    expected = [single, "wait_tensor", single, "wait_tensor", several, "wait_tensor", "wait_tensor"]
    assert talks.names[: len(expected)] == expected


def test_a_plan_overlaps_more_than_the_program(world_size: int) -> None:
    graph = captured(summed).graph
    plan = olla.plan(graph)
    program = olla.timeline(graph, np.arange(graph.num_ops))
    planned = olla.timeline(graph, plan.order)
    assert planned.link_seconds == program.link_seconds > 0
    assert planned.exposed_seconds < program.exposed_seconds
    assert planned.seconds == pytest.approx(planned.compute_seconds + planned.exposed_seconds)


def test_collectives_that_work_on_their_arguments_or_of_single_ranks_are_refused_by_name() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        for call, name in (
            (lambda t: dist.all_reduce(t), "all_reduce"),
            (lambda t: torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.isend(t, 1, 0, "0")), "isend"),
        ):

            def step(model: Any, optimizer: Any, batch: torch.Tensor, call: Any = call) -> Any:
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                call(next(model.parameters()).grad)
                optimizer.step()
                return loss.detach()

            with pytest.raises(olla.CaptureError, match=name):
                captured(step, 1)
    finally:
        dist.destroy_process_group()


def test_the_example_of_the_docs_runs_as_printed(world_size: int, capsys: pytest.CaptureFixture[str]) -> None:
    block, _ = blocks(ROOT / "docs/distributed.md")
    model = nn.Sequential(Block())
    names = {
        "torch": torch,
        "olla": olla,
        "model": model,
        "batch": torch.ones(8, 16),
        "optimizer": torch.optim.AdamW(model.parameters()),
    }
    exec(compile(block.text, "distributed.md", "exec"), names)
    assert capsys.readouterr().out.strip()
