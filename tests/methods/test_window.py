"""A window of an order is a graph of its own with the same memory."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from olla import _core
from olla.methods.roam import window_graph
from tests.support.generate import random_graph


@settings(max_examples=200)
@given(st.integers(0, 10_000), st.data())
def test_a_window_has_the_live_bytes_of_the_whole_order(seed: int, data: st.DataObject) -> None:
    graph = random_graph(data.draw(st.integers(1, 25)), seed=seed)
    order = np.arange(graph.num_ops, dtype=np.int32)
    lo = data.draw(st.integers(0, graph.num_ops - 1))
    hi = data.draw(st.integers(lo + 1, graph.num_ops))
    inside = window_graph(graph, graph.core, order, lo, hi)
    live = _core.profile(graph.core, order).live_bytes
    start = np.arange(hi - lo, dtype=np.int32)
    assert _core.profile(inside, start).live_bytes.tolist() == live[lo:hi].tolist()

    # So has the best order of the window, put into its place.
    best = _core.order(inside, [start], 0, _core.Limits(time_limit=10.0, max_work=None, progress=None))
    order[lo:hi] = order[lo:hi][best.order]
    assert graph.core.is_order(order)
    assert max(_core.profile(graph.core, order).live_bytes[lo:hi]) == best.peak_bytes <= max(live[lo:hi])


def test_windows_obey_extra_precedences() -> None:
    graph = random_graph(20, seed=3)
    free = [(u, v) for u in range(5, 15) for v in range(u + 1, 15) if u not in graph.core.preds(v)]
    before, after = (np.array(column, dtype=np.int32) for column in zip(*free[:6], strict=True))
    core = graph.core.constrained(before, after)
    order = np.arange(20, dtype=np.int32)
    inside = window_graph(graph, core, order, 5, 15)
    offset, preds = inside.precedences()
    pairs = {(int(u), v) for v in range(10) for u in preds[offset[v] : offset[v + 1]]}
    assert {(int(u) - 5, int(v) - 5) for u, v in zip(before, after, strict=True)} <= pairs
