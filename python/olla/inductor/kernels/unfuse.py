"""Undo fusions that raise the peak, where one kernel makes at once what is needed at different times.

A value that a plan recomputes, so as not to keep it, has the same inputs as the first one: Inductor fuses both into one
kernel, and the second waits in memory after all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

import numpy as np

from olla.inductor.compat import codegen
from olla.inductor.kernels.fused import Storages
from olla.inductor.kernels.parts import Ints, KernelParts, parts_of

_MAX_TRIALS = 3000  # whose memory is computed, per graph
_LEAST_SHARE = 1e-3  # of the peak: smaller tensors are ignored
LEAST_GAIN = 1 / 200  # of the peak: least gain of a set of splits, and what is given up for fewer splits
_HIGH_SHARE = 15 / 16  # of the peak: bytes above it break ties between equal peaks

Key = tuple[int, int]  # the peak, and what lies above a threshold


@dataclass
class _KernelAssignment:
    """Which parts are one kernel, and when kernels run.

    Attributes:
        kernel: int64[num_parts], the kernel a part is in.
        order: kernels in the order in which they run.
        origin: of a kernel, the fused node whose parts it has.
    """

    kernel: Ints
    order: list[int]
    origin: list[int]

    def step(self) -> Ints:
        """Return when the kernel of every part runs."""
        place = np.zeros(max(self.order) + 1, dtype=np.int64)
        place[self.order] = np.arange(len(self.order))
        steps: Ints = place[self.kernel]
        return steps


class Unfusing:
    """A search for the fusions to take back.

    Args:
        fused: Inductor's fused nodes, in the order in which they run.
        storages: what is known of them.
    """

    def __init__(self, fused: Sequence[Any], storages: Storages) -> None:
        self.fused = fused
        self.parts: KernelParts = parts_of(fused, storages)
        self.state = _KernelAssignment(self.parts.kernel.copy(), list(range(len(fused))), list(range(len(fused))))
        self.trials = 0
        self._floor = _LEAST_SHARE * self._peak()  # bytes that count
        self._kernels: dict[tuple[int, ...], Any] = {}

    def search(self) -> list[Any] | None:
        """Return the nodes after fusions were taken back, in an order with a lower peak; None where none was found."""
        start = self._peak()
        while self.trials < _MAX_TRIALS and (better := self._best_split()) is not None:
            self.state = better
        slack = int(start * LEAST_GAIN)
        peak = self._peak() + slack
        if peak >= start:
            return None
        self._fuse_again(peak)
        return self._nodes()

    def apart(self) -> list[Any]:
        """Split all kernels into groups of parts between which no data flows, or next to none.

        Returns:
            The nodes, in an order they can run in.
        """
        order: list[int] = []
        origin = self.state.origin
        for whole in self.state.order:
            order.append(whole)
            members = self._members(self.state, whole)
            if len(members) == 1 or not self.parts.movable[members].all():
                continue
            first, *others = self._independent(members)
            if any(self._kernel(group, whole) is None for group in (first, *others)):
                continue
            for group in others:
                order.append(len(origin))
                self.state.kernel[group] = len(origin)
                origin.append(whole)
        self.state.order = order
        return self._nodes()

    def together(self, order: Sequence[int]) -> list[Any]:
        """Fuse again what was taken apart, as far as the peak allows it.

        Args:
            order: in which the nodes run that `apart` returned, by their places there.

        Returns:
            The nodes, in an order they can run in.
        """
        self.state.order = [self.state.order[place] for place in order]
        self._fuse_again(int(self._peak() * (1 + LEAST_GAIN)))
        return self._nodes()

    def _nodes(self) -> list[Any]:
        return [self._kernel(self._members(self.state, k), self.state.origin[k]) for k in self.state.order]

    def _independent(self, members: Sequence[int]) -> list[list[int]]:
        """Return the parts of a kernel in groups between which nothing flows, or little of what has no input in common.

        The latter are the sums that make the gradient of what a graph uses several times: all users would wait for it.

        Returns:
            The groups, in an order they can run in.
        """
        inside, left, groups = set(members), list(members), []
        while left:
            group, waiting = {left[0]}, left[:1]
            while waiting:
                part = waiting.pop()
                near = (self.parts.behind[part] | self.parts.before[part]) & inside - group
                new = {other for other in near if self._is_tied(part, other)}
                group |= new
                waiting += new
            groups.append(sorted(group))
            left = [i for i in left if i not in group]
        of = {part: i for i, group in enumerate(groups) for part in group}
        ahead = {
            i: {of[n] for p in group for n in self.parts.before[p] & inside} - {i} for i, group in enumerate(groups)
        }
        try:
            return [groups[i] for i in TopologicalSorter(ahead).static_order()]
        except CycleError:
            return [list(members)]

    def _is_tied(self, part: int, other: int) -> bool:
        """Whether much flows between two parts that follow each other, or both need some of the same memory."""
        graph = self.parts.graph
        mine, theirs = ({*graph.reads.of(i).tolist(), *graph.writes.of(i).tolist()} for i in (part, other))
        common = list(mine & theirs)
        return not common or int(graph.tensor_bytes[common].max()) >= self._floor

    def _peak(self) -> int:
        return int(self.parts.live_bytes(self.state.step()).max())

    def _key(self, state: _KernelAssignment, threshold: int) -> Key:
        self.trials += 1
        live = self.parts.live_bytes(state.step())
        return int(live.max()), int(np.maximum(live - threshold, 0).sum())

    def _members(self, state: _KernelAssignment, kernel: int) -> list[int]:
        return np.flatnonzero(state.kernel == kernel).tolist()

    def _kernel(self, members: Sequence[int], origin: int) -> Any:
        """Return the node of some parts of a fused node; None where they are no kernel."""
        key = tuple(members)
        if key not in self._kernels:
            whole = self.fused[origin]
            nodes = [self.parts.nodes[i] for i in members]
            all_of_it = len(members) == int((self.parts.kernel == origin).sum())
            self._kernels[key] = whole if all_of_it else codegen.fused_again(nodes, whole)
        return self._kernels[key]

    def _best_split(self) -> _KernelAssignment | None:
        """Return the best that one split makes of the present state; None where none lowers the peak."""
        state = self.state
        step = state.step()
        live = self.parts.live_bytes(step)
        threshold = int(live.max() * _HIGH_SHARE)
        key, best = self._key(state, threshold), None
        for early, late in self._splits(step, int(live.argmax())):
            for tried in self._placements(step, early, late):
                tried_key = self._key(tried, threshold)
                if tried_key < key:
                    key, best = tried_key, tried
            if self.trials >= _MAX_TRIALS:
                break
        return best

    def _splits(self, step: Ints, peak_step: int) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the parts of a kernel that would run first and those that would follow, for what is alive at a step."""
        parts, kernel = self.parts, self.state.kernel
        first, last, num_bytes = parts.lifetimes(step)
        alive = np.flatnonzero((first <= peak_step) & (peak_step <= last) & (num_bytes > 0))
        alive = alive[np.argsort(-num_bytes[alive], kind="stable")]
        floor = _LEAST_SHARE * num_bytes[alive].sum()
        seen: set[tuple[int, ...]] = set()
        for tensor in alive[num_bytes[alive] >= floor].tolist():
            writer = int(parts.graph.writer[tensor])
            users = [] if parts.kept[tensor] else [int(i) for i in parts.readers.of(tensor) if step[i] == last[tensor]]
            for seeds, onward in (([writer] if writer >= 0 else [], True), (users, False)):
                if not seeds or not parts.movable[seeds[0]]:
                    continue
                members = self._members(self.state, int(kernel[seeds[0]]))
                for moved in (self._reach(seeds, members, onward, not onward), self._reach(seeds, members, True, True)):
                    rest = [i for i in members if i not in moved]
                    early, late = (rest, sorted(moved)) if onward else (sorted(moved), rest)
                    if rest and tuple(early) not in seen:
                        seen.add(tuple(early))
                        yield early, late

    def _reach(self, seeds: Sequence[int], members: Sequence[int], onward: bool, backward: bool) -> set[int]:
        """Return the parts of a kernel that have to follow, or precede, some of them."""
        inside, found, waiting = set(members), set(seeds), list(seeds)
        while waiting:
            part = waiting.pop()
            near = (self.parts.behind[part] if onward else set()) | (self.parts.before[part] if backward else set())
            new = (near & inside) - found
            found |= new
            waiting += new
        return found

    def _placements(self, step: Ints, early: list[int], late: list[int]) -> Iterator[_KernelAssignment]:
        """Yield a split with the early part in place or as early as it can be, the late part in place or as late."""
        before, behind, state = self.parts.before, self.parts.behind, self.state
        origin = state.origin[int(state.kernel[early[0]])]
        if self._kernel(early, origin) is None or self._kernel(late, origin) is None:
            return
        here, new = int(step[early[0]]), len(state.origin)
        old = state.order[here]
        kernel = state.kernel.copy()
        kernel[late] = new
        soonest = 1 + max((int(step[i]) for part in early for i in before[part] if step[i] < here), default=-1)
        latest = min((int(step[i]) for part in late for i in behind[part] if step[i] > here), default=len(state.order))
        for first in {soonest, here}:
            for then in {here + 1, latest}:
                order = state.order.copy()
                order.insert(then, new)
                del order[here]
                order.insert(first, old)
                yield _KernelAssignment(kernel, order, [*state.origin, origin])

    def _fuse_again(self, peak: int) -> None:
        """Undo the splits that the peak does not need, the newest first."""
        origin = self.state.origin
        for new in range(len(origin) - 1, len(self.fused) - 1, -1):
            for old in [k for k in self.state.order if origin[k] == origin[new] and k != new]:
                merged = self._merged(old, new, peak)
                if merged is not None:
                    self.state = merged
                    break

    def _merged(self, old: int, new: int, peak: int) -> _KernelAssignment | None:
        """Return the state with two kernels as one, if that can run and the peak stays."""
        step = self.state.step()
        members = sorted(self._members(self.state, old) + self._members(self.state, new))
        if self._kernel(members, self.state.origin[old]) is None:
            return None
        inside = set(members)
        places = [int(step[self.state.kernel == k][0]) for k in (old, new)]
        earliest = max((int(step[i]) for m in members for i in self.parts.before[m] - inside), default=-1)
        latest = min((int(step[i]) for m in members for i in self.parts.behind[m] - inside), default=len(step))
        for place in places:
            if not earliest < place < latest:
                continue
            kernel = self.state.kernel.copy()
            kernel[members] = old
            order = [k for k in self.state.order if k not in (old, new)]
            order.insert(place - sum(other < place for other in places), old)
            merged = _KernelAssignment(kernel, order, self.state.origin)
            if self._key(merged, 0)[0] <= peak:
                return merged
        return None
