"""olla.pool: an ordinary training loop at planned addresses, without capture. Importing this does not import torch."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from olla.base.process import ProcessPeak
from olla.errors import ReplayError
from olla.layout import requests

if TYPE_CHECKING:
    import torch

    from olla.pytorch.memory.replay import Replay

_DEVIATION = 0.01  # of the bytes of an iteration: with more of them missed no plan fits it


@dataclass(frozen=True, kw_only=True)
class PoolReport:
    """Memory of a pool.

    Attributes:
        state: ``"recording"``, ``"planned"``, or ``"off"`` where there is no planned memory.
        num_iterations: ended by ``step()``.
        num_planned: of these, how many ran while there was a plan.
        num_plans: plans made or loaded so far: one for each kind of iteration, more where one had to be planned again.
        arena_bytes: size of the arena that all plans share; 0 without one.
        process_peak_before_bytes: the most that the process had resident until the arena was taken, recorded iterations
            included; None without an arena, and where the system does not say.
        process_peak_bytes: the most since then, all else in the process included; None where the system cannot reset
            its count, as only Linux can.
        load_bytes: most bytes of it in use at once by plan. A pool keeps the order of the loop, so an ordinary loop has
            as much of these in use, and no arena can be smaller.
        requested_bytes: of all requests in planned iterations.
        served_bytes: of these, at their planned addresses.
        num_misses: requests that were to have a planned address and got another.
        missed_bytes: of these.
        note: what a reader should know besides; empty if nothing.
    """

    state: str
    num_iterations: int
    num_planned: int
    num_plans: int
    arena_bytes: int
    load_bytes: int
    requested_bytes: int
    served_bytes: int
    num_misses: int
    missed_bytes: int
    note: str
    process_peak_before_bytes: int | None = None
    process_peak_bytes: int | None = None

    @property
    def served(self) -> float:
        """Share of the requested bytes at their planned addresses; 0.0 before the first planned iteration."""
        return self.served_bytes / self.requested_bytes if self.requested_bytes else 0.0

    def __str__(self) -> str:
        """Say it in two lines, and a third for the process where the system counts its memory."""
        from olla.base import human_bytes

        lines = [
            f"pool {self.state}: {self.num_iterations} iterations, {self.num_planned} planned, {self.num_plans} plans",
            f"arena {human_bytes(self.arena_bytes)}, load {human_bytes(self.load_bytes)}, "
            f"served as planned {self.served:.2%}, missed {human_bytes(self.missed_bytes)}",
        ]
        if self.process_peak_bytes is not None:
            before = human_bytes(self.process_peak_before_bytes or 0)
            lines.append(f"process: at most {human_bytes(self.process_peak_bytes)} resident with it, {before} before")
        return "\n".join([*lines, self.note]).strip()

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        from olla.base import human_bytes, notebook

        amounts = [("arena", self.arena_bytes), ("load", self.load_bytes)]
        picture = notebook.bars(amounts, "; ".join(f"{name} {human_bytes(n)}" for name, n in amounts))
        rows = [
            ("iterations", f"{self.num_iterations:,}, {self.num_planned:,} planned"),
            ("plans", f"{self.num_plans:,}"),
        ]
        rows += [("served as planned", f"{self.served:.2%}"), ("missed", human_bytes(self.missed_bytes))]
        return notebook.shown(f"pool {self.state}", rows, picture, [self.note])


def pool(
    device: torch.device | str = "cpu",
    *,
    plan: str | os.PathLike[str] | None = None,
    time_limit: float = 5.0,
    seed: int = 0,
) -> Pool:
    """Plan the memory of an ordinary training loop, which stays as it is.

    Iterations are recorded. Once two make the same requests for memory, these are laid out, and from then on every
    request of such an iteration gets its planned address. Up to eight kinds of iterations, as training and evaluation
    or batches of several sizes, come in any order, each with its plan, in one arena; the requests tell the kind. What
    fits no plan goes to torch's own allocator and is counted. Compiled steps inside the loop keep their own memory:
    while one runs, the pool is suspended.

    Args:
        device: whose memory; ``"cuda"`` is built, but has not been measured yet.
        plan: a file of ``Pool.save``, or what ``olla layout`` made of one: nothing is recorded at first.
        time_limit: seconds for a layout.
        seed: for its random choices.

    Returns:
        A context manager. Call its ``step()`` at the end of every iteration.

    Raises:
        GraphError: the plan file cannot be read.
        PlanError: it is no plan of a trace.

    Source:
        SmartPool, arXiv 1903.06631: an iteration's requests repeat; one allocation serves them at planned addresses.

    Example:
        >>> import olla, torch
        >>> model = torch.nn.Linear(8, 4)
        >>> with olla.pool() as pool:
        ...     for _ in range(5):
        ...         model.zero_grad()
        ...         model(torch.ones(2, 8)).square().mean().backward()
        ...         pool.step()
        >>> report = pool.report()
        >>> report.num_planned > 0, report.num_misses
        (True, 0)
    """
    return Pool(device, None if plan is None else str(os.fspath(plan)), time_limit, seed)


class Pool:
    """The planned memory of a loop; made by olla.pool. It belongs to the thread that enters it.

    In a process that is forked from the loop, as workers of a DataLoader are, it is off.
    """

    def __init__(self, device: torch.device | str, plan: str | None, time_limit: float, seed: int) -> None:
        import torch

        from olla.pytorch.kinds import Kinds
        from olla.pytorch.memory.replay import alignment_of

        self._device = torch.device(device)
        alignment = alignment_of(self._device.type)
        self._shared = self._device.type != "cpu"  # autograd allocates on a thread of its own
        self._kinds = Kinds(alignment, time_limit, seed, None if plan is None else requests.load(plan, alignment))
        self._replay: Replay | None = None  # None: the loop runs on torch's own allocator
        self._thread: threading.Thread | None = None  # inside the with block
        self._process = os.getpid()
        self._num_iterations = self._num_planned = 0
        self._requested_bytes = self._served_bytes = self._num_misses = self._missed_bytes = 0
        self._note = ""
        self._taken_bytes = 0  # of the arena
        self._is_new = False  # no iteration has ended in it so far
        self._process_peak = ProcessPeak()

    def __enter__(self) -> Pool:
        """Begin the first iteration.

        Raises:
            ReplayError: the pool was entered already, or the thread is inside another one or a compiled step.
        """
        from olla.pytorch.memory.replay import load

        if self._thread is not None and self._process == os.getpid():
            raise ReplayError(f"the pool was entered already, by thread {self._thread.name!r}: leave it there first")
        replay = None
        try:
            replay = load(self._device)
        except ReplayError as error:
            self._say(f"The loop runs on torch's own allocator: {error}")
        else:
            with self._on_device():
                replay.open_loop(shared=self._shared)
            self._taken_bytes = 0
            self._kinds.restart()
        self._replay, self._process, self._thread = replay, os.getpid(), threading.current_thread()
        if replay is not None and self._kinds:
            self._plan(replay)
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        """End the last iteration; tensors in the arena stay valid.

        Raises:
            ReplayError: another thread entered the pool; it stays as it is.
        """
        replay = self._in_thread("left")
        self._thread = self._replay = None
        if replay is not None:
            replay.close_loop()

    def step(self) -> None:
        """End an iteration of the loop.

        Raises:
            ReplayError: outside the ``with`` block, or in another thread than that.
        """
        if self._thread is None:
            raise ReplayError("pool.step() was called outside the pool's with block")
        replay = self._in_thread("stepped")
        number = self._num_iterations
        self._num_iterations += 1
        if replay is None:
            return
        replay.end()
        try:
            self._end(replay, number)
        finally:  # an interrupted layout leaves the loop as it was
            self._begin()

    def report(self) -> PoolReport:
        """Return what the pool did so far."""
        is_off = self._replay is None or self._process != os.getpid()
        return PoolReport(
            state="off" if is_off else "planned" if self._kinds else "recording",
            num_iterations=self._num_iterations,
            num_planned=self._num_planned,
            num_plans=self._kinds.num_plans,
            arena_bytes=self._kinds.arena_bytes,
            load_bytes=self._kinds.load_bytes,
            requested_bytes=self._requested_bytes,
            served_bytes=self._served_bytes,
            num_misses=self._num_misses,
            missed_bytes=self._missed_bytes,
            note=self._note,
            process_peak_before_bytes=self._process_peak.before_bytes,
            process_peak_bytes=self._process_peak.since_bytes,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an iteration and its plan as a CSV file, for ``olla layout`` and for ``olla.pool(plan=...)``.

        Of several kinds of iterations it is the one that came most often.

        Raises:
            PlanError: the file cannot be written.
            ReplayError: no two iterations were the same so far.
        """
        placed = self._kinds.most_seen
        if placed is None:
            raise ReplayError("the pool has no plan yet: two iterations must make the same requests for memory")
        placed.save(path)

    def _in_thread(self, verb: str) -> Replay | None:
        """Return the planned memory, None where the pool is off, and refuse other threads."""
        if self._process != os.getpid():
            self._note = "The process was forked inside the pool: it runs on torch's own allocator."
            return None
        if self._thread is not None and self._thread is not threading.current_thread():
            raise ReplayError(
                f"the pool was entered by thread {self._thread.name!r} and is {verb} by "
                f"{threading.current_thread().name!r}: do both in one thread, or give each thread a pool of its own"
            )
        return self._replay

    def _say(self, note: str) -> None:
        self._note = note
        warnings.warn(note, stacklevel=3)

    def _begin(self) -> None:
        """Open the window of an iteration."""
        if self._replay is not None:
            self._replay.begin(self._num_iterations)

    def _on_device(self) -> AbstractContextManager[object]:
        """Make the device of the pool the current one: loops and arenas are of that."""
        import torch

        return torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()

    def _plan(self, replay: Replay) -> None:
        """Plan the iterations that follow, in one arena for all kinds."""
        from olla.pytorch.memory.arrange import trim

        size = self._kinds.arena_bytes
        is_new = size != self._taken_bytes
        with self._on_device():
            if is_new and self._device.type == "cpu":  # what was recorded, and the arena before, would lie beside it
                replay.unplan_loop()
                trim("cpu")
            # The loop has shown what it reserves without an arena: the first one must not add to that.
            replay.plan_loop(*self._kinds.table(), no_more=self._taken_bytes == 0 and self._num_iterations > 0)
        self._taken_bytes = size
        if is_new:
            self._is_new = True
            self._process_peak.begin()

    def _leave_arena(self, replay: Replay, error: Exception) -> None:
        """Go on without planned memory, because there was no room for the arena."""
        self._replay = None
        replay.close_loop()
        size = self._kinds.arena_bytes
        self._say(f"The loop runs on torch's own allocator: there is no room for an arena of {size} bytes: {error}")

    def _end(self, replay: Replay, number: int) -> None:
        """Count what was served, and plan an iteration that no plan fits once it repeats."""
        import torch

        from olla.pytorch.kinds import MAX_SEEN
        from olla.pytorch.memory.arrange import trim

        if self._is_new:  # gradients and the like, made before the arena, may have lived into this iteration
            self._is_new = False
            trim(self._device.type)
        try:
            counters = replay.loop_counters()
        except (ReplayError, MemoryError, torch.OutOfMemoryError) as error:
            return self._leave_arena(replay, error)
        kind, held = replay.last_iteration()
        fits = False
        if self._kinds:
            self._num_planned += 1
            self._requested_bytes += counters.requested_bytes
            self._served_bytes += counters.hit_bytes
            self._num_misses += counters.num_misses
            self._missed_bytes += counters.missed_bytes
            fits = counters.missed_bytes <= _DEVIATION * counters.requested_bytes
        num_bytes = counters.requested_bytes
        if self._kinds.fits(replay, number, kind, num_bytes) if fits else self._kinds.learn(replay, number, held):
            self._note = ""
            self._plan(replay)
        elif not self._kinds and self._kinds.num_seen == MAX_SEEN:
            self._note = f"No two of {MAX_SEEN} iterations made the same requests for memory."
