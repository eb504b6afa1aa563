"""BudgetPlan: a plan whose graph was rewritten to need less memory, and the proof of how good that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from olla import planfile
from olla.chunked import Chunked
from olla.errors import GraphError, PlanError
from olla.graph import Graph
from olla.plan import Plan

if TYPE_CHECKING:
    from olla.operators import Rules


class Decision(NamedTuple):
    """An op that runs again, or later than in the program, so that what it makes need not be kept."""

    op: int  # of the original graph
    name: str
    num_bytes: int  # of what it makes
    num_runs: int  # in all; 1: it only moved
    seconds: float  # added


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class BudgetPlan(Plan):
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
        rerun: uint8[graph.num_ops], how op i runs; see `olla.operators.Rerun`. 0: in its own place.
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

    def _to_object(self) -> dict[str, Any]:
        return to_object(self)

    def decisions(self, source: Graph, rules: Rules) -> list[Decision]:
        """Say what was chosen: the ops that run again or later, those that save most first.

        Args:
            source: the original graph; `chunked.graph`, where its losses are in chunks.
            rules: of that graph; see `olla.operators.rules`.

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
_FIELDS = {
    "source_digest": planfile.text,
    "origin": planfile.integers(np.int32),
    "rerun": planfile.integers(np.uint8),
    "tensor_origin": planfile.integers(np.int32),
    "goal": planfile.options,
    "base_peak_bytes": planfile.count,
    "base_seconds": planfile.seconds,
    "added_seconds": planfile.seconds,
    "added_seconds_lower_bound": planfile.seconds,
    "peak_lower_bound_bytes": planfile.count,
    "num_recomputed": planfile.count,
    "num_in_place": planfile.count,
}


def to_object(plan: BudgetPlan) -> dict[str, Any]:
    """Return the plan as what `json.dumps` takes: a plan with the key "rewrite", the rewritten graph in it."""
    values = {name: getattr(plan, name) for name in _FIELDS}
    lists = {name: value.tolist() for name, value in values.items() if isinstance(value, np.ndarray)}
    rewrite = {**values, **lists, "graph": plan.graph.to_dict()}
    if plan.chunked is not None:
        rewrite["chunked"] = plan.chunked.to_dict()
    return {**planfile.to_object(plan), "rewrite": rewrite}


def fields_of(content: object) -> dict[str, Any]:
    """Return the fields of `BudgetPlan` beyond those of `Plan`, from the key "rewrite" of a plan file.

    Raises:
        PlanError: a key is missing or has another type.
    """
    rewrite = planfile.section("rewrite", content, (*_FIELDS, "graph"))
    graph = planfile.graph("rewrite", rewrite["graph"])
    try:
        chunked = Chunked.from_dict(rewrite["chunked"]) if "chunked" in rewrite else None
    except GraphError as error:
        raise PlanError(f"the chunked graph in 'rewrite' is invalid: {error}", rule="type") from error
    fields = {name: read(f"rewrite.{name}", rewrite[name]) for name, read in _FIELDS.items()}
    return {"graph": graph, "chunked": chunked, **fields}
