"""Run one layout solver on one problem, in a process of its own: ours, or a rival where that is installed.

    python bench/layout/place.py SOLVER PROBLEM.npz ANSWER.npz --time-limit 10 --threads 2 --seed 0

PROBLEM.npz holds int64 arrays lower, upper and size, and capacity (0: minimise). ANSWER.npz gets offsets (empty: none
found) and a line of JSON in ``facts``: status, seconds, cpu_seconds, mebibytes. Needs numpy and the solver's package.
Making the solver's objects from the arrays is not counted, nor is loading it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Task:
    """A problem and the limits on solving it; capacity 0 asks for the least height."""

    lower: Any
    upper: Any
    size: Any
    capacity: int
    time_limit: float
    threads: int
    seed: int


Answer = tuple[list[int] | Any, str]  # offset of buffer i, empty if there is no layout, and status
Solver = Callable[[Task], Callable[[], Answer]]  # loads and prepares; what it returns solves


def olla(task: Task) -> Callable[[], Answer]:
    """Return ours."""
    from olla.layout.layout import layout

    options: dict[str, Any] = {"time_limit": task.time_limit, "num_threads": task.threads, "seed": task.seed}
    if task.capacity:
        options["capacity"] = task.capacity

    def solve() -> Answer:
        found = layout(task.lower, task.upper, task.size, **options)
        return found.offsets, found.status

    return solve


def _allocations(task: Task) -> Any:
    from omnimalloc import Allocation, set_max_threads

    set_max_threads(task.threads)
    rows = zip(task.size.tolist(), task.lower.tolist(), task.upper.tolist(), strict=True)
    return tuple(Allocation(i, size, lower, upper) for i, (size, lower, upper) in enumerate(rows))


def _offsets(allocations: Any, count: int) -> Any:
    offsets = np.zeros(count, dtype=np.int64)
    for a in allocations:
        offsets[a.id] = a.offset
    return offsets


def supermalloc(task: Task) -> Callable[[], Answer]:
    """Return omnimalloc's exact search, with all threads and the whole time limit."""
    from omnimalloc.allocators import SupermallocAllocator

    allocations = _allocations(task)
    solver = SupermallocAllocator(timeout=task.time_limit, num_threads=task.threads)

    def solve() -> Answer:
        found = solver.solve(allocations)
        return _offsets(found.allocations, len(task.size)), "optimal" if found.proved_optimal else "feasible"

    return solve


def portfolio(task: Task) -> Callable[[], Answer]:
    """Return omnimalloc's portfolio of greedy rules."""
    from omnimalloc.allocators import OmniAllocator

    return _greedy(task, OmniAllocator(), lambda allocations: allocations)


def size_first(task: Task) -> Callable[[], Answer]:
    """Return best fit, largest buffer first, in omnimalloc's code."""
    from omnimalloc.allocators import BestFitAllocator

    return _greedy(task, BestFitAllocator(), lambda all_: tuple(sorted(all_, key=lambda a: a.size, reverse=True)))


def life_first(task: Task) -> Callable[[], Answer]:
    """Return first fit, longest lifetime first, in omnimalloc's code."""
    from omnimalloc.allocators import GreedyByDurationAllocator

    return _greedy(task, GreedyByDurationAllocator(), lambda allocations: allocations)


def _greedy(task: Task, solver: Any, order: Callable[[Any], Any]) -> Callable[[], Answer]:
    allocations = _allocations(task)
    return lambda: (_offsets(solver.allocate(order(allocations)), len(task.size)), "feasible")


def cp_sat(task: Task) -> Callable[[], Answer]:
    """Return OR-Tools' constraint solver: rectangles that do not overlap, and a cumulative load."""
    from ortools.sat.python import cp_model  # type: ignore[import-not-found]

    model = cp_model.CpModel()
    sizes = task.size.tolist()
    most = task.capacity or sum(sizes)
    height = model.new_int_var(0, most, "height")
    starts, ends, lives, places = [], [], [], []
    for i, (lower, upper, size) in enumerate(zip(task.lower.tolist(), task.upper.tolist(), sizes, strict=True)):
        starts.append(model.new_int_var(0, most - size, ""))
        ends.append(model.new_int_var(size, most, ""))
        lives.append(model.new_fixed_size_interval_var(lower, upper - lower, ""))
        places.append(model.new_interval_var(starts[i], size, ends[i], ""))
        model.add(ends[i] <= height)
    model.add_no_overlap_2d(lives, places)
    model.add_cumulative(lives, sizes, height)
    if not task.capacity:
        model.minimize(height)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = task.time_limit
    solver.parameters.num_workers = task.threads
    solver.parameters.random_seed = task.seed % 2**31

    def solve() -> Answer:
        status = solver.solve(model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return [], "infeasible" if status == cp_model.INFEASIBLE else "none"
        return [solver.value(start) for start in starts], "optimal" if status == cp_model.OPTIMAL else "feasible"

    return solve


SOLVERS: dict[str, Solver] = {
    "olla": olla,
    "supermalloc": supermalloc,
    "portfolio": portfolio,
    "size first": size_first,
    "life first": life_first,
    "CP-SAT": cp_sat,
}


def peak_mebibytes() -> float | None:
    """Return the most this process had resident, on Linux alone (getrusage would count what its parent had as well)."""
    status = Path("/proc/self/status")
    peak = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(peak[1]) / 1024 if peak else None


def main() -> int:
    """Solve, and write the answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("solver", choices=SOLVERS)
    parser.add_argument("problem")
    parser.add_argument("answer")
    parser.add_argument("--time-limit", type=float, default=10.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with np.load(options.problem) as file:
        columns = {name: file[name] for name in ("lower", "upper", "size")}
        task = Task(**columns, capacity=int(file["capacity"]), time_limit=options.time_limit,
                    threads=options.threads, seed=options.seed)  # fmt: skip
    solve = SOLVERS[options.solver](task)
    begin, cpu_begin = time.perf_counter(), time.process_time()
    offsets, status = solve()
    facts = {
        "status": status,
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - cpu_begin,
        "mebibytes": peak_mebibytes(),
    }
    np.savez(options.answer, offsets=np.asarray(offsets, dtype=np.int64), facts=json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
