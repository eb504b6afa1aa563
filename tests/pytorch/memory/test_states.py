"""The states of the allocator: calls out of turn, exceptions in a window, and many steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from olla.pytorch.memory.replay import Replay  # noqa: E402
from tests.support.pytorch.addresses import (  # noqa: E402, F401
    test_a_table_can_record_what_it_serves_and_what_it_does_not,
    test_an_arena_that_there_is_no_room_for_is_refused,
    test_an_exception_inside_a_window_leaves_the_process_healthy,
    test_calls_that_do_not_fit_the_state_are_refused,
    test_out_of_memory_inside_a_window_leaves_the_process_healthy,
    test_requests_of_no_bytes_do_not_count,
    test_requests_planned_outside_the_arena_are_neither_hits_nor_misses,
    test_tables_that_do_not_hold_are_refused,
    test_tensors_are_freed_by_other_threads_and_after_the_table_has_ended,
    test_two_tables_run_alternately_in_arenas_that_are_kept,
    test_two_threads_run_their_own_tables_at_once,
    test_what_was_recorded_can_be_freed_after_the_recording_and_in_the_next,
)
from tests.support.pytorch.windows import ones, process_bytes, table  # noqa: E402

pytestmark = pytest.mark.torch


# Many steps


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="needs /proc")
def test_a_thousand_steps_do_not_grow_the_process(replay: Replay) -> None:
    steps = table([[(1 << 20, 0), (1 << 20, 1 << 20)]], 2 << 20)

    def cycle() -> None:
        replay.start_recording(1)
        ones(replay, 0, 1 << 18)
        replay.stop_recording()
        replay.activate(steps)
        _, output, _ = ones(replay, 0, 1 << 18, 1 << 18, 100)
        assert replay.deactivate()[:2] == (2, 1)
        assert float(output[-1]) == 1

    for _ in range(50):
        cycle()
    held, before = replay.held_bytes, process_bytes()
    for _ in range(1000):
        cycle()
    assert process_bytes() - before < 8 << 20  # a leak of one arena in each step would be 2 GiB
    assert replay.held_bytes == held


def test_tensors_in_an_arena_may_live_until_the_interpreter_ends() -> None:
    script = """
import numpy as np, torch
from olla.pytorch.memory.replay import Table, load
replay = load(torch.device("cpu"))
replay.activate(Table(128, np.array([0, 2]), np.array([64, 64]), np.array([0, 64])))
replay.begin(0)
kept, other = torch.ones(16), torch.ones(16)
replay.deactivate()
replay.start_recording(1)
replay.begin(0)
recorded = torch.ones(16)
print(int(kept.sum()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "16\n"), done.stderr
