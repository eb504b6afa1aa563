"""The states of the allocator: calls out of turn, exceptions in a window, and many steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from olla.errors import ReplayError

torch = pytest.importorskip("torch")
from olla.pytorch.memory.replay import Replay  # noqa: E402
from tests.support.pytorch.windows import in_arena, offset, ones, process_bytes, table  # noqa: E402

pytestmark = pytest.mark.torch


# States, exceptions


def test_calls_that_do_not_fit_the_state_are_refused(replay: Replay) -> None:
    small = table([[(64, 0)]], 64)
    for call, message in [
        (lambda: replay.begin(0), "neither records nor has an active table"),
        (replay.deactivate, "no active table"),
        (replay.stop_recording, "does not record"),
        (lambda: replay.start_recording(-1), "num_ops is -1"),
    ]:
        with pytest.raises(ReplayError, match=message):
            call()
    replay.end()
    replay.activate(small)
    for call, message in [
        (lambda: replay.activate(small), "already has an active table"),
        (lambda: replay.start_recording(1), "already has an active table"),
        (lambda: replay.begin(1), "op is 1, expected 0 to 0"),
        (lambda: replay.begin(-5), "expected 0 to 0"),
    ]:
        with pytest.raises(ReplayError, match=message):
            call()
    with pytest.raises(TypeError):
        replay.begin("0")  # type: ignore[arg-type]
    replay.begin(0)
    with pytest.raises(ReplayError, match="op 0 has not ended"):
        replay.begin(0)
    with pytest.raises(ReplayError, match="already has an active table"):
        replay.start_recording(1)
    assert offset(replay, torch.ones(16)) == 0
    assert replay.deactivate()[:2] == (1, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_bytes": np.array([64], np.int32)}, "num_bytes is int32"),
        ({"offsets": np.array([32])}, "no multiple of 64"),
        ({"offsets": np.array([64])}, "ends outside the arena"),
        ({"alignment": 1}, "alignment is 1 bytes"),
        ({"op_offset": np.array([0, 2])}, "expected 2, the last of op_offset"),
        ({"arena_bytes": 1 << 60}, "allocate"),
    ],
)
def test_tables_that_do_not_hold_are_refused(replay: Replay, change: dict[str, object], message: str) -> None:
    small = table([[(64, 0)]], 64)
    with pytest.raises(ReplayError, match=message):
        replay.activate(small._replace(**change))
    replay.activate(small)
    assert replay.deactivate().num_hits == 0


def test_an_exception_inside_a_window_leaves_the_process_healthy(replay: Replay) -> None:
    steps = table([[(64, 0)], [(64, 64)]], 128)
    for failing in (0, 1):
        replay.activate(steps)
        for op in range(failing):
            ones(replay, op, 16)
        replay.begin(failing)
        kept = torch.ones(16)
        with pytest.raises(IndexError):
            kept.transpose(0, 5)
        replay.deactivate()  # with the window still open
        after = torch.ones(16)
        replay.activate(steps)
        assert not in_arena(replay, after)
        [again] = ones(replay, failing, 16)
        assert offset(replay, again) == 64 * failing
        del kept, again
        assert replay.deactivate()[:2] == (1, 0)


def test_out_of_memory_inside_a_window_leaves_the_process_healthy(replay: Replay) -> None:
    replay.activate(table([[(64, 0)]], 64))
    replay.begin(0)
    with pytest.raises(RuntimeError):
        torch.empty(1 << 58)
    tensor = torch.ones(16)
    assert offset(replay, tensor) == 0
    del tensor
    assert replay.deactivate().misses == [(0, 0, 1 << 60, "size")]


# Many steps


def test_two_tables_run_alternately_in_arenas_that_are_kept(replay: Replay) -> None:
    tables = [table([[(64, 0)]], 64), table([[(128, 64)], [(64, 0)]], 192)]
    held = replay.held_bytes
    for i in range(100):
        replay.activate(tables[i % 2])
        [tensor] = ones(replay, 0, 16 + 16 * (i % 2))
        assert offset(replay, tensor) == 64 * (i % 2)
        del tensor
        assert replay.deactivate(keep_arena=True)[:2] == (1, 0)
    assert replay.held_bytes == held + 192
    replay.release()
    assert replay.held_bytes == held


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
