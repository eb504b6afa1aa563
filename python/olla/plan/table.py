"""A plan as text: what `print(plan)` and `olla show` show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from olla.base import cells, human_bytes, percent, plain

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

_WIDTH = 100


class Figure(NamedTuple):
    """A number of bytes by name; None where there is none."""

    name: str
    num_bytes: int | None
    remark: str


class Live(NamedTuple):
    """A tensor, or a workspace, that is live at the peak."""

    num_bytes: int
    name: str
    kind: str
    source: str


class Rows(NamedTuple):
    """What a plan says of itself.

    Attributes:
        title: of which graph it is.
        figures: bytes by name.
        remarks: lines below them.
        peak: where the peak is; empty where there is none.
        live: the largest tensors live there.
        details: lines for a reader who wants to know more.
        seconds: wall-clock time per stage.
    """

    title: str
    figures: Sequence[Figure]
    remarks: Sequence[str]
    peak: str
    live: Sequence[Live]
    details: Sequence[str]
    seconds: Mapping[str, float]


def rows(plan: Any) -> Rows:
    """Return what a plan says of itself to a reader.

    Args:
        plan: an `olla.Plan`; not named by its type, since that prints itself through here.
    """
    saved = plan.saved_bytes / plan.program_peak_bytes if plan.program_peak_bytes else 0.0
    figures = [
        Figure("peak before", plan.program_peak_bytes, "in program order"),
        Figure("peak after", plan.peak_bytes, f"method {plan.method}"),
        Figure("saved", plan.saved_bytes, percent(saved)),
        Figure("lower bound", plan.lower_bound_bytes, f"gap {percent(plan.gap)}, {plan.status.value}"),
        Figure("resident", plan.resident_bytes, "live throughout, outside the arena"),
    ]
    if plan.arena_bytes > 0:
        figures += [
            Figure("arena", plan.arena_bytes, f"fragmentation {percent(plan.fragmentation)}"),
            Figure("load", plan.load_bytes, f"offsets are multiples of {plan.alignment}"),
        ]
        if plan.arena_lower_bound_bytes > 0:
            figures.append(Figure("arena bound", plan.arena_lower_bound_bytes, "no order has a smaller arena"))
    else:
        figures.append(Figure("arena", None, "nothing was laid out"))
    return Rows(
        title=f"{plan.graph_name or 'unnamed graph'}: {plan.num_ops:,} ops, {plan.num_tensors:,} tensors",
        figures=figures,
        remarks=[plan.message, *(rewrite.line() for rewrite in plan.rewrites), *_tradeoff(plan)],
        peak=_peak_line(plan),
        live=[Live(tensor.bytes, *_where(tensor)) for tensor in plan.peak_tensors],
        details=plan.details,
        seconds=plan.seconds,
    )


def _tradeoff(plan: Any) -> list[str]:
    """Say what a goal costs in time, and what is proved of that."""
    if not plan.goal:
        return []
    added, least = (1e3 * seconds for seconds in (plan.added_seconds, plan.added_seconds_lower_bound))
    return [
        f"added time {added:.3f} ms ({percent(plan.slowdown)} of {1e3 * plan.base_seconds:.3f} ms on "
        f"{plan.goal['device']}); no rewriting within this memory adds less than {least:.3f} ms",
        f"peak {human_bytes(plan.peak_bytes)}, {human_bytes(plan.base_peak_bytes)} without rewriting; "
        f"no rewriting within this time needs less than {human_bytes(plan.peak_lower_bound_bytes)}",
    ]


def _peak_line(plan: Any) -> str:
    if plan.peak_op is None:
        return ""
    who = ". Largest live there besides resident memory:" if plan.peak_tensors else ", with resident memory alone."
    return f"The peak is at op {plan.peak_op.id} ({plan.peak_op.name or 'unnamed'}){who}"


def _where(tensor: Any) -> tuple[str, str, str]:
    """Say where a tensor of the peak comes from: itself, its kind, its producer."""
    if tensor.id < 0:
        return "", tensor.kind, f"of {tensor.producer}"
    name = f"tensor {tensor.id}" + (f" {tensor.name}" if tensor.name else "")
    return name, tensor.kind, f"written by {tensor.producer}" if tensor.producer else ""


def text(rows: Rows, verbose: bool = False) -> str:
    """Return the rows as plain text, without colour codes.

    Args:
        rows: of a plan.
        verbose: whether to add the plan's details.

    Returns:
        Lines of at most 100 columns: the figures, what is remarked about them, where the peak is and what lives there,
        seconds per stage.
    """
    return plain(render(rows, verbose), width=_WIDTH)


def render(rows: Rows, verbose: bool = False) -> Group:
    """Return the rows for a rich console, which decides about width and colour."""
    from rich.console import Group

    parts: list[RenderableType] = [*cells(rows.title, style="bold"), _figures(rows), *cells(*rows.remarks)]
    if rows.peak:
        parts += cells("", rows.peak)
    if rows.live:
        parts.append(_live(rows))
    if verbose and rows.details:
        parts += cells("", *rows.details)
    parts += [*cells(""), *cells(_stages(rows), style="dim")]
    return Group(*parts)


def _table() -> Table:
    from rich.table import Table

    return Table(box=None, show_header=False, padding=(0, 2, 0, 2), pad_edge=True)


def _figures(rows: Rows) -> Table:
    table = _table()
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right", style="dim")
    table.add_column()
    for name, num_bytes, remark in rows.figures:
        number = ("none", "") if num_bytes is None else (human_bytes(num_bytes), f"{num_bytes:,}")
        table.add_row(*cells(name, *number, remark))
    return table


def _live(rows: Rows) -> Table:
    table = _table()
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column()
    table.add_column(overflow="fold")
    for live in rows.live:
        table.add_row(*cells(human_bytes(live.num_bytes), live.name, live.kind, live.source))
    return table


def _stages(rows: Rows) -> str:
    stages = [f"{name} {seconds:.2f} s" for name, seconds in rows.seconds.items()]
    return "Time: " + ", ".join(stages) if stages else "Time: not recorded"
