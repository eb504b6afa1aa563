"""The ordering program against brute force."""

import functools
import itertools
import os
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from olla import _core
from olla.errors import PlanError, SolverError
from olla.ilp import highs_library, order_ilp

NUM_RANDOM = int(os.environ.get("OLLA_RANDOM", "200"))


@dataclass
class Op:
    reads: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    mutates: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    workspace: int = 0
    random: bool = False


@dataclass
class Small:
    """A graph in plain lists, small enough to try every order."""

    tensors: list[int]
    ops: list[Op]
    donated: set[int] = field(default_factory=set)
    outputs: set[int] = field(default_factory=set)

    def core(self) -> _core.Graph:
        def lists(rows):
            offset = np.zeros(len(rows) + 1, np.int64)
            offset[1:] = np.cumsum([len(row) for row in rows])
            return offset, np.array([item for row in rows for item in row], np.int32)

        return _core.Graph(
            np.array(self.tensors, np.int64),
            np.array([t in self.donated for t in range(len(self.tensors))], np.uint8),
            *lists([op.reads for op in self.ops]),
            *lists([op.writes for op in self.ops]),
            *lists([op.mutates for op in self.ops]),
            *lists([op.after for op in self.ops]),
            np.array([op.workspace for op in self.ops], np.int64),
            np.array([op.random for op in self.ops], np.uint8),
            np.array(sorted(self.outputs), np.int32),
        )


def program_order(graph: Small) -> np.ndarray:
    return np.arange(len(graph.ops), dtype=np.int32)


def peak_of(graph: Small, order, core) -> int:
    """Peak of one order, by the words of the memory model."""
    written = {t for op in graph.ops for t in op.writes}
    last = {}
    for step, v in enumerate(order):
        for t in [*graph.ops[v].reads, *graph.ops[v].mutates]:
            last[t] = step
    resident = sum(s for t, s in enumerate(graph.tensors) if t not in written and t not in graph.donated)
    live = {t for t in graph.donated if t in last or t in graph.outputs}
    peak = 0
    for step, v in enumerate(order):
        live |= set(graph.ops[v].writes)
        peak = max(peak, resident + sum(graph.tensors[t] for t in live) + graph.ops[v].workspace)
        live = {t for t in live if t in graph.outputs or last.get(t, -1) > step}
    return peak if graph.ops else resident


def best_peak(graph: Small) -> int:
    """Least peak of all orders: what is live depends on the set of ops that have run, not on their order."""
    core = graph.core()
    n = len(graph.ops)
    preds = [sum(1 << int(u) for u in core.preds(v)) for v in range(n)]
    uses = [0] * len(graph.tensors)
    producer = [None] * len(graph.tensors)
    for v, op in enumerate(graph.ops):
        for t in op.reads + op.mutates:
            uses[t] |= 1 << v
        for t in op.writes:
            producer[t] = v

    def live(done: int) -> int:
        total = 0
        for t, size in enumerate(graph.tensors):
            if producer[t] is None and t not in graph.donated:
                total += size
            elif producer[t] is None or done >> producer[t] & 1:
                total += size if t in graph.outputs or uses[t] & ~done else 0
        return total

    @functools.cache
    def least(done: int) -> int:
        if done == (1 << n) - 1:
            return 0
        results = []
        for v, op in enumerate(graph.ops):
            if not done >> v & 1 and preds[v] & ~done == 0:
                during = live(done) + sum(graph.tensors[t] for t in set(op.writes)) + op.workspace
                results.append(max(during, least(done | 1 << v)))
        return min(results)

    return least(0) if n else live(0)


def random_graph(rng: random.Random, max_ops: int = 9) -> Small:
    n = rng.randint(1, max_ops)
    sizes = rng.choice([[1, 2, 3, 5, 8, 13], [0, 1, 1, 2], [512, 1024, 4096, 10**6], [7, 10**6 + 7, 3 * 10**6]])
    tensors = [rng.choice(sizes) for _ in range(rng.randint(0, 3))]
    num_resident = len(tensors)
    donated = {t for t in range(num_resident) if rng.random() < 0.5}
    readable = list(range(num_resident))
    ops = []
    density = rng.choice([0.5, 1.0, 2.0])
    for v in range(n):
        op = Op(workspace=rng.choice(sizes) if rng.random() < 0.2 else 0, random=rng.random() < 0.15)
        count = min(len(readable), int(rng.expovariate(1 / density)))
        op.reads = rng.sample(readable, count)
        if readable and rng.random() < 0.2:
            op.mutates = [rng.choice(readable)]
        if v and rng.random() < 0.15:
            op.after = [rng.randrange(v)]
        for _ in range(rng.choice([0, 1, 1, 1, 2])):
            op.writes.append(len(tensors))
            tensors.append(rng.choice(sizes))
        readable += op.writes
        ops.append(op)
    outputs = {t for t in range(len(tensors)) if rng.random() < 0.1}
    return Small(tensors, ops, donated, outputs)


def fork(num_chains: int, length: int) -> Small:
    """A source read by chains that end in one sink, with a hump in the middle of each chain."""
    graph = Small([10], [Op(writes=[0])])
    ends = []
    for chain in range(num_chains):
        source = 0
        for step in range(length):
            graph.tensors.append((20 if step == 0 else 5) + chain)
            graph.ops.append(Op(reads=[source], writes=[len(graph.tensors) - 1]))
            source = len(graph.tensors) - 1
        ends.append(source)
    graph.tensors.append(1)
    graph.ops.append(Op(reads=ends, writes=[len(graph.tensors) - 1]))
    return graph


def solve(graph: Small, reduce: bool = True, start=None, lower_bound: int = 0, time_limit: float = 60.0, progress=None):
    start = program_order(graph) if start is None else start
    core = graph.core()
    order, peak, bound, status, info = _core.order_ilp(
        core, start, lower_bound, highs_library(), time_limit, 0, 1, progress, reduce
    )
    assert core.is_order(order)
    assert _core.profile(core, order)[3] == peak == peak_of(graph, order, core)
    assert bound <= peak <= _core.profile(core, start)[3]
    assert (status == "optimal") == (peak == bound)
    return order, peak, bound, status, info


def test_brute_force_over_sets_equals_brute_force_over_orders():
    rng = random.Random(7)
    for _ in range(60):
        graph = random_graph(rng, max_ops=5)
        core = graph.core()
        orders = [p for p in itertools.permutations(range(len(graph.ops))) if core.is_order(np.array(p, np.int32))]
        assert best_peak(graph) == min(peak_of(graph, order, core) for order in orders)


@pytest.mark.parametrize("reduce", [True, False], ids=["reduced", "as_stated"])
def test_optimum_equals_brute_force_on_random_graphs(reduce):
    num_solved = 0
    for seed in range(NUM_RANDOM):
        graph = random_graph(random.Random(seed))
        _, peak, _, status, info = solve(graph, reduce)
        assert status == "optimal", f"graph {seed}: {info['message']}"
        assert peak == best_peak(graph), f"graph {seed}"
        num_solved += info["num_columns"] > 0
    assert num_solved >= NUM_RANDOM // (20 if reduce else 4), (
        "most graphs never reached HiGHS: this test would show nothing"
    )


def test_optimum_of_a_wide_fork_equals_the_best_schedule_of_its_chains():
    graph = fork(8, 2)
    _, peak, _, status, _ = solve(graph)
    assert status == "optimal"
    # Every chain has its hump at the start and its small end is live until the join: the largest hump comes first.
    assert peak == best_peak(graph)
    assert peak < peak_of(graph, program_order(graph), None)


def test_a_fork_of_eight_chains_run_breadth_first_is_repaired():
    graph = fork(8, 3)
    breadth_first = np.array([0, *(1 + 3 * chain + step for step in range(3) for chain in range(8)), 25], np.int32)
    _, peak, _, status, _ = solve(graph, start=breadth_first)
    assert status == "optimal"
    assert peak < peak_of(graph, breadth_first, None)


def test_a_graph_without_ops_has_its_resident_bytes_as_peak():
    order, peak, _, status, info = solve(Small([5, 7], []))
    assert (len(order), peak, status, info["num_columns"]) == (0, 12, "optimal", 0)


def test_ops_without_tensors_are_ordered():
    graph = Small([], [Op(), Op(workspace=3), Op(after=[1]), Op()])
    assert solve(graph)[1] == 3


def test_a_start_that_meets_the_bound_is_returned_without_a_solver_run():
    graph = fork(3, 2)
    best, peak, *_ = solve(graph)
    order, again, _, status, info = solve(graph, start=best, lower_bound=peak)
    assert (status, again, info["num_columns"]) == ("optimal", peak, 0)
    assert order.tolist() == best.tolist()


def test_mutations_and_random_ops_keep_their_program_order():
    graph = Small(
        [4, 9, 2, 1],
        [
            Op(reads=[0], writes=[1], random=True),
            Op(writes=[2], random=True),
            Op(reads=[1], mutates=[0]),
            Op(reads=[0, 2], writes=[3]),
        ],
        donated={0},
    )
    order, peak, *_ = solve(graph)
    assert list(order).index(0) < list(order).index(1)  # random
    assert list(order).index(0) < list(order).index(2) < list(order).index(3)  # read, mutate, read
    assert peak == best_peak(graph)


def test_sizes_of_billions_of_bytes_without_common_divisor_keep_an_honest_bound():
    num_open = 0
    for seed in range(40):
        graph = random_graph(random.Random(seed), max_ops=7)
        graph.tensors = [size * 1_000_000_007 + t for t, size in enumerate(graph.tensors)]
        best = best_peak(graph)
        _, peak, bound, status, info = solve(graph)
        assert bound <= best <= peak
        assert peak - best <= 1e-6 * best
        assert status == "optimal" or "rounded" in info["message"]
        num_open += status != "optimal"
    assert num_open > 0


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_proven_bound_changes_no_optimum(share):
    for seed in range(30):
        graph = random_graph(random.Random(1000 + seed))
        best = best_peak(graph)
        assert solve(graph, lower_bound=int(share * best))[1] == best


def test_a_false_lower_bound_is_refused():
    graph = Small([3], [Op(writes=[0])])
    with pytest.raises(SolverError, match="lower bound of 4 bytes is false: the start has a peak of 3 bytes"):
        solve(graph, lower_bound=4)


def test_a_start_that_breaks_a_dependency_is_refused():
    graph = Small([3], [Op(writes=[0]), Op(reads=[0])])
    with pytest.raises(PlanError, match="start"):
        solve(graph, start=np.array([1, 0], np.int32))


def test_without_time_the_start_comes_back_as_feasible():
    graph = fork(8, 3)
    breadth_first = np.array([0, *(1 + 3 * chain + step for step in range(3) for chain in range(8)), 25], np.int32)
    order, _, bound, status, info = solve(graph, start=breadth_first, time_limit=0.0)
    assert status == "feasible"
    assert bound > 0
    assert order.tolist() == breadth_first.tolist()
    assert "time limit" in info["message"]


def hard_graph() -> Small:
    rng = random.Random(3)
    graph = Small([], [])
    for v in range(60):
        graph.tensors.append(rng.randint(1, 10**6))
        reads = rng.sample(range(v), min(v, 2)) if v > 8 else []
        graph.ops.append(Op(reads=reads, writes=[v]))
    return graph


def test_progress_can_stop_the_search_with_the_best_order_so_far():
    seen = []

    def stop(stage, seconds, value, bound):
        seen.append((stage, seconds, value, bound))
        return len(seen) < 3

    graph = hard_graph()
    _, peak, bound, status, info = solve(graph, time_limit=120.0, progress=stop)
    assert status == "feasible"
    assert "request" in info["message"]
    assert len(seen) == 3
    assert all(stage == "ilp" and bound <= value for stage, _, value, bound in seen)
    assert bound <= peak


def test_an_error_in_the_progress_callback_comes_through():
    def fail(*_):
        raise LookupError("no such display")

    with pytest.raises(LookupError, match="no such display"):
        solve(hard_graph(), time_limit=120.0, progress=fail)


def test_same_input_and_seed_give_the_same_order():
    graph = random_graph(random.Random(11))
    assert solve(graph)[0].tolist() == solve(graph)[0].tolist()


def test_the_wrapper_returns_named_fields():
    graph = fork(3, 2)
    result = order_ilp(graph.core(), program_order(graph))
    assert result.status == "optimal"
    assert result.peak_bytes == result.lower_bound_bytes == best_peak(graph)
    assert result.info["num_nodes"] >= 0
