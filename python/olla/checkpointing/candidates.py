"""Modules that may be checkpointed, and what that does to memory and time, as sums over decisions.

The memory at a point of backward is linear in the decisions: what an uncheckpointed module saves is alive from forward
on, what a checkpointed one recomputes from the point where backward first needs it.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from olla.checkpointing.regions import SaveKey
from olla.checkpointing.trace import GIVEN, ModuleCall, StepTrace, Storage

# Of all saved bytes: modules that save less are no candidates. With 0.002 the program of a LoRA llama takes five times
# as long for a peak that is 0.7 % lower; with 0.01, GPT-2's peak is the same.
_LEAST_SHARE = 0.005
_MOST_MODULES = 300
_MOST_GROUPS = 10  # of operators of a module, each saved or recomputed as one; with five, peaks are 1 % higher
Int64 = NDArray[np.int64]


@dataclass(eq=False)
class Candidate:
    """A module that may be checkpointed.

    Attributes:
        name: of the module.
        calls: of it, which do not overlap.
        again_at: of every call, when backward asks first for something that it saves.
        done_at: of every call, when backward asks for the last of it.
        stops: of every call, the operator at which its recomputation ends.
        buffers: names of its buffers that its calls change.
        noting: names of its parts, "" for itself, whose Python attributes its calls change.
        num_bytes: that its calls save for backward.
        seconds: of all recomputations.
        groups: operators that may be saved together.
    """

    name: str
    calls: list[ModuleCall]
    again_at: list[int]
    done_at: list[int]
    stops: list[int]
    buffers: tuple[str, ...]
    noting: tuple[str, ...]
    num_bytes: int
    seconds: float
    groups: list[Group] = field(default_factory=list)


@dataclass(eq=False)
class Group:
    """Operators of a candidate that are saved together."""

    keys: frozenset[SaveKey]
    positions: list[int]
    num_bytes: int
    seconds: float


class Chains:
    """Of every operator, the calls of candidates that it is in, by number of the candidate and of the call."""

    def __init__(self, candidates: list[Candidate], num_operators: int) -> None:
        events: list[tuple[int, int, int, int]] = []
        for i, candidate in enumerate(candidates):
            events += [(call.begin, -call.end, i, k) for k, call in enumerate(candidate.calls)]
        events.sort()
        self._of: list[tuple[tuple[int, int], ...]] = []
        open_calls: list[tuple[int, tuple[int, int]]] = []
        position = 0
        for at in range(num_operators):
            while open_calls and open_calls[-1][0] <= at:
                open_calls.pop()
            while position < len(events) and events[position][0] == at:
                _, end, i, k = events[position]
                open_calls.append((-end, (i, k)))
                position += 1
            self._of.append(tuple(call for _, call in open_calls))

    def __getitem__(self, position: int) -> tuple[tuple[int, int], ...]:
        return self._of[min(position, len(self._of) - 1)]

    def all(self) -> set[tuple[tuple[int, int], ...]]:
        """Return all that there are."""
        return set(self._of)


def candidates(traced: StepTrace, selective: bool) -> tuple[list[Candidate], dict[str, str]]:
    """Return the modules that may be checkpointed, those that save most first; and why others may not.

    Args:
        traced: the step.
        selective: whether operators inside of them may be saved.
    """
    by_module: dict[str, list[ModuleCall]] = collections.defaultdict(list)
    for call in traced.calls:
        if call.end > call.begin + 1:
            by_module[call.module].append(call)
    packs = np.unique([p for s in traced.storages if s.made_at != GIVEN for p in s.packed_at]).astype(np.int64)
    num_forward = len(traced.operators)
    kept = [s for s in traced.storages if s.is_kept(num_forward)]
    weights = np.zeros(num_forward + 1, dtype=np.int64)
    np.add.at(weights, [s.made_at for s in kept], [s.num_bytes for s in kept])
    total = np.concatenate([[0], np.cumsum(weights)])
    changes = [(at, s) for s in traced.storages for at in s.changed_at]
    found: list[Candidate] = []
    reasons: dict[str, str] = {}
    ranges: set[tuple[tuple[int, int], ...]] = set()
    for name in sorted(by_module, key=lambda n: n.count(".")):  # outer modules first
        calls = sorted(by_module[name], key=lambda c: c.begin)
        num_bytes = int(sum(total[c.end] - total[c.begin] for c in calls))
        spans = tuple((c.begin, c.end) for c in calls)
        if not name or spans in ranges or num_bytes < _LEAST_SHARE * total[-1]:
            continue
        ranges.add(spans)
        made = _candidate(traced, name, calls, packs, changes, num_bytes)
        if isinstance(made, str):
            reasons[name] = made
        else:
            found.append(made)
    found.sort(key=lambda c: -c.num_bytes)
    del found[_MOST_MODULES:]
    for candidate in found if selective else ():
        candidate.groups = _groups(traced, candidate)
    return found, reasons


def _candidate(
    traced: StepTrace,
    name: str,
    calls: list[ModuleCall],
    packs: Int64,
    changes: list[tuple[int, Storage]],
    num_bytes: int,
) -> Candidate | str:
    """Return a module as a candidate, or why it is none."""
    if any(a.end > b.begin for a, b in pairwise(calls)):
        return "calls itself"
    buffers = _changed_buffers(name, calls, changes)
    if buffers is None:
        return "changes in place what it did not make"
    if _has_outdated_inputs(traced, calls):
        return "what it takes is changed in place later on"
    inside = [packs[(packs >= c.begin) & (packs < c.end)] for c in calls]
    asked_at = [[traced.unpacked_at[p] for p in map(int, own) if p in traced.unpacked_at] for own in inside]
    if not all(asked_at):
        return "backward does not ask for what it saves"
    stops = [int(own.max()) for own in inside]
    seconds = sum(op[1] for c, stop in zip(calls, stops, strict=True) for op in traced.operators[c.begin : stop])
    noting = tuple(sorted(n[len(name) + 1 :] for n in traced.noting if f"{n}.".startswith(f"{name}.")))
    again_at, done_at = [*map(min, asked_at)], [*map(max, asked_at)]
    return Candidate(name, calls, again_at, done_at, stops, buffers, noting, num_bytes, seconds)


def _changed_buffers(name: str, calls: list[ModuleCall], changes: list[tuple[int, Storage]]) -> tuple[str, ...] | None:
    """Return names of the buffers of a module that it changes; None: it changes something else that it did not make."""
    buffers = set()
    for at, storage in changes:
        for call in calls:
            if call.begin <= at < call.end and storage.made_at < call.begin:
                if not storage.name.startswith(f"{name}."):
                    return None
                buffers.add(storage.name[len(name) + 1 :])
    return tuple(sorted(buffers))


def _has_outdated_inputs(traced: StepTrace, calls: list[ModuleCall]) -> bool:
    """Whether an input of a module is mutated elsewhere after its call: recomputation would read the new value."""
    for storage in traced.storages:
        others = [at for at in storage.changed_at if not any(call.begin <= at < call.end for call in calls)]
        for call in calls if others else ():
            is_input = storage.made_at < call.begin and any(call.begin <= at < call.end for at in storage.used_at)
            if is_input and max(others) >= call.end:
                return True
    return False


def _groups(traced: StepTrace, candidate: Candidate) -> list[Group]:
    """Return operators whose results may be saved, those of one kind and size together, where that can save time."""
    kinds: dict[tuple[str, int, float], Group] = {}
    for call, stop in zip(candidate.calls, candidate.stops, strict=True):
        asked = [at for at in range(call.begin, call.end) if traced.operators[at][2]]
        for position, at in enumerate(asked):
            name, seconds, _ = traced.operators[at]
            key = (name, position)
            made = traced.made[at]
            num_bytes = sum(s.num_bytes for s in made)
            if at >= stop or not seconds or not num_bytes or any(s.changed_at for s in made):
                continue
            kind = kinds.setdefault((name, num_bytes, round(seconds, 12)), Group(frozenset(), [], 0, 0.0))
            kind.keys |= {key}
            kind.positions.append(at)
            kind.num_bytes += num_bytes
            kind.seconds += seconds
    ordered = sorted(kinds.values(), key=lambda g: -g.seconds / g.num_bytes)
    if len(ordered) <= _MOST_GROUPS:
        return ordered
    merged = []
    for part in np.array_split(np.arange(len(ordered)), _MOST_GROUPS):
        own = [ordered[i] for i in part]
        positions = [at for g in own for at in g.positions]
        keys = frozenset().union(*(g.keys for g in own))
        merged.append(Group(keys, positions, sum(g.num_bytes for g in own), sum(g.seconds for g in own)))
    return merged
