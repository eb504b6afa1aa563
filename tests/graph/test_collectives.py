"""Ops that communicate: their file, their order, their time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import olla
from olla import _core
from olla.check.collectives import check_kept
from olla.graph import PROFILES, collective_seconds
from olla.order.overlap import overlapped

SECONDS = 1e-3
BYTES = 300_000_000  # a millisecond on an A100's link, one way


def data_parallel(num_layers: int = 4, group: str = "0") -> olla.Graph:
    """Forward, backward with a sum of each layer's gradient in place, then the updates."""
    b = olla.Graph.builder("data parallel")
    weights = [b.tensor(BYTES, kind="parameter") for _ in range(num_layers)]
    kept, gradients, waits = [b.tensor(2 * BYTES) for _ in weights], [], []
    for i, t in enumerate(kept):
        b.op(f"forward {i}", reads=[weights[i], *kept[max(i - 1, 0) : i]], writes=[t], kind="forward", seconds=SECONDS)
    passed = kept[-1:]  # from layer to layer
    for i in reversed(range(num_layers)):
        gradients.append(b.tensor(BYTES))
        used, passed = [weights[i], kept[i], *passed], [b.tensor(8)]
        b.op(f"backward {i}", reads=used, writes=[gradients[-1], *passed], kind="backward", seconds=3 * SECONDS)
        talk = {"group": group, "ranks": 2}
        b.op(f"sum {i}", mutates=[gradients[-1]], collective="all_reduce", message_bytes=BYTES, **talk)
        waits.append(dict(mutates=[gradients[-1]], collective="wait", launches=0, **talk))
    for i, wait in enumerate(waits):
        b.op(f"wait {i}", recomputable=False, **wait)
        b.op(f"update {i}", reads=[gradients[i]], mutates=[weights[num_layers - 1 - i]], kind="update", seconds=SECONDS)
    return b.build()


def issues(graph: olla.Graph) -> list[int]:
    return [v for v, kind in enumerate(graph.collectives) if kind not in ("", "wait")]


def test_a_file_of_a_graph_that_communicates_has_version_2_and_gives_the_graph_back(tmp_path: Path) -> None:
    graph = data_parallel()
    graph.save(tmp_path / "graph.json")
    content = json.loads((tmp_path / "graph.json").read_text())
    assert content["version"] == 2
    again = olla.Graph.load(tmp_path / "graph.json")
    assert (again.collectives, again.groups) == (graph.collectives, graph.groups)
    assert again.digest == graph.digest
    assert (again.message_bytes == graph.message_bytes).all()


def test_other_graphs_keep_version_1_in_which_the_new_keys_mean_nothing() -> None:
    b = olla.Graph.builder()
    b.op("make", writes=[b.tensor(8)])
    content = b.build().to_dict()
    assert content["version"] == 1
    content["ops"][0] |= {"collective": "all_reduce", "ranks": 2}
    read = olla.Graph.from_dict(content)
    assert (read.collectives, read.ranks.tolist(), read.digest) == ([""], [0], b.build().digest)


def test_an_unknown_collective_is_rejected_with_its_place() -> None:
    content = data_parallel().to_dict()
    content["ops"][5]["collective"] = "gossip"
    with pytest.raises(olla.GraphError, match=r"ops\[5\].collective is 'gossip', expected one of .*all_reduce"):
        olla.Graph.from_dict(content)


def test_the_digest_knows_what_communicates_and_not_what_its_group_is_called() -> None:
    assert data_parallel(group="0").digest == data_parallel(group="7").digest
    content = data_parallel().to_dict()
    content["ops"][5]["ranks"] = 4
    assert olla.Graph.from_dict(content).digest != data_parallel().digest


def test_every_plan_has_the_collectives_in_program_order() -> None:
    graph = data_parallel(6)
    for options in ({}, {"minimise": "peak"}, {"method": "inductor"}, {"host_budget": "8GB", "max_slowdown": 1.0}):
        plan = olla.plan(graph, **options)
        olla.check(graph, plan)
        last = plan.graph if plan.graph is not None else graph
        order = [v for v in plan.order.tolist() if v in set(issues(last))]
        assert order == issues(last)
        assert len(order) == 6
        assert [last.op_names[v] for v in order] == [graph.op_names[v] for v in issues(graph)]


def test_an_order_that_swaps_two_collectives_is_refused_with_both_named() -> None:
    content = data_parallel(2).to_dict()
    first, second = issues(data_parallel(2))
    content["ops"][second].pop("after")  # the dependencies alone allow both orders
    graph = olla.Graph.from_dict(content)
    order = [0, 1, 2, 4, second, first, *range(6, graph.num_ops)]
    with pytest.raises(olla.PlanError, match=r"op 5 \(sum 0\) runs before op 3 \(sum 1\).*group '0'") as error:
        olla.plan(graph, order=order)
    assert (error.value.rule, error.value.ids) == ("collective_order", (second, first))


def test_a_rewriting_that_drops_a_collective_is_refused() -> None:
    graph = data_parallel(2)
    content = graph.to_dict()
    content["ops"][5].pop("collective")
    with pytest.raises(olla.PlanError, match=r"op 5 \(sum 0\) communicates, and runs 0 times") as error:
        check_kept(graph, olla.Graph.from_dict(content), np.arange(graph.num_ops))
    assert error.value.rule == "rewrite_collective"


@pytest.mark.parametrize(
    ("kind", "ranks", "milliseconds"),
    [("all_reduce", 2, 1.0), ("all_reduce", 8, 1.75), ("all_gather", 4, 0.75), ("reduce_scatter", 4, 0.75),
     ("all_to_all", 4, 0.75), ("broadcast", 4, 1.0), ("all_gather", 1, 0.0)],
)  # fmt: skip
def test_a_collective_takes_what_a_ring_takes(kind: str, ranks: int, milliseconds: float) -> None:
    b = olla.Graph.builder()
    b.op("talk", writes=[b.tensor(BYTES)], collective=kind, group="0", ranks=ranks, message_bytes=BYTES)
    latency = PROFILES["a100"].peer_latency_seconds * (ranks - 1) * (2 if kind == "all_reduce" else 1)
    (seconds,) = collective_seconds(b.build(), PROFILES["a100"])
    assert seconds == pytest.approx(milliseconds * 1e-3 + latency)


def test_small_sums_among_many_ranks_go_through_a_tree() -> None:
    b = olla.Graph.builder()
    b.op("sum", writes=[b.tensor(8)], collective="all_reduce", group="0", ranks=64, message_bytes=8)
    (seconds,) = collective_seconds(b.build(), PROFILES["a100"])
    assert seconds == pytest.approx(12 * PROFILES["a100"].peer_latency_seconds, rel=1e-3)


def test_collectives_are_hidden_behind_ops_without_a_higher_peak() -> None:
    graph = data_parallel(6)
    num, by_name = graph.num_ops, {name: v for v, name in enumerate(graph.op_names)}
    names = [(f"backward {5 - i}", f"sum {5 - i}", f"wait {i}", f"update {i}") for i in range(6)]
    rows = [[by_name[name] for name in row] for row in names]
    at_once = np.array([*range(6), *(v for row in rows for v in row)], dtype=np.int32)
    found = overlapped(graph, graph.core, at_once, PROFILES["a100"])
    assert graph.core.is_order(found)
    assert sorted(found.tolist()) == list(range(num))
    peaks = [_core.profile(graph.core, order).peak_bytes for order in (at_once, found)]
    assert peaks[1] <= peaks[0]
    before, after = (olla.timeline(graph, order) for order in (at_once, found))
    assert before.exposed_seconds == pytest.approx(before.link_seconds)
    assert after.exposed_seconds < 0.3 * before.exposed_seconds


def test_what_a_collective_needs_moves_before_other_ops_with_it() -> None:
    builder = olla.Graph.builder("late")
    made, sent, other = (builder.tensor(size) for size in (BYTES, BYTES, 8))
    builder.op("gradient", writes=[made], seconds=SECONDS)
    for i in range(3):
        builder.op(f"other{i}", **({"writes": [other]} if i == 0 else {"mutates": [other]}), seconds=SECONDS)
    builder.op("fill", reads=[made], writes=[sent], seconds=SECONDS)
    builder.op("scale", mutates=[sent], seconds=SECONDS)
    builder.op("sum", mutates=[sent], collective="all_reduce", group="0", ranks=2, message_bytes=BYTES)
    builder.op("wait", mutates=[sent], collective="wait", group="0", ranks=2)
    builder.output(sent)
    builder.output(other)
    graph = builder.build()
    found = overlapped(graph, graph.core, np.arange(graph.num_ops, dtype=np.int32), PROFILES["a100"])
    names = [graph.op_names[v] for v in found.tolist()]
    assert names == ["gradient", "fill", "scale", "sum", "other0", "other1", "other2", "wait"]


def test_where_the_peak_leaves_no_room_nothing_moves() -> None:
    b = olla.Graph.builder()
    for i in range(3):
        gradient = b.tensor(BYTES)
        b.op(f"make {i}", writes=[gradient], seconds=SECONDS)
        talk = {"group": "0", "ranks": 2, "mutates": [gradient]}
        b.op(f"sum {i}", collective="all_reduce", message_bytes=BYTES, **talk)
        b.op(f"wait {i}", collective="wait", **talk)
    graph = b.build()
    order = np.arange(graph.num_ops, dtype=np.int32)
    assert (overlapped(graph, graph.core, order, PROFILES["a100"]) == order).all()


def test_the_timeline_of_a_graph_that_does_not_communicate_is_the_sum_of_its_ops() -> None:
    b = olla.Graph.builder()
    b.op("make", writes=[b.tensor(8)], seconds=2.0)
    b.op("more", writes=[b.tensor(8)], seconds=3.0)
    assert olla.timeline(b.build()) == (5.0, 5.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="device is 'abacus'"):
        olla.timeline(b.build(), device="abacus")
