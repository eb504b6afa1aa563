"""The kinds of iterations that a loop makes: each is laid out once its requests repeat, all of them in one arena.

Iterations on batches of several lengths are one kind: they make equally many requests, freed at the same points, of
different sizes. Their plan has room for the largest size seen of each request, and serves all smaller ones too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from olla.layout import rounded_up
from olla.layout.requests import NEVER, Placed, Trace
from olla.pytorch.memory.pattern import Pattern, repeated
from olla.pytorch.memory.replay import Int64, Iteration, Replay, Table

MAX_SEEN = 20  # iterations that no plan fits; each is kept until another one makes the same requests
_MAX_KINDS = 8
_MAX_PLANS = 4  # of one kind: blocks that other kinds leave alive may overlap its places
_SMALL = 0.0005  # of the bytes of an iteration
_MAX_UNSEEN = 1000  # iterations, then a kind is forgotten and its memory with it
_LARGE = 0.9  # of a kind's bytes: if none of _MAX_UNSEEN iterations asks for that much, the kind is shrunk
_MAX_GROWN = 4  # times that a kind is laid out at once for a longer iteration; after that it waits for 2, 4, 8, ...


@dataclass
class _Seen:
    """An iteration that no plan fits; its requests are in the recording under its number."""

    number: int
    num_requests: int
    held: Int64  # rows of offset, end, kind: blocks in the arena when its first request came


@dataclass
class _Kind:
    placed: Placed
    held_bytes: int  # of the arena, when its first request comes
    taken: Int64  # rows of begin and end: where other kinds' blocks were found so far
    last_seen: int
    last_large: int  # when it asked for about as many bytes as there are places for
    pattern: Pattern | None  # what the places are for; None: they were read from a file, and sizes do not vary
    num_seen: int = 0
    num_plans: int = 1
    num_grown: int = 0
    num_longer: int = 0  # iterations that it was too small for since it grew last
    longest: Pattern | None = None  # of all of them

    @property
    def key(self) -> bytes:
        return self.placed.num_bytes.tobytes()

    @property
    def least(self) -> Int64:
        """int64[m]: the smallest sizes that take the places."""
        return self.placed.num_bytes if self.pattern is None else self.pattern.least

    def takes(self, num_bytes: Int64) -> bool:
        """Whether the places are for requests of these sizes."""
        most = self.placed.num_bytes
        return len(most) == len(num_bytes) and bool(np.all((self.least <= num_bytes) & (num_bytes <= most)))


class Kinds:
    """The plans of a loop, and its recorded iterations that no plan fits.

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
        known = [] if placed is None else [_Kind(placed, 0, np.zeros((0, 2), np.int64), 0, 0, None)]
        self._kinds = known  # those with the largest load first
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

    def table(self) -> tuple[Table, Int64, Int64]:
        """Return the table of all plans, each as one op, the arena bytes that each expects in use at its first
        request, and the smallest size of each request."""
        placed = [kind.placed for kind in self._kinds]
        op_offset = np.cumsum([0, *(len(p.num_bytes) for p in placed)], dtype=np.int64)
        sizes, offsets = (np.concatenate(c) for c in ([p.num_bytes for p in placed], [p.offsets for p in placed]))
        held = np.array([kind.held_bytes for kind in self._kinds], dtype=np.int64)
        least = np.concatenate([kind.least for kind in self._kinds])
        return Table(self.arena_bytes, op_offset, sizes, offsets, self._alignment), held, least

    def restart(self) -> None:
        """Forget what was seen of a recording that has ended."""
        self._seen.clear()

    def fits(self, replay: Replay, number: int, kind: int, num_bytes: int) -> bool:
        """Count an iteration that followed the plan of a kind, and drop its recorded requests, of num_bytes in all.

        Returns:
            Whether kinds, or lengths, were forgotten that have not come for long.
        """
        is_shrunk = False
        if kind >= 0:
            found = self._kinds[kind]
            found.last_seen, found.num_seen = number, found.num_seen + 1
            if (before := self._seen.pop(found.key, None)) is not None:
                replay.forget(before.number)
            if num_bytes >= _LARGE * found.placed.num_bytes.sum():
                found.last_large = number
            is_shrunk = number - found.last_large > _MAX_UNSEEN and self._shrink(
                found, replay.iteration(number), number
            )
        replay.forget(number)
        recent = [k for k in self._kinds if number - k.last_seen <= _MAX_UNSEEN]
        is_old = 0 < len(recent) < len(self._kinds)
        if is_old:
            self._kinds = recent
        return is_old or is_shrunk

    def learn(self, replay: Replay, number: int, held: Int64) -> bool:
        """Take note of an iteration that no plan fits, and lay it out if an earlier one was of its kind.

        Args:
            replay: has recorded it.
            number: of the iteration.
            held: see _Seen.

        Returns:
            Whether there is a new plan.
        """
        now = replay.iteration(number)
        kind = next((k for k in self._kinds if k.takes(now.num_bytes)), None)
        if kind is None and (longer := self._longer(now)) is not None:
            replay.forget(number)
            return self._grow(*longer, number, held)
        key = now.num_bytes.tobytes() if kind is None else kind.key
        if not key or (kind is not None and kind.num_plans == _MAX_PLANS):
            replay.forget(number)
            return False
        before, self._seen[key] = self._seen.pop(key, None), _Seen(number, len(now.num_bytes), held)
        found = None
        if before is not None:
            found = repeated(replay.iteration(before.number), now, same_sizes=kind is None)
            replay.forget(before.number)
        elif kind is None and (other := self._other_length(replay, number, now)) is not None:
            before, found = other
        if found is None or before is None:
            if len(self._seen) > MAX_SEEN:
                replay.forget(self._seen.pop(next(iter(self._seen))).number)
            return False
        if kind is not None and kind.pattern is not None:
            found = found.joined(kind.pattern)
        del self._seen[key]
        replay.forget(number)
        self._plan(found, self._taken(kind, before.held, held), _num_bytes(held), number, kind)
        return True

    def _other_length(self, replay: Replay, number: int, now: Iteration) -> tuple[_Seen, Pattern] | None:
        """Return, and forget, an unplanned iteration that differs from this one only in length, and their pattern."""
        for key, seen in reversed(self._seen.items()):
            if seen.number == number or seen.num_requests != len(now.num_bytes):
                continue
            before = replay.iteration(seen.number)
            found = repeated(before, now, same_sizes=False)
            if found is not None and found.is_compact(self._alignment, before.num_bytes, now.num_bytes):
                replay.forget(seen.number)
                del self._seen[key]
                return seen, found
        return None

    def _longer(self, now: Iteration) -> tuple[_Kind, Pattern] | None:
        """Return the kind that an iteration of other sizes belongs to, and its pattern widened to these sizes."""
        for kind in self._kinds:
            if kind.pattern is not None and kind.pattern.is_like(now):
                so_far = kind.longest or kind.pattern
                found = so_far.with_sizes(now.num_bytes)
                if found.is_compact(self._alignment, so_far.trace.num_bytes, now.num_bytes):
                    return kind, found
        return None

    def _grow(self, kind: _Kind, longest: Pattern, number: int, held: Int64) -> bool:
        """Widen a kind to other lengths, ever less often once it has grown often; return whether that was done now."""
        kind.longest, kind.num_longer = longest, kind.num_longer + 1
        assert kind.pattern is not None
        if np.array_equal(longest.trace.num_bytes, kind.pattern.trace.num_bytes):
            kind.pattern, kind.longest, kind.num_longer = longest, None, 0  # shorter: the places are there
            return True
        if kind.num_longer < 2 ** max(0, kind.num_grown - _MAX_GROWN):
            return False
        self._seen.pop(kind.key, None)
        self._replace(kind, longest, self._taken(kind, held), _num_bytes(held), number).num_grown += 1
        return True

    def _shrink(self, kind: _Kind, now: Iteration, number: int) -> bool:
        """Lay a kind out for its present length as the longest, to free memory; return whether that was done."""
        if kind.pattern is None or not kind.pattern.is_like(now):
            return False
        self._replace(kind, kind.pattern.shrunk(now.num_bytes), np.zeros((0, 2), np.int64), kind.held_bytes, number)
        return True

    def _replace(self, kind: _Kind, pattern: Pattern, taken: Int64, held_bytes: int, number: int) -> _Kind:
        """Lay a kind out for other sizes, which does not count towards _MAX_PLANS."""
        made = self._plan(pattern, taken, held_bytes, number, kind)
        made.num_plans = kind.num_plans
        return made

    def _taken(self, kind: _Kind | None, *held: Int64) -> Int64:
        """Return rows of begin and end: where blocks of other kinds were found."""
        own = self._kinds.index(kind) if kind is not None else NEVER
        rows = np.concatenate(held)
        return rows[rows[:, 2] != own, :2]

    def _plan(self, found: Pattern, taken: Int64, held_bytes: int, number: int, kind: _Kind | None) -> _Kind:
        kinds = [k for k in self._kinds if k is not kind]
        if len(kinds) == _MAX_KINDS:
            kinds.remove(min(kinds, key=lambda k: k.last_seen))
        taken = merged(taken if kind is None else np.concatenate([kind.taken, taken]), self._alignment)
        trace = _without_small(found.trace) if kinds else found.trace
        load = trace.load_bytes(self._alignment) + int((taken[:, 1] - taken[:, 0]).sum())
        fixed = _answers(kinds, trace.num_bytes, held_bytes, load)
        placed = trace.place(self._alignment, self._time_limit, self._seed, taken, fixed)
        made = _Kind(placed, held_bytes, taken, number, number, found)
        if kind is not None:
            made.num_seen, made.num_plans = kind.num_seen, kind.num_plans + 1
            made.num_grown = kind.num_grown
        self.num_plans += 1
        self._kinds = sorted([*kinds, made], key=lambda k: -k.placed.load_bytes)
        return made


def _num_bytes(held: Int64) -> int:
    return int((held[:, 1] - held[:, 0]).sum())


def _answers(kinds: list[_Kind], num_bytes: Int64, held_bytes: int, load_bytes: int) -> Int64:
    """Return the offsets at which other kinds serve the first requests of a new one, while they begin alike.

    The new kind gets the same offsets there, so that its other places are free. See Replay.plan_loop for the choice.

    Returns:
        int64[m], bytes; -1 where no other kind serves the request.
    """
    offsets = np.full(len(num_bytes), -1, dtype=np.int64)
    ahead = [k for k in kinds if k.placed.load_bytes >= load_bytes]
    first = [k for k in ahead if k.held_bytes == held_bytes][:1]
    done = 0
    for k in [*first, *ahead] if first else []:
        n = min(len(num_bytes), len(k.placed.num_bytes))
        fits = (k.least[:n] <= num_bytes[:n]) & (num_bytes[:n] <= k.placed.num_bytes[:n])
        alike = int(np.argmin(np.append(fits, False)))
        if alike > done:
            offsets[done:alike] = k.placed.offsets[done:alike]
            done = alike
    return offsets


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
    rows = intervals[np.argsort(intervals[:, 0])]
    begins, ends = rows[:, 0], np.maximum.accumulate(rounded_up(rows[:, 1], alignment))
    is_first = np.append(True, begins[1:] > ends[:-1])[: len(rows)]
    return np.stack([begins[is_first], ends[np.roll(is_first, -1)]], axis=1)
