"""Plan, the answer: when every op runs, where every tensor lies, and the proof of how good that is."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from olla.base.files import naming, read_json, write_json
from olla.errors import PlanError
from olla.graph import Graph, Rules
from olla.plan import fields, table
from olla.plan.chunks import Chunked
from olla.plan.peak import LiveTensor, OpAt, read_op, read_tensors
from olla.plan.recomputed import Decision, Recomputed
from olla.plan.rewrite import Rewrite, composed, read_rewrites
from olla.plan.swapped import SwapDecision, Swapped

FORMAT = "olla-plan"
VERSION = 3

_AnyRewrite = TypeVar("_AnyRewrite", bound=Rewrite)


class Status(Enum):
    """What is known about a plan's order. A limit that was reached is a status, not an error."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"

    @property
    def message(self) -> str:
        """What the status means, for a reader."""
        if self is Status.OPTIMAL:
            return "Proved: no valid order has a lower peak."
        return "Not proved: a better order may exist, but none has a peak below the bound."


def _status(key: str, value: object) -> Status:
    name = fields.text(key, value)
    try:
        return Status(name)
    except ValueError as cause:
        raise PlanError(f"{key}: {cause}; expected one of {[s.value for s in Status]}", rule="type") from None


_READERS = {"status": _status, "peak_op": read_op, "peak_tensors": read_tensors, "rewrites": read_rewrites}
# What a plan says of the request and of all its rewritings; the rest is about the last graph alone.
_OF_REQUEST = (
    "goal",
    "base_peak_bytes",
    "base_seconds",
    "added_seconds",
    "added_seconds_lower_bound",
    "peak_lower_bound_bytes",
)


def _fields_of(content: object) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise PlanError(f"is a JSON {type(content).__name__}, expected an object", rule="format")
    if content.get("format") != FORMAT:
        raise fields.reject("format", content.get("format"), f"{FORMAT!r}: this is no plan", rule="format")
    version = content.get("version")
    if type(version) is not int or version != VERSION:
        is_older = type(version) is int and 0 < version < VERSION
        remedy = "make the plan again, with olla plan" if is_older else "update olla, or make the plan again"
        raise fields.reject("version", version, f"{VERSION}: {remedy}", rule="version")
    readers = fields.readers(Plan, _READERS)
    for name in readers:
        if name not in content:
            raise PlanError(f"has no {name!r}, which every plan needs: was the file cut or edited?", rule="missing")
    return fields.from_object(content, readers)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Plan:
    """When every op of a training step runs, where every tensor lies, and how good that is.

    Where the graph that was given had to be rewritten, everything is about the last graph of `rewrites`, but for what
    is said to be of the graph that was given; the printed table names ops and tensors as that one does. `olla.check`
    accepts the plan with either graph, and given the first one also proves that both compute the same.

    All byte figures include resident memory, except `arena_bytes` and `load_bytes`: these cover the arena, in which
    lies what ops write, and their workspaces. A plan made without a layout has no arena: all offsets are -1.

    Attributes:
        graph_name: name of the graph the plan was made for.
        graph_digest: digest of that graph; the plan is refused for any other.
        num_ops: ops of the graph.
        num_tensors: tensors of the graph.
        method: as given to `plan`, or "given" for an order the caller gave.
        status: OPTIMAL or FEASIBLE.
        message: what is known, and what to try next.
        order: int32[num_ops]: the op that runs at step i.
        offsets: int64[num_tensors], bytes: where tensor i begins in the arena; -1 where it keeps its own storage.
        workspace_offsets: int64[num_ops], bytes: where the workspace of op i begins; -1 where it has none.
        alignment: every offset is a multiple of this many bytes.
        peak_bytes: most bytes live at once in this order.
        lower_bound_bytes: no valid order has a lower peak.
        program_peak_bytes: the peak of the program order of the graph that was given: savings are measured against it.
        resident_bytes: live throughout: parameters, optimizer state, data.
        donated_bytes: of what the step may overwrite or free: live until its last use, outside the arena.
        arena_bytes: size of the arena.
        load_bytes: most bytes live at once in the arena, each size rounded up to the alignment: no arena of this order
            is smaller.
        arena_lower_bound_bytes: no valid order and layout have a smaller arena; 0 where nothing is known.
        before: int32[k], op ids: extra precedences the order keeps besides those of the graph.
        after: int32[k], op ids: op before[i] runs before op after[i].
        seconds: wall-clock time per stage, and "total".
        peak_op: the first op at the peak; None in an empty graph.
        peak_tensors: the largest tensors live at the peak that are not resident, largest first.
        options: the options the plan was made with.
        details: lines for a reader who wants to know more, such as the status of every part that a method solved.
        rewrites: from the graph that was given to the one that is planned, one behind the other.
        source_digest: digest of the graph that was given.
        goal: what was asked for: budget_bytes, max_slowdown or minimise; device, in_place, recompute, and where tensors
            may be swapped the link and host_budget_bytes. Empty where only an order was.
        base_peak_bytes: the peak of the best order found without rewriting; `program_peak_bytes` is that of no plan.
        base_seconds: estimated time of the ops of the graph that was given; 0 without a goal.
        added_seconds: estimated time that the rewritings add.
        added_seconds_lower_bound: no rewriting that reaches this plan's peak (the budget, if one was given) adds less.
        peak_lower_bound_bytes: no rewriting that the goal allows has a lower peak, in any order: of those within
            `max_slowdown`, if that was asked for; of all, for a budget or the least peak.

    Example:
        >>> import olla
        >>> from olla.plan import Plan
        >>> builder = olla.Graph.builder("two ops")
        >>> activation = builder.tensor(1000)
        >>> _ = builder.op("forward", writes=[activation])
        >>> _ = builder.op("backward", reads=[activation])
        >>> plan = olla.plan(builder.build())
        >>> plan.peak_bytes, plan.status.value, plan.order.tolist(), plan.arena_bytes
        (1000, 'optimal', [0, 1], 1024)
    """

    graph_name: str
    graph_digest: str
    num_ops: int
    num_tensors: int
    method: str
    status: Status
    message: str
    order: NDArray[np.int32]
    offsets: NDArray[np.int64]
    workspace_offsets: NDArray[np.int64]
    alignment: int
    peak_bytes: int
    lower_bound_bytes: int
    program_peak_bytes: int
    resident_bytes: int
    donated_bytes: int
    arena_bytes: int
    load_bytes: int
    arena_lower_bound_bytes: int = 0
    before: NDArray[np.int32]
    after: NDArray[np.int32]
    seconds: Mapping[str, float]
    peak_op: OpAt | None
    peak_tensors: tuple[LiveTensor, ...]
    options: Mapping[str, Any]
    details: tuple[str, ...] = ()
    rewrites: tuple[Rewrite, ...] = ()
    source_digest: str
    goal: Mapping[str, Any]
    base_peak_bytes: int
    base_seconds: float = 0.0
    added_seconds: float = 0.0
    added_seconds_lower_bound: float = 0.0
    peak_lower_bound_bytes: int

    def __post_init__(self) -> None:
        """Make the arrays read-only, like the rest."""
        for array in (self.order, self.offsets, self.workspace_offsets, self.before, self.after):
            array.flags.writeable = False

    @property
    def graph(self) -> Graph | None:
        """The graph that is planned, where it is a rewritten one."""
        return self.rewrites[-1].graph if self.rewrites else None

    @property
    def origin(self) -> NDArray[np.int32]:
        """int32[num_ops], op of the graph that was given that op i stands for; -1: a copy to host memory or back."""
        num_ops = int(self.rewrites[0].origin.max(initial=-1)) + 1 if self.rewrites else self.num_ops
        return composed((rewrite.origin for rewrite in self.rewrites), num_ops)

    @property
    def tensor_origin(self) -> NDArray[np.int32]:
        """int32[num_tensors], tensor of the graph that was given that tensor t stands for; -1: none."""
        origins = [rewrite.tensors() for rewrite in self.rewrites]
        return composed(origins, int(origins[0].max(initial=-1)) + 1 if origins else self.num_tensors)

    def rewrite(self, kind: type[_AnyRewrite]) -> _AnyRewrite | None:
        """Return the rewriting of a kind, or None."""
        return next((rewrite for rewrite in self.rewrites if isinstance(rewrite, kind)), None)

    @property
    def chunked(self) -> Chunked | None:
        """The rewriting that puts losses in chunks, if there is one."""
        return self.rewrite(Chunked)

    @property
    def recomputed(self) -> Recomputed | None:
        """The rewriting that recomputes ops, if there is one."""
        return self.rewrite(Recomputed)

    @property
    def swapped(self) -> Swapped | None:
        """The rewriting that copies tensors to host memory, if there is one."""
        return self.rewrite(Swapped)

    @property
    def num_recomputed(self) -> int:
        """Runs of ops beyond one of each."""
        return self.recomputed.num_recomputed if self.recomputed else 0

    @property
    def num_in_place(self) -> int:
        """Results that take over an input's storage."""
        return self.recomputed.num_in_place if self.recomputed else 0

    @property
    def swapped_bytes(self) -> int:
        """Copied to host memory in all."""
        return self.swapped.swaps.swapped_bytes if self.swapped else 0

    @property
    def host_bytes(self) -> int:
        """Most host memory in use at once."""
        return self.swapped.swaps.host_bytes if self.swapped else 0

    @property
    def slowdown(self) -> float:
        """Added time as a share of the step's own."""
        return self.added_seconds / self.base_seconds if self.base_seconds > 0 else 0.0

    @property
    def gap(self) -> float:
        """How far the peak can be from the best: (peak - bound) / bound."""
        return _ratio(self.peak_bytes - self.lower_bound_bytes, self.lower_bound_bytes)

    @property
    def saved_bytes(self) -> int:
        """What the plan saves against the program order of the graph that was given; negative if it is worse."""
        return self.program_peak_bytes - self.peak_bytes

    @property
    def fragmentation(self) -> float:
        """How much larger the arena is than its load: (arena - load) / load."""
        return _ratio(self.arena_bytes - self.load_bytes, self.load_bytes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, through gzip where the name ends in `.gz`; the file appears whole or not at all.

        Raises:
            PlanError: the file cannot be written, or its name does not end in .json or .json.gz.
        """
        with naming(os.fsdecode(path)):
            write_json(path, self.to_object(), PlanError)

    def to_object(self) -> dict[str, Any]:
        """Return the plan as what `json.dumps` takes.

        Returns:
            "format" and "version", then one key per attribute; arrays are lists.
        """
        return {"format": FORMAT, "version": VERSION, **fields.to_object(self)}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan written by `save`. That it fits a graph is for `olla.check` to say.

        Raises:
            PlanError: the file cannot be read, is damaged, is no plan, or has an unknown version.
        """
        with naming(os.fsdecode(path)):
            return cls.from_object(read_json(path, PlanError))

    @classmethod
    def from_object(cls, content: Any) -> Plan:
        """Return the plan of what `json.loads` made of a plan file.

        Raises:
            PlanError: it is no plan, damaged, or of an unknown version: rule "format", "version", "missing" or "type",
                naming the key and the value seen.
        """
        return cls(**_fields_of(content))

    def decisions(self, graph: Graph, rules: Rules) -> list[Decision | SwapDecision]:
        """Say what was chosen for each tensor, and at what price, most bytes first.

        Args:
            graph: that was given; `chunked.graph`, where its losses are in chunks.
            rules: of that graph; see `olla.graph.rules`.

        Returns:
            A `Decision` for every op that is recomputed or moved, then a `SwapDecision` for every swapped tensor.

        Complexity: O(ops log ops + swaps^2).
        """
        recomputed, swapped = self.recomputed, self.swapped
        before, origin = graph, np.arange(graph.num_ops, dtype=np.int32)
        found: list[Decision | SwapDecision] = []
        if recomputed is not None:
            before, origin = recomputed.graph, recomputed.origin
            found += recomputed.decisions(graph, rules)
        if swapped is not None:
            found += swapped.decisions(before, origin, graph, rules)
        return found

    def __repr__(self) -> str:
        """Say the essentials on one line."""
        return (
            f"<Plan of {self.graph_name!r}: {self.num_ops} ops, peak {self.peak_bytes} bytes, {self.status.value}, "
            f"arena {self.arena_bytes} bytes>"
        )

    def __str__(self) -> str:
        """Return the plan as the table a person wants."""
        return table.text(self)

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return table.html(self)


def with_figures(plan: Plan, figures: Plan, graph: Graph, given: Graph) -> Plan:
    """Return a plan with the order and figures of another plan of its last graph.

    Args:
        plan: with rewritings or without.
        figures: the other plan.
        graph: its graph: the last one, with its costs.
        given: the graph that was given, with the same costs.
    """
    if not plan.rewrites:
        return figures
    rewrites = (*plan.rewrites[:-1], replace(plan.rewrites[-1], graph=graph))
    return replace(
        figures,
        rewrites=rewrites,
        source_digest=given.digest,
        program_peak_bytes=given.program_peak_bytes,
        **{name: getattr(plan, name) for name in _OF_REQUEST},
    )


def of_last_graph(plan: Plan) -> Plan:
    """Return what a plan says of its last graph alone, as if that had been given."""
    peak = plan.program_peak_bytes if plan.graph is None else plan.graph.program_peak_bytes
    return replace(plan, rewrites=(), source_digest=plan.graph_digest, program_peak_bytes=peak)


def _ratio(difference: int, base: int) -> float:
    if difference == 0:
        return 0.0
    return difference / base if base > 0 else math.inf
