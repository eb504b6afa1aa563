"""Answer every allocation of an op with its planned address: windows, recordings, tables."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from olla.errors import ReplayError
from olla.pytorch.memory.extension import load_module

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


def alignment_of(device_type: str) -> int:
    """Return the alignment of memory in bytes: torch's allocators for accelerators align to 512."""
    return 64 if device_type == "cpu" else 512


class Allocations(NamedTuple):
    """Every allocation made inside a window, in the order of the requests. Requests of no bytes do not count.

    Attributes:
        op: int32[m], in whose window it was made.
        index: int32[m], it was the op's request of this number.
        num_bytes: int64[m].
        freed_in: int32[m], the op that ran, or had run last, when it was freed; -1: alive when the recording stopped.
        freed_at: int64[m], how many requests had been made when it was freed; -1: alive when the recording stopped.
        address: int64[m], of its first byte; 0 where nothing tells when it is freed.
    """

    op: Int32
    index: Int32  # type: ignore[assignment]  # hides tuple.index
    num_bytes: Int64
    freed_in: Int32
    freed_at: Int64
    address: Int64


class Table(NamedTuple):
    """Planned offsets of the requests of all ops. Those of op v are op_offset[v] to op_offset[v + 1] - 1.

    Attributes:
        arena_bytes: size of the arena.
        op_offset: int64[num_ops + 1], rising from 0 to m.
        num_bytes: int64[m], size of each request, at least 1.
        offsets: int64[m], its first byte in the arena; -1: by plan, the default allocator answers.
        alignment: bytes; every offset is a multiple of it, and Counters count sizes rounded up to it.
    """

    arena_bytes: int
    op_offset: Int64
    num_bytes: Int64
    offsets: Int64
    alignment: int = 64


class Miss(NamedTuple):
    """A request that did not go to its planned address.

    Attributes:
        op: in whose window it was made.
        index: it was the op's request of this number.
        num_bytes: its size.
        reason: ``"size"``: the op has no such request left, ``"unplanned"``: it has none at all left, ``"occupied"``:
            an earlier tensor still overlaps the place, ``"stream"`` (CUDA): made on another stream than the table's.
    """

    op: int
    index: int  # type: ignore[assignment]  # hides tuple.index
    num_bytes: int
    reason: str


class Counters(NamedTuple):
    """What happened to the requests while a table was active.

    Attributes:
        num_hits: requests answered from the arena.
        num_misses: requests that the default allocator had to answer instead.
        missed_bytes: their sum.
        peak_bytes: most arena bytes in use at once, every size rounded up to the table's alignment.
        high_water_bytes: the largest end of a block in the arena, rounded likewise.
        misses: the first thousand missed requests.
        requested_bytes: sum of all requests in windows.
        hit_bytes: sum of those answered from the arena.
        total_peak_bytes: of a step: most bytes in use at once, in the arena and of what was planned outside of it.
        given_bytes: of a step on a GPU: what its thread asked the default allocator for, in windows and between them.
    """

    num_hits: int
    num_misses: int
    missed_bytes: int
    peak_bytes: int
    high_water_bytes: int
    misses: list[Miss]
    requested_bytes: int
    hit_bytes: int
    total_peak_bytes: int
    given_bytes: int


class Iteration(NamedTuple):
    """Requests of one iteration of a loop, and when they were freed so far.

    Attributes:
        start: how many requests the loop had made before it.
        num_bytes: int64[m].
        freed_inside: bool[m], whether the block was freed before the iteration ended.
        freed_at: int64[m], how many requests the loop had made when it was freed; -1: it is alive, or unknown.
    """

    start: int
    num_bytes: Int64
    freed_inside: npt.NDArray[np.bool_]
    freed_at: Int64


class Replay:
    """The planned memory of a device; see load().

    Recording, table and window belong to the thread that opens them: other threads, code outside the windows, and
    threads that an op starts inside its window keep using the default allocator. Tensors may outlive all of them and
    be freed anywhere.

    Attributes:
        begin: begin(op) opens the window of an op. ReplayError: one is open, no table is active, no such op.
        live: live(op) tells how many blocks that an op of the step asked for are in use.
        end: end() closes it; nothing happens where none is open. A pair of both takes about 0.1 microseconds.
        abandon: abandon() ends the window, the recording and the table that an interrupted step left open on this
            thread, if any.
        forget: forget(number) drops what an iteration asked for. ReplayError: this thread is in no loop.
        close_loop: close_loop() ends the loop of this thread, if it is in one, and what is open inside it. Tensors in
            the arena stay valid.
        unplan_loop: unplan_loop() lets the loop of this thread go on without a plan; its arena goes back when the last
            tensor in it is freed. ReplayError: this thread is in no loop.
        release: release() gives the arenas back that deactivate() kept.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self.begin, self.live, self.end = module.begin, module.live, module.end
        self.abandon, self.release = module.abandon, module.release
        self.forget, self.close_loop, self.unplan_loop = module.forget, module.close_loop, module.unplan_loop

    def stop_recording(self) -> Allocations:
        """End the recording, its table, and the window where one is open.

        Returns:
            Entry i is the i-th request.

        Raises:
            ReplayError: this thread does not record.
        """
        columns = np.frombuffer(self._module.stop_recording(), np.int64).reshape(-1, 6).T
        op, index, num_bytes, freed_in, *others = (np.ascontiguousarray(column) for column in columns)
        return Allocations(op.astype(np.int32), index.astype(np.int32), num_bytes, freed_in.astype(np.int32), *others)

    def activate(self, table: Table, *, recording: bool = False, load_bytes: int = -1) -> None:
        """Take the arena from the default allocator, and answer the requests of this thread's windows from it.

        A request takes the op's next planned slot of its size, so that one request more or less does not shift those
        after it.

        Args:
            table: copied.
            recording: whether every request is recorded too; then stop_recording() ends the table, and its arena goes
                back.
            load_bytes: most bytes of the arena that are in use at once by plan; -1: not known. A request that would
                exceed it waits for a moment: other threads may free late.

        Raises:
            ReplayError: the table does not hold together, this thread already records or has an active table, or a CPU
                has no room for the arena.
            torch.OutOfMemoryError: a GPU has no room for the arena.

        Complexity:
            O(m) here, O(log blocks in use) for each request and each tensor that is freed.
        """
        self._module.activate(table.arena_bytes, table.alignment, *_arrays(table), load_bytes, recording)

    def deactivate(self, *, keep_arena: bool = False) -> Counters:
        """End the table, and the window where one is open. Tensors in the arena stay readable.

        Args:
            keep_arena: hold the arena for the next table that fits in, until release(); fresh pages cost about as much
                time as writing them. Otherwise it goes back when the last tensor in it is freed.

        Raises:
            ReplayError: this thread has no active table.
        """
        return _counters(self._module.deactivate(keep_arena))

    def open_loop(self, *, shared: bool = False) -> None:
        """Begin a loop on this thread: window i is iteration i, numbers rise, and all their requests are recorded.

        A step that records or activates a table inside the loop suspends it until that ends.

        Args:
            shared: whether the windows of this thread are open for all threads that have none of their own: on a GPU,
                autograd allocates on a thread of its own.

        Raises:
            ReplayError: this thread is inside a loop or a step, or another thread shares its own.
        """
        self._module.open_loop(shared)

    def plan_loop(self, table: Table, held: Int64, least: Int64, *, no_more: bool = False) -> None:
        """Answer the iterations that follow from an arena. Call it between windows.

        Op v of the table is a kind of iteration. At its first request an iteration is taken for the kind whose `held`
        is nearest to the arena bytes in use; where it stops matching, for the first kind that matches all its requests
        so far. Where none does, a request of another size than the next planned one counts as one more than planned,
        unless it and the one before show where the sequence goes on. A request larger than its place, where sizes vary,
        misses that place alone.

        Args:
            table: copied.
            held: int64[num_ops], bytes of the arena in use when the first request of a kind comes.
            least: int64[m], bytes: the smallest size that takes the place of a request; from 1 to its size.
            no_more: whether a GPU continues without a plan if the arena would make torch's allocator reserve more than
                it has so far.

        An arena of another size than the present one is allocated at the first request that follows: what lives between
        two iterations, gradients in most loops, is freed by then. loop_counters() raises if there was no room for it.

        Raises:
            ReplayError: the table does not hold together, or this thread is in no loop.
        """
        held, least = map(np.ascontiguousarray, (held, least))
        self._module.plan_loop(table.arena_bytes, table.alignment, *_arrays(table), held, least, no_more)

    def loop_counters(self) -> Counters:
        """Return what happened in the loop since the last call.

        Raises:
            ReplayError: this thread is in no loop; or there was no room for the arena of plan_loop(), and the loop goes
                on without a plan.
            MemoryError: the latter, of a CPU's.
            torch.OutOfMemoryError: the latter, of a GPU's.
        """
        return _counters(self._module.loop_counters())

    def last_iteration(self) -> tuple[int, Int64]:
        """Return the kind that the iteration that ended last followed, and what was in the arena.

        Returns:
            The op of the table that it followed, -1 without a plan or a request; and int64[n, 3], rows of offset, end
            and kind of the blocks that were in the arena when its first request came.

        Raises:
            ReplayError: this thread is in no loop.
        """
        kind, rows = self._module.loop_row()
        return kind, np.frombuffer(rows, np.int64).reshape(-1, 3)

    def iteration(self, number: int) -> Iteration:
        """Return the requests of an iteration; empty if it was forgotten.

        Raises:
            ReplayError: this thread is in no loop.
        """
        rows = np.frombuffer(self._module.iteration(number), np.int64).reshape(-1, 4)
        made_at, num_bytes, freed_in, freed_at = (np.ascontiguousarray(column) for column in rows.T)
        return Iteration(int(made_at[0]) if len(rows) else 0, num_bytes, freed_in == number, freed_at)

    @property
    def arena(self) -> tuple[int, int]:
        """Address and bytes of this thread's arena; zeros without an active table."""
        address, num_bytes = self._module.arena()
        return int(address or 0), int(num_bytes)

    @property
    def held_bytes(self) -> int:
        """Bytes of all arenas of the process: active, kept, or waiting for their last tensor to be freed."""
        return int(self._module.held_bytes())


def _arrays(table: Table) -> tuple[Int64, Int64, Int64]:
    arrays = (table.op_offset, table.num_bytes, table.offsets)
    for name, array in zip(("op_offset", "num_bytes", "offsets"), arrays, strict=True):
        if array.dtype != np.int64 or array.ndim != 1 or not array.flags.c_contiguous:
            raise ReplayError(f"table: {name} is {array.dtype}{list(array.shape)}, expected a contiguous list of int64")
    return arrays


def _counters(row: tuple[Any, ...]) -> Counters:
    counts = Counters(*row)
    return counts._replace(misses=[Miss(*miss) for miss in counts.misses])


def planned_memory(device: torch.device, arena: bool | None) -> tuple[Replay | None, str]:
    """Return the planned memory of a device, or None and why a step has none.

    Args:
        device: of the step.
        arena: see olla.compile.
    """
    if arena is False:
        return None, "arena=False: torch's own allocator."
    if arena is None and device.type not in ("cpu", "cuda"):
        return None, f"Planned addresses are for CPUs and CUDA, not for {device.type}."
    try:
        return load(device), ""
    except ReplayError as error:
        note = f"The step runs in planned order on torch's own allocator, in no arena: {error}"
        warnings.warn(note, stacklevel=6)
        return None, note


def load(device: torch.device) -> Replay:
    """Return the planned memory of a device. Its allocator is compiled at first use and kept in the user's cache.

    Raises:
        ReplayError: the allocator cannot be compiled or loaded; the message says what to install.

    Example:
        >>> import numpy as np, torch
        >>> replay = load(torch.device("cpu"))
        >>> table = Table(128, np.array([0, 1]), np.array([64]), np.array([64]))
        >>> replay.activate(table)
        >>> replay.begin(0)
        >>> ones = torch.ones(16)
        >>> replay.end()
        >>> ones.data_ptr() - replay.arena[0]
        64
        >>> replay.deactivate().num_hits
        1
        >>> replay.activate(table, recording=True)
        >>> replay.begin(0)
        >>> ones = torch.ones(32)
        >>> replay.end()
        >>> replay.stop_recording().num_bytes.tolist()
        [128]
    """
    return Replay(load_module(device.type))
