"""Recomputed: a graph that keeps fewer values, because ops are recomputed or write results in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from olla.graph import Graph, Rules
from olla.plan.rewrite import Rewrite


class Decision(NamedTuple):
    """An op that is recomputed, or moved later than in the program, so that what it makes need not be kept."""

    op: int  # of the graph before the rewriting
    name: str
    num_bytes: int  # of what it makes
    num_runs: int  # in all; 1: it only moved
    seconds: float  # added


@dataclass(frozen=True, eq=False, kw_only=True)
class Recomputed(Rewrite, kind="recomputed"):
    """A graph in which ops are recomputed, or write results in place, instead of keeping values.

    Results of op i are what it writes, then what it mutates, in the order of the results of the op it stands for; where
    a pointwise result takes over an input, it mutates that input.

    Attributes:
        rerun: uint8[graph.num_ops], how op i runs; see `olla.graph.Rerun`. 0: in its own place.
        tensor_origin: int32[graph.num_tensors], tensor of the graph before whose size, name and start tensor t has.
        num_recomputed: runs beyond one per op.
        num_in_place: results that take over an input's storage.
    """

    rerun: NDArray[np.uint8]
    tensor_origin: NDArray[np.int32]
    num_recomputed: int
    num_in_place: int

    def line(self) -> str:
        """Say in one line what was rewritten."""
        return f"The graph was rewritten: {self.num_recomputed} more runs of ops, {self.num_in_place} results in place."

    def tensors(self) -> NDArray[np.int32]:
        """int32[graph.num_tensors], tensor of the graph before that tensor t stands for."""
        return self.tensor_origin

    def remark(self, op: int) -> str:
        """Say what became of an op."""
        if self.rerun[op] == 0:
            return ""
        return "recomputed" if np.count_nonzero(self.origin == self.origin[op]) > 1 else "moved later"

    def decisions(self, before: Graph, rules: Rules) -> list[Decision]:
        """Say which ops are recomputed or moved later, those that save most first.

        Args:
            before: the graph before the rewriting.
            rules: of that graph; see `olla.graph.rules`.

        Complexity:
            O(ops log ops).
        """
        counts = np.bincount(self.origin, minlength=before.num_ops)
        own = np.bincount(self.origin[self.rerun == 0], minlength=before.num_ops)
        found = []
        for v in np.flatnonzero((counts > 1) | (own == 0)).tolist():
            again = int(counts[v]) - 1
            num_bytes = int(before.tensor_bytes[before.writes.of(v)].sum())
            seconds = again * float(rules.rerun_seconds[v])
            found.append(Decision(v, before.op_names[v], num_bytes, int(counts[v]), seconds))
        return sorted(found, key=lambda decision: -decision.num_bytes)
