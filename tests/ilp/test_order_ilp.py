"""The ordering program against brute force."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from olla import Graph, _core
from olla._core import OrderIlpResult
from olla.errors import PlanError, SolverError
from olla.ilp import order_ilp, solver
from tests.support import oracle
from tests.support.generate import small_random_graph
from tests.support.samples import fork, scaled, wide_graph

NUM_RANDOM = int(os.environ.get("OLLA_RANDOM", "200"))

Order = NDArray[np.int32]


def program_order(graph: Graph) -> Order:
    return np.arange(graph.num_ops, dtype=np.int32)


def solve(
    graph: Graph,
    *,
    start: Order | None = None,
    lower_bound: int = 0,
    time_limit: float = 60.0,
    progress: Callable[..., bool] | None = None,
    reduce: bool = True,
) -> OrderIlpResult:
    """Run the program and check all that holds of every answer."""
    start = program_order(graph) if start is None else start
    result = _core.order_ilp(graph.core, start, lower_bound, reduce, solver(time_limit, 0, progress))
    assert oracle.is_order(graph, result.order.tolist())
    assert result.peak_bytes == oracle.peak(graph, result.order.tolist())
    assert result.lower_bound_bytes <= result.peak_bytes <= oracle.peak(graph, start.tolist())
    assert (result.status == "optimal") == (result.peak_bytes == result.lower_bound_bytes)
    return result


@pytest.mark.parametrize("reduce", [True, False], ids=["reduced", "as_stated"])
def test_optimum_equals_brute_force_on_random_graphs(reduce: bool) -> None:
    num_solved = 0
    for seed in range(NUM_RANDOM):
        graph = small_random_graph(seed)
        result = solve(graph, reduce=reduce)
        assert result.status == "optimal", f"graph {seed}: {result.figures.message}"
        assert result.peak_bytes == oracle.best_peak(graph), f"graph {seed}"
        num_solved += result.figures.num_columns > 0
    assert num_solved >= NUM_RANDOM // (20 if reduce else 4), "too few graphs reached HiGHS to show anything"


def test_optimum_of_a_wide_fork_equals_the_best_schedule_of_its_chains() -> None:
    graph = fork(8, 2)
    result = solve(graph)
    # Every chain has its hump at the start and its small end is live until the join: the largest hump comes first.
    assert result.status == "optimal"
    assert result.peak_bytes == oracle.best_peak(graph) < oracle.peak(graph, range(graph.num_ops))


def breadth_first(num_chains: int, length: int) -> Order:
    """An order of fork(num_chains, length): the first step of all chains, the second, and so on."""
    steps = [1 + length * chain + step for step in range(length) for chain in range(num_chains)]
    return np.array([0, *steps, 1 + num_chains * length], dtype=np.int32)


def test_a_fork_of_eight_chains_run_breadth_first_is_repaired() -> None:
    graph, start = fork(8, 3), breadth_first(8, 3)
    result = solve(graph, start=start)
    assert result.status == "optimal"
    assert result.peak_bytes < oracle.peak(graph, start.tolist())


def test_a_graph_without_ops_has_its_resident_bytes_as_peak() -> None:
    builder = Graph.builder()
    builder.tensor(5)
    builder.tensor(7)
    result = solve(builder.build())
    assert (len(result.order), result.peak_bytes, result.status, result.figures.num_columns) == (0, 12, "optimal", 0)


def test_ops_without_tensors_are_ordered() -> None:
    builder = Graph.builder()
    builder.op("idle")
    works = builder.op("works", workspace_bytes=3)
    builder.op("after", after=[works])
    builder.op("idle too")
    assert solve(builder.build()).peak_bytes == 3


def test_a_start_that_meets_the_bound_is_returned_without_a_solver_run() -> None:
    graph = fork(3, 2)
    best = solve(graph)
    again = solve(graph, start=best.order, lower_bound=best.peak_bytes)
    assert (again.status, again.peak_bytes, again.figures.num_columns) == ("optimal", best.peak_bytes, 0)
    assert again.order.tolist() == best.order.tolist()


def test_mutations_and_random_ops_keep_their_program_order() -> None:
    builder = Graph.builder()
    state = builder.tensor(4, donated=True)
    a, b, c = (builder.tensor(size) for size in (9, 2, 1))
    draw = builder.op("draw", reads=[state], writes=[a], random=True)
    draw_again = builder.op("draw again", writes=[b], random=True)
    mutate = builder.op("mutate", reads=[a], mutates=[state])
    read = builder.op("read", reads=[state, b], writes=[c])
    graph = builder.build()
    result = solve(graph)
    step = {v: i for i, v in enumerate(result.order.tolist())}
    assert step[draw] < step[draw_again]
    assert step[draw] < step[mutate] < step[read]
    assert result.peak_bytes == oracle.best_peak(graph)


def test_sizes_of_billions_of_bytes_without_common_divisor_are_told_apart() -> None:
    for seed in range(40):
        graph = scaled(small_random_graph(seed), 1_000_000_007, extra=1)
        result = solve(graph)
        assert result.peak_bytes == result.lower_bound_bytes == oracle.best_peak(graph), f"graph {seed}"


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_proven_bound_changes_no_optimum(share: float) -> None:
    for seed in range(1000, 1030):
        graph = small_random_graph(seed)
        best = oracle.best_peak(graph)
        assert solve(graph, lower_bound=int(share * best)).peak_bytes == best


def test_a_false_lower_bound_is_refused() -> None:
    graph = Graph.from_arrays(tensor_bytes=[3], reads=[[]], writes=[[0]])
    with pytest.raises(SolverError, match="lower bound of 4 bytes is false: the start has a peak of 3 bytes"):
        solve(graph, lower_bound=4)


def test_a_start_that_breaks_a_dependency_is_refused() -> None:
    graph = Graph.from_arrays(tensor_bytes=[3], reads=[[], [0]], writes=[[0], []])
    with pytest.raises(PlanError, match="start"):
        solve(graph, start=np.array([1, 0], dtype=np.int32))


def test_without_time_the_start_comes_back_as_feasible() -> None:
    start = breadth_first(8, 3)
    result = solve(fork(8, 3), start=start, time_limit=0.0)
    assert result.status == "feasible"
    assert result.lower_bound_bytes > 0
    assert result.order.tolist() == start.tolist()
    assert "time limit" in result.figures.message


def test_progress_can_stop_the_search_with_the_best_order_so_far() -> None:
    seen: list[tuple[str, float, int, int]] = []

    def stop(stage: str, seconds: float, value: int, bound: int) -> bool:
        seen.append((stage, seconds, value, bound))
        return len(seen) < 3

    result = solve(wide_graph(60), time_limit=120.0, progress=stop)
    assert result.status == "feasible"
    assert "request" in result.figures.message
    assert len(seen) == 3
    assert all(stage == "ilp" and bound <= value for stage, _, value, bound in seen)


def test_an_error_in_the_progress_callback_comes_through() -> None:
    def fail(*_: Any) -> bool:
        raise LookupError("no such display")

    with pytest.raises(LookupError, match="no such display"):
        solve(wide_graph(60), time_limit=120.0, progress=fail)


def test_same_input_and_seed_give_the_same_order() -> None:
    graph = small_random_graph(11)
    assert solve(graph).order.tolist() == solve(graph).order.tolist()


def test_the_wrapper_returns_named_fields() -> None:
    graph = fork(3, 2)
    result = order_ilp(graph.core, program_order(graph))
    assert result.status == "optimal"
    assert result.peak_bytes == result.lower_bound_bytes == oracle.best_peak(graph)
    assert result.figures.num_nodes >= 0
