"""Simulator of torch's CUDA caching allocator: the memory it reserves for an ordinary training loop.

The allocator takes segments from the driver, splits blocks off them, and keeps the segments while the loop runs.
Reserved memory exceeds the peak of allocated memory: by free blocks too small for the next request (fragmentation), and
by the rounding of segments.

Source: torch's `c10/core/AllocatorConfig.h` (sizes) and the documentation of `torch.cuda.memory`, with the settings it
has without `PYTORCH_ALLOC_CONF`.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from olla.graph import Graph

# The first five are torch's.
_ROUND = 512  # block sizes are multiples of it
_SMALL = 1 << 20  # up to here requests share small segments; a large block is split if more than this remains
_SMALL_SEGMENT, _LARGE_SEGMENT = 2 << 20, 20 << 20
_OWN_SEGMENT = 10 << 20  # from here on a request that no free block fits gets a segment of its own size,
_ROUND_SEGMENT = 2 << 20  # rounded up
_ITERATIONS = 3  # the first allocates the optimizer's state, so the second fragments otherwise; the third adds nothing
_NUMBER_BYTES = 8  # learning rates and step counts, which torch keeps on the CPU

Request = tuple[int, int]  # a tensor's number and its bytes; -1 bytes free it


def most_bytes(requests: Iterable[Request]) -> int:
    """Return the most bytes that requests have at once.

    Example:
        >>> most_bytes([(0, 10), (1, 20), (0, -1), (2, 5)])
        30
    """
    most = now = 0
    sizes: dict[int, int] = {}
    for tensor, num_bytes in requests:
        if num_bytes < 0:
            now -= sizes.pop(tensor)
        else:
            sizes[tensor] = num_bytes
            now += num_bytes
        most = max(most, now)
    return most


@dataclass(eq=False)
class _Block:
    address: int
    size: int
    is_small: bool
    is_free: bool = False
    before: _Block | None = None  # in the same segment
    behind: _Block | None = None


@dataclass
class CachingAllocator:
    """Torch's allocator of one device and one stream.

    Attributes:
        allocated_bytes: of the blocks in use.
        most_allocated_bytes: at once so far.
        reserved_bytes: of all segments.

    Complexity: O(log blocks) comparisons for a request.

    Example:
        >>> allocator = CachingAllocator()
        >>> allocator.allocate(0, 600), allocator.allocate(1, 3 << 20), allocator.free(0)
        (None, None, None)
        >>> allocator.allocated_bytes, allocator.most_allocated_bytes, allocator.reserved_bytes >> 20
        (3145728, 3146752, 22)
    """

    allocated_bytes: int = 0
    most_allocated_bytes: int = 0
    reserved_bytes: int = 0
    _used: dict[int, _Block] = field(default_factory=dict)
    _free: tuple[list[tuple[int, int]], list[tuple[int, int]]] = field(default_factory=lambda: ([], []))
    _at: dict[int, _Block] = field(default_factory=dict)  # free blocks by address

    def allocate(self, tensor: int, num_bytes: int) -> None:
        """Serve a request from the smallest free block that holds it, or from a new segment; none for no bytes."""
        if num_bytes <= 0:
            return
        size = _up(num_bytes, _ROUND)
        is_small = size <= _SMALL
        free = self._free[is_small]
        k = bisect.bisect_left(free, (size, 0))
        if k < len(free):
            block = self._at.pop(free.pop(k)[1])
            block.is_free = False
        else:
            block = _Block(self.reserved_bytes, _segment_bytes(size), is_small)  # behind all others
            self.reserved_bytes += block.size
        remaining = block.size - size
        if remaining >= (_ROUND if is_small else _SMALL + 1):
            rest = _Block(block.address + size, remaining, is_small, before=block, behind=block.behind)
            if rest.behind is not None:
                rest.behind.before = rest
            block.size, block.behind = size, rest
            self._put(rest)
        self._used[tensor] = block
        self.allocated_bytes += block.size
        self.most_allocated_bytes = max(self.most_allocated_bytes, self.allocated_bytes)

    def free(self, tensor: int) -> None:
        """Free the block of a tensor, if it has one, and join it with free ones beside it."""
        block = self._used.pop(tensor, None)
        if block is None:
            return
        self.allocated_bytes -= block.size
        if block.before is not None and block.before.is_free:
            first = block.before
            self._take(first)
            block = _join(first, block)
        if block.behind is not None and block.behind.is_free:
            self._take(block.behind)
            block = _join(block, block.behind)
        self._put(block)

    def serve(self, requests: Iterable[Request]) -> None:
        """Allocate and free in turn."""
        for tensor, num_bytes in requests:
            if num_bytes < 0:
                self.free(tensor)
            else:
                self.allocate(tensor, num_bytes)

    def _put(self, block: _Block) -> None:
        block.is_free = True
        bisect.insort(self._free[block.is_small], (block.size, block.address))
        self._at[block.address] = block

    def _take(self, block: _Block) -> None:
        block.is_free = False
        free = self._free[block.is_small]
        del free[bisect.bisect_left(free, (block.size, block.address))]
        del self._at[block.address]


def _join(first: _Block, second: _Block) -> _Block:
    first.size += second.size
    first.behind = second.behind
    if first.behind is not None:
        first.behind.before = first
    return first


def _up(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


def _segment_bytes(size: int) -> int:
    if size <= _SMALL:
        return _SMALL_SEGMENT
    return _LARGE_SEGMENT if size < _OWN_SEGMENT else _up(size, _ROUND_SEGMENT)


def allocator_of_loop(graph: Graph, kept: Iterable[int], update: Iterable[Request] | None) -> CachingAllocator:
    """Run the requests of an ordinary loop through torch's allocator, and return it.

    Parameters and data are allocated first. In each iteration tensors are freed after their last use, kept ones at the
    next `zero_grad`; the first optimizer step allocates the state.

    Args:
        graph: the captured step, in program order.
        kept: tensors that live until the next `zero_grad`: gradients and outputs.
        update: requests of the optimizer's step, of tensors counted from 0; None: its ops as they were captured.

    Example:
        >>> import olla
        >>> builder = olla.Graph.builder("step")
        >>> x, loss = builder.tensor(3 << 20), builder.tensor(4)
        >>> _ = builder.op("forward", writes=[x]), builder.op("loss", reads=[x], writes=[loss])
        >>> found = allocator_of_loop(builder.build(), kept=[1], update=None)
        >>> found.most_allocated_bytes, found.reserved_bytes >> 20
        (3146240, 22)
    """
    sizes = graph.tensor_bytes.tolist()
    held = set(kept)
    ops = list(_requests(graph, held, with_updates=update is None))
    step = [(graph.num_tensors + tensor, num_bytes) for tensor, num_bytes in update or ()]
    given = np.flatnonzero(graph.writer < 0).tolist()
    is_state = {t for t in given if graph.tensor_kinds[t] == "optimizer_state"}
    allocator = CachingAllocator()
    allocator.serve((t, sizes[t]) for t in given if t not in is_state and sizes[t] > _NUMBER_BYTES)
    for i in range(_ITERATIONS):
        allocator.serve((t, -1) for t in held)
        allocator.serve(request for is_update, request in ops if not is_update)
        if i == 0:
            allocator.serve((t, sizes[t]) for t in given if t in is_state and sizes[t] > _NUMBER_BYTES)
        allocator.serve(itertools.chain((request for is_update, request in ops if is_update), step))
    return allocator


def _requests(graph: Graph, held: set[int], *, with_updates: bool) -> Iterable[tuple[bool, Request]]:
    """Yield (op is an update, request) in program order."""
    sizes, workspaces = graph.tensor_bytes.tolist(), graph.workspace_bytes.tolist()
    last = np.full(graph.num_tensors, -1)
    for lists in (graph.writes, graph.reads, graph.mutates):
        np.maximum.at(last, lists.item, lists.owner)
    mine = (graph.writer >= 0) & ~np.isin(np.arange(graph.num_tensors), list(held))
    dying: list[list[int]] = [[] for _ in range(graph.num_ops)]
    for t in np.flatnonzero(mine).tolist():
        dying[last[t]].append(t)
    workspace = -1  # no tensor
    for v in range(graph.num_ops):
        is_update = graph.op_kinds[v] == "update"
        if is_update and not with_updates:
            continue
        for t in graph.writes.of(v):
            yield is_update, (int(t), sizes[int(t)])
        if workspaces[v]:
            yield from ((is_update, (workspace, num_bytes)) for num_bytes in (workspaces[v], -1))
        yield from ((is_update, (t, -1)) for t in dying[v])
