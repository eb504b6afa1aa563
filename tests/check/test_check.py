from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import olla
from olla import Graph, PlanError, _core
from olla.check.check import check
from olla.plan import Plan
from tests.support import oracle
from tests.support.plans import buffers_of, plan_of, training_step
from tests.support.strategies import graphs_with_order

ORDER_RULES = {"dependency", "mutation_order", "random_order"}
Mutation = tuple[Plan, set[str]]


def changed(array: NDArray[Any], position: int, value: int) -> NDArray[Any]:
    result = array.copy()
    result[position] = value
    return result


def rule_of(graph: Graph, plan: Plan) -> str:
    with pytest.raises(PlanError) as caught:
        check(graph, plan)
    return caught.value.rule


def wrong_orders(graph: Graph, plan: Plan) -> Iterator[Mutation]:
    step = np.argsort(plan.order)
    for v, before in enumerate(oracle.dependencies(graph)):
        for u in before:
            order = plan.order.copy()
            order[step[[u, v]]] = v, u
            yield replace(plan, order=order), ORDER_RULES
            pair = np.array([v], dtype=np.int32), np.array([u], dtype=np.int32)
            yield replace(plan, before=pair[0], after=pair[1]), {"extra_precedence"}
    if graph.num_ops > 0:
        yield replace(plan, order=changed(plan.order, 0, graph.num_ops)), {"permutation"}
        yield replace(plan, order=plan.order[1:].copy()), {"permutation"}
    if graph.num_ops > 1:
        yield replace(plan, order=changed(plan.order, 0, plan.order[-1])), {"permutation"}


def wrong_figures(graph: Graph, plan: Plan) -> Iterator[Mutation]:
    for delta in (-1, 1):
        yield replace(plan, peak_bytes=plan.peak_bytes + delta), {"peak"}
        yield replace(plan, program_peak_bytes=plan.program_peak_bytes + delta), {"program_peak"}
        yield replace(plan, resident_bytes=plan.resident_bytes + delta), {"resident_bytes"}
        yield replace(plan, load_bytes=plan.load_bytes + delta), {"load", "missing_offset"}
        yield replace(plan, arena_bytes=plan.arena_bytes + delta), {"arena", "missing_offset"}
    yield replace(plan, lower_bound_bytes=plan.peak_bytes + 1), {"bound"}
    yield replace(plan, lower_bound_bytes=plan.resident_bytes - 1), {"bound"}


def wrong_offsets(graph: Graph, plan: Plan) -> Iterator[Mutation]:
    yield replace(plan, offsets=np.append(plan.offsets, -1)), {"offsets_length"}
    yield replace(plan, workspace_offsets=np.append(plan.workspace_offsets, -1)), {"offsets_length"}
    yield replace(plan, alignment=0), {"alignment"}
    buffers = buffers_of(graph, plan)

    def moved(buffer: tuple[str, int], offset: int) -> Plan:
        name = "offsets" if buffer[0] == "tensor" else "workspace_offsets"
        return replace(plan, **{name: changed(getattr(plan, name), buffer[1], offset)})

    for t in range(graph.num_tensors):
        if t not in graph.writes.item:
            yield moved(("tensor", t), 0), {"unplanned_offset", "missing_offset"}
    for v in np.flatnonzero(graph.workspace_bytes == 0):
        yield moved(("workspace", v), 0), {"unplanned_offset", "missing_offset"}
    for buffer, (first, last, size) in buffers.items():
        offsets = plan.offsets if buffer[0] == "tensor" else plan.workspace_offsets
        yield moved(buffer, -2), {"negative_offset"}
        yield moved(buffer, offsets[buffer[1]] + 1), {"alignment"}
        if plan.arena_bytes > 0:
            yield moved(buffer, -1), {"missing_offset"}
        yield moved(buffer, plan.arena_bytes + plan.alignment - size // plan.alignment * plan.alignment), {"arena"}
        for other, (other_first, other_last, other_size) in buffers.items():
            if other != buffer and size and other_size and first < other_last and other_first < last:
                offsets = plan.offsets if other[0] == "tensor" else plan.workspace_offsets
                yield moved(buffer, offsets[other[1]]), {"overlap", "arena"}


@given(graphs_with_order(), st.sampled_from([1, 8, 512]), st.booleans())
def test_every_valid_plan_is_accepted(drawn: tuple[Graph, list[int]], alignment: int, layout: bool) -> None:
    graph, order = drawn
    check(graph, plan_of(graph, order, alignment=alignment, layout=layout))


@pytest.mark.parametrize("mutations", [wrong_orders, wrong_figures, wrong_offsets])
@given(drawn=graphs_with_order(max_ops=6), alignment=st.sampled_from([8, 512]))
def test_every_mutated_plan_is_rejected(
    drawn: tuple[Graph, list[int]], alignment: int, mutations: Callable[[Graph, Plan], Iterator[Mutation]]
) -> None:
    graph, order = drawn
    for plan, rules in mutations(graph, plan_of(graph, order, alignment=alignment)):
        assert rule_of(graph, plan) in rules


def step_graph() -> Graph:
    """Every feature at least once."""
    builder = Graph.builder("step")
    weight = builder.tensor(100, kind="parameter")
    batch = builder.tensor(64, kind="input", donated=True)
    a, b, empty = builder.tensor(20), builder.tensor(40), builder.tensor(0)
    builder.op("forward", reads=[weight, batch], writes=[a], random=True)
    builder.op("dropout", reads=[a], writes=[b, empty], random=True, workspace_bytes=16)
    builder.op("read", reads=[weight, b], after=[0])
    builder.op("update", reads=[a], mutates=[weight])
    builder.output(b)
    return builder.build()


def test_the_mutations_cover_every_rule() -> None:
    graph = step_graph()
    plan = plan_of(graph, range(4))
    check(graph, plan)
    seen = {
        rule_of(graph, mutated)
        for mutations in (wrong_orders, wrong_figures, wrong_offsets)
        for mutated, _ in mutations(graph, plan)
    }
    assert seen == {
        *("permutation", "dependency", "mutation_order", "extra_precedence", "offsets_length"),
        *("alignment", "negative_offset", "unplanned_offset", "missing_offset", "overlap", "arena"),
        *("resident_bytes", "peak", "program_peak", "bound", "load"),
    }


def test_random_ops_must_keep_their_program_order() -> None:
    builder = Graph.builder("random")
    for name in ("first", "second"):
        builder.op(name, random=True)
    graph = builder.build()
    with pytest.raises(PlanError, match="random ops keep their program order") as caught:
        check(graph, plan_of(graph, [1, 0]))
    assert (caught.value.rule, caught.value.ids) == ("random_order", (0, 1))


def test_a_plan_for_another_graph_is_refused() -> None:
    builder = Graph.builder("other")
    for _ in range(4):
        builder.op("nothing")
    other = builder.build()
    with pytest.raises(PlanError, match=r"made for graph 'step' with 4 ops .* this is graph 'other'") as caught:
        check(other, plan_of(step_graph(), range(4)))
    assert caught.value.rule == "digest"


def test_an_overlap_names_both_tensors_with_their_steps_and_bytes() -> None:
    graph = step_graph()
    plan = plan_of(graph, range(4))
    with pytest.raises(PlanError, match=r"tensor 2 \(steps \[0, 4\), bytes \[0, 24\)\) and tensor 3") as caught:
        check(graph, replace(plan, offsets=changed(plan.offsets, 3, 0)))
    assert caught.value.ids == (2, 3)


def test_a_missing_figure_is_named() -> None:
    graph = step_graph()
    plan = plan_of(graph, range(4))
    arrays = plan.order, plan.offsets, plan.workspace_offsets
    with pytest.raises(PlanError, match="peak_bytes is missing"):
        _core.check(graph.core, *arrays, 8, {}, plan.before, plan.after, graph.core)


def test_a_bound_above_the_arena_is_refused() -> None:
    graph = training_step()
    made = olla.plan(graph)
    assert made.arena_lower_bound_bytes <= made.arena_bytes
    with pytest.raises(PlanError, match="no arena is below the bound") as caught:
        check(graph, replace(made, arena_lower_bound_bytes=made.arena_bytes + 1))
    assert caught.value.rule == "arena_bound"
