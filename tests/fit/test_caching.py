"""The rules of torch's allocator: what a few requests reserve, and what holds for all of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import olla
from olla.fit.caching import CachingAllocator, allocator_of_loop, most_bytes
from olla.fit.eager import kept_tensors

MIB = 1 << 20
SIZES = st.one_of(st.integers(1, 2 * MIB), st.integers(1, 40 * MIB))


@pytest.mark.parametrize(
    ("requests", "allocated", "reserved"),
    [
        ([(0, 1)], 512, 2 * MIB),  # a small segment
        ([(0, MIB), (1, MIB), (2, 1)], 2 * MIB + 512, 4 * MIB),
        ([(0, MIB + 1)], MIB + 512, 20 * MIB),  # a large one, which the next one fits in
        ([(0, 9 * MIB), (1, 9 * MIB)], 18 * MIB, 20 * MIB),
        ([(0, 10 * MIB), (1, 9 * MIB)], 19 * MIB, 30 * MIB),  # 10 MiB have a segment of their own
        ([(0, 9 * MIB), (1, 10 * MIB)], 20 * MIB, 20 * MIB),  # unless there is one
        ([(0, 11 * MIB - 512)], 11 * MIB - 512, 12 * MIB),
        ([(0, 11 * MIB)], 12 * MIB, 12 * MIB),  # too little is left to be cut off
        ([(0, 11 * MIB), (0, -1), (1, 10 * MIB)], 12 * MIB, 12 * MIB),
        ([(0, 11 * MIB), (0, -1), (1, 13 * MIB)], 14 * MIB, 26 * MIB),
        ([(0, 0), (0, -1)], 0, 0),
    ],
)
def test_segments_are_those_of_torch(requests: list[tuple[int, int]], allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.serve(requests)
    assert allocator.most_allocated_bytes == allocated
    assert allocator.reserved_bytes == reserved


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 12), SIZES), max_size=80))
def test_what_is_in_use_is_reserved_and_free_neighbours_are_one(requests: list[tuple[int, int]]) -> None:
    allocator = CachingAllocator()
    used: dict[int, int] = {}
    for tensor, size in requests:  # one that is in use is freed, which makes room for the next
        if used.pop(tensor, None) is not None:
            allocator.free(tensor)
        else:
            used[tensor] = size
            allocator.allocate(tensor, size)
        assert sum(used.values()) <= allocator.allocated_bytes <= allocator.reserved_bytes
    peak = allocator.reserved_bytes
    for tensor in used:
        allocator.free(tensor)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, peak)
    segments = [size for free in allocator._free for size, _ in free]
    assert sum(segments) == peak
    assert all(size % (2 * MIB) == 0 for size in segments)


def test_a_loop_reserves_for_state_gradients_and_data() -> None:
    builder = olla.Graph.builder("one layer")
    weight, state = builder.tensor(30 * MIB, kind="parameter"), builder.tensor(30 * MIB, kind="optimizer_state")
    hidden, gradient = builder.tensor(50 * MIB), builder.tensor(30 * MIB)
    builder.op("forward", reads=[weight], writes=[hidden])
    builder.op("backward", reads=[hidden], writes=[gradient])
    builder.op("update", reads=[gradient], mutates=[weight, state], kind="update")
    graph = builder.build()
    kept = kept_tensors(graph).tolist()
    assert kept == [3]
    one_by_one = allocator_of_loop(graph, kept, update=None)
    # The state is made in the block of what is hidden, which the second iteration has to take anew.
    assert one_by_one.most_allocated_bytes == (30 + 30 + 50 + 30) * MIB
    assert one_by_one.reserved_bytes == (30 + 30 + 50 + 50) * MIB
    temporary = [(0, 90 * MIB), (0, -1)]
    # What the update takes at once is free when the second iteration comes.
    assert allocator_of_loop(graph, kept, temporary).reserved_bytes == (30 + 50 + 30 + 90) * MIB
    assert most_bytes(temporary) == 90 * MIB
