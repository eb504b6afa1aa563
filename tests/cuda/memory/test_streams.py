"""Blocks of arenas that other streams use: what waits, for how long, and what a request costs meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

import olla  # noqa: E402
from olla.pytorch.memory.replay import Replay, Table  # noqa: E402
from tests.cuda.standin import Standin  # noqa: E402
from tests.cuda.test_allocator import FEW, SLOT, table  # noqa: E402
from tests.support.pytorch.windows import in_arena, offset, ones  # noqa: E402

LAUNCH_FAILURE = 719  # of CUDA's errors, the one of a kernel that went wrong


def slots(number: int) -> Table:
    return table([[(4 * FEW, SLOT * i) for i in range(number)]], SLOT * number)


def used_by(stream: torch.cuda.Stream, tensor: torch.Tensor, times: int = 1) -> None:
    """Let a stream read a tensor, and say so as often as asked for."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        tensor + 1
    for _ in range(times):
        tensor.record_stream(stream)


def prefetched(stream: Callable[[], torch.cuda.Stream]) -> float:
    """Train in a pool, with tensors recorded on a stream as prefetchers do it; return what was served as planned."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with olla.pool("cuda") as pool:
        for _ in range(8):
            x = torch.randn(128, 64, device="cuda")
            x.record_stream(stream())
            optimizer.zero_grad()
            hidden = model(x)
            hidden.record_stream(stream())
            hidden.square().mean().backward()
            optimizer.step()
            del x, hidden
            pool.step()
        report = pool.report()
    assert report.state == "planned"
    return float(report.served)


def test_the_own_stream_of_a_tensor_is_nothing_to_wait_for(device: torch.device) -> None:
    """Torch ignores it, too."""
    assert prefetched(torch.cuda.current_stream) == 1.0


def test_on_a_stream_beside_the_default_one_that_one_is_the_own(device: torch.device) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        assert prefetched(torch.cuda.current_stream) == 1.0


def test_a_stream_is_waited_for_once_however_often_it_is_recorded(faults: Standin, replay: Replay) -> None:
    replay.activate(slots(1))
    side = torch.cuda.Stream()
    [tensor] = ones(replay, 0, FEW)
    used_by(side, tensor)
    for _ in range(10):
        tensor.record_stream(side)
    del tensor
    side.synchronize()
    before = faults.num_queries()
    assert offset(replay, ones(replay, 0, FEW)[0]) == 0
    assert faults.num_queries() - before <= 2  # torch's own allocator may ask once, too
    replay.deactivate()


def test_events_are_used_again(faults: Standin, replay: Replay) -> None:
    replay.activate(slots(1))
    side = torch.cuda.Stream()
    counts = []
    for _ in range(6):
        [tensor] = ones(replay, 0, FEW)
        assert in_arena(replay, tensor)
        tensor.record_stream(side)
        before = faults.num_events()
        del tensor
        counts.append(faults.num_events() - before)
    assert sum(counts[1:]) == 0
    replay.deactivate()


@pytest.mark.parametrize("num_streams", [1, 4])
def test_a_request_asks_one_event_of_each_stream_however_many_blocks_wait(
    faults: Standin, replay: Replay, num_streams: int
) -> None:
    """Sharded parameters and prefetched batches are held by the hundred."""
    num_blocks = 400
    many = [(4 * FEW, SLOT * i) for i in range(num_blocks)]
    replay.activate(table([many, [(4 * FEW, SLOT * num_blocks)]], SLOT * (num_blocks + 1)))
    streams = [torch.cuda.Stream() for _ in range(num_streams)]
    held = ones(replay, 0, *[FEW] * num_blocks)
    faults.schedule("late")
    for i, tensor in enumerate(held):
        used_by(streams[i % num_streams], tensor)
    held.clear()
    del tensor
    before = faults.num_queries()
    assert in_arena(replay, ones(replay, 1, FEW)[0])
    assert faults.num_queries() - before <= num_streams * 2  # torch's own allocator, which fills it, may ask once more
    torch.cuda.synchronize()
    assert all(in_arena(replay, tensor) for tensor in ones(replay, 0, *[FEW] * num_blocks))
    replay.deactivate()
    faults.schedule("now")


def test_blocks_of_a_stream_that_is_done_do_not_wait_for_those_of_another(faults: Standin, replay: Replay) -> None:
    replay.activate(slots(2))
    slow, fast = torch.cuda.Stream(), torch.cuda.Stream()
    first, second = ones(replay, 0, FEW, FEW)
    faults.schedule("late")
    used_by(slow, first)
    used_by(fast, second)
    del first, second
    fast.synchronize()
    found = ones(replay, 0, FEW, FEW)
    assert [in_arena(replay, tensor) for tensor in found] == [False, True]
    replay.deactivate()
    faults.schedule("now")


def test_a_request_that_waits_for_its_place_sees_that_the_stream_is_done(faults: Standin, replay: Replay) -> None:
    """The host waits up to five milliseconds in a step; what another thread does meanwhile is seen."""
    replay.activate(slots(1))
    side = torch.cuda.Stream()
    [tensor] = ones(replay, 0, FEW)
    faults.schedule("late")
    used_by(side, tensor)
    del tensor

    def finish() -> None:
        time.sleep(0.001)
        side.synchronize()

    thread = threading.Thread(target=finish)
    thread.start()
    [tensor] = ones(replay, 0, FEW)
    thread.join()
    assert offset(replay, tensor) == 0
    replay.deactivate()
    faults.schedule("now")


@pytest.mark.parametrize("when", ["as it is freed", "while it is held"])
def test_an_error_of_the_device_reaches_python_as_an_error(faults: Standin, replay: Replay, when: str) -> None:
    """As with torch, whose deleters must not throw either: the process would end."""
    replay.activate(slots(2))
    side = torch.cuda.Stream()
    [tensor] = ones(replay, 0, FEW)
    faults.schedule("late")
    used_by(side, tensor)
    if when == "while it is held":
        del tensor
    faults.fail_events(LAUNCH_FAILURE)
    tensor = None
    replay.begin(0)
    with pytest.raises(RuntimeError, match="CUDA error"):
        torch.empty(FEW)
    replay.end()
    faults.fail_events(0)
    side.synchronize()
    assert offset(replay, ones(replay, 0, FEW)[0]) == 0
    replay.deactivate()
    faults.schedule("now")


def test_an_arena_goes_back_once_the_streams_that_used_it_are_done(faults: Standin, replay: Replay) -> None:
    """Nobody asks for memory after the last step: who gives it back asks the streams."""
    replay.activate(slots(1))
    side = torch.cuda.Stream()
    [tensor] = ones(replay, 0, FEW)
    faults.schedule("late")
    used_by(side, tensor)
    del tensor
    replay.deactivate()
    replay.release()
    assert replay.held_bytes == SLOT
    side.synchronize()
    replay.release()
    assert replay.held_bytes == 0
    faults.schedule("now")
