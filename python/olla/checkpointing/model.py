"""The memory of a step as a linear function of what is checkpointed, and the program that chooses by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from olla._core import solve_mip
from olla.checkpointing.candidates import Candidate, Chains
from olla.checkpointing.regions import ModuleRegion, SaveKey
from olla.checkpointing.trace import GIVEN, StepTrace, Storage
from olla.ilp import solver

_TIME_WEIGHT = 1e-4  # of added seconds against the peak: of choices with equal peaks, the faster one
Float64 = NDArray[np.float64]


@dataclass(eq=False)
class CheckpointChoice:
    """What to checkpoint.

    Attributes:
        saved: number of a candidate -> numbers of its groups that are saved.
        peak_bytes: as the model has it.
        seconds: added.
        bound: of the objective: bytes for a limit of time, seconds for a limit of bytes.
    """

    saved: dict[int, list[int]]
    peak_bytes: float
    seconds: float
    bound: float = 0.0


class Model:
    """Bytes at points of a step = constant + decisions; seconds = decisions.

    Columns: for every candidate whether it is checkpointed, for every group of every candidate whether it is saved,
    for every storage that several modules share whether it is kept from forward to backward.
    """

    def __init__(self, traced: StepTrace, candidates: list[Candidate]) -> None:
        self._traced, self.candidates = traced, candidates
        self._num_forward = len(traced.operators)
        self._chains = Chains(candidates, self._num_forward)
        self.group_column: list[list[int]] = []
        column = len(candidates)
        for candidate in candidates:
            self.group_column.append(list(range(column, column + len(candidate.groups))))
            column += len(candidate.groups)
        self._num_decisions = column
        self.times = self._points()
        self._rows: list[tuple[dict[int, float], float]] = []  # coefficients, and what they sum up to at least
        self._parts: list[tuple[Float64, int, float]] = []  # by column: 1 where it counts, the column, its bytes
        self.constant = self._constant()
        for storage in traced.storages:
            if storage.made_at == GIVEN:
                continue
            if not storage.is_kept(self._num_forward):
                column = self._add_input(storage, column)
            elif storage.packed_at:
                column = self._add(storage, column)
        self._add_groups()
        self._add_temporaries()
        self._add_rules()
        self.num_columns = column
        self.bytes = np.zeros((len(self.times), column))
        for counts, at, num_bytes in self._parts:
            self.bytes[:, at] += num_bytes * counts
        self.seconds = np.zeros(column)
        for i, candidate in enumerate(candidates):
            self.seconds[i] = candidate.seconds
            self.seconds[self.group_column[i]] = [-group.seconds for group in candidate.groups]
        self._scale = float(self.constant.max()) or 1.0
        self._known = [self.choice({}), *self.by_hand()]  # answers that searches may start from

    def _points(self) -> NDArray[np.int64]:
        """Return points of the step: where a recomputation begins, and between two of these where most is alive."""
        end = len(self._traced.live_bytes)
        begins = sorted({at for c in self.candidates for at in c.again_at} | {self._num_forward, end})
        found = set(begins[:-1])
        live, other = np.array(self._traced.live_bytes), np.array(self._traced.other_bytes)
        for a, b in pairwise(begins):
            found |= {a + int(np.argmax(live[a:b])), a + int(np.argmax(other[a:b]))}
        return np.array(sorted(at for at in found if at < end), dtype=np.int64)

    def _constant(self) -> Float64:
        given = sum(s.num_bytes for s in self._traced.storages if s.made_at == GIVEN)
        total = np.array(self._traced.other_bytes)[self.times] + float(given)
        for s in self._traced.storages:
            if s.is_kept(self._num_forward) and not s.packed_at:
                total += s.num_bytes * self._alive(s)
        return total

    def _alive(self, storage: Storage) -> Float64:
        if storage.freed_at is None:
            return np.ones(len(self.times))
        return (self.times < storage.freed_at).astype(np.float64)

    def _add(self, storage: Storage, column: int) -> int:
        """Add the bytes of a storage that autograd saves; return the number of the next free column."""
        # For every operator that saves it: the enclosing calls whose recomputation would make it again.
        relief = {tuple(c for c in self._chains[p] if self._begin(c) <= storage.made_at) for p in storage.packed_at}
        covered = {c for p in storage.packed_at for c in self._chains[p]}
        inputs = self._inputs(storage)
        alive = self._alive(storage)
        within = set.intersection(*map(set, relief))
        for i, k in set().union(*relief):  # a second copy, where others have kept the first one
            again = alive * (self.times >= self.candidates[i].again_at[k])
            self._parts.append((again, i, storage.num_bytes))
        if len(relief) == 1 and inputs <= covered:  # as of most: kept unless one of these modules is checkpointed
            self.constant = self.constant + storage.num_bytes * alive
            self._parts += [(-alive, i, storage.num_bytes) for i, _ in within]
            return column
        for chain in relief:  # else a column says whether it is kept
            self._rows.append(({column: 1.0, **{i: 1.0 for i, _ in chain}}, 1.0))
        for i, _ in inputs - covered:
            self._rows.append(({column: 1.0, i: -1.0}, 0.0))
        self._parts.append((alive, column, storage.num_bytes))
        return column + 1

    def _inputs(self, storage: Storage) -> set[tuple[int, int]]:
        """Return the calls that a storage is an input of."""
        return {c for at in storage.used_at for c in self._chains[at] if self._begin(c) > storage.made_at}

    def _add_input(self, storage: Storage, column: int) -> int:
        """Add the bytes of a storage that only a checkpointed module would keep, as its input."""
        calls = self._inputs(storage)
        if not calls:
            return column
        done = max(self.candidates[i].done_at[k] for i, k in calls)
        self._rows += [({column: 1.0, i: -1.0}, 0.0) for i, _ in calls]
        self._parts.append(((self.times <= done).astype(np.float64), column, storage.num_bytes))
        return column + 1

    def _begin(self, call: tuple[int, int]) -> int:
        return self.candidates[call[0]].calls[call[1]].begin

    def _add_groups(self) -> None:
        for i, candidate in enumerate(self.candidates):
            for column, group in zip(self.group_column[i], candidate.groups, strict=True):
                self._rows.append(({i: 1.0, column: -1.0}, 0.0))
                for at in group.positions:
                    k = next(k for k, call in enumerate(candidate.calls) if call.begin <= at < call.end)
                    before = (self.times < candidate.again_at[k]).astype(np.float64)
                    self._parts += [(before, column, s.num_bytes) for s in self._traced.made[at]]

    def _add_temporaries(self) -> None:
        """Add what a recomputation takes beyond what it leaves behind: tensors that die before it ends."""
        live = np.array(self._traced.live_bytes)
        for i, candidate in enumerate(self.candidates):
            for call, again, stop in zip(candidate.calls, candidate.again_at, candidate.stops, strict=True):
                made = [
                    s for at in range(call.begin, stop) for s in self._traced.made[at] if s.is_kept(self._num_forward)
                ]
                most = live[call.begin : stop].max(initial=0) - (live[call.begin - 1] if call.begin else live[0])
                extra = int(most) - sum(s.num_bytes for s in made)
                if extra > 0:
                    self._parts.append(((self.times == again).astype(np.float64), i, extra))

    def _add_rules(self) -> None:
        for chain in self._chains.all():
            modules = {i for i, _ in chain}
            if len(modules) > 1:
                self._rows.append((dict.fromkeys(modules, -1.0), -1.0))

    def choice(self, saved: dict[int, list[int]]) -> CheckpointChoice:
        """Return a choice with its peak and seconds."""
        x = self._columns(saved)
        return CheckpointChoice(saved, float((self.constant + self.bytes @ x).max()), float(self.seconds @ x))

    def _columns(self, saved: dict[int, list[int]]) -> Float64:
        """Return the value of every column."""
        x = np.zeros(self.num_columns)
        for i, groups in saved.items():
            x[i] = 1.0
            x[[self.group_column[i][g] for g in groups]] = 1.0
        for row, least in self._rows:  # storages are kept where they have to be
            last = max(row)
            if last >= self._num_decisions:
                x[last] = max(x[last], least - sum(value * x[c] for c, value in row.items() if c != last))
        return x

    def by_hand(self) -> list[CheckpointChoice]:
        """Return what people choose by hand: every n-th module of lists of modules."""
        lists: dict[str, list[tuple[int, int]]] = {}
        for i, candidate in enumerate(self.candidates):
            parent, _, number = candidate.name.rpartition(".")
            if number.isdecimal() and not any(
                f"{parent}.".startswith(f"{outer}.") for outer in lists if outer != parent
            ):
                lists.setdefault(parent, []).append((int(number), i))
        blocks = [[i for _, i in sorted(found)] for found in lists.values() if len(found) > 1]
        most = max(map(len, blocks), default=0)
        return [self.choice({i: [] for found in blocks for i in found[n - 1 :: n]}) for n in range(1, most + 1)]

    def _start(self, most_seconds: float, most_bytes: float | None) -> Float64:
        """Return the best known answer of a program; empty where none is known."""
        bytes_at_most = np.inf if most_bytes is None else most_bytes
        known = [c for c in self._known if c.seconds <= most_seconds and c.peak_bytes <= bytes_at_most]
        if not known:
            return np.zeros(0)
        best = min(known, key=lambda c: c.peak_bytes if most_bytes is None else c.seconds)
        return np.append(self._columns(best.saved), best.peak_bytes / self._scale)

    def regions(self, choice: CheckpointChoice) -> dict[str, ModuleRegion]:
        """Return how the chosen modules are to be checkpointed."""
        found = {}
        for i, groups in choice.saved.items():
            candidate = self.candidates[i]
            saved = frozenset[SaveKey]().union(*(candidate.groups[g].keys for g in groups))
            found[candidate.name] = ModuleRegion(saved, candidate.buffers, candidate.noting)
        return found

    def choice_of(self, regions: dict[str, ModuleRegion]) -> CheckpointChoice:
        """Return the choice that regions come from, as far as there are such candidates here."""
        saved = {
            i: [g for g, group in enumerate(candidate.groups) if group.keys <= regions[candidate.name].saved]
            for i, candidate in enumerate(self.candidates)
            if candidate.name in regions
        }
        return self.choice(saved)

    def solve(
        self, *, most_seconds: float, most_bytes: float | None, time_limit: float, seed: int
    ) -> CheckpointChoice | None:
        """Return the choice of least peak within seconds, or of least seconds within bytes; None: none was found.

        Args:
            most_seconds: that may be added; infinity: any.
            most_bytes: that may be needed; None: as few as can be.
            time_limit: seconds for the search.
            seed: of it.
        """
        scale = self._scale
        total = float(np.abs(self.seconds).sum()) or 1.0
        peak = self.num_columns  # the last column, as a share of the peak without checkpoints
        rows = _Rows()
        for coefficients, constant in zip(self.bytes, self.constant, strict=True):
            at = np.flatnonzero(coefficients)
            rows.add([*at, peak], [*(coefficients[at] / scale), -1.0], -np.inf, -constant / scale)
        for row, least in self._rows:
            rows.add(list(row), list(row.values()), least, np.inf)
        if most_seconds < np.inf:
            at = np.flatnonzero(self.seconds)
            rows.add(list(at), list(self.seconds[at] / total), -np.inf, most_seconds / total)
        weight = 1.0 if most_bytes is not None else _TIME_WEIGHT
        found = solve_mip(
            np.append(weight * self.seconds / total, 0.0 if most_bytes is not None else 1.0),
            np.zeros(peak + 1),
            np.append(np.ones(peak), np.inf if most_bytes is None else most_bytes / scale),
            (np.arange(peak + 1) < self._num_decisions).astype(np.int32),
            *rows.arrays(),
            self._start(most_seconds, most_bytes),
            solver(time_limit, seed, None),
        )
        if not len(found.values):
            return None
        choice = self.choice(self._saved(found.values > 0.5))
        bound = found.bound * total
        if most_bytes is None:
            bound = (found.bound - _TIME_WEIGHT * min(most_seconds / total, 1.0)) * scale
        choice.bound = max(0.0, bound)  # none was found within the time limit where it is minus infinity
        self._known.append(choice)
        return choice

    def _saved(self, chosen: NDArray[np.bool_]) -> dict[int, list[int]]:
        modules = np.flatnonzero(chosen[: len(self.candidates)])
        return {int(i): [g for g, at in enumerate(self.group_column[i]) if chosen[at]] for i in modules}


class _Rows:
    """The constraints of a program."""

    def __init__(self) -> None:
        self._columns: list[Sequence[int]] = []
        self._values: list[Sequence[float]] = []
        self._bounds: list[tuple[float, float]] = []

    def add(self, columns: Sequence[int], values: Sequence[float], lower: float, upper: float) -> None:
        """Add lower <= sum of values times columns <= upper."""
        self._columns.append(columns)
        self._values.append(values)
        self._bounds.append((lower, upper))

    def arrays(self) -> tuple[Float64, Float64, NDArray[np.int32], NDArray[np.int32], Float64]:
        """Return lower and upper bounds, where each row begins, its columns and its values."""
        lower, upper = np.array(self._bounds, dtype=np.float64).reshape(-1, 2).T.copy()
        start = np.concatenate([[0], np.cumsum([len(columns) for columns in self._columns])]).astype(np.int32)
        columns = np.array([at for part in self._columns for at in part], dtype=np.int32)
        values = np.array([value for part in self._values for value in part], dtype=np.float64)
        return lower, upper, start, columns, values
