"""Steps of many ranks captured by one process: what a rank holds and sends, and that this is FSDP2's and DDP's step."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import olla
from olla.graph import PROFILES, Rerun, rules
from olla.graph.collectives import gathers
from olla.pytorch.program.variants import restrict_rules
from tests.support.pages import ROOT, blocks
from tests.support.ranks.processes import ranks
from tests.support.ranks.sharded import beside_fsdp2

pytestmark = pytest.mark.torch


def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def captured(world_size: int = 4, parallel: str = "fsdp", widths: tuple[int, ...] = (8, 16, 4), **options: Any) -> Any:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(a, b) for a, b in pairwise(widths)])
        batch = torch.ones(5, widths[0])
    optimizer = torch.optim.AdamW(model.parameters())
    return olla.capture(
        model, batch, optimizer=optimizer, loss=loss, world_size=world_size, parallel=parallel, **options
    )


def of_kind(graph: olla.Graph, kind: str) -> list[int]:
    return [v for v, found in enumerate(graph.collectives) if found == kind]


@pytest.mark.parametrize(("world_size", "widths"), [(1, (3, 4)), (2, (5, 3, 1)), (8, (8, 16)), (64, (2, 70, 3))])
def test_a_rank_holds_a_padded_share_of_every_parameter_and_its_state(world_size: int, widths: tuple[int, ...]) -> None:
    graph = captured(world_size, widths=widths).graph
    sizes = {graph.tensor_names[t]: int(graph.tensor_bytes[t]) for t in range(graph.num_tensors)}
    for i, (a, b) in enumerate(pairwise(widths)):
        for name, row in ((f"{i}.weight", a), (f"{i}.bias", 1)):
            share = 4 * math.ceil(b / world_size) * row
            assert [sizes[n] for n in (name, f"exp_avg of {name}", f"exp_avg_sq of {name}")] == [share] * 3
    for v in (*of_kind(graph, "all_gather"), *of_kind(graph, "reduce_scatter")):
        (given,), (made,) = graph.reads.of(v), graph.writes.of(v)
        small, large = sorted((int(graph.tensor_bytes[given]), int(graph.tensor_bytes[made])))
        assert (large, graph.message_bytes[v], graph.ranks[v]) == (world_size * small, large, world_size)


def test_parameters_are_gathered_right_before_their_first_use_and_gradients_averaged_at_once() -> None:
    graph = captured().graph
    names = [graph.tensor_names[graph.reads.of(v)[0]] for v in of_kind(graph, "all_gather")]
    assert [sorted(names[:2]), sorted(names[2:])] == [["0.bias", "0.weight"], ["1.bias", "1.weight"]]
    for v in of_kind(graph, "all_gather"):
        (made,) = graph.writes.of(v)
        users = [u for u in range(v + 1, graph.num_ops) if made in graph.reads.of(u) or made in graph.mutates.of(u)]
        assert users[0] == v + 1
        assert graph.collectives[v + 1] == "wait"
        assert all(graph.collectives[u] for u in range(v, users[1]))  # nothing else comes in between
        assert graph.op_kinds[v] == "forward"
    assert len(of_kind(graph, "reduce_scatter")) == 4
    for v in of_kind(graph, "reduce_scatter"):
        (sent,) = graph.reads.of(v)
        made = next(u for u in range(graph.num_ops) if sent in graph.writes.of(u))
        assert v - made <= 4  # the gradient of the bias, and its collective, may come in between
        assert graph.op_kinds[v] == "backward"


def test_a_parameter_that_is_used_twice_is_gathered_and_reduced_once() -> None:
    model = nn.ModuleList([nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)])
    model[1].weight = model[0].weight
    tied = lambda model, batch: model[1](model[0](batch)).square().mean()  # noqa: E731
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.zeros(3, dtype=torch.long)
    graph = olla.capture(model, tokens, optimizer=optimizer, loss=tied, world_size=2, parallel="fsdp").graph
    assert [len(of_kind(graph, kind)) for kind in ("all_gather", "reduce_scatter", "wait")] == [1, 1, 2]


def test_with_ddp_parameters_are_whole_and_gradients_averaged() -> None:
    graph, alone = captured(parallel="ddp").graph, captured(1, "ddp").graph
    assert graph.resident_bytes == alone.resident_bytes
    assert [graph.collectives.count(kind) for kind in ("all_gather", "reduce_scatter", "all_reduce")] == [0, 0, 4]
    assert set(graph.ranks[of_kind(graph, "all_reduce")].tolist()) == {4}


def test_state_that_exists_is_in_shards_and_stays_whole_in_the_optimizer() -> None:
    model = nn.Linear(4, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    loss(model, torch.ones(2, 4)).backward()
    optimizer.step()
    graph = olla.capture(model, torch.ones(2, 4), optimizer=optimizer, loss=loss, world_size=4, parallel="fsdp").graph
    sizes = dict(zip(graph.tensor_names, graph.tensor_bytes.tolist(), strict=True))
    assert (sizes["exp_avg of weight"], sizes["step of weight"]) == (4 * 2 * 4, 4)
    assert optimizer.state[model.weight]["exp_avg"].shape == model.weight.shape == (8, 4)


def test_inference_gathers_and_reduces_nothing() -> None:
    graph = olla.capture(nn.Linear(4, 8), torch.ones(2, 4), world_size=4, parallel="fsdp").graph
    assert [graph.collectives.count(kind) for kind in ("all_gather", "wait", "reduce_scatter")] == [2, 2, 0]


def test_the_group_of_a_capture_is_taken_away_also_where_it_fails() -> None:
    captured()
    assert not dist.is_initialized()
    with pytest.raises(olla.CaptureError):
        olla.capture(
            nn.Linear(4, 1), torch.ones(2, 4), loss=lambda m, x: m(x).sum().item(), world_size=2, parallel="ddp"
        )
    assert not dist.is_initialized()


def test_a_process_group_that_is_there_is_left_alone_and_named() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    try:
        with pytest.raises(olla.CaptureError, match=r"has one already \(fake, 3 ranks\).*leave world_size out"):
            captured()
        assert dist.get_world_size() == 3
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 8}, "parallel is None, expected 'fsdp'"),
        ({"world_size": 8, "parallel": "tp"}, "parallel is 'tp', expected 'fsdp'"),
        ({"parallel": "fsdp"}, "world_size is None, expected how many"),
        ({"world_size": 0, "parallel": "ddp"}, "world_size is 0"),
        ({"world_size": True, "parallel": "ddp"}, "world_size is True"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        olla.capture(nn.Linear(4, 1), torch.ones(2, 4), **options)


def test_step_functions_and_single_numbers_are_refused_with_a_remedy() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"world_size": 2, "parallel": "fsdp"}
    with pytest.raises(olla.CaptureError, match=r"says itself what its ranks send.*pass loss="):
        olla.capture(model, torch.ones(2, 4), optimizer=optimizer, step=lambda m, o, b: None, **options)
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    with pytest.raises(olla.CaptureError, match=r"scale is a single number.*torch.ones\(1\)"):
        olla.capture(model, torch.ones(2, 4), loss=loss, **options)


@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
def test_two_ranks_of_the_captured_step_train_as_torchs_own(parallel: str, tmp_path: Path) -> None:
    for answer in ranks(beside_fsdp2, 2, tmp_path, parallel=parallel, store=tmp_path / "second"):
        found, wanted, difference = answer
        assert np.allclose(found, wanted, rtol=1e-6)
        assert difference < 1e-6


def test_what_gathers_a_parameter_may_run_again_in_plans_and_in_compiled_steps() -> None:
    step = captured()
    graph = step.graph
    assert gathers(graph).sum() == 8
    allowed = rules(graph, PROFILES["a100"])
    assert (allowed.rerun[gathers(graph)] == Rerun.REPLAY).all()
    again = restrict_rules(step, "cpu", allowed, replays=False).rerun  # nothing is drawn
    assert np.array_equal(again[graph.communicates] != Rerun.NEVER, gathers(graph)[graph.communicates])


def test_a_plan_gathers_again_and_is_checked() -> None:
    graph = captured(8, widths=(64, 64, 64, 64, 64)).graph
    plan = olla.plan(graph, minimise="peak", device="h100")
    olla.check(graph, plan)
    assert plan.graph is not None
    assert plan.graph.collectives.count("all_gather") > graph.collectives.count("all_gather")
    assert plan.graph.collectives.count("reduce_scatter") == graph.collectives.count("reduce_scatter")
    assert plan.added_seconds >= plan.added_seconds_lower_bound > 0


def test_the_example_of_the_docs_runs_as_printed() -> None:
    _, block = blocks(ROOT / "docs/distributed.md")
    names: dict[str, Any] = {}
    exec(compile(block.text, "distributed.md", "exec"), names)
    graph = names["captured"].graph
    assert set(graph.ranks[graph.ranks > 1]) == {64}
    assert names["plan"].peak_bytes < olla.plan(graph).peak_bytes
    assert not dist.is_initialized()
