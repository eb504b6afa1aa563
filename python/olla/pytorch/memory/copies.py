"""Copies of tensors to host memory and back beside the ops of a step: two streams of a GPU, two threads of a CPU.

What a step calls is the same for both: `out` starts a copy to the host, `back` one to the device, `wait` makes the ops
that follow wait for the latest copy of a swap. The half for CUDA is built, not measured.
"""

from __future__ import annotations

import _thread
import atexit
import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from olla.errors import ReplayError

_TO_HOST, _TO_DEVICE = 0, 1  # the two queues; each copies in the order of the calls


class Outline(NamedTuple):
    """Where the elements of a tensor are in its storage.

    Example:
        >>> x = torch.arange(6).reshape(2, 3).t()
        >>> memory = torch.empty(48, dtype=torch.uint8).copy_(whole(x))
        >>> torch.equal(Outline.of(x).within(memory), x)
        True
    """

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, value: torch.Tensor) -> Outline:
        """Return that of a tensor."""
        offset, conj, neg = int(value.storage_offset()), value.is_conj(), value.is_neg()
        return cls(value.dtype, value.size(), value.stride(), offset, conj, neg)

    def within(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor of this outline in another storage, that of `memory`."""
        value = torch.empty(0, dtype=self.dtype, device=memory.device)
        value.set_(memory.untyped_storage(), self.offset, self.size, self.stride)
        if self.is_conj:
            value = value.conj()
        return torch._neg_view(value) if self.is_neg else value


def whole(value: torch.Tensor) -> torch.Tensor:
    """Return the storage of a tensor as uint8[num_bytes]; nothing is copied."""
    whole = torch.empty(0, dtype=torch.uint8, device=value.device)
    return whole.set_(value.untyped_storage())


class HostMemory:
    """Host memory of a compiled step, pinned where it serves a GPU; all captures share it, and it lasts between calls.

    Attributes:
        num_taken: how often it was reallocated; a CUDA graph that copies to it is valid for one allocation.
    """

    def __init__(self, device: str) -> None:
        self.num_taken = 0
        self._is_pinned = device == "cuda"
        self._memory: torch.Tensor | None = None
        self._unpin: weakref.finalize[..., HostMemory] | None = None
        self._devices: set[torch.device] = set()  # whose copies read or write it

    def serve(self, device: torch.device) -> None:
        """Note that a device copies to and from it."""
        self._devices.add(device)

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return uint8[n], n at least num_bytes; what was there before does not last.

        Raises:
            ReplayError: there is no memory, or the driver does not pin it.
        """
        if self._memory is None or len(self._memory) < num_bytes:
            self.release()
            _unpin_waiting()
            try:
                memory = torch.empty(num_bytes, dtype=torch.uint8)
            except RuntimeError as error:
                raise ReplayError(f"cannot allocate {num_bytes} bytes of host memory for swapping: {error}") from None
            if self._is_pinned:
                _pin(memory)
                self._unpin = weakref.finalize(self, _unpin, memory, self._devices)
                self._unpin.atexit = False
            self._memory = memory
            self.num_taken += 1
        return self._memory

    def release(self) -> None:
        """Give the memory back."""
        if self._unpin is not None:
            self._unpin()
        self._memory = self._unpin = None


def _pin(memory: torch.Tensor) -> None:
    """Pin memory to the byte: torch's own pinned memory takes the next power of two."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if code := int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
        raise ReplayError(f"cannot pin {memory.nbytes} bytes of host memory for swapping: CUDA error {code}")


_waiting: list[tuple[torch.Tensor, set[torch.device]]] = []  # released but still pinned: a capture was under way


def _unpin(memory: torch.Tensor, devices: set[torch.device]) -> None:
    """Unpin memory once no copy of the latest step uses it; during a capture nobody can wait for that: later."""
    _waiting.append((memory, devices))
    if not torch.cuda.is_current_stream_capturing():
        _unpin_waiting()


def _unpin_waiting() -> None:
    while _waiting:
        memory, devices = _waiting.pop()
        for device in devices:
            torch.cuda.synchronize(device)
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostUnregister(memory.data_ptr())


class _Copy:
    """A copy that is queued to a thread, and the signal that it is over. Without tensors nothing is copied.

    What threads share are queues in C and plain attributes: an interrupt that comes between two lines of a lock in
    Python, as conditions and futures have them, would leave it held for ever.
    """

    def __init__(self, tensors: list[torch.Tensor], after: _Copy | None = None) -> None:
        self._tensors, self._after = tensors, after
        self._error: BaseException | None = None
        self._is_over = False
        self._news: SimpleQueue[None] = SimpleQueue()

    def run(self) -> None:
        """Copy, and signal twice: the ops and the other thread may both wait."""
        try:
            if self._after is not None:
                self._after.wait()
            if self._tensors:
                self._tensors[0].copy_(self._tensors[1])
        except BaseException as error:
            self._error = error
        finally:
            self._after = None
            self._tensors.clear()  # nothing here may hold their memory once the copy counts as over
            self._is_over = True
            self._news.put(None)
            self._news.put(None)

    def wait(self) -> None:
        """Return once the copy is over. It may be called again after an interrupt: then no signal is needed."""
        if not self._is_over:
            self._news.get()
        if self._error is not None:
            raise self._error


def _serve(queue: SimpleQueue[_Copy | None]) -> None:
    while (copy := queue.get()) is not None:
        copy.run()
        del copy


def _end(queues: Sequence[SimpleQueue[_Copy | None]]) -> None:
    for queue in queues:
        queue.put(None)


class _Threads:
    """Two threads that copy within host memory.

    `copy` begins once what ran so far, the copy `after` and the copies before in the queue are over. `wait` lets what
    runs next come after a copy, and `drain` returns once all are over.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._queues: list[SimpleQueue[_Copy | None]] = [SimpleQueue() for _ in (_TO_HOST, _TO_DEVICE)]
        for queue in self._queues:
            _thread.start_new_thread(_serve, (queue,))
        weakref.finalize(self, _end, self._queues).atexit = False
        _running.add(self)

    def copy(self, queue: int, target: torch.Tensor, source: torch.Tensor, after: _Copy | None) -> _Copy:
        if self._process != os.getpid():
            self.__init__()  # type: ignore[misc]  # threads do not survive a fork
        copy = _Copy([target, source], after)
        self._queues[queue].put(copy)
        return copy

    def wait(self, copy: _Copy) -> None:
        copy.wait()

    def drain(self) -> None:
        if self._process == os.getpid():
            for queue in self._queues:
                last = _Copy([])
                queue.put(last)
                last.wait()


_running: weakref.WeakSet[_Threads] = weakref.WeakSet()


@atexit.register
def _drain_all() -> None:
    """Let no thread be in the middle of a copy when the interpreter goes."""
    for threads in list(_running):
        threads.drain()


class _Streams:
    """The same on two streams beside the current one."""

    def __init__(self, device: torch.device) -> None:
        self._streams = [torch.cuda.Stream(device) for _ in (_TO_HOST, _TO_DEVICE)]  # type: ignore[no-untyped-call]

    def copy(self, queue: int, target: torch.Tensor, source: torch.Tensor, after: torch.cuda.Event | None) -> Any:
        stream = self._streams[queue]
        stream.wait_stream(torch.cuda.current_stream())  # the value is there; who had the target's memory has finished
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return stream.record_event()

    def wait(self, copy: torch.cuda.Event) -> None:
        torch.cuda.current_stream().wait_event(copy)

    def drain(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            return  # nothing runs, and a wait would take the place of the error that ends the capture
        for stream in self._streams:
            stream.synchronize()


@dataclass(eq=False)
class Copies:
    """The copies of one step.

    Args:
        num_bytes: of what each swap copies.
        places: where it goes in host memory, the first byte.
        after: for each swap, the one whose copy back must be over before its place is written again; -1: none.
        host: the memory.
        host_bytes: of it that the step uses.
        device: where the step runs.

    Attributes:
        host_bytes, host: see above.
        stall_seconds: that the ops waited for copies in the latest step; on a GPU, where only streams wait, None.

    Example:
        >>> x = torch.arange(4.0)
        >>> copies = Copies([16], [0], [-1], HostMemory("cpu"), 16, torch.device("cpu"))
        >>> copies.begin()
        >>> copies.out(0, x)
        >>> copies.wait(0)
        >>> memory = copies.back(0)
        >>> copies.wait(0)
        >>> Outline.of(x).within(memory)
        tensor([0., 1., 2., 3.])
    """

    _num_bytes: Sequence[int]
    _places: Sequence[int]
    _after: Sequence[int]
    host: HostMemory
    host_bytes: int
    _device: torch.device
    stall_seconds: float | None = field(default=None, init=False)
    _latest: list[Any] = field(default_factory=list, init=False)
    _is_running: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.host.serve(self._device)
        self._queues: _Streams | _Threads = _Streams(self._device) if self._device.type == "cuda" else _Threads()

    def begin(self) -> None:
        """Get ready for a step."""
        self.abandon()
        self.host.take(self.host_bytes)
        self._latest = [None] * len(self._num_bytes)
        self._is_running = True
        self.stall_seconds = None if self._device.type == "cuda" else 0.0

    def out(self, swap: int, value: torch.Tensor) -> None:
        """Start to copy the storage of a tensor to the host; nobody changes it before `wait`."""
        source = whole(value)
        if len(source) != self._num_bytes[swap]:
            raise ReplayError(
                f"a tensor to be swapped has {len(source)} bytes where it had {self._num_bytes[swap]} when it was "
                "captured: compile with swap=False"
            )
        before = self._after[swap]
        after = self._latest[before] if before >= 0 else None
        self._latest[swap] = self._queues.copy(_TO_HOST, self._at_host(swap), source, after)

    def back(self, swap: int) -> torch.Tensor:
        """Return new device memory, uint8[num_bytes], and start copying back into it; the copy out is over by then."""
        target = torch.empty(self._num_bytes[swap], dtype=torch.uint8, device=self._device)
        self._latest[swap] = self._queues.copy(_TO_DEVICE, target, self._at_host(swap), None)
        return target

    def wait(self, swap: int) -> None:
        """Make the ops that follow wait for the latest copy of a swap."""
        start = time.perf_counter()
        self._queues.wait(self._latest[swap])
        if self.stall_seconds is not None:
            self.stall_seconds += time.perf_counter() - start

    def end(self) -> None:
        """Say that the step is over: every copy was waited for."""
        self._is_running = False

    def abandon(self) -> None:
        """Wait until no copy of an interrupted step, if there was one, is running: then its memory can be freed."""
        if self._is_running:
            self._queues.drain()
        self._is_running = False

    def _at_host(self, swap: int) -> torch.Tensor:
        first = self._places[swap]
        return self.host.take(self.host_bytes)[first : first + self._num_bytes[swap]]
