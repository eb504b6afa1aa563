"""Messages of FSDP under GraphTrainer: one for each layer, sent while another layer computes.

Its `joint_transformer_block_bucketing_reordering_pass` gathers the parameters of a layer as one, right before those of
the layer before are used, and copies them out where they are used first. The gradients of a layer are reduced as one
when all are there; the copy that is sent stays until those of the next layer are sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """One run of an op: what it reads, writes and changes in place.

    Attributes:
        op: of the graph; -1 for what is part of a message.
        is_backward: whether it runs in backward.
    """

    op: int
    is_backward: bool
    reads: list[int]
    writes: list[int]
    mutates: list[int]


class Messages:
    """Which ops of a graph are parts of which message.

    Args:
        layer: of each op, by number: what is sent as one.
        gathers: ops that gather a parameter.
        casts: ops that prepare what is gathered.
        reduces: ops that reduce a gradient.
    """

    def __init__(self, layer: Sequence[int], gathers: set[int], casts: set[int], reduces: set[int]) -> None:
        self._layer = layer
        self._gathers, self._casts, self._reduces = gathers, casts, reduces

    def sent(self, runs: list[Run], sizes: list[int]) -> list[Run]:
        """Return runs in which messages are sent as one, in the order GraphTrainer gives them.

        Args:
            runs: of a step, in order, each collective on its own.
            sizes: of tensors, in bytes; those of messages are added.
        """
        return self._reduced(self._gathered(runs, sizes), sizes)

    def _gathered(self, runs: list[Run], sizes: list[int]) -> list[Run]:
        parts: dict[tuple[bool, int], list[Run]] = {}
        first: dict[int, tuple[bool, int]] = {}
        for i, run in enumerate(runs):
            if run.op in self._gathers or run.op in self._casts:
                key = run.is_backward, self._layer[run.op]
                if key not in parts:
                    first[i] = key
                parts.setdefault(key, []).append(run)
        starts, ends = dict[tuple[bool, int], Run](), dict[tuple[bool, int], list[Run]]()
        following: dict[tuple[bool, int], tuple[bool, int]] = {}
        for is_backward in (False, True):
            keys = [key for key in parts if key[0] == is_backward]
            following.update(itertools.pairwise(keys))
        for key, own in parts.items():
            made = {t for run in own for t in run.writes}
            shards = [t for run in own for t in run.reads if t not in made]
            whole = [t for run in own if run.op in self._gathers for t in run.writes]
            for t in made.difference(whole):
                sizes[t] = 0  # casts are made in the message
            if len(whole) > 1:
                sizes.append(sum(sizes[t] for t in whole))
                message = len(sizes) - 1
                starts[key] = Run(-1, key[0], shards, [message], [])
                ends[key] = [Run(-1, key[0], [message], [t], []) for t in whole]
            else:
                starts[key], ends[key] = Run(-1, key[0], shards, whole, []), []
        found: list[Run] = []
        begun = set(following.values())
        for i, run in enumerate(runs):
            if i in first:
                key = first[i]
                if key not in begun:
                    found.append(starts[key])
                if key in following:
                    found.append(starts[following[key]])
                found += ends[key]
            if run.op not in self._gathers and run.op not in self._casts:
                found.append(run)
        return found

    def _reduced(self, runs: list[Run], sizes: list[int]) -> list[Run]:
        read = {t for run in runs for t in run.reads + run.mutates}
        alone = {run.op for run in runs if run.op in self._reduces and not read.isdisjoint(run.writes)}
        parts: dict[int, list[Run]] = {}
        last: dict[int, int] = {}
        for i, run in enumerate(runs):
            if run.op in self._reduces and run.op not in alone:
                parts.setdefault(self._layer[run.op], []).append(run)
                last[self._layer[run.op]] = i
        ends = {i: layer for layer, i in last.items()}
        found: list[Run] = []
        waiting: list[int] = []
        for i, run in enumerate(runs):
            if run.op not in self._reduces or run.op in alone:
                found.append(run)
            if i in ends:
                own = parts[ends[i]]
                given = [t for part in own for t in part.reads]
                sizes.append(sum(sizes[t] for t in given))
                message = len(sizes) - 1
                found.append(Run(-1, True, given, [message], []))
                found.append(Run(-1, True, [message], [t for part in own for t in part.writes], []))
                found += [Run(-1, True, [t], [], []) for t in waiting]
                waiting = [message]
        return found + [Run(-1, True, [t], [], []) for t in waiting]
