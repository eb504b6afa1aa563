"""Rotor, a rival of our budgets: its schedules are steps, and cost what its dynamic program says."""

from __future__ import annotations

import numpy as np
import pytest

from olla import Graph, _core, check, plan
from olla.graph import profile_of

pytest.importorskip("torch", reason="the rivals need it")
from bench.recompute import rotor


@pytest.fixture(scope="module")
def graph() -> Graph:
    """Twelve layers of a product and a function, whose backward pass needs what both made; each weight is updated."""
    step = Graph.builder("layers")
    weights = [step.tensor(100, kind="parameter") for _ in range(12)]
    values = [step.tensor(400, kind="input")]
    inner = []
    for weight in weights:
        inner.append(step.tensor(1600))
        step.op("product", reads=[weight, values[-1]], writes=[inner[-1]], kind="forward", flops=10**9)
        values.append(step.tensor(400))
        step.op("function", reads=[inner[-1]], writes=[values[-1]], kind="forward", flops=10**8)
    gradient = values[-1]
    for weight, before, middle in zip(weights[::-1], values[-2::-1], inner[::-1], strict=True):
        (of_middle, of_weight, of_before) = (step.tensor(num) for num in (1600, 100, 400))
        step.op("of function", reads=[gradient, middle], writes=[of_middle], kind="backward", flops=10**8)
        step.op("of weight", reads=[of_middle, before], writes=[of_weight], kind="backward", flops=10**9)
        step.op("of values", reads=[of_middle, weight], writes=[of_before], kind="backward", flops=10**9)
        step.op("update", reads=[of_weight], mutates=[weight], kind="update")
        gradient = of_before
    step.output(gradient)
    return step.build()


def chain_of(graph: Graph) -> rotor.Chain:
    forward = [v for v, kind in enumerate(graph.op_kinds) if kind == "forward"]
    order = np.arange(graph.num_ops, dtype=np.int32)
    return rotor.chain_of(graph, order, forward, profile_of("a100").op_seconds(graph), 6)


def test_stages_hold_every_op_once(graph: Graph) -> None:
    chain = chain_of(graph)
    assert sorted(v for part in (*chain.forward, *chain.backward) for v in part) == list(range(graph.num_ops))
    assert [v for part in chain.forward for v in part] == [v for v, k in enumerate(graph.op_kinds) if k == "forward"]


def test_a_schedule_takes_the_time_that_its_table_says(graph: Graph) -> None:
    chain = chain_of(graph)
    table = rotor.solve(chain)
    (feasible,) = np.nonzero(np.isfinite(table[0, -1]))
    num_runs = set()
    for limit in map(int, np.linspace(feasible[0], table.shape[2] - 1, 5)):
        runs = list(rotor.schedule(chain, table, limit))
        seconds = {"forward": chain.forward_seconds, "backward": chain.backward_seconds}
        assert sum(seconds[what][stage] for what, stage in runs) == pytest.approx(table[0, -1, limit])
        assert [s for what, s in runs if what == "backward"] == list(range(len(chain.forward)))[::-1]
        num_runs.add(len(runs))
    assert len(num_runs) > 1  # less memory, more runs
    assert min(num_runs) == 2 * len(chain.forward)  # with all memory, nothing runs twice


def test_an_unrolled_schedule_is_a_step_of_the_same_updates(graph: Graph) -> None:
    chain = chain_of(graph)
    table = rotor.solve(chain)
    (feasible,) = np.nonzero(np.isfinite(table[0, -1]))
    peaks = []
    for limit in (int(feasible[0]), table.shape[2] - 1):
        unrolled = rotor.unroll(graph, chain, list(rotor.schedule(chain, table, limit)))
        found = plan(unrolled, method="program")
        check(unrolled, found)
        peaks.append(found.peak_bytes)
        later = [kind for kind in unrolled.op_kinds if kind != "forward"]
        assert sorted(later) == sorted(kind for kind in graph.op_kinds if kind != "forward")
        steps = np.arange(unrolled.num_ops, dtype=np.int32)
        assert _core.profile(unrolled.core, steps).peak_bytes == found.peak_bytes
    assert peaks[0] < peaks[1]


def test_a_schedule_that_leaves_ops_out_is_refused(graph: Graph) -> None:
    chain = chain_of(graph)
    with pytest.raises(ValueError, match="leaves out ops"):
        rotor.unroll(graph, chain, [("forward", 0)])
    runs = [("forward", s) for s in range(len(chain.forward))]
    back = [("backward", s) for s in range(len(chain.forward))][::-1]
    with pytest.raises(ValueError, match="runs an op of the backward pass twice"):
        rotor.unroll(graph, chain, [*runs, *back, back[0]])


def test_an_op_in_place_in_the_forward_pass_is_refused() -> None:
    step = Graph.builder()
    state, made = step.tensor(8, kind="buffer"), step.tensor(8)
    step.op("norm", reads=[], writes=[made], mutates=[state], kind="forward")
    with pytest.raises(ValueError, match="changes a tensor in place"):
        rotor.rotor(step.build(), np.arange(1, dtype=np.int32), "a100")
