"""Planned addresses on the CPU: recordings, tables, misses, and what happens to tensors that outlive both."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from olla.errors import ReplayError

torch = pytest.importorskip("torch")
from olla.pytorch.memory.replay import Replay  # noqa: E402
from tests.support.pytorch.windows import in_arena, offset, ones, table  # noqa: E402

pytestmark = pytest.mark.torch


# Planned addresses


def test_tensors_are_at_their_planned_addresses_and_results_are_the_same(replay: Replay) -> None:
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
    assert y.data_ptr() % 64 == 0
    del y
    counters = replay.deactivate()
    assert torch.equal(z, expected)
    assert counters == (2, 0, 0, 16384, 16384, [], 16384, 16384, 16384, 0)


def test_misses_go_to_the_default_allocator_and_are_named(replay: Replay) -> None:
    replay.activate(table([[(64, 0), (128, 64)], []], 192))
    a, other, b, more = ones(replay, 0, 16, 17, 32, 32)
    [unplanned] = ones(replay, 1, 8)
    [occupied] = ones(replay, 0, 16)
    assert (offset(replay, a), offset(replay, b)) == (0, 64)
    assert not any(in_arena(replay, tensor) for tensor in (other, more, unplanned, occupied))
    counters = replay.deactivate()
    assert (counters.num_hits, counters.num_misses, counters.missed_bytes) == (2, 4, 68 + 128 + 32 + 64)
    assert counters.misses == [
        (0, 1, 68, "size"), (0, 3, 128, "unplanned"), (1, 0, 32, "unplanned"), (0, 0, 64, "occupied")
    ]  # fmt: skip
    assert all(bool((tensor == 1).all()) for tensor in (a, other, b, more, unplanned, occupied))


@pytest.mark.parametrize("recording", [False, True])
def test_blocks_of_an_op_are_counted_until_they_are_freed(replay: Replay, recording: bool) -> None:
    """A collective of gloo asks for more than its result, and a thread frees that a moment after the wait."""
    assert replay.live(0) == 0
    replay.activate(table([[(64, 0), (128, 64)], [(64, 192)]], 256), recording=recording)
    a, b = ones(replay, 0, 16, 32)
    [c] = ones(replay, 1, 16)
    assert [replay.live(op) for op in (0, 1, 2)] == [2, 1, 0]
    view = a[3:]
    del a, b
    assert replay.live(0) == 1
    del view
    assert [replay.live(op) for op in (0, 1)] == [0, 1]
    assert float(c.sum()) == 16
    replay.stop_recording() if recording else replay.deactivate()
    assert replay.live(1) == 0


def test_a_slot_is_free_again_when_its_tensor_and_all_views_are_gone(replay: Replay) -> None:
    replay.activate(table([[(64, 0)]], 64))
    [tensor] = ones(replay, 0, 16)
    view = tensor[3:]
    del tensor
    [missed] = ones(replay, 0, 16)
    assert not in_arena(replay, missed)
    del view
    [hit] = ones(replay, 0, 16)
    assert offset(replay, hit) == 0
    assert replay.deactivate()[:2] == (2, 1)


def test_tensors_may_grow_out_of_the_arena(replay: Replay) -> None:
    replay.activate(table([[(64, 0)]], 64))
    [tensor] = ones(replay, 0, 16)
    tensor.resize_(1000)
    assert not in_arena(replay, tensor)
    assert bool((tensor[:16] == 1).all())
    replay.deactivate()


# Threads and code outside windows


def test_other_threads_and_code_outside_windows_use_the_default_allocator(replay: Replay) -> None:
    replay.activate(table([[(64, 0)]], 64))
    made: list[torch.Tensor] = []
    errors: list[str] = []

    def work() -> None:
        made.append(torch.ones(16))
        try:
            replay.begin(0)
        except ReplayError as error:
            errors.append(str(error))

    outside = torch.ones(16)
    replay.begin(0)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    inside = torch.ones(16)
    replay.end()
    assert [in_arena(replay, tensor) for tensor in (outside, *made, inside)] == [False, False, True]
    assert errors == ["begin: this thread neither records nor has an active table"]
    assert replay.deactivate()[:2] == (1, 0)


def test_memory_of_numpy_is_left_alone(replay: Replay) -> None:
    array = np.arange(16, dtype=np.float32)
    replay.activate(table([[(64, 0)]], 64))
    replay.begin(0)
    shared = torch.from_numpy(array)
    doubled = shared + shared
    replay.end()
    array[0] = 7
    assert float(shared[0]) == 7
    assert offset(replay, doubled) == 0
    back = doubled.numpy()
    del doubled, shared
    assert replay.deactivate()[:2] == (1, 0)
    assert back.tolist() == [2 * i for i in range(16)]
