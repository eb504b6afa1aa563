"""What a collective uses stays in its memory until the wait for it: it is neither made again nor copied out and in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import olla
from olla.check.collectives import check_kept
from olla.graph.collectives import UnderWay, under_way

UNIT = 1_000_000


def hill(*, talks: bool = True) -> olla.Graph:
    """Return a step that reaches its peak while a copy of its input is on its way to other ranks."""
    b = olla.Graph.builder("a hill while something is sent")
    x, sent, mine = b.tensor(4 * UNIT, kind="input"), b.tensor(8 * UNIT), b.tensor(UNIT)
    talk: dict[str, Any] = {"group": "0", "ranks": 8, "message_bytes": 8 * UNIT} if talks else {}
    steps, large = [b.tensor(8) for _ in range(12)], b.tensor(20 * UNIT)
    b.op("copy", reads=[x], writes=[sent], seconds=1e-3)
    b.op("begin", reads=[sent], writes=[mine], **talk, **({"collective": "reduce_scatter"} if talks else {}))
    before = b.op("first", writes=steps[:1], seconds=1e-3, after=[1])
    for i in range(10):
        before = b.op(f"up {i}", reads=[steps[i]], writes=[steps[i + 1]], seconds=1e-2, after=[before])
        if i == 4:
            before = b.op("large", reads=[steps[5]], writes=[large], seconds=1e-2)
            before = b.op("top", reads=[large], mutates=[steps[5]], seconds=1e-2)
    ending = {k: v for k, v in talk.items() if k != "message_bytes"} | ({"collective": "wait"} if talks else {})
    b.op("end", reads=[sent], mutates=[mine], after=[before], **ending)
    b.op("use", reads=[mine, steps[10]], writes=[steps[11]])
    return b.build()


def test_pairs_are_found_with_what_both_use() -> None:
    graph = hill()
    begin, end = graph.op_names.index("begin"), graph.op_names.index("end")
    assert under_way(graph) == [UnderWay(begin, end, frozenset({1, 2}))]
    assert under_way(hill(talks=False)) == []


@pytest.mark.parametrize("goal", [{"minimise": "peak"}, {"max_slowdown": 0.0, "swap": True}])
def test_what_is_sent_is_neither_made_again_nor_swapped(goal: dict[str, Any]) -> None:
    """Without the collective both are: the copy is dropped over the peak."""
    kept, dropped = [olla.plan(hill(talks=talks), device="a100", **goal) for talks in (True, False)]
    olla.check(hill(), kept)
    assert dropped.peak_bytes < kept.peak_bytes == (4 + 8 + 1 + 20) * UNIT + 8
    assert all((rewrite.origin == 0).sum() == 1 for rewrite in kept.rewrites)


def test_the_checker_refuses_other_memory_at_the_wait() -> None:
    graph = hill()
    content = graph.to_dict()
    end = graph.op_names.index("end")
    content["tensors"].append({"bytes": 8 * UNIT})
    again = {**content["ops"][0], "writes": [graph.num_tensors], "after": [end - 1]}
    content["ops"].insert(end, again)
    content["ops"][end + 1]["reads"] = [graph.num_tensors]
    origin = np.array([*range(end), 0, *range(end, graph.num_ops)], dtype=np.int32)
    with pytest.raises(olla.PlanError, match=r"\(end\) waits for a collective whose memory was let go of"):
        check_kept(graph, olla.Graph.from_dict(content), origin)
