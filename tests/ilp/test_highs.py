"""HiGHS by its shared library and by highspy's extension: finding it, solving, stopping."""

import importlib.metadata
import importlib.util
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Timer
from types import SimpleNamespace

import numpy as np
import pytest

from olla import _core
from olla.errors import SolverError
from olla.ilp import highs
from olla.ilp.highs import WAYS, find_highs, solver

NONE = np.zeros(0)


def installed_ways():
    """Return the ways to HiGHS that the installed highspy offers; the extension is in every wheel."""
    return WAYS if isinstance(find_highs(), str) else WAYS[1:]


@pytest.fixture(params=installed_ways(), autouse=True)
def way(request, monkeypatch):
    """Solve every program by each way."""
    monkeypatch.setattr(highs, "WAYS", (request.param,))
    return request.param


def solve(
    cost, upper, rows, *, lower=None, integer=True, start=NONE, time_limit=30.0, seed=0, num_threads=1, progress=None
):
    """Minimise cost x with rows [(lower, upper, {column: value})]."""
    n = len(cost)
    start_of_row = np.cumsum([0] + [len(terms) for _, _, terms in rows]).astype(np.int32)
    return _core.solve_mip(
        np.array(cost, np.float64),
        np.zeros(n) if lower is None else np.array(lower, np.float64),
        np.array(upper, np.float64),
        np.full(n, int(integer), np.int32),
        np.array([row[0] for row in rows], np.float64),
        np.array([row[1] for row in rows], np.float64),
        start_of_row,
        np.array([column for _, _, terms in rows for column in terms], np.int32),
        np.array([value for _, _, terms in rows for value in terms.values()], np.float64),
        np.array(start, np.float64),
        solver(time_limit, seed, progress, num_threads=num_threads),
    )


def market_split(num_rows=4, num_columns=30):
    """A small program that is hard for branch and bound: split every row's sum in two halves, slack is the cost."""
    rng = np.random.default_rng(5)
    weights = rng.integers(0, 100, (num_rows, num_columns))
    cost = [0.0] * num_columns + [1.0] * (2 * num_rows)
    upper = [1.0] * num_columns + [1e4] * (2 * num_rows)
    rows = []
    for i, row in enumerate(weights):
        terms = {j: float(w) for j, w in enumerate(row) if w}
        terms |= {num_columns + 2 * i: 1.0, num_columns + 2 * i + 1: -1.0}
        half = float(row.sum() // 2)
        rows.append((half, half, terms))
    return cost, upper, rows


def assignment(n):
    """Return the program that assigns n items to n places, and may not weigh too much."""
    rng = np.random.default_rng(n)
    cost = rng.integers(1, 1000, (n, n)).astype(float)
    rows = [(1.0, 1.0, {i * n + j: 1.0 for j in range(n)}) for i in range(n)]
    rows += [(1.0, 1.0, {i * n + j: 1.0 for i in range(n)}) for j in range(n)]
    weight = rng.integers(1, 1000, n * n).astype(float)
    rows.append((-np.inf, 300.0 * n, dict(enumerate(weight))))
    return cost.ravel().tolist(), [1.0] * (n * n), rows


def solver_of(path):
    return _core.Solver(highs=str(path), time_limit=1.0, seed=0, num_threads=1, progress=None)


def test_a_knapsack_is_solved_to_optimality():
    value, weight = [10, 13, 7, 8], [3, 4, 2, 3]
    rows = [(-np.inf, 7.0, dict(enumerate(map(float, weight))))]
    found = solve([-v for v in map(float, value)], [1.0] * 4, rows)
    assert (found.status, round(found.objective), round(found.bound)) == ("optimal", -23, -23)
    assert np.round(found.values).tolist() in ([1, 1, 0, 0],)


def test_a_start_is_taken_as_incumbent():
    cost, upper, rows = market_split()
    half = [0.0] * 30
    sums = [row[0] for row in rows]
    start = half + [x for s in sums for x in (s, 0.0)]
    found = solve(cost, upper, rows, start=start, time_limit=0.0)
    assert found.status == "feasible"
    assert found.objective == pytest.approx(sum(sums))
    assert len(found.values) == len(cost)


def test_a_start_that_comes_back_for_an_optimum_is_left_out(way, monkeypatch):
    """HiGHS 1.16 returns it, with the objective of the optimum, where presolve alone finds that."""
    if way != "extension":
        pytest.skip("the extension shows it for both ways")
    extension = importlib.import_module("olla.ilp.extension")
    run, end, starts = extension.HighsExtension.run, extension.HighsEnd, []

    def returns_the_start(self, program, options, start, progress):
        starts.append(start.tolist())
        values = {"values": start} if start.size else {}
        monkeypatch.setattr(extension, "HighsEnd", lambda **said: end(**said | values))
        return run(self, program, options, start, progress)

    monkeypatch.setattr(extension.HighsExtension, "run", returns_the_start)
    found = solve([1.0, 2.0], [1.0, 1.0], [(1.0, np.inf, {0: 1.0, 1: 1.0})], start=[0.0, 1.0])
    assert (found.status, found.objective, found.values.tolist()) == ("optimal", 1.0, [1.0, 0.0])
    assert starts == [[0.0, 1.0], []]


def test_a_start_of_the_wrong_length_is_refused():
    with pytest.raises(SolverError, match="start has 1 values, expected one for each of 2 columns"):
        solve([1.0, 1.0], [1.0, 1.0], [], start=[0.0])


def test_an_infeasible_program_is_told_apart_from_a_limit():
    found = solve([1.0, 1.0], [1.0, 1.0], [(3.0, np.inf, {0: 1.0, 1: 1.0})])
    assert (found.status, len(found.values)) == ("infeasible", 0)


def test_an_unbounded_program_is_an_error():
    with pytest.raises(SolverError, match="no least value"):
        solve([-1.0], [np.inf], [(0.0, np.inf, {0: 1.0})])


def test_a_time_limit_is_a_status():
    begin = time.monotonic()
    found = solve(*market_split(), time_limit=1.0)
    assert found.status in ("feasible", "unknown")
    assert found.bound <= found.objective
    assert time.monotonic() - begin < 3.0


def test_a_program_without_columns_has_the_value_zero():
    found = solve([], [], [])
    assert (found.status, found.objective) == ("optimal", 0.0)


def test_a_callback_stops_the_solver():
    seen = []

    def stop(stage, seconds, value, bound):
        seen.append(stage)
        return False

    begin = time.monotonic()
    found = solve(*market_split(), time_limit=120.0, progress=stop)
    assert found.status in ("feasible", "unknown")
    assert seen == ["mip"]
    assert time.monotonic() - begin < 3.0


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_stops_the_solver():
    begin = time.monotonic()
    interrupt = Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    interrupt.start()
    found = solve(*market_split(), time_limit=120.0)
    interrupt.join()
    assert found.status in ("feasible", "unknown")
    assert time.monotonic() - begin < 4.0


def test_an_error_in_a_callback_comes_through_the_solver():
    def fail(*_):
        raise ValueError("from the callback")

    with pytest.raises(ValueError, match="from the callback"):
        solve(*market_split(), time_limit=120.0, progress=fail)


def test_the_number_of_threads_can_change_from_run_to_run():
    for num_threads in (1, 2, 1):
        assert solve([1.0], [5.0], [(2.5, np.inf, {0: 1.0})], num_threads=num_threads).objective == pytest.approx(3.0)


def test_an_option_out_of_range_is_named():
    with pytest.raises(SolverError, match="random_seed to -1"):
        solve([1.0], [1.0], [], seed=-1)


def test_arrays_that_disagree_are_refused():
    with pytest.raises(SolverError, match="disagree"):
        solve([1.0, 1.0], [1.0], [])


def test_two_threads_solve_at_the_same_time():
    rows = [(-np.inf, 7.0, {0: 3.0, 1: 4.0, 2: 2.0, 3: 3.0})]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda _: solve([-10.0, -13.0, -7.0, -8.0], [1.0] * 4, rows).objective, range(16)))
    assert np.round(results).tolist() == [-23.0] * 16


def test_version_is_that_of_the_package():
    assert importlib.metadata.version("highspy").startswith(solver(1.0, 0, None).highs_version)


def test_the_first_program_of_a_process_prints_nothing(way):
    code = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}]
from olla.ilp import highs
highs.WAYS = ({way!r},)
from test_highs import market_split, solve
solve(*market_split(), time_limit=0.5)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_bounds_rise_and_values_fall_while_it_runs():
    seen = []
    solve(*market_split(), time_limit=1.0, progress=lambda stage, seconds, value, bound: seen.append((value, bound)))
    values, bounds = zip(*seen, strict=True)
    assert list(values) == sorted(values, reverse=True)
    assert list(bounds) == sorted(bounds)
    assert values[-1] < 2**62


LATE = """
import time
import numpy as np
from olla import _core
from olla.ilp.extension import HighsExtension

class Late(HighsExtension):
    def run(self, program, options, start, progress):
        progress.note(-1.0, 5.0, np.array([2.5]))
        progress.note(1.0, 7.0, None)
        time.sleep(1.5)  # HiGHS looks at its clock between its stages alone
        assert progress.note(2.0, 3.0, None)
        raise RuntimeError("nobody waits for this")

solver = _core.Solver(highs=Late(), time_limit=0.1, seed=0, num_threads=1, progress=None)
one, none = np.ones(1), np.zeros(0)
begin = time.monotonic()
found = _core.solve_mip(
    2.0 * one, 0.0 * one, 9.0 * one, np.zeros(1, np.int32), none, none,
    np.zeros(1, np.int32), np.zeros(0, np.int32), none, none, solver,
)
assert time.monotonic() - begin < 1.3
assert (found.status, found.objective, found.bound, found.values.tolist()) == ("feasible", 5.0, 1.0, [2.5])
"""


def test_half_a_second_after_its_limit_the_best_so_far_is_returned_and_the_interpreter_ends_well():
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(len(installed_ways()) < 2, reason="this highspy brings no shared library")
@pytest.mark.parametrize("size", [0, 5, 8])
def test_both_ways_find_and_prove_the_same(size, monkeypatch):
    program = assignment(size) if size else ([1.0, 1.0], [1.0, 1.0], [(3.0, np.inf, {0: 1.0, 1: 1.0})])
    found = []
    for way in WAYS:
        monkeypatch.setattr(highs, "WAYS", (way,))
        answer = solve(*program)
        found.append((answer.status, answer.objective, answer.bound, answer.values.tolist()))
    assert found[0] == found[1]


def test_a_missing_library_says_what_to_install(tmp_path):
    with pytest.raises(SolverError, match=r"pip install \"highspy>=1\.15\""):
        solver_of(tmp_path / "libhighs.so.1")


def test_a_file_that_is_no_library_is_refused(tmp_path):
    path = tmp_path / "libhighs.so.1"
    path.write_text("not a library")
    with pytest.raises(SolverError, match=r"cannot be opened.*pip install"):
        solver_of(path)


def test_a_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SolverError, match=r"not installed: pip install --upgrade \"highspy>=1\.15\""):
        find_highs()


@pytest.mark.parametrize("version", ["1.14.0", "1.9.0", "0.9"])
def test_a_package_that_is_too_old_is_named_with_its_version(version, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(SolverError, match=rf"highspy {version} is too old.*--upgrade \"highspy>=1\.15\""):
        find_highs()


def test_an_extension_that_cannot_be_imported_is_named_with_its_version_and_folder(monkeypatch, tmp_path):
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.16.0")
    monkeypatch.setitem(sys.modules, "olla.ilp.extension", None)
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(SolverError, match=rf"highspy 1\.16\.0 in {tmp_path} brings no HiGHS library .* cannot be used"):
        find_highs()


@pytest.mark.skipif("library" not in installed_ways(), reason="this highspy brings no shared library")
def test_the_library_is_found_without_importing_highspy():
    code = "import sys; from olla.ilp.highs import find_highs; find_highs(); assert 'highspy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
