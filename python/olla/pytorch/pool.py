"""olla.pool: an ordinary training loop at planned addresses, without capture. Importing this does not import torch."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from olla import trace
from olla.errors import ReplayError
from olla.trace import NEVER, Placed, Trace

if TYPE_CHECKING:
    import torch

    from olla.pytorch.replay import Allocations, Counters, Replay

_ALIGNMENT = {"cpu": 64}  # bytes; torch's allocators for accelerators align to 512
_MAX_RECORDED = 20  # iterations without a repetition, then what was recorded is forgotten
_DEVIATION = 0.01  # of the bytes of an iteration: with more of them missed it is another one than planned
_MAX_DEVIATIONS = 2  # in a row, then the loop is recorded anew


@dataclass(frozen=True, kw_only=True)
class PoolReport:
    """Memory of a pool.

    Attributes:
        state: ``"recording"``, ``"planned"``, or ``"off"`` where there is no planned memory.
        num_iterations: ended by ``step()``.
        num_planned: of these, how many ran at planned addresses.
        num_plans: plans made or loaded so far.
        arena_bytes: size of the present plan's arena; 0 without one.
        load_bytes: most bytes of it in use at once by plan: no arena is smaller.
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

    @property
    def served(self) -> float:
        """Share of the requested bytes at their planned addresses; 0.0 before the first planned iteration."""
        return self.served_bytes / self.requested_bytes if self.requested_bytes else 0.0

    def __str__(self) -> str:
        """Say it in two lines."""
        from olla.report.text import human_bytes

        lines = [
            f"pool {self.state}: {self.num_iterations} iterations, {self.num_planned} planned, {self.num_plans} plans",
            f"arena {human_bytes(self.arena_bytes)}, load {human_bytes(self.load_bytes)}, "
            f"served as planned {self.served:.2%}, missed {human_bytes(self.missed_bytes)}",
        ]
        return "\n".join([*lines, self.note]).strip()


def pool(
    device: torch.device | str = "cpu",
    *,
    plan: str | os.PathLike[str] | None = None,
    time_limit: float = 5.0,
    seed: int = 0,
) -> Pool:
    """Plan the memory of an ordinary training loop, which stays as it is.

    Iterations are recorded until two in a row make the same requests for memory. These are laid out in one arena, and
    from then on every request gets its planned address. One that deviates goes to torch's own allocator and is
    counted; after two iterations in a row that deviate, the loop is recorded and planned anew.

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
    """The planned memory of a loop; made by olla.pool. It belongs to the thread that enters it."""

    def __init__(self, device: torch.device | str, plan: str | None, time_limit: float, seed: int) -> None:
        import torch

        self._device = torch.device(device)
        self._alignment = _ALIGNMENT.get(self._device.type, 512)
        self._shared = self._device.type != "cpu"  # autograd allocates on a thread of its own
        self._time_limit = time_limit
        self._seed = seed
        self._replay: Replay | None = None
        self._state = "off"
        self._placed: Placed | None = None if plan is None else trace.load(plan, self._alignment)
        self._trace: Trace | None = None
        self._num_plans = int(plan is not None)
        self._num_iterations = self._num_planned = self._num_recorded = self._num_deviations = 0
        self._requested_bytes = self._served_bytes = self._num_misses = self._missed_bytes = 0
        self._note = ""

    def __enter__(self) -> Pool:
        """Begin the first iteration.

        Raises:
            ReplayError: the thread is inside another pool or a compiled step.
        """
        from olla.pytorch.replay import load

        try:
            self._replay = load(self._device)
        except ReplayError as error:
            self._note = f"The loop runs on torch's own allocator: {error}"
            warnings.warn(self._note, stacklevel=2)
            return self
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        """End the last iteration; tensors in the arena stay valid."""
        if self._replay is None or self._state == "off":
            return
        if self._state == "planned":
            self._replay.deactivate()
        else:
            self._replay.stop_recording()
        self._replay.release()
        self._state = "off"

    def step(self) -> None:
        """End an iteration of the loop.

        Raises:
            ReplayError: outside the ``with`` block.
        """
        if self._replay is None and self._note:
            self._num_iterations += 1
            return
        if self._replay is None or self._state == "off":
            raise ReplayError("pool.step() was called outside the pool's with block")
        self._replay.end()
        self._num_iterations += 1
        if self._state == "planned":
            self._end_planned(self._replay)
        else:
            self._end_recorded(self._replay)
        self._begin()

    def report(self) -> PoolReport:
        """Return what the pool did so far."""
        return PoolReport(
            state=self._state,
            num_iterations=self._num_iterations,
            num_planned=self._num_planned,
            num_plans=self._num_plans,
            arena_bytes=self._placed.arena_bytes if self._placed else 0,
            load_bytes=self._placed.load_bytes if self._placed else 0,
            requested_bytes=self._requested_bytes,
            served_bytes=self._served_bytes,
            num_misses=self._num_misses,
            missed_bytes=self._missed_bytes,
            note=self._note,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the iteration and its plan as a CSV file, for ``olla layout`` and for ``olla.pool(plan=...)``.

        Raises:
            PlanError: the file cannot be written.
            ReplayError: no two iterations in a row were the same so far.
        """
        if self._placed is None:
            raise ReplayError(
                "the pool has no plan yet: two iterations in a row must make the same requests for memory"
            )
        self._placed.save(path)

    def _begin(self) -> None:
        """Open the window of an iteration."""
        from olla.pytorch.replay import Table

        replay = self._replay
        assert replay is not None
        if self._placed is None:
            if self._state != "recording":
                replay.start_recording(_MAX_RECORDED, shared=self._shared)
                self._state, self._num_recorded = "recording", 0
            replay.begin(self._num_recorded)
            return
        placed = self._placed
        op_offset = np.array([0, len(placed.num_bytes)], dtype=np.int64)
        table = Table(
            placed.arena_bytes, op_offset, placed.num_bytes, placed.offsets, self._alignment, in_sequence=True
        )
        replay.activate(table, shared=self._shared)
        self._state = "planned"
        replay.begin(0)

    def _end_recorded(self, replay: Replay) -> None:
        """Lay the iteration out if it was the same as the one before."""
        self._num_recorded += 1
        found = repeated(replay.recorded(), self._num_recorded)
        if found is not None:
            replay.stop_recording()
            self._placed = found.place(self._alignment, self._time_limit, self._seed)
            self._num_plans += 1
            self._note = ""
        elif self._num_recorded == _MAX_RECORDED:
            replay.stop_recording()
            self._state = "off"  # _begin starts anew
            self._note = f"No two of {_MAX_RECORDED} iterations in a row made the same requests for memory."

    def _end_planned(self, replay: Replay) -> None:
        counters: Counters = replay.deactivate(keep_arena=True)
        self._num_planned += 1
        self._requested_bytes += counters.requested_bytes
        self._served_bytes += counters.hit_bytes
        self._num_misses += counters.num_misses
        self._missed_bytes += counters.missed_bytes
        deviates = counters.missed_bytes > _DEVIATION * counters.requested_bytes
        self._num_deviations = self._num_deviations + 1 if deviates else 0
        if self._num_deviations == _MAX_DEVIATIONS:
            self._placed, self._num_deviations = None, 0
            replay.release()


def repeated(recorded: Allocations, num_iterations: int) -> Trace | None:
    """Return the requests of the last two iterations if these are the same.

    Args:
        recorded: iteration i in the window of op i.
        num_iterations: that have ended.

    Complexity: O(requests).
    """
    if num_iterations < 2:
        return None
    before, after = (np.flatnonzero(recorded.op == num_iterations - k) for k in (2, 1))
    if len(before) == 0 or not np.array_equal(recorded.num_bytes[before], recorded.num_bytes[after]):
        return None
    inside, inside_after = (recorded.freed_in[i] == recorded.op[i] for i in (before, after))
    if not np.array_equal(inside, inside_after):
        return None
    freed, freed_after = (recorded.freed_at[i] - i[0] for i in (before, after))
    freed[recorded.freed_at[before] < 0] = NEVER
    return Trace(recorded.num_bytes[after], np.where(inside, np.maximum(freed, freed_after), freed))
