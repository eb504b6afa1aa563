"""The states of the allocator: calls out of turn, exceptions in a window, and many steps."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
from tests.support.pytorch.addresses import (  # noqa: E402, F401
    test_a_recording_has_every_allocation_with_its_op_size_and_end,
    test_a_table_can_record_what_it_serves_and_what_it_does_not,
    test_a_thousand_steps_do_not_grow_the_process,
    test_an_arena_that_there_is_no_room_for_is_refused,
    test_an_exception_inside_a_window_leaves_the_process_healthy,
    test_calls_that_do_not_fit_the_state_are_refused,
    test_out_of_memory_inside_a_window_leaves_the_process_healthy,
    test_requests_of_no_bytes_do_not_count,
    test_requests_planned_outside_the_arena_are_neither_hits_nor_misses,
    test_sizes_count_rounded_up_to_the_alignment_of_the_table,
    test_tables_that_do_not_hold_are_refused,
    test_tensors_are_freed_by_other_threads_and_after_the_table_has_ended,
    test_two_tables_run_alternately_in_arenas_that_are_kept,
    test_two_threads_run_their_own_tables_at_once,
    test_what_was_recorded_can_be_freed_after_the_recording_and_in_the_next,
    test_workspaces_end_in_the_op_that_makes_them,
)

pytestmark = pytest.mark.torch


def test_tensors_in_an_arena_may_live_until_the_interpreter_ends() -> None:
    script = """
import numpy as np, torch
from olla.pytorch.memory.replay import Table, load
replay = load(torch.device("cpu"))
table = Table(128, np.array([0, 2]), np.array([64, 64]), np.array([0, 64]))
replay.activate(table)
replay.begin(0)
kept, other = torch.ones(16), torch.ones(16)
replay.deactivate()
replay.activate(table, recording=True)
replay.begin(0)
recorded, missed = torch.ones(16), torch.ones(99)
print(int(kept.sum()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "16\n"), done.stderr
