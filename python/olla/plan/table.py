"""A plan as text: what `print(plan)` and `olla show` show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from olla.base import cells, figures, human_bytes, notebook, percent, plain
from olla.plan.texts import op_text, tensor_text

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

WIDTH = 100


def text(plan: Any, verbose: bool = False) -> str:
    """Return the table as plain text, without colour codes.

    Args:
        plan: an `olla.Plan`; not named by its type, since that prints itself through here.
        verbose: whether to add the plan's details.

    Returns:
        Lines of at most 100 columns: the figures, what is remarked about them, where the peak is and what lives there,
        seconds per stage.
    """
    return plain(render(plan, verbose), width=WIDTH)


def render(plan: Any, verbose: bool = False) -> Group:
    """Return the table for a rich console, which decides about width and colour."""
    from rich.console import Group

    title = f"{plan.graph_name or 'unnamed graph'}: {plan.num_ops:,} ops, {plan.num_tensors:,} tensors"
    title += " as rewritten" if plan.rewrites else ""
    remarks = [plan.message, *(rewrite.line() for rewrite in plan.rewrites), *_tradeoff(plan)]
    parts: list[RenderableType] = [*cells(title, style="bold"), _figures(plan), *cells(*remarks)]
    if plan.peak_op is not None:
        who = ". Largest live there besides resident memory:" if plan.peak_tensors else ", with resident memory alone."
        parts += cells("", f"The peak is at {op_text(plan, plan.peak_op.id, plan.peak_op.name)}{who}")
    if plan.peak_tensors:
        parts.append(_live(plan))
    if verbose and plan.details:
        parts += cells("", *plan.details)
    stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in plan.seconds.items())
    return Group(*parts, *cells(""), *cells(f"Time: {stages or 'not recorded'}", style="dim"))


def _tradeoff(plan: Any) -> list[str]:
    """Say what a goal costs in time, and what is proved of that."""
    if not plan.goal:
        return []
    added, least = (1e3 * seconds for seconds in (plan.added_seconds, plan.added_seconds_lower_bound))
    return [
        f"added time {added:.3f} ms ({percent(plan.slowdown)} of {1e3 * plan.base_seconds:.3f} ms on "
        f"{plan.goal['device']}); no rewriting within this memory adds less than {least:.3f} ms",
        f"peak {human_bytes(plan.peak_bytes)}, {human_bytes(plan.base_peak_bytes)} in the best order without "
        "rewriting; "
        f"no rewriting that the goal allows needs less than {human_bytes(plan.peak_lower_bound_bytes)}",
    ]


def html(plan: Any) -> str:
    """Return what a notebook shows of a plan."""
    peaks = [
        ("peak before", plan.program_peak_bytes),
        ("peak after", plan.peak_bytes),
        ("lower bound", plan.lower_bound_bytes),
    ]
    rows = [(name, f"{human_bytes(n)}, {remark}") for name, n, remark in _rows(plan) if (name, n) not in peaks]
    if plan.arena_bytes <= 0:
        rows.append(("arena", "none: nothing was laid out"))
    title = f"{plan.graph_name or 'unnamed graph'}: {plan.num_ops:,} ops, {plan.method}, {plan.status.value}"
    notes = [plan.message, *(rewrite.line() for rewrite in plan.rewrites)]
    picture = notebook.bars(peaks, "; ".join(f"{name} {human_bytes(n)}" for name, n in peaks))
    return notebook.shown(title, rows, picture, notes)


def _rows(plan: Any) -> list[tuple[str, int, str]]:
    """Return the figures of a plan: name, bytes, remark."""
    saved = plan.saved_bytes / plan.program_peak_bytes if plan.program_peak_bytes else 0.0
    rows = [
        ("peak before", plan.program_peak_bytes, "in program order, as given" if plan.rewrites else "in program order"),
        ("peak after", plan.peak_bytes, f"method {plan.method}"),
        ("saved", plan.saved_bytes, percent(saved)),
        ("lower bound", plan.lower_bound_bytes, f"gap {percent(plan.gap)}, {plan.status.value}"),
        ("resident", plan.resident_bytes, "live throughout, outside the arena"),
    ]
    if plan.arena_bytes > 0:
        rows += [
            ("arena", plan.arena_bytes, f"fragmentation {percent(plan.fragmentation)}"),
            ("load", plan.load_bytes, f"offsets are multiples of {plan.alignment}"),
        ]
        if plan.arena_lower_bound_bytes > 0:
            rows.append(("arena bound", plan.arena_lower_bound_bytes, "no order has a smaller arena"))
    return rows


def _figures(plan: Any) -> Table:
    table = figures({}, {"justify": "right"}, {"justify": "right", "style": "dim"}, {})
    for name, num_bytes, remark in _rows(plan):
        table.add_row(*cells(name, human_bytes(num_bytes), f"{num_bytes:,}", remark))
    if plan.arena_bytes <= 0:
        table.add_row(*cells("arena", "none", "", "nothing was laid out"))
    return table


def _live(plan: Any) -> Table:
    table = figures({"justify": "right", "no_wrap": True}, {"overflow": "fold"}, {}, {"overflow": "fold"})
    for tensor in plan.peak_tensors:
        if tensor.id < 0:
            name, source = "", f"of {tensor.producer}"
        else:
            name = tensor_text(plan, tensor.id, tensor.name)
            source = f"written by {tensor.producer}" if tensor.producer else ""
        table.add_row(*cells(human_bytes(tensor.bytes), name, tensor.kind, source))
    return table
