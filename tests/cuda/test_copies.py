"""Copies of swaps beside the ops of a step: each wait is needed, and with all of them the numbers are right."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from olla.pytorch.memory.copies import Copies, HostMemory  # noqa: E402
from tests.cuda.standin import Standin  # noqa: E402
from tests.pytorch.memory.test_copies import (  # noqa: E402
    VIEWS,
    require_the_same_view,
    require_the_size_of_the_capture,
)

SIZE = 4 << 20
SCHEDULES = ("late", "early", *(f"random:{seed}" for seed in range(4)))


def swapped_twice() -> tuple[list[int], list[int]]:
    """Swap two values through one place of the host, into used memory; return the first and last bytes that came."""
    device = torch.device("cuda")
    copies = Copies([SIZE, SIZE], [0, 0], [-1, 0], HostMemory("cuda"), SIZE, device)
    first, second = (torch.zeros(SIZE, dtype=torch.uint8, device=device) for _ in range(2))
    torch.cuda.synchronize()
    copies.begin()
    first.fill_(1)
    second.fill_(2)
    copies.out(0, first)
    copies.wait(0)
    first.fill_(9)  # what was swapped out is written again
    used = torch.full((SIZE,), 7, dtype=torch.uint8, device=device)
    place = used.data_ptr()
    del used
    back = copies.back(0)
    assert back.data_ptr() == place
    copies.out(1, second)  # into the place that the copy back still reads
    copies.wait(1)
    second.fill_(9)
    copies.wait(0)
    came = [back.clone()]
    back = copies.back(1)
    copies.wait(1)
    came.append(back.clone())
    copies.end()
    got = [int(value.cpu()[0]) for value in came]
    return got, [int(value.cpu()[-1]) for value in came]


def test_what_comes_back_is_what_went_out(device: torch.device) -> None:
    assert swapped_twice() == ([1, 2], [1, 2])


@pytest.mark.parametrize("kind", VIEWS)
def test_views_are_the_same_in_the_memory_that_comes_back(device: torch.device, kind: str) -> None:
    value = VIEWS[kind]
    memory = torch.empty(value.untyped_storage().nbytes(), dtype=torch.uint8).set_(value.untyped_storage()).to(device)
    there = torch.empty(0, dtype=value.dtype, device=device)
    there.set_(memory.untyped_storage(), value.storage_offset(), value.shape, value.stride())
    there = torch._conj(there) if value.is_conj() else there
    require_the_same_view(torch._neg_view(there) if value.is_neg() else there)


def test_a_tensor_of_another_size_than_captured_is_refused(device: torch.device) -> None:
    require_the_size_of_the_capture(device)


@pytest.mark.parametrize("left_out", ["value is there", "memory is free", "place is free", "copy is over"])
def test_every_wait_is_needed(faults: Standin, monkeypatch: pytest.MonkeyPatch, left_out: str) -> None:
    wait_stream, wait_event = torch.cuda.Stream.wait_stream, torch.cuda.Stream.wait_event
    sides: list[torch.cuda.Stream] = []  # in the order of their first use: to the host, to the device

    def on_stream(self: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        if self not in sides:
            sides.append(self)
        if left_out != ("value is there" if self == sides[0] else "memory is free"):
            wait_stream(self, other)

    def on_event(self: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        if left_out != ("place is free" if self in sides else "copy is over"):
            wait_event(self, event)

    monkeypatch.setattr(torch.cuda.Stream, "wait_stream", on_stream)
    monkeypatch.setattr(torch.cuda.Stream, "wait_event", on_event)
    results = []
    for schedule in SCHEDULES:
        sides.clear()
        faults.schedule(schedule)
        results.append(swapped_twice())
        faults.schedule("now")
    assert any(result != ([1, 2], [1, 2]) for result in results)


def test_an_abandoned_step_has_no_copy_left(faults: Standin) -> None:
    host = HostMemory("cuda")
    copies = Copies([SIZE], [0], [-1], host, SIZE, torch.device("cuda"))
    faults.schedule("late")
    copies.begin()
    copies.out(0, torch.full((SIZE,), 3, dtype=torch.uint8, device="cuda"))
    copies.abandon()
    assert bool(host.take(SIZE).eq(3).all())
    faults.schedule("now")


def copied_out(faults: Standin) -> tuple[HostMemory, Copies]:
    """Return host memory that holds threes, from which a copy back takes its time."""
    host = HostMemory("cuda")
    copies = Copies([SIZE], [0], [-1], host, SIZE, torch.device("cuda"))
    copies.begin()
    copies.out(0, torch.full((SIZE,), 3, dtype=torch.uint8, device="cuda"))
    copies.wait(0)
    torch.cuda.synchronize()
    faults.schedule("late")
    return host, copies


def test_host_memory_goes_once_no_copy_reads_it(faults: Standin) -> None:
    host, copies = copied_out(faults)
    back = copies.back(0)
    copies.wait(0)
    copies.end()
    memory = host.take(SIZE)
    host.release()
    memory.fill_(9)  # whose it is next
    assert bool(back.cpu().eq(3).all())
    faults.schedule("now")


@pytest.mark.parametrize("captured", [False, True])
def test_host_memory_that_nobody_has_goes_once_no_copy_reads_it(faults: Standin, captured: bool) -> None:
    """The collector may take it at any time, in the middle of a capture too, which allows no wait."""
    host, copies = copied_out(faults)
    back = copies.back(0)
    copies.wait(0)
    copies.end()
    memory = host.take(SIZE)
    if captured:
        graph, kept = torch.cuda.CUDAGraph(), torch.zeros(4, device="cuda")
        torch.cuda.synchronize()
        back = copies.back(0)
        copies.wait(0)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            kept += 1
            del host, copies
        graph.replay()
        assert bool(kept.cpu().eq(1).all())
        assert memory.is_pinned()
        HostMemory("cuda").take(SIZE)
    else:
        del host, copies
    assert not memory.is_pinned()
    memory.fill_(9)  # whose it is next
    assert bool(back.cpu().eq(3).all())
    faults.schedule("now")
