"""Swapped: a graph that copies tensors to host memory and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from olla.base import human_bytes
from olla.graph import Graph, Rules
from olla.plan.fields import Reader
from olla.plan.rewrite import Rewrite
from olla.plan.swaps import Swaps, read_swaps

SWAP_OUT, SWAP_IN = "olla::swap_out", "olla::swap_in"  # targets of copies to host memory, and back


class SwapDecision(NamedTuple):
    """A tensor that waits in host memory between two uses."""

    tensor: int  # of the graph without swaps
    name: str
    num_bytes: int
    made_by: str  # name of the op that writes it
    out_after: int  # op of the graph without swaps that uses it last before; -1: in the step before
    in_before: int  # and the one that uses it next
    absent_seconds: float  # it is not on the device
    copy_seconds: float  # both copies
    rerun_seconds: float | None  # of making it again instead, what that reads aside; None: it cannot be made again

    def __str__(self) -> str:
        """Say it in a line."""
        again = "it cannot be made again"
        if self.rerun_seconds is not None:
            again = f"making it again takes {1e3 * self.rerun_seconds:.3f} ms, and what it reads"
        return (
            f"{self.name or f'tensor {self.tensor}'}, {self.num_bytes:,} bytes written by {self.made_by}: in host "
            f"memory for {1e3 * self.absent_seconds:.3f} ms, copied for {1e3 * self.copy_seconds:.3f} ms; {again}"
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Swapped(Rewrite, kind="swapped"):
    """A graph that copies tensors to host memory and back; see `olla.swap.swapped_graph`.

    Its program order is the order that the swaps were chosen for; the time it adds is what ops wait for copies.

    Attributes:
        swaps: what is swapped, and when.
    """

    swaps: Swaps

    readers: ClassVar[dict[str, Reader]] = {**Rewrite.readers, "swaps": read_swaps}

    def line(self) -> str:
        """Say in one line what is swapped."""
        swaps = self.swaps
        return (
            f"swapped {human_bytes(swaps.swapped_bytes)} in {len(swaps.tensor)} tensors, at most "
            f"{human_bytes(swaps.host_bytes)} in host memory at once; ops wait {1e3 * swaps.stall_seconds:.3f} ms "
            "for copies"
        )

    def tensors(self) -> NDArray[np.int32]:
        """int32[graph.num_tensors], tensor of the graph without swaps that tensor t is, or a copy of."""
        found = np.arange(self.graph.num_tensors, dtype=np.int32)
        for v in np.flatnonzero(self.origin < 0).tolist():  # a copy is read where it was written
            found[self.graph.writes.of(v)] = found[self.graph.reads.of(v)[0]]
        return found

    def remark(self, op: int) -> str:
        """Say what became of an op."""
        if self.origin[op] >= 0:
            return ""
        return "copied to host memory" if self.graph.targets[op] == SWAP_OUT else "copied back from host memory"

    def decisions(self, before: Graph, origin: NDArray[np.int32], source: Graph, rules: Rules) -> list[SwapDecision]:
        """Say which tensors wait in host memory, and at what price, most bytes first.

        Args:
            before: the graph without swaps.
            origin: int32[before.num_ops], op of the source that op i stands for.
            source: the graph before any recomputation.
            rules: of the source; see `olla.graph.rules`.

        Complexity:
            O(ops + swaps^2).
        """
        steps = self.origin[self.origin >= 0]
        s = self.swaps
        end = s.base_seconds + s.stall_seconds
        start = np.append(s.start, end)
        found = []
        for i in np.flatnonzero(s.next < len(steps)).tolist():
            t, lasts = int(s.tensor[i]), bool(s.last[i] < 0)
            v = -1 if lasts else int(origin[before.writer[t]])
            away = float(start[s.issue[i]] - start[s.freed[i]])
            copies = float(s.in_end[i] - s.in_start[i])
            if lasts:  # and from its last use to the end of the step
                (j,) = np.flatnonzero((s.tensor == t) & (s.next == len(steps)))
                away += end - float(start[s.freed[j]])
                copies += float(s.out_end[j] - s.out_start[j])
            found.append(
                SwapDecision(
                    tensor=t,
                    name=before.tensor_names[t],
                    num_bytes=int(before.tensor_bytes[t]),
                    made_by="the step before" if lasts else source.op_names[v],
                    out_after=-1 if lasts else int(steps[s.last[i]]),
                    in_before=int(steps[s.next[i]]),
                    absent_seconds=max(0.0, away),
                    copy_seconds=copies + float(s.out_end[i] - s.out_start[i]),
                    rerun_seconds=float(rules.rerun_seconds[v]) if not lasts and rules.rerun[v] else None,
                )
            )
        return sorted(found, key=lambda decision: -decision.num_bytes)
