"""BudgetPlan: a plan whose graph was rewritten to need less memory, and the proof of how good that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from olla.base import human_bytes, percent
from olla.errors import GraphError, PlanError
from olla.graph import Graph, Rules
from olla.plan import fields, table
from olla.plan.chunks import Chunked
from olla.plan.plan import Plan


class Decision(NamedTuple):
    """An op that runs again, or later than in the program, so that what it makes need not be kept."""

    op: int  # of the original graph
    name: str
    num_bytes: int  # of what it makes
    num_runs: int  # in all; 1: it only moved
    seconds: float  # added


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class BudgetPlan(Plan, section="rewrite"):
    """A plan for a rewritten graph: some ops run again, some results take over their inputs' storage.

    Everything `Plan` says is about `graph`, the rewritten one. `olla.check` accepts the plan with the original graph
    too: then it also proves that both compute the same.

    With its losses in chunks, the original of the rewriting is `chunked.graph`, and `chunked` says what that has to do
    with the graph that was given; times, bounds and peaks are told from there.

    Attributes:
        graph: the rewritten graph. Results of op i are what it writes, then what it mutates, in the order of the
            results of the op it stands for; where a pointwise result takes over an input, it mutates that input.
        source_digest: digest of the original graph.
        origin: int32[graph.num_ops], op of the original graph that op i stands for.
        rerun: uint8[graph.num_ops], how op i runs; see `olla.graph.Rerun`. 0: in its own place.
        tensor_origin: int32[graph.num_tensors], tensor of the original whose size, name and start tensor t has.
        goal: what was asked for: budget_bytes, max_slowdown or minimise; device, in_place, recompute.
        base_peak_bytes: the peak of the best order found without rewriting.
        base_seconds: estimated time of the original ops.
        added_seconds: estimated time of what runs beyond them.
        added_seconds_lower_bound: no rewriting that reaches this plan's peak (the budget, if one was given) adds less.
        peak_lower_bound_bytes: no rewriting with this plan's added time has a lower peak, in any order.
        num_recomputed: runs beyond one per op.
        num_in_place: results that take over an input's storage.
        chunked: the graph with losses in chunks that was rewritten in place of the original, or None. Chunks change
            rounding, and bounds hold with these chunks only.
    """

    graph: Graph
    source_digest: str
    origin: NDArray[np.int32]
    rerun: NDArray[np.uint8]
    tensor_origin: NDArray[np.int32]
    goal: Mapping[str, Any]
    base_peak_bytes: int
    base_seconds: float
    added_seconds: float
    added_seconds_lower_bound: float
    peak_lower_bound_bytes: int
    num_recomputed: int
    num_in_place: int
    chunked: Chunked | None = None

    def __post_init__(self) -> None:
        """Make the arrays read-only, like the rest."""
        super().__post_init__()
        for array in (self.origin, self.rerun, self.tensor_origin):
            array.flags.writeable = False

    @property
    def slowdown(self) -> float:
        """Added time as a share of the step's own."""
        return self.added_seconds / self.base_seconds if self.base_seconds > 0 else 0.0

    def to_object(self) -> dict[str, Any]:
        """Return the plan as what `json.dumps` takes: a plan with the key "rewrite", the rewritten graph in it."""
        rewrite = {**fields.to_object(self, _FIELDS), "graph": self.graph.to_dict()}
        if self.chunked is not None:
            rewrite["chunked"] = self.chunked.to_dict()
        return {**super().to_object(), "rewrite": rewrite}

    @classmethod
    def _fields_of_section(cls, content: object) -> dict[str, Any]:
        rewrite = fields.section("rewrite", content, (*_FIELDS, "graph"))
        graph = fields.graph("rewrite", rewrite["graph"])
        try:
            chunked = Chunked.from_dict(rewrite["chunked"]) if "chunked" in rewrite else None
        except GraphError as error:
            raise PlanError(f"the chunked graph in 'rewrite' is invalid: {error}", rule="type") from error
        return {"graph": graph, "chunked": chunked, **fields.from_object(rewrite, _FIELDS, "rewrite.")}

    def rows(self) -> table.Rows:
        """Return what the plan says of itself to a reader, what was rewritten included."""
        return with_rewriting(super().rows(), self)

    def decisions(self, source: Graph, rules: Rules) -> list[Decision]:
        """Say what was chosen: the ops that run again or later, those that save most first.

        Args:
            source: the original graph; `chunked.graph`, where its losses are in chunks.
            rules: of that graph; see `olla.graph.rules`.

        Complexity:
            O(ops log ops).
        """
        counts = np.bincount(self.origin, minlength=source.num_ops)
        own = np.bincount(self.origin[self.rerun == 0], minlength=source.num_ops)
        found = []
        for v in np.flatnonzero((counts > 1) | (own == 0)).tolist():
            again = int(counts[v]) - 1
            num_bytes = int(source.tensor_bytes[source.writes.of(v)].sum())
            seconds = again * float(rules.rerun_seconds[v])
            found.append(Decision(v, source.op_names[v], num_bytes, int(counts[v]), seconds))
        return sorted(found, key=lambda decision: -decision.num_bytes)


# Field -> what turns its JSON value into the field's.
_FIELDS: fields.Table = {
    "source_digest": fields.text,
    "origin": fields.integers(np.int32),
    "rerun": fields.integers(np.uint8),
    "tensor_origin": fields.integers(np.int32),
    "goal": fields.options,
    "base_peak_bytes": fields.count,
    "base_seconds": fields.seconds,
    "added_seconds": fields.seconds,
    "added_seconds_lower_bound": fields.seconds,
    "peak_lower_bound_bytes": fields.count,
    "num_recomputed": fields.count,
    "num_in_place": fields.count,
}


def with_rewriting(rows: table.Rows, plan: Any, *swapped: str) -> table.Rows:
    """Add to the rows of a plan what was rewritten, and what that costs.

    Args:
        rows: of the plan.
        plan: a `BudgetPlan` or a `SwapPlan`, which have these figures in common.
        swapped: lines on what is swapped.
    """
    added, least = (1e3 * seconds for seconds in (plan.added_seconds, plan.added_seconds_lower_bound))
    chunks = ""
    if plan.chunked is not None:
        num = plan.chunked.num_losses
        chunks = f" {num} loss{'es' if num > 1 else ''} in {plan.chunked.num_chunks} chunks of rows: other rounding."
    runs, in_place = plan.num_recomputed, plan.num_in_place
    lines = [
        f"The graph was rewritten: {runs} more runs of ops, {in_place} results in place.{chunks}",
        *swapped,
        f"added time {added:.3f} ms ({percent(plan.slowdown)} of {1e3 * plan.base_seconds:.3f} ms on "
        f"{plan.goal['device']}); no rewriting within this memory adds less than {least:.3f} ms",
        f"peak {human_bytes(plan.peak_bytes)}, {human_bytes(plan.base_peak_bytes)} without rewriting; "
        f"no rewriting within this time needs less than {human_bytes(plan.peak_lower_bound_bytes)}",
    ]
    return rows._replace(remarks=[*rows.remarks, *lines])
