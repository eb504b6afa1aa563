"""Plan, the answer: when every op runs, where every tensor lies, and the proof of how good that is."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from olla.base import percent
from olla.base.files import naming, read_json, write_json
from olla.errors import PlanError
from olla.plan import fields, table

FORMAT = "olla-plan"
VERSION = 1


class Status(Enum):
    """What is known about a plan's order. A limit that was reached is a status, not an error."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"

    @property
    def message(self) -> str:
        """What the status means, for a reader."""
        return _STATUS_MESSAGES[self]


_STATUS_MESSAGES = {
    Status.OPTIMAL: "Proved: no valid order has a lower peak.",
    Status.FEASIBLE: "Not proved: a better order may exist, but none has a peak below the bound.",
}


class LiveTensor(NamedTuple):
    """A tensor, or the workspace of the op itself (id -1), that is live at the peak."""

    id: int
    name: str
    bytes: int
    kind: str  # as in the graph file, or "workspace"
    producer: str  # name of the op that writes it; empty if none does


class OpAt(NamedTuple):
    """An op by position and name."""

    id: int
    name: str


def _status(key: str, value: object) -> Status:
    name = fields.text(key, value)
    try:
        return Status(name)
    except ValueError as cause:
        raise PlanError(f"{key}: {cause}; expected one of {[s.value for s in Status]}", rule="type") from None


def _peak_op(key: str, value: object) -> OpAt | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise fields.reject(key, value, "[id, name] or null")
    return OpAt(fields.count(f"{key}[0]", value[0]), fields.text(f"{key}[1]", value[1]))


def _peak_tensors(key: str, value: object) -> tuple[LiveTensor, ...]:
    if not isinstance(value, list):
        raise fields.reject(key, value, "a list")
    tensors = []
    for i, row in enumerate(value):
        place = f"{key}[{i}]"
        if not isinstance(row, list) or len(row) != 5:
            raise fields.reject(place, row, "[id, name, bytes, kind, producer]")
        tensor = LiveTensor(
            fields.integer(place, row[0], least=-1),
            fields.text(place, row[1]),
            fields.count(place, row[2]),
            fields.text(place, row[3]),
            fields.text(place, row[4]),
        )
        tensors.append(tensor)
    return tuple(tensors)


# Field -> what turns its JSON value into the field's.
_FIELDS: fields.Table = {
    "graph_name": fields.text,
    "graph_digest": fields.text,
    "num_ops": fields.count,
    "num_tensors": fields.count,
    "method": fields.text,
    "status": _status,
    "message": fields.text,
    "order": fields.integers(np.int32),
    "offsets": fields.integers(np.int64),
    "workspace_offsets": fields.integers(np.int64),
    "alignment": fields.count,
    "peak_bytes": fields.count,
    "lower_bound_bytes": fields.count,
    "program_peak_bytes": fields.count,
    "resident_bytes": fields.count,
    "arena_bytes": fields.count,
    "load_bytes": fields.count,
    "arena_lower_bound_bytes": fields.count,
    "before": fields.integers(np.int32),
    "after": fields.integers(np.int32),
    "seconds": fields.stage_seconds,
    "peak_op": _peak_op,
    "peak_tensors": _peak_tensors,
    "options": fields.options,
    "details": fields.lines,
}
_OPTIONAL = ("arena_lower_bound_bytes", "details")  # files made before these keys existed do without


def _fields_of(content: object) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise PlanError(f"is a JSON {type(content).__name__}, expected an object", rule="format")
    if content.get("format") != FORMAT:
        raise fields.reject("format", content.get("format"), f"{FORMAT!r}: this is no plan", rule="format")
    version = content.get("version")
    if type(version) is not int or version != VERSION:
        raise fields.reject("version", version, f"{VERSION}: make the plan again, or update olla", rule="version")
    for name in _FIELDS:
        if name not in content and name not in _OPTIONAL:
            raise PlanError(f"has no {name!r}, which every plan needs: was the file cut or edited?", rule="missing")
    return fields.from_object(content, _FIELDS)


def _where(tensor: LiveTensor) -> tuple[str, str, str]:
    """Say where a tensor of the peak comes from: itself, its kind, its producer."""
    if tensor.id < 0:
        return "", tensor.kind, f"of {tensor.producer}"
    name = f"tensor {tensor.id}" + (f" {tensor.name}" if tensor.name else "")
    return name, tensor.kind, f"written by {tensor.producer}" if tensor.producer else ""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Plan:
    """When every op of a training step runs, where every tensor lies, and how good that is.

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
        program_peak_bytes: the peak of the program order.
        resident_bytes: live throughout: parameters, optimizer state, data.
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

    _kinds: ClassVar[dict[str, type[Plan]]] = {}  # section of a plan file -> the kind of plan that it makes of it

    def __init_subclass__(cls, section: str, **kwargs: Any) -> None:
        """Register a kind of plan, and the section of the file that is its own."""
        super().__init_subclass__(**kwargs)
        Plan._kinds[section] = cls

    def __post_init__(self) -> None:
        """Make the arrays read-only, like the rest."""
        for array in (self.order, self.offsets, self.workspace_offsets, self.before, self.after):
            array.flags.writeable = False

    @property
    def gap(self) -> float:
        """How far the peak can be from the best: (peak - bound) / bound."""
        return _ratio(self.peak_bytes - self.lower_bound_bytes, self.lower_bound_bytes)

    @property
    def saved_bytes(self) -> int:
        """What the order saves against the program order; negative if a given order is worse."""
        return self.program_peak_bytes - self.peak_bytes

    @property
    def fragmentation(self) -> float:
        """How much larger the arena is than its load: (arena - load) / load."""
        return _ratio(self.arena_bytes - self.load_bytes, self.load_bytes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, through gzip where the name ends in `.gz`; the file appears whole or not at all.

        Raises:
            PlanError: the file cannot be written.
        """
        with naming(os.fsdecode(path)):
            write_json(path, self.to_object(), PlanError)

    def to_object(self) -> dict[str, Any]:
        """Return the plan as what `json.dumps` takes.

        Returns:
            "format" and "version", then one key per field of `Plan`; arrays are lists. Kinds of plans that say more add
            a section of their own.
        """
        return {"format": FORMAT, "version": VERSION, **fields.to_object(self, _FIELDS)}

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
        values = _fields_of(content)
        for section, kind in Plan._kinds.items():
            if section in content:
                return kind(**values, **kind._fields_of_section(content[section]))
        return cls(**values)

    @classmethod
    def _fields_of_section(cls, content: object) -> dict[str, Any]:
        """Return the fields that this kind of plan adds, from its section of a plan file; a plain plan adds none."""
        return {}

    def __repr__(self) -> str:
        """Say the essentials on one line."""
        return (
            f"<Plan of {self.graph_name!r}: {self.num_ops} ops, peak {self.peak_bytes} bytes, {self.status.value}, "
            f"arena {self.arena_bytes} bytes>"
        )

    def __str__(self) -> str:
        """Return the plan as the table a person wants."""
        return table.text(self.rows())

    def rows(self) -> table.Rows:
        """Return what the plan says of itself to a reader."""
        saved = self.saved_bytes / self.program_peak_bytes if self.program_peak_bytes else 0.0
        figures = [
            table.Figure("peak before", self.program_peak_bytes, "in program order"),
            table.Figure("peak after", self.peak_bytes, f"method {self.method}"),
            table.Figure("saved", self.saved_bytes, percent(saved)),
            table.Figure("lower bound", self.lower_bound_bytes, f"gap {percent(self.gap)}, {self.status.value}"),
            table.Figure("resident", self.resident_bytes, "live throughout, outside the arena"),
        ]
        if self.arena_bytes > 0:
            figures += [
                table.Figure("arena", self.arena_bytes, f"fragmentation {percent(self.fragmentation)}"),
                table.Figure("load", self.load_bytes, f"offsets are multiples of {self.alignment}"),
            ]
            if self.arena_lower_bound_bytes > 0:
                bound = self.arena_lower_bound_bytes
                figures.append(table.Figure("arena bound", bound, "no order has a smaller arena"))
        else:
            figures.append(table.Figure("arena", None, "nothing was laid out"))
        return table.Rows(
            title=f"{self.graph_name or 'unnamed graph'}: {self.num_ops:,} ops, {self.num_tensors:,} tensors",
            figures=figures,
            remarks=[self.message],
            peak=self._peak_line(),
            live=[table.Live(tensor.bytes, *_where(tensor)) for tensor in self.peak_tensors],
            details=self.details,
            seconds=self.seconds,
        )

    def _peak_line(self) -> str:
        if self.peak_op is None:
            return ""
        who = ". Largest live there besides resident memory:" if self.peak_tensors else ", with resident memory alone."
        return f"The peak is at op {self.peak_op.id} ({self.peak_op.name or 'unnamed'}){who}"


def _ratio(difference: int, base: int) -> float:
    if difference == 0:
        return 0.0
    return difference / base if base > 0 else math.inf
