"""The kinds of iterations that a loop makes: each is laid out once its requests repeat, all of them in one arena."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from olla.layout import rounded_up
from olla.layout.requests import NEVER, Placed, Trace
from olla.pytorch.memory.replay import Iteration, Replay, Table

Int64 = npt.NDArray[np.int64]

MAX_SEEN = 20  # iterations that no plan fits; each is kept until another one makes the same requests
_MAX_KINDS = 8
_MAX_PLANS = 4  # of one kind: its places may have to give way to blocks that others leave behind
_SMALL = 0.0005  # of the bytes of an iteration
_MAX_UNSEEN = 1000  # iterations, then a kind is forgotten and its memory with it


@dataclass
class _Seen:
    """An iteration that no plan fits; its requests are in the recording under its number."""

    number: int
    held: Int64  # rows of offset, end, kind: blocks in the arena when its first request came


@dataclass
class _Kind:
    placed: Placed
    held_bytes: int  # of the arena, when its first request comes
    taken: Int64  # rows of begin and end: where other kinds' blocks were found so far
    last_seen: int
    num_seen: int = 0
    num_plans: int = 1

    @property
    def key(self) -> bytes:
        return self.placed.num_bytes.tobytes()


class Kinds:
    """The plans of a loop, and what was seen of it that no plan fits.

    Args:
        alignment: bytes; of every place.
        time_limit: seconds for a layout.
        seed: for its random choices.
        placed: the plan of a kind that is known from the start, if any.

    Attributes:
        num_plans: made or loaded so far.
    """

    def __init__(self, alignment: int, time_limit: float, seed: int, placed: Placed | None) -> None:
        self._alignment = alignment
        self._time_limit = time_limit
        self._seed = seed
        self._kinds = (
            [] if placed is None else [_Kind(placed, 0, np.zeros((0, 2), np.int64), 0)]
        )  # those with the largest load first
        self._seen: dict[bytes, _Seen] = {}
        self.num_plans = len(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)

    @property
    def num_seen(self) -> int:
        """How many iterations are kept that no plan fits."""
        return len(self._seen)

    @property
    def arena_bytes(self) -> int:
        """Size of the arena for all plans: that of the largest."""
        return max((kind.placed.arena_bytes for kind in self._kinds), default=0)

    @property
    def load_bytes(self) -> int:
        """Most bytes of it in use at once by plan."""
        return max((kind.placed.load_bytes for kind in self._kinds), default=0)

    @property
    def most_seen(self) -> Placed | None:
        """The plan of the kind that came most often."""
        return max(self._kinds, key=lambda kind: kind.num_seen).placed if self._kinds else None

    def table(self) -> tuple[Table, Int64]:
        """Return all plans, one as one op, and the bytes that each expects in use when its iteration begins."""
        placed = [kind.placed for kind in self._kinds]
        op_offset = np.cumsum([0, *(len(p.num_bytes) for p in placed)], dtype=np.int64)
        sizes, offsets = (np.concatenate(c) for c in ([p.num_bytes for p in placed], [p.offsets for p in placed]))
        held = np.array([kind.held_bytes for kind in self._kinds], dtype=np.int64)
        return Table(self.arena_bytes, op_offset, sizes, offsets, self._alignment), held

    def restart(self) -> None:
        """Forget what was seen of a recording that has ended."""
        self._seen.clear()

    def fits(self, replay: Replay, number: int, kind: int) -> bool:
        """Take note of an iteration that went as planned for a kind; its requests are not needed.

        Returns:
            Whether kinds were forgotten that have not come for long.
        """
        replay.forget(number)
        if kind >= 0:
            found = self._kinds[kind]
            found.last_seen, found.num_seen = number, found.num_seen + 1
            if (before := self._seen.pop(found.key, None)) is not None:
                replay.forget(before.number)
        recent = [k for k in self._kinds if number - k.last_seen <= _MAX_UNSEEN]
        is_old = 0 < len(recent) < len(self._kinds)
        if is_old:
            self._kinds = recent
        return is_old

    def learn(self, replay: Replay, number: int, held: Int64) -> bool:
        """Take note of an iteration that no plan fits, and lay it out if an earlier one made the same requests.

        Args:
            replay: has recorded it.
            number: of the iteration.
            held: see _Seen.

        Returns:
            Whether there is a new plan.
        """
        now = replay.iteration(number)
        key = now.num_bytes.tobytes()
        kind = next((k for k in self._kinds if k.key == key), None)
        if not key or (kind is not None and kind.num_plans == _MAX_PLANS):
            replay.forget(number)
            return False
        before, self._seen[key] = self._seen.pop(key, None), _Seen(number, held)
        if before is None:
            if len(self._seen) > MAX_SEEN:
                replay.forget(self._seen.pop(next(iter(self._seen))).number)
            return False
        found = repeated(replay.iteration(before.number), now)
        replay.forget(before.number)
        if found is None:
            return False
        del self._seen[key]
        replay.forget(number)
        own = self._kinds.index(kind) if kind is not None else NEVER
        taken = np.concatenate([before.held, held])
        self._plan(found, taken[taken[:, 2] != own, :2], int((held[:, 1] - held[:, 0]).sum()), number, kind)
        return True

    def _plan(self, found: Trace, taken: Int64, held_bytes: int, number: int, kind: _Kind | None) -> None:
        kinds = [k for k in self._kinds if k is not kind]
        if len(kinds) == _MAX_KINDS:
            kinds.remove(min(kinds, key=lambda k: k.last_seen))
        taken = merged(taken if kind is None else np.concatenate([kind.taken, taken]), self._alignment)
        if kinds:
            found = _without_small(found)
        load = found.load_bytes(self._alignment) + int((taken[:, 1] - taken[:, 0]).sum())
        fixed = _answers(kinds, found.num_bytes, held_bytes, load)
        made = _Kind(
            found.place(self._alignment, self._time_limit, self._seed, taken, fixed), held_bytes, taken, number
        )
        if kind is not None:
            made.num_seen, made.num_plans = kind.num_seen, kind.num_plans + 1
        self.num_plans += 1
        self._kinds = sorted([*kinds, made], key=lambda k: -k.placed.load_bytes)


def _answers(kinds: list[_Kind], num_bytes: Int64, held_bytes: int, load_bytes: int) -> Int64:
    """Return where the other kinds answer the first requests of a new one, for as long as they begin alike.

    It is to have the same places there, and then finds the others free. See Replay.plan_loop for who answers.

    Returns:
        int64[m], bytes; -1 where the new kind answers itself.
    """
    offsets = np.full(len(num_bytes), -1, dtype=np.int64)
    ahead = [k for k in kinds if k.placed.load_bytes >= load_bytes]
    first = [k for k in ahead if k.held_bytes == held_bytes][:1]
    done = 0
    for k in [*first, *ahead] if first else []:
        n = min(len(num_bytes), len(k.placed.num_bytes))
        alike = int(np.argmin(np.append(k.placed.num_bytes[:n] == num_bytes[:n], False)))
        if alike > done:
            offsets[done:alike] = k.placed.offsets[done:alike]
            done = alike
    return offsets


def repeated(before: Iteration, after: Iteration) -> Trace | None:
    """Return the requests of two iterations of a loop if these are the same, and freed inside them alike.

    Args:
        before: may be any number of iterations earlier.
        after: the one that ended last.

    Complexity: O(requests).
    """
    m = len(before.num_bytes)
    if m == 0 or not np.array_equal(before.num_bytes, after.num_bytes):
        return None
    inside = before.freed_inside
    if not np.array_equal(inside, after.freed_inside):
        return None
    # What iterations between the two freed was alive to the end of the first, and is gone when the second begins.
    crossing = np.where(before.freed_at < 0, NEVER, m + np.maximum(before.freed_at - after.start, 0))
    within = np.maximum(before.freed_at - before.start, after.freed_at - after.start)
    return Trace(after.num_bytes, np.where(inside, within, crossing))


def _without_small(found: Trace) -> Trace:
    """Leave the smallest blocks that outlive their iteration to the default allocator: a loss of four bytes, kept until
    the next one, would be in the way of large blocks of other kinds."""
    outlives = np.flatnonzero(found.planned & (found.freed_at >= found.num_requests))
    by_size = outlives[np.argsort(found.num_bytes[outlives], kind="stable")]
    small = by_size[np.cumsum(found.num_bytes[by_size]) <= _SMALL * found.num_bytes.sum()]
    freed_at = found.freed_at.copy()
    freed_at[small] = NEVER
    return Trace(found.num_bytes, freed_at)


def merged(intervals: Int64, alignment: int) -> Int64:
    """Return the union of half-open intervals, ends rounded up to the alignment: disjoint rows from low to high.

    Example:
        >>> merged(np.array([[128, 200], [0, 70], [64, 128]]), 64).tolist()
        [[0, 256]]
    """
    union: list[list[int]] = []
    for begin, end in sorted((b, rounded_up(e, alignment)) for b, e in intervals.tolist()):
        if union and begin <= union[-1][1]:
            union[-1][1] = max(union[-1][1], end)
        else:
            union.append([begin, end])
    return np.array(union, dtype=np.int64).reshape(-1, 2)
