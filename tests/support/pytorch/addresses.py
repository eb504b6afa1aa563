"""Tests of planned addresses that hold on every device: test modules import them, and have a `replay` of their own."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from olla.errors import ReplayError

torch = pytest.importorskip("torch")
from olla.pytorch.memory.replay import Replay  # noqa: E402
from tests.support.pytorch.windows import in_arena, offset, ones, process_bytes, record, slot, slots  # noqa: E402


def test_a_recording_has_every_allocation_with_its_op_size_and_end(replay: Replay) -> None:
    a = torch.ones(64, 64)
    record(replay, 3)
    outside = a + a
    replay.begin(0)
    b = a + a
    replay.end()
    replay.begin(2)
    c = b.sum()
    d = torch.empty(5, dtype=torch.int64)
    replay.end()
    del b
    replay.begin(1)
    replay.end()
    del d
    seen = replay.stop_recording()
    assert seen.op.tolist() == [0, 2, 2]
    assert seen.index.tolist() == [0, 0, 1]
    assert seen.num_bytes.tolist() == [64 * 64 * 4, 4, 40]
    assert seen.freed_in.tolist() == [2, -1, 1]
    assert seen.freed_at.tolist() == [3, -1, 3]
    assert [column.dtype.name for column in seen] == ["int32", "int32", "int64", "int32", "int64", "int64"]
    assert seen.address[1] == c.data_ptr()
    assert float(c) == float(outside.sum())


def test_workspaces_end_in_the_op_that_makes_them(replay: Replay) -> None:
    x = torch.randn(64, 33, 65).transpose(0, 2)
    record(replay, 1)
    replay.begin(0)
    y = torch.nn.functional.avg_pool1d(x.contiguous().cumsum(0).flip(1), 3)
    replay.end()
    seen = replay.stop_recording()
    assert seen.freed_in.tolist().count(-1) == 1
    assert set(seen.freed_in.tolist()) == {0, -1}
    assert seen.num_bytes[seen.freed_in == -1].tolist() == [y.numel() * 4]


def test_requests_of_no_bytes_do_not_count(replay: Replay) -> None:
    record(replay, 1)
    kept = ones(replay, 0, 0, 4, 0)
    assert replay.stop_recording().num_bytes.tolist() == [16]
    assert [tensor.numel() for tensor in kept] == [0, 4, 0]


def test_what_was_recorded_can_be_freed_after_the_recording_and_in_the_next(replay: Replay) -> None:
    for _ in range(3):
        record(replay, 1)
        kept = ones(replay, 0, 1000, 2000)
        assert replay.stop_recording().freed_in.tolist() == [-1, -1]
    del kept


def test_a_table_can_record_what_it_serves_and_what_it_does_not(replay: Replay) -> None:
    before, size = replay.held_bytes, slot()
    replay.activate(slots([[(64, 0)], [(128, 1), (32, -1)]], 4), recording=True)
    base = replay.arena[0]
    first, missed = ones(replay, 0, 16, 100)
    second, outside = ones(replay, 1, 32, 8)
    del first, missed
    seen = replay.stop_recording()
    assert seen.num_bytes.tolist() == [64, 400, 128, 32]
    assert (seen.op.tolist(), seen.freed_in.tolist()) == ([0, 0, 1, 1], [1, 1, -1, -1])
    assert second.data_ptr() == base + size
    assert (seen.address[[0, 2]] - base).tolist() == [0, size]
    assert replay.held_bytes == before + 4 * size
    del second, outside
    assert replay.held_bytes == before


def test_requests_planned_outside_the_arena_are_neither_hits_nor_misses(replay: Replay) -> None:
    replay.activate(slots([[(64, -1), (64, 0)]], 1))
    state, inner = ones(replay, 0, 16, 16)
    assert not in_arena(replay, state)
    assert offset(replay, inner) == 0
    del inner
    assert replay.deactivate()[:3] == (1, 0, 0)


def test_sizes_count_rounded_up_to_the_alignment_of_the_table(replay: Replay) -> None:
    requests, size = slots([[(20, 0), (40, 8)]], 16), slot()
    replay.activate(requests._replace(alignment=8 * size))
    kept = ones(replay, 0, 5, 10)
    counters = replay.deactivate()
    assert (counters.peak_bytes, counters.high_water_bytes) == (16 * size, 16 * size)
    replay.activate(requests)
    kept = ones(replay, 0, 5, 10)
    counters = replay.deactivate()
    assert (counters.peak_bytes, counters.high_water_bytes) == (2 * size, 9 * size)
    del kept


def test_tensors_are_freed_by_other_threads_and_after_the_table_has_ended(replay: Replay) -> None:
    replay.activate(slots([[(64, 0), (64, 1)]], 2))
    kept = ones(replay, 0, 16, 16)
    replay.deactivate()
    held = replay.held_bytes
    assert all(bool((tensor == 1).all()) for tensor in kept)
    thread = threading.Thread(target=kept.pop)
    thread.start()
    thread.join()
    assert replay.held_bytes == held
    kept.pop()
    assert replay.held_bytes == held - 2 * slot()


def test_two_threads_run_their_own_tables_at_once(replay: Replay) -> None:
    failures: list[str] = []
    device, size = torch.get_default_device(), slot()

    def work(count: int) -> None:
        torch.set_default_device(device)  # each thread has its own
        for _ in range(300):
            replay.activate(slots([[(4 * count, 1)], [(4 * count, 8)]], 16))
            a, b = ones(replay, 0, count)[0], ones(replay, 1, count)[0]
            if (offset(replay, a), offset(replay, b)) != (size, 8 * size) or float((a + b).sum()) != 2 * count:
                failures.append("wrong place or value")
            del a, b
            if replay.deactivate()[:2] != (2, 0):
                failures.append("wrong counters")

    threads = [threading.Thread(target=work, args=(count,)) for count in (16, 50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_calls_that_do_not_fit_the_state_are_refused(replay: Replay) -> None:
    small = slots([[(64, 0)]], 1)
    for call, message in [
        (lambda: replay.begin(0), "neither records nor has an active table"),
        (replay.deactivate, "no active table"),
        (replay.stop_recording, "does not record"),
    ]:
        with pytest.raises(ReplayError, match=message):
            call()
    replay.end()
    replay.activate(small)
    for call, message in [
        (lambda: replay.activate(small), "already has an active table"),
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
        replay.activate(small, recording=True)
    assert offset(replay, torch.ones(16)) == 0
    assert replay.deactivate()[:2] == (1, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_bytes": np.array([64], np.int32)}, "num_bytes is int32"),
        ({"offsets": np.array([32])}, "no multiple of"),
        ({"offsets": np.array([4096])}, "ends outside the arena"),
        ({"alignment": 1}, "alignment is 1 bytes"),
        ({"op_offset": np.array([0, 2])}, "expected 2, the last of op_offset"),
    ],
)
def test_tables_that_do_not_hold_are_refused(replay: Replay, change: dict[str, object], message: str) -> None:
    small = slots([[(64, 0)]], 1)
    with pytest.raises(ReplayError, match=message):
        replay.activate(small._replace(**change))
    replay.activate(small)
    assert replay.deactivate().num_hits == 0


def test_an_arena_that_there_is_no_room_for_is_refused(replay: Replay) -> None:
    """A GPU has an error of its own for that, which users catch."""
    small = slots([[(64, 0)]], 1)
    error = ReplayError if torch.get_default_device().type == "cpu" else torch.OutOfMemoryError
    with pytest.raises(error, match="allocate"):
        replay.activate(small._replace(arena_bytes=1 << 60))
    replay.activate(small)
    assert replay.deactivate().num_hits == 0


def test_an_exception_inside_a_window_leaves_the_process_healthy(replay: Replay) -> None:
    steps = slots([[(64, 0)], [(64, 1)]], 2)
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
        assert offset(replay, again) == slot() * failing
        del kept, again
        assert replay.deactivate()[:2] == (1, 0)


def test_out_of_memory_inside_a_window_leaves_the_process_healthy(replay: Replay) -> None:
    replay.activate(slots([[(64, 0)]], 1))
    replay.begin(0)
    with pytest.raises(RuntimeError):
        torch.empty(1 << 58)
    tensor = torch.ones(16)
    assert offset(replay, tensor) == 0
    del tensor
    assert replay.deactivate().misses == [(0, 0, 1 << 60, "size")]


def test_two_tables_run_alternately_in_arenas_that_are_kept(replay: Replay) -> None:
    tables = [slots([[(64, 0)]], 1), slots([[(128, 1)], [(64, 0)]], 3)]
    held = replay.held_bytes
    for i in range(100):
        replay.activate(tables[i % 2])
        [tensor] = ones(replay, 0, 16 + 16 * (i % 2))
        assert offset(replay, tensor) == slot() * (i % 2)
        del tensor
        assert replay.deactivate(keep_arena=True)[:2] == (1, 0)
    assert replay.held_bytes == held + 3 * slot()
    replay.release()
    assert replay.held_bytes == held


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="needs /proc")
def test_a_thousand_steps_do_not_grow_the_process(replay: Replay) -> None:
    size = (1 << 20) // slot()
    steps = slots([[(1 << 20, 0), (1 << 20, size)]], 2 * size)

    def cycle() -> None:
        record(replay, 1)
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
