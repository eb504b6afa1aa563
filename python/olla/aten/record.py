"""Record of the graphs of a wrapped model: which are planned, which are not and why, with figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from olla.base import human_bytes, percent, plain

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class GraphRecord:
    """One graph of a model.

    Attributes:
        kind: "training", forward and backward; or "inference", forward alone, which keeps its order.
        reason: why olla left it to torch; empty where it is planned.
        num_ops: operators of the graph as the program has them.
        peak_bytes: most memory live at once in forward and backward, with parameters, inputs and gradients, as planned;
            workspaces of kernels come on top. 0 where it is not planned.
        eager_peak_bytes: computed, not measured: the peak of the same operators in the order of the program, with all
            that autograd saves.
        lower_bound_bytes: no plan that takes as long has a lower peak.
        resident_bytes: parameters, buffers and inputs among these.
        saved_bytes: what forward makes and keeps for backward.
        num_again: operators that are recomputed.
        num_in_place: results that take over the memory of an input.
        added_seconds, base_seconds: estimated, of recomputation, and of the whole.
        plan_seconds: wall-clock time of planning.
    """

    kind: str = "training"
    reason: str = ""
    num_ops: int = 0
    peak_bytes: int = 0
    eager_peak_bytes: int = 0
    lower_bound_bytes: int = 0
    resident_bytes: int = 0
    saved_bytes: int = 0
    num_again: int = 0
    num_in_place: int = 0
    added_seconds: float = 0.0
    base_seconds: float = 0.0
    plan_seconds: float = 0.0


@dataclass(kw_only=True)
class WrapReport:
    """What runs planned of a model that `olla.wrap` has wrapped.

    Attributes:
        name: class of the model.
        num_calls: of the model, so far.
        num_unplanned_calls: of these, calls in which no graph ran: Dynamo took nothing, or made graphs too often.
        graphs: in the order they were compiled; another size of batch, or training and evaluation, make graphs of
            their own.
        breaks: where Dynamo had to end a graph: file, line and reason; each once.
        notes: for a person.
    """

    name: str
    num_calls: int = 0
    num_unplanned_calls: int = 0
    graphs: list[GraphRecord] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def planned(self) -> list[GraphRecord]:
        """The training graphs that run in planned order."""
        return [graph for graph in self.graphs if graph.kind == "training" and not graph.reason]

    @property
    def graph_count(self) -> int:
        """How many graphs there are, planned or not."""
        return len(self.graphs)

    @property
    def graph_break_count(self) -> int:
        """At how many lines Dynamo had to end a graph."""
        return len(self.breaks)

    @property
    def op_count(self) -> int:
        """Operators of all graphs."""
        return sum(graph.num_ops for graph in self.graphs)

    def __str__(self) -> str:
        """Return the figures as text: a line on the calls, a table of the graphs, then what is not planned."""
        calls = f"{self.name}: {self.num_calls:,} calls, {self.num_unplanned_calls:,} of them without a graph"
        counts = (
            f"graph count {self.graph_count}, graph break count {self.graph_break_count}, op count {self.op_count:,}"
        )
        lines: list[Table | str] = [calls, counts, ""]
        if self.graphs:
            lines += [self._table(), ""]
        lines += [f"graph break: {line}" for line in self.breaks]
        lines += [f"graph {i} is not planned: {g.reason}" for i, g in enumerate(self.graphs) if g.reason]
        lines += self.notes
        return plain(*lines, width=120)

    def _table(self) -> Table:
        from rich.table import Column, Table

        names = "kind", "ops", "peak", "of eager's", "bound", "saved", "recomputed", "in place", "slower"
        columns = (Column(name, justify="right") for name in names)
        table = Table("graph", *columns, box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for i, g in enumerate(self.graphs):
            if not g.peak_bytes:
                table.add_row(str(i), g.kind, f"{g.num_ops:,}", "as it is", *[""] * 6)
                continue
            sizes = human_bytes(g.peak_bytes), percent(g.peak_bytes / max(g.eager_peak_bytes, 1))
            bound, saved = human_bytes(g.lower_bound_bytes), human_bytes(g.saved_bytes)
            slower = percent(g.added_seconds / g.base_seconds if g.base_seconds else 0.0)
            row = (*sizes, bound, saved, f"{g.num_again:,}", f"{g.num_in_place:,}", slower)
            table.add_row(str(i), g.kind, f"{g.num_ops:,}", *row)
        return table
