"""A plan as text: what `print(plan)` and `olla show` show."""

from __future__ import annotations

import io
import math
import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text

    from olla.plan import Plan

_WIDTH = 100
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control characters, also those of direction; surrogates; other line ends


def visible(text: str) -> str:
    r"""Return text from a file as a terminal may show it: characters that would steer the terminal as escapes.

    Example:
        >>> visible("a name"), visible("\x1b[2Jgone") == r"\x1b[2Jgone"
        ('a name', True)
    """
    if text.isprintable():
        return text
    return "".join(c.encode("unicode_escape").decode() if unicodedata.category(c) in _HIDDEN else c for c in text)


def cells(*texts: str, style: str = "") -> list[Text]:
    """Return texts for rich as they are: `visible`, and "[0]" or "[red]" in a name is no markup."""
    from rich.text import Text

    return [Text(visible(text), style) for text in texts]


def human_bytes(num_bytes: int) -> str:
    """Return a byte count for a reader.

    Example:
        >>> human_bytes(0), human_bytes(1536), human_bytes(5 * 2**30), human_bytes(-2048)
        ('0 B', '1.50 KiB', '5.00 GiB', '-2.00 KiB')
    """
    size, unit = float(abs(num_bytes)), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if size < 1024.0:
            break
        size, unit = size / 1024.0, larger
    sign = "-" if num_bytes < 0 else ""
    return f"{sign}{size:.0f} B" if unit == "B" else f"{sign}{size:.2f} {unit}"


def percent(ratio: float) -> str:
    """Return a ratio in percent; a small one never reads as zero.

    Example:
        >>> percent(0.0), percent(0.1234), percent(1e-7), percent(float("inf"))
        ('0 %', '12.34 %', '<0.01 %', 'unknown')
    """
    if not math.isfinite(ratio):
        return "unknown"
    if ratio != 0 and abs(ratio) < 1e-4:
        return "<0.01 %" if ratio > 0 else ">-0.01 %"
    return f"{ratio * 100:.2f} %" if ratio else "0 %"


def text(plan: Plan, verbose: bool = False) -> str:
    """Return the plan as plain text, without colour codes.

    Args:
        plan: the plan.
        verbose: whether to add the plan's details.

    Returns:
        Lines of at most 100 columns: peak before and after, bound and gap, what was saved, the arena and its
        fragmentation, where the peak is and what lives there, seconds per stage.
    """
    from rich.console import Console

    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(render(plan, verbose))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def render(plan: Plan, verbose: bool = False) -> Group:
    """Return the plan for a rich console, which decides about width and colour."""
    from rich.console import Group

    title = f"{plan.graph_name or 'unnamed graph'}: {plan.num_ops:,} ops, {plan.num_tensors:,} tensors"
    parts: list[RenderableType] = [*cells(title, style="bold"), _figures(plan), *cells(plan.message)]
    parts += cells(*_rewriting(plan))
    if plan.peak_op is not None:
        parts += cells("", f"The peak is at op {plan.peak_op.id} ({plan.peak_op.name or 'unnamed'})" + _who(plan))
    if plan.peak_tensors:
        parts.append(_live(plan))
    if verbose and plan.details:
        parts += cells("", *plan.details)
    parts += [*cells(""), *cells(_stages(plan), style="dim")]
    return Group(*parts)


def _rewriting(plan: Plan) -> list[str]:
    """Say what a budget was met with; nothing for a plan without one."""
    from olla.budgetplan import BudgetPlan
    from olla.swapplan import SwapPlan

    if not isinstance(plan, BudgetPlan | SwapPlan):
        return []
    added, least = (1e3 * seconds for seconds in (plan.added_seconds, plan.added_seconds_lower_bound))
    chunks = ""
    if (chunked := getattr(plan, "chunked", None)) is not None:
        num = chunked.num_losses
        chunks = f" {num} loss{'es' if num > 1 else ''} in {chunked.num_chunks} chunks of rows: other rounding."
    runs, in_place = plan.num_recomputed, plan.num_in_place
    lines = [
        f"The graph was rewritten: {runs} more runs of ops, {in_place} results in place.{chunks}",
        f"added time {added:.3f} ms ({percent(plan.slowdown)} of {1e3 * plan.base_seconds:.3f} ms on "
        f"{plan.goal['device']}); no rewriting within this memory adds less than {least:.3f} ms",
        f"peak {human_bytes(plan.peak_bytes)}, {human_bytes(plan.base_peak_bytes)} without rewriting; "
        f"no rewriting within this time needs less than {human_bytes(plan.peak_lower_bound_bytes)}",
    ]
    if isinstance(plan, SwapPlan):
        lines[1:1] = [
            f"swapped {human_bytes(plan.swapped_bytes)} in {len(plan.swaps.tensor)} tensors, at most "
            f"{human_bytes(plan.host_bytes)} in host memory at once; ops wait {1e3 * plan.swaps.stall_seconds:.3f} ms "
            "for copies"
        ]
    return lines


def _table() -> Table:
    from rich.table import Table

    return Table(box=None, show_header=False, padding=(0, 2, 0, 2), pad_edge=True)


def _figures(plan: Plan) -> Table:
    table = _table()
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right", style="dim")
    table.add_column()

    def row(name: str, num_bytes: int, remark: str = "") -> None:
        table.add_row(*cells(name, human_bytes(num_bytes), f"{num_bytes:,}", remark))

    saved = plan.saved_bytes / plan.program_peak_bytes if plan.program_peak_bytes else 0.0
    row("peak before", plan.program_peak_bytes, "in program order")
    row("peak after", plan.peak_bytes, f"method {plan.method}")
    row("saved", plan.saved_bytes, percent(saved))
    row("lower bound", plan.lower_bound_bytes, f"gap {percent(plan.gap)}, {plan.status.value}")
    row("resident", plan.resident_bytes, "live throughout, outside the arena")
    if plan.arena_bytes > 0:
        row("arena", plan.arena_bytes, f"fragmentation {percent(plan.fragmentation)}")
        row("load", plan.load_bytes, f"offsets are multiples of {plan.alignment}")
        if plan.arena_lower_bound_bytes > 0:
            row("arena bound", plan.arena_lower_bound_bytes, "no order has a smaller arena")
    else:
        table.add_row("arena", "none", "", "nothing was laid out")
    return table


def _who(plan: Plan) -> str:
    return ". Largest live there besides resident memory:" if plan.peak_tensors else ", with resident memory alone."


def _live(plan: Plan) -> Table:
    table = _table()
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column()
    table.add_column(overflow="fold")
    for tensor in plan.peak_tensors:
        if tensor.id < 0:
            where, source = "", f"of {tensor.producer}"
        else:
            where = f"tensor {tensor.id}" + (f" {tensor.name}" if tensor.name else "")
            source = f"written by {tensor.producer}" if tensor.producer else ""
        table.add_row(*cells(human_bytes(tensor.bytes), where, tensor.kind, source))
    return table


def _stages(plan: Plan) -> str:
    stages = [f"{name} {seconds:.2f} s" for name, seconds in plan.seconds.items()]
    return "Time: " + ", ".join(stages) if stages else "Time: not recorded"
