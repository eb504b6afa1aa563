"""When copies leave, return and wait: nothing in host memory is written over before it is back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import olla
from olla.plan import Link, Swapped, Swaps
from olla.pytorch.program.swapped import Transfers, transfers
from olla.swap import swapped_graph
from olla.swap.search import SwapSearch
from tests.support.strategies import graphs_with_order

pytestmark = pytest.mark.torch


def required(t: Transfers, plan: Swapped) -> None:
    """Walk the program: nothing in host memory is written over before it is back, or by a copy that does not wait."""
    out_at_host: set[int] = set()
    queue: list[int] = []  # copies back, as issued

    def share(a: int, b: int) -> bool:
        return max(t.places[a], t.places[b]) < min(t.places[a] + t.num_bytes[a], t.places[b] + t.num_bytes[b])

    waited: set[int] = set()
    held = np.zeros(plan.graph.num_tensors, dtype=bool)
    for op in range(plan.graph.num_ops):
        for i in t.starts.get(op, ()):
            assert held[t.tensor[i]]
            for other in out_at_host:
                assert not share(i, other)
            before = [other for other in queue if share(i, other) and other not in waited]
            if before:
                assert queue.index(t.after[i]) >= max(map(queue.index, before))
            out_at_host.add(i)
        waited.update(t.waits.get(op, ()))
        assert waited <= set(queue)
        if op in t.outs:
            assert t.outs[op] in out_at_host
            held[t.tensor[t.outs[op]]] = False
        if op in t.backs:
            queue.append(t.backs[op])
            out_at_host.remove(t.backs[op])
        held[plan.graph.writes.of(op)] = True
    assert waited == set(queue) == set(range(len(t.tensor)))
    assert max((p + n for p, n in zip(t.places, t.num_bytes, strict=True)), default=0) <= t.host_bytes


@settings(max_examples=80, deadline=None)
@given(graphs_with_order(max_ops=14), st.integers(0, 2**20), st.sampled_from([None, 0.7]))
def test_copies_of_any_choice_of_blocks_keep_out_of_each_others_way(
    graph_with_order: tuple[olla.Graph, list[int]], seed: int, share: float | None
) -> None:
    g, order = graph_with_order[0], np.array(graph_with_order[1], dtype=np.int32)
    rng = np.random.default_rng(seed)
    seconds = rng.integers(0, 4, g.num_ops).astype(np.float64)
    search = SwapSearch(g, order, seconds, Link.of(float(max(1, g.tensor_bytes.max(initial=1)))), min_bytes=1)
    blocks = np.flatnonzero(rng.random(len(search.blocks.tensor)) < 0.8).astype(np.int32)
    limit = int(search.live.max(initial=0) * share) if share else None
    plan = swapped_graph(g, order, search.evaluate(blocks, limit))
    required(transfers(plan), plan)


def test_a_tensor_that_leaves_twice_goes_out_again_once_it_is_back() -> None:
    b = olla.Graph.builder("two gaps")
    x, small = b.tensor(1 << 20), [b.tensor(64) for _ in range(12)]
    b.op("make", writes=[x], seconds=1.0)
    for i, t in enumerate(small):
        b.op(f"op{i}", reads=[*small[max(0, i - 1) : i], *([x] if i in (5, 11) else [])], writes=[t], seconds=1.0)
    g = b.build()
    program = np.arange(g.num_ops, dtype=np.int32)
    search = SwapSearch(g, program, g.seconds, Link.of(2e6), min_bytes=1 << 19)
    swaps: Swaps = search.evaluate(np.arange(2, dtype=np.int32))
    plan = swapped_graph(g, program, swaps)
    t = transfers(plan)
    assert swaps.tensor.tolist() == [x, x]
    assert t.tensor[0] == x != t.tensor[1]
    required(t, plan)
