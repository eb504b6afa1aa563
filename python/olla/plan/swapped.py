"""SwapPlan: a plan whose graph copies tensors to host memory and back, on top of recomputation or alone; its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from olla.base import human_bytes
from olla.errors import PlanError
from olla.graph import Graph, Rules
from olla.plan import fields, table
from olla.plan.chunks import Chunked
from olla.plan.plan import Plan
from olla.plan.recomputed import BudgetPlan, Decision, with_rewriting
from olla.plan.swaps import Swaps


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


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SwapPlan(Plan, section="swap"):
    """A plan for a graph that swaps.

    Everything `Plan` says is about `graph`, the one with swaps. `olla.check` accepts the plan with the graph it was
    made from too: then it also proves that both compute the same.

    Attributes:
        graph: the graph with swaps; see `olla.swap.swapped_graph`.
        source_digest: digest of the original graph.
        origin: int32[graph.num_ops], op of the graph without swaps, which is the recomputation's where there is one;
            -1: a swap-out or a swap-in.
        swaps: what is swapped, and when.
        recomputation: the plan on top of which this swaps, or None; it says what was chunked.
        goal: what was asked for, as in `BudgetPlan`, and the link; host_budget_bytes, if it was bounded.
        base_peak_bytes: the peak of the best order found, or of the given one, without rewriting and swaps.
        added_seconds_lower_bound: no rewriting with swaps over this link that reaches this plan's peak (the budget, if
            one was given) adds less.
        peak_lower_bound_bytes: no rewriting with swaps over this link, with this plan's added time, has a lower peak,
            in any order.
    """

    graph: Graph
    source_digest: str
    origin: NDArray[np.int32]
    swaps: Swaps
    recomputation: BudgetPlan | None
    goal: Mapping[str, Any]
    base_peak_bytes: int
    added_seconds_lower_bound: float = 0.0
    peak_lower_bound_bytes: int = 0

    def __post_init__(self) -> None:
        """Make the arrays read-only, like the rest."""
        super().__post_init__()
        self.origin.flags.writeable = False

    def to_object(self) -> dict[str, Any]:
        """Return the plan as what `json.dumps` takes: a plan with the key "swap", the graph that swaps in it."""
        copies = fields.to_object(self.swaps, _COPIES)
        below = None if self.recomputation is None else self.recomputation.to_object()
        parts = {"copies": copies, "recomputation": below, "graph": self.graph.to_dict()}
        return {**super().to_object(), "swap": {**fields.to_object(self, _FIELDS), **parts}}

    @classmethod
    def _fields_of_section(cls, content: object) -> dict[str, Any]:
        swap = fields.section("swap", content, (*_FIELDS, "copies", "recomputation", "graph"))
        copies = fields.section("swap.copies", swap["copies"], _COPIES)
        columns = fields.from_object(copies, _COPIES, "swap.copies.")
        lengths = {len(column) for name, column in columns.items() if np.ndim(column) and name != "start"}
        if len(lengths) > 1:
            raise PlanError("the columns of swap.copies have different lengths: was the file edited?", rule="type")
        below = swap["recomputation"]
        return {
            "graph": fields.graph("swap", swap["graph"]),
            "swaps": Swaps(**columns),
            "recomputation": None if below is None else _recomputation(below),
            **fields.from_object(swap, _FIELDS, "swap."),
        }

    def rows(self) -> table.Rows:
        """Return what the plan says of itself to a reader, what was rewritten and swapped included."""
        swapped = (
            f"swapped {human_bytes(self.swapped_bytes)} in {len(self.swaps.tensor)} tensors, at most "
            f"{human_bytes(self.host_bytes)} in host memory at once; ops wait {1e3 * self.swaps.stall_seconds:.3f} ms "
            "for copies"
        )
        return with_rewriting(super().rows(), self, swapped)

    @property
    def base_seconds(self) -> float:
        """Estimated time of the original ops."""
        return self.swaps.base_seconds if self.recomputation is None else self.recomputation.base_seconds

    @property
    def added_seconds(self) -> float:
        """Estimated time of ops that run again, and of waiting for copies; chunks may save some of it."""
        below, stall = self.recomputation, self.swaps.stall_seconds
        if below is not None and below.chunked is not None:
            return max(0.0, self.swaps.base_seconds + stall - below.base_seconds)
        return (0.0 if below is None else below.added_seconds) + stall

    @property
    def chunked(self) -> Chunked | None:
        """The graph with losses in chunks that was rewritten in place of the original, or None."""
        return None if self.recomputation is None else self.recomputation.chunked

    @property
    def slowdown(self) -> float:
        """Added time as a share of the step's own."""
        return self.added_seconds / self.base_seconds if self.base_seconds > 0 else 0.0

    @property
    def num_recomputed(self) -> int:
        """Runs beyond one per op."""
        return 0 if self.recomputation is None else self.recomputation.num_recomputed

    @property
    def num_in_place(self) -> int:
        """Results that take over an input's storage."""
        return 0 if self.recomputation is None else self.recomputation.num_in_place

    @property
    def swapped_bytes(self) -> int:
        """Copied to host memory in all."""
        return self.swaps.swapped_bytes

    @property
    def host_bytes(self) -> int:
        """Most host memory in use at once."""
        return self.swaps.host_bytes

    def decisions(self, source: Graph, rules: Rules) -> list[Decision | SwapDecision]:
        """Say what was chosen for each tensor, and at what price, most bytes first.

        Args:
            source: the original graph; `chunked.graph`, where its losses are in chunks.
            rules: of that graph; see `olla.graph.rules`.

        Returns:
            A `SwapDecision` for every tensor that is swapped, a `Decision` for every op that runs again or moves.

        Complexity:
            O(ops log ops).
        """
        found: list[Decision | SwapDecision] = []
        original: NDArray[np.int32] = np.arange(
            source.num_ops, dtype=np.int32
        )  # op of the source, of every op without swaps
        without = source
        if self.recomputation is not None:
            without, original = self.recomputation.graph, self.recomputation.origin
            found += self.recomputation.decisions(source, rules)
        steps = self.origin[self.origin >= 0]
        writer = np.full(without.num_tensors, -1)
        writer[without.writes.item] = np.repeat(np.arange(without.num_ops), np.diff(without.writes.offset))
        s = self.swaps
        end = s.base_seconds + s.stall_seconds
        start = np.append(s.start, end)
        for i in np.flatnonzero(s.next < len(steps)).tolist():
            t, lasts = int(s.tensor[i]), bool(s.last[i] < 0)
            v = -1 if lasts else int(original[writer[t]])
            away = float(start[s.issue[i]] - start[s.freed[i]])
            copies = float(s.in_end[i] - s.in_start[i])
            if lasts:  # and from its last use to the end of the step
                (j,) = np.flatnonzero((s.tensor == t) & (s.next == len(steps)))
                away += end - float(start[s.freed[j]])
                copies += float(s.out_end[j] - s.out_start[j])
            found.append(
                SwapDecision(
                    tensor=t,
                    name=without.tensor_names[t],
                    num_bytes=int(without.tensor_bytes[t]),
                    made_by="the step before" if lasts else source.op_names[v],
                    out_after=-1 if lasts else int(steps[s.last[i]]),
                    in_before=int(steps[s.next[i]]),
                    absent_seconds=max(0.0, away),
                    copy_seconds=copies + float(s.out_end[i] - s.out_start[i]),
                    rerun_seconds=float(rules.rerun_seconds[v]) if not lasts and rules.rerun[v] else None,
                )
            )
        return sorted(found, key=lambda decision: -decision.num_bytes)


# Field -> what turns its JSON value into the field's.
_FIELDS: fields.Table = {
    "source_digest": fields.text,
    "origin": fields.integers(np.int32),
    "goal": fields.options,
    "base_peak_bytes": fields.count,
    "added_seconds_lower_bound": fields.seconds,
    "peak_lower_bound_bytes": fields.count,
}
_COPIES: fields.Table = {
    **dict.fromkeys(("tensor", "ready", "last", "freed", "issue", "next"), fields.integers(np.int32)),
    **dict.fromkeys(("start", "out_start", "out_end", "in_start", "in_end"), fields.seconds_list),
    "peak_bytes": fields.count,
    "stall_seconds": fields.seconds,
    "host_bytes": fields.count,
    "swapped_bytes": fields.count,
    "base_seconds": fields.seconds,
}


def _recomputation(content: object) -> BudgetPlan:
    plan = Plan.from_object(content)
    if not isinstance(plan, BudgetPlan):
        raise PlanError("swap.recomputation is no plan of a rewritten graph: was the file edited?", rule="type")
    return plan
