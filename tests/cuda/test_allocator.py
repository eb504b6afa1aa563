"""Planned addresses on a GPU: windows and misses, other streams, threads, devices, and what torch's allocator says."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

torch = pytest.importorskip("torch")

from olla.pytorch.memory.replay import Replay, Table  # noqa: E402
from tests.cuda.standin import Standin  # noqa: E402
from tests.support.pytorch import windows  # noqa: E402
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
from tests.support.pytorch.windows import in_arena, offset, ones, record  # noqa: E402

SLOT = 512  # bytes, the alignment of a GPU
FEW = 16  # floats, far less than a slot


def table(requests: Sequence[Sequence[tuple[int, int]]], arena_bytes: int) -> Table:
    return windows.table(requests, arena_bytes)._replace(alignment=SLOT)


def one_slot() -> Table:
    return table([[(4 * FEW, 0)]], SLOT)


def test_tensors_are_at_their_planned_addresses_and_results_are_the_same(device: torch.device, replay: Replay) -> None:
    x, w = torch.randn(32, 64), torch.randn(64, 64)
    expected = torch.softmax(x @ w, -1)
    replay.activate(table([[(8192, 8192)], [(8192, 0)]], 16384))
    replay.begin(0)
    y = x @ w
    replay.end()
    replay.begin(1)
    z = torch.softmax(y, -1)
    replay.end()
    assert (offset(replay, y), offset(replay, z)) == (8192, 0)
    del y
    assert replay.deactivate() == (2, 0, 0, 16384, 16384, [], 16384, 16384, 16384, 0)
    assert torch.equal(z, expected)


def test_misses_go_to_torchs_allocator_and_are_named(replay: Replay) -> None:
    replay.activate(table([[(64, 0), (128, 512)], []], 1024))
    made = [*ones(replay, 0, 16, 17, 32, 32), *ones(replay, 1, 8), *ones(replay, 0, 16)]
    assert [in_arena(replay, tensor) for tensor in made] == [True, False, True, False, False, False]
    counters = replay.deactivate()
    assert [miss[3] for miss in counters.misses] == ["size", "unplanned", "unplanned", "occupied"]
    assert all(bool((tensor == 1).all()) for tensor in made)


def test_what_torchs_allocator_gives_to_a_step_is_counted_and_nothing_that_other_threads_get(replay: Replay) -> None:
    replay.activate(one_slot())
    thread = threading.Thread(target=lambda: torch.ones(8 * FEW, device="cuda"))
    thread.start()
    thread.join()
    between = torch.ones(FEW)
    block = torch.cuda.caching_allocator_alloc(1000)
    made = ones(replay, 0, FEW, 17)
    assert [in_arena(replay, tensor) for tensor in made] == [True, False]
    counters = replay.deactivate()
    torch.cuda.caching_allocator_delete(block)
    assert counters.given_bytes == 4 * FEW + 1000 + 68
    assert bool((between == 1).all())


def test_a_slot_is_free_again_when_its_tensor_and_all_views_are_gone(replay: Replay) -> None:
    replay.activate(one_slot())
    [tensor] = ones(replay, 0, FEW)
    view = tensor[3:]
    del tensor
    assert not in_arena(replay, ones(replay, 0, FEW)[0])
    del view
    assert offset(replay, ones(replay, 0, FEW)[0]) == 0
    assert replay.deactivate()[:2] == (2, 1)


def test_tensors_may_grow_out_of_the_arena(replay: Replay) -> None:
    replay.activate(one_slot())
    [tensor] = ones(replay, 0, FEW)
    tensor.resize_(1000)
    assert not in_arena(replay, tensor)
    assert bool((tensor[:FEW] == 1).all())
    replay.deactivate()


def test_other_threads_and_code_outside_windows_use_torchs_allocator(replay: Replay) -> None:
    replay.activate(one_slot())
    made: list[torch.Tensor] = []
    outside = torch.ones(FEW)
    replay.begin(0)
    thread = threading.Thread(target=lambda: made.append(torch.ones(FEW, device="cuda")))
    thread.start()
    thread.join()
    inside = torch.ones(FEW)
    replay.end()
    assert [in_arena(replay, tensor) for tensor in (outside, *made, inside)] == [False, False, True]
    assert replay.deactivate()[:2] == (1, 0)


def test_what_another_stream_asks_for_in_a_window_is_not_planned(replay: Replay) -> None:
    replay.activate(one_slot())
    with torch.cuda.stream(torch.cuda.Stream()):
        [tensor] = ones(replay, 0, FEW)
    assert not in_arena(replay, tensor)
    assert replay.deactivate().misses[0][3] == "stream"


def test_a_slot_that_another_stream_uses_stays_taken_until_that_stream_is_done(faults: Standin, replay: Replay) -> None:
    """As a block of torch's own allocator: a free waits for an event of the stream, and never makes the host wait."""
    replay.activate(one_slot())
    [tensor] = ones(replay, 0, FEW)
    side = torch.cuda.Stream()
    faults.schedule("late")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        read = tensor + 1
        tensor.record_stream(side)
    del tensor
    assert not in_arena(replay, ones(replay, 0, FEW)[0])  # the side stream has not read yet
    side.synchronize()
    assert bool(read.cpu().eq(2).all())
    assert offset(replay, ones(replay, 0, FEW)[0]) == 0
    assert replay.deactivate()[:2] == (2, 1)
    faults.schedule("now")


@pytest.mark.parametrize("current", [False, True])
def test_a_block_freed_while_a_stream_that_used_it_is_captured_goes_back_later(replay: Replay, current: bool) -> None:
    """An event of a capture cannot be asked for, and asking for any ends a capture: both wait until it is over."""
    replay.activate(one_slot())
    [tensor] = ones(replay, 0, FEW)
    side, other, graph = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    tensor.record_stream(other if current else side)
    kept = torch.zeros(FEW)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="global")
    with torch.cuda.stream(side if current else torch.cuda.current_stream()):
        del tensor
        with torch.cuda.stream(side):
            kept += 1
            graph.capture_end()
    graph.replay()
    torch.cuda.synchronize()
    assert bool(kept.cpu().eq(1).all())
    assert offset(replay, ones(replay, 0, FEW)[0]) == 0
    assert replay.deactivate()[:2] == (2, 0)


def test_blocks_of_a_recording_may_be_used_by_other_streams(faults: Standin, replay: Replay) -> None:
    faults.schedule("late")
    record(replay, 1)
    [tensor] = ones(replay, 0, 1 << 20)
    replay.stop_recording()
    address = tensor.data_ptr()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        read = tensor + 1
        tensor.record_stream(side)
    del tensor
    assert torch.zeros(1 << 20).data_ptr() != address  # torch's allocator holds the block back
    side.synchronize()
    assert bool(read.cpu().eq(2).all())
    faults.schedule("now")


def test_torchs_statistics_and_snapshots_know_the_arena(replay: Replay) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(max_entries=1000)
    replay.activate(table([[(4 << 20, 0)]], 4 << 20))
    [tensor] = ones(replay, 0, 1 << 20)
    assert torch.cuda.memory_allocated() - before == 4 << 20
    blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
    assert any(block["address"] == replay.arena[0] and block["state"] == "active_allocated" for block in blocks)
    torch.cuda.empty_cache()
    assert bool((tensor == 1).all())
    torch.cuda.memory._record_memory_history(enabled=None)
    replay.deactivate()
    del tensor
    replay.release()
    assert torch.cuda.memory_allocated() == before


def test_where_there_is_no_memory_for_the_arena_the_error_says_so(faults: Standin, replay: Replay) -> None:
    torch.cuda.empty_cache()
    faults.fail_after(0)
    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate 1024.00 MiB"):
        replay.activate(table([[(1 << 30, 0)]], 1 << 30))
    faults.fail_after(-1)
    replay.activate(one_slot())
    assert in_arena(replay, ones(replay, 0, FEW)[0])
    replay.deactivate()
