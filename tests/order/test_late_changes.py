"""Changes of what lasts wait for what needs them, so that what reads a parameter can be recomputed until then."""

from __future__ import annotations

import numpy as np
import pytest

import olla
from olla.order.base_orders import late_changes

KIB = 1024


def blocks(num_blocks: int, decay: str, *, first: bool = False) -> olla.Graph:
    """Return a step whose blocks add a bias, forward and backward; updates follow.

    Args:
        decay: "in place", as of AdamW; "twice": in two ops; "by a scalar": that the step makes; "": none.
        first: whether decays stand before the backward pass.
    """
    b = olla.Graph.builder("blocks")
    biases = [b.tensor(KIB, kind="parameter") for _ in range(num_blocks)]
    kept = [b.tensor(64 * KIB) for _ in range(num_blocks)]
    factor, loss = b.tensor(4), b.tensor(4)
    b.op("factor", writes=[factor])

    def decays() -> None:
        for i, bias in enumerate(biases):
            for turn in range({"": 0, "twice": 2}.get(decay, 1)):
                b.op(f"decay {i}, {turn}", reads=[factor] if "scalar" in decay else [], mutates=[bias], kind="update")

    for i in range(num_blocks):
        b.op(f"forward {i}", reads=[biases[i], *kept[max(i - 1, 0) : i]], writes=[kept[i]], seconds=1e-5)
    b.op("loss", reads=kept[-1:], writes=[loss], recomputable=False)
    if first:
        decays()
    passed, gradients = loss, [b.tensor(KIB) for _ in biases]
    for i in reversed(range(num_blocks)):
        back = b.tensor(64 * KIB)
        b.op(f"backward {i}", reads=[kept[i], passed], writes=[back, gradients[i]], kind="backward", recomputable=False)
        passed = back
    if not first:
        decays()
    for i in range(num_blocks):
        b.op(f"update {i}", reads=[gradients[i]], mutates=[biases[i]], kind="update")
    return b.build()


@pytest.mark.parametrize("first", [True, False], ids=["decay behind forward", "decay behind backward"])
@pytest.mark.parametrize("decay", ["in place", "twice", "by a scalar"])
def test_decay_of_a_bias_costs_no_rerun(decay: str, first: bool) -> None:
    graph, without = blocks(8, decay, first=first), blocks(8, "")
    plan, free = (olla.plan(g, minimise="peak", layout=False) for g in (graph, without))
    olla.check(graph, plan)
    assert plan.peak_bytes <= free.peak_bytes + 4
    assert plan.peak_bytes < 0.6 * plan.base_peak_bytes


def test_a_decay_moves_right_before_the_update_that_waits_for_it() -> None:
    graph = blocks(3, "twice", first=True)
    order = late_changes(graph, np.arange(graph.num_ops, dtype=np.int32))
    names = [graph.op_names[v] for v in order]
    for i in range(3):
        at = names.index(f"update {i}")
        assert names[at - 2 : at] == [f"decay {i}, 0", f"decay {i}, 1"]


def test_what_frees_a_gradient_stays_early() -> None:
    b = olla.Graph.builder("gradient that goes at once")
    parameter, x, gradient, y = b.tensor(KIB, kind="parameter"), b.tensor(8), b.tensor(KIB), b.tensor(8)
    b.op("forward", reads=[parameter], writes=[x])
    b.op("backward", reads=[x], writes=[gradient])
    b.op("update", reads=[gradient], mutates=[parameter], kind="update")
    b.op("rest", reads=[x], writes=[y])
    b.op("report", reads=[parameter, y])
    order = np.arange(5, dtype=np.int32)
    assert late_changes(b.build(), order).tolist() == order.tolist()


def test_what_nobody_reads_before_its_change_stays() -> None:
    b = olla.Graph.builder("a count of steps")
    count, x = b.tensor(8, kind="buffer"), b.tensor(8)
    b.op("count", mutates=[count])
    b.op("forward", writes=[x])
    b.op("use", reads=[count, x])
    order = np.arange(3, dtype=np.int32)
    assert late_changes(b.build(), order).tolist() == order.tolist()
