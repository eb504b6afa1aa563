"""What is recomputed of a step over sharded parameters, on graphs made by hand: torchtitan is not needed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import olla  # noqa: E402
from olla import _core  # noqa: E402
from olla.errors import BudgetError  # noqa: E402
from olla.graph import profile_of  # noqa: E402
from olla.integrations import torchtitan as ours  # noqa: E402
from olla.integrations.torchtitan_messages import Messages, Run  # noqa: E402
from olla.integrations.torchtitan_program import GraphTrainerProgram  # noqa: E402
from olla.plan import asked  # noqa: E402
from tests.support.ranks.processes import Raised, ranks  # noqa: E402
from tests.support.ranks.sharded_step import ShardedStep, recomputed  # noqa: E402
from tests.support.ranks.work import recomputed_together  # noqa: E402

pytestmark = pytest.mark.torch
RANKS = 8


@pytest.fixture(scope="module")
def group() -> Iterator[str]:
    """Be the first of ranks that do not exist; the name of their group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield torch.distributed.group.WORLD.group_name
    torch.distributed.destroy_process_group()


def chosen(module: Any, **goal: Any) -> ours.PolicyChoice:
    found, _ = asked(in_place=False, device="a100", **goal)
    assert found is not None
    return ours.choose(module, found, sends_ahead=False)


def program_of(module: Any) -> GraphTrainerProgram:
    return GraphTrainerProgram(olla.from_fx(module), module, profile_of("a100"), sends_ahead=False)


def peak_bytes(module: Any) -> int:
    graph = olla.from_fx(module)
    return int(_core.profile(graph.core, np.arange(graph.num_ops, dtype=np.int32)).peak_bytes)


@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize("is_summed", [False, True])
@pytest.mark.parametrize("goal", [{"minimise": "peak"}, {"max_slowdown": 0.03}, {"max_slowdown": 0.2}])
def test_the_peak_is_the_one_foreseen(group: str, layers: int, is_summed: bool, goal: dict[str, Any]) -> None:
    module = ShardedStep(group, RANKS, layers, is_summed=is_summed).module
    choice = chosen(module, **goal)
    assert choice.saved_peak_bytes == peak_bytes(module)
    ours.tag(module, choice)
    assert peak_bytes(recomputed(module)) == choice.peak_bytes <= choice.saved_peak_bytes
    if "max_slowdown" in goal:
        assert choice.added_seconds <= goal["max_slowdown"] * choice.base_seconds + 1e-12


def test_every_set_of_ops_is_judged_as_it_comes_out(group: str) -> None:
    step = ShardedStep(group, RANKS, 3, is_summed=True).module
    program, random = program_of(step), np.random.default_rng(0)
    units = [frozenset((op,)) for op in program.allowed]
    for _ in range(40):
        ops = frozenset().union(*(unit for unit in units if random.random() < 0.5))
        module = copy.deepcopy(step)
        names = program.names_of(ops)
        every = frozenset(program.names_of(range(program.graph.num_ops)))
        ours.tag(module, ours.PolicyChoice(every, names, 0, 0, 0.0, 1.0))
        assert peak_bytes(recomputed(module)) == program.judged(ops).peak_bytes


def test_gathers_are_recomputed_with_their_waits_and_casts_and_all_of_a_layer(group: str) -> None:
    module = ShardedStep(group, RANKS, 4, width=256, rows=32).module  # weights are what fills the memory
    again = set(chosen(module, minimise="peak").recomputed)
    gathers = [node for node in module.graph.nodes if "all_gather" in node.name]
    found = [node for node in gathers if node.name in again]
    assert found
    for node in gathers:
        (wait,), (cast,) = node.users, node.all_input_nodes
        assert {wait.name in again, cast.name in again} == {node.name in again}


def test_what_is_changed_in_place_is_recomputed_with_what_made_it(group: str) -> None:
    module = ShardedStep(group, RANKS, 4).module
    program = program_of(module)
    pairs = [names for names in map(program.names_of, ([v] for v in program.allowed)) if names[0].startswith("mean")]
    assert len(pairs) == 4
    assert all(names[1].startswith("add_") for names in pairs)


def test_a_collective_that_is_waited_for_later_is_never_recomputed(group: str) -> None:
    module = ShardedStep(group, RANKS, 3, waits_late=True).module
    names = chosen(module, minimise="peak").recomputed
    assert names
    assert not any("gather" in name or "wait" in name for name in names)


def test_gathers_beside_long_computing_take_no_time_and_sums_of_results_do(group: str) -> None:
    def base(**options: Any) -> float:
        return program_of(ShardedStep(group, RANKS, 4, width=512, rows=65536, **options).module).base_seconds

    device = profile_of("a100")
    graph = olla.from_fx(ShardedStep(group, RANKS, 4, width=512, rows=65536).module)
    assert base() == pytest.approx(device.op_seconds(graph).sum(), rel=1e-3)
    message = 65536 * 512 * 2
    waited = 4 * 2 * message * (RANKS - 1) / RANKS / device.peer_bytes_per_second
    assert base(is_summed=True) - base() > 0.9 * waited


def test_messages_are_sent_as_one_for_each_layer_and_ahead_of_it() -> None:
    def run(op: int, reads: list[int], writes: list[int], is_backward: bool = False) -> Run:
        return Run(op, is_backward, reads, writes, [])

    # Tensors 0 to 2 are shards, 3 a cast of the first one, 4 to 6 are whole, of layers 0, 0 and 1.
    layer = [0, 0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 0]
    messages = Messages(layer, gathers={1, 2, 4}, casts={0}, reduces={9, 10, 11})
    sizes = [8, 8, 8, 4, 40, 41, 42, 1, 1, 10, 20, 30, 1, 2, 3]
    runs = [
        run(0, [0], [3]), run(1, [3], [4]), run(2, [1], [5]), run(3, [4, 5], [7]),
        run(4, [2], [6]), run(5, [6, 7], [8]),
        run(6, [8], [9, 10], True), run(9, [9], [12], True), run(10, [10], [13], True),
        run(7, [8], [11], True), run(11, [11], [14], True),
    ]  # fmt: skip
    found = [(r.op, r.reads, r.writes) for r in messages.sent(runs, sizes)]
    assert found == [
        (-1, [0, 1], [15]), (-1, [2], [6]), (-1, [15], [4]), (-1, [15], [5]), (3, [4, 5], [7]), (5, [6, 7], [8]),
        (6, [8], [9, 10]), (-1, [9, 10], [16]), (-1, [16], [12, 13]),
        (7, [8], [11]), (-1, [11], [17]), (-1, [17], [14]), (-1, [16], []), (-1, [17], []),
    ]  # fmt: skip
    assert sizes[3] == 0  # a cast is made in the message
    assert sizes[15:] == [40 + 41, 10 + 20, 30]


@pytest.mark.parametrize("goal", [{"minimise": "peak"}, {"max_slowdown": 0.1}])
def test_what_is_sent_ahead_counts(group: str, goal: dict[str, Any]) -> None:
    module = ShardedStep(group, RANKS, 5, width=256, rows=64).module
    found, _ = asked(in_place=False, device="a100", **goal)
    assert found is not None
    ahead, alone = ours.choose(module, found), ours.choose(module, found, sends_ahead=False)
    whole, gradient = 256 * 256 * 2, 256 * 256 * 4
    assert ahead.peak_bytes - alone.peak_bytes in range(1, 2 * whole + 2 * gradient)
    assert ahead.base_seconds == alone.base_seconds


def test_a_budget_that_nothing_fits_is_an_error_that_names_the_least(group: str) -> None:
    module = ShardedStep(group, RANKS, 4).module
    least = chosen(module, minimise="peak").peak_bytes
    assert chosen(module, budget=least).peak_bytes == least
    with pytest.raises(BudgetError, match=f"the least is {least} bytes"):
        chosen(module, budget=least - 1)


def test_ranks_take_the_choice_of_the_first(tmp_path: Path) -> None:
    goals = {0: {"goal": {"minimise": "peak"}}, 1: {"goal": {"max_slowdown": 0.0}}}
    first, second = ranks(recomputed_together, 2, tmp_path, per_rank=goals)
    assert first == second
    assert first["recomputed"]


def test_ranks_fail_together(tmp_path: Path) -> None:
    goals = {0: {"goal": {"budget": 1000}}, 1: {"goal": {"minimise": "peak"}}}
    first, second = ranks(recomputed_together, 2, tmp_path, per_rank=goals)
    assert isinstance(first, Raised)
    assert isinstance(second, Raised)
    assert (first.kind, second.kind) == ("BudgetError", "BudgetError")
    assert second.text.startswith("rank 0: nothing was found that fits budget 1000")
