"""A fit as a table: what `print(olla.fit(...))` and `olla fit` show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from olla.base import cells, human_bytes, percent, plain

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

TITLES = {"least": "least peak", "budget": "in memory"}
WIDTH = 120
_NOTE = (
    "Eager: the ordinary loop; planned: its operators in the best order; 5%, 10%: the least peak within so much "
    "added time; in memory: the least added time that fits. In brackets: does not fit; with ?: not proved. Below each "
    "peak of a plan what is proved: no plan of that kind needs less; below the eager loop's the peak of its ops in "
    "program order, which keeps no gradient beyond its last use: what every plan is measured against; reserved: of "
    "torch's allocator on a GPU, with the free blocks that it keeps, for the eager loop."
)


def text(fit: Any) -> str:
    """Return the table as plain text, of at most 120 columns for six ways, without colour codes.

    Args:
        fit: an `olla.fit.Fit`; not named by its type, since that prints itself through here.
    """
    return plain(render(fit), width=WIDTH)


def render(fit: Any) -> Group:
    """Return the table for a rich console, which decides about width and colour."""
    from rich.console import Group

    name = fit.rows[0].graph_name if fit.rows else ""
    title = f"{name or 'unnamed graph'} on {fit.device} with {human_bytes(fit.memory_bytes)} ({fit.memory_bytes:,} B)"
    if fit.parallel:
        title += f", one of {fit.world_size} ranks ({fit.parallel})"
    lines = [_NOTE, "", *_answers(fit)]
    if fit.interrupted:
        lines.append("Interrupted: sizes and ways are missing.")
    seconds = f"Time: {fit.seconds:.1f} s"
    return Group(*cells(title, style="bold"), _table(fit), *cells(*lines), *cells(seconds, style="dim"))


def _answers(fit: Any) -> list[str]:
    """Say which n is the largest, and which trains fastest."""
    found = [f"{TITLES.get(name, name)} {fit.largest(name) or 'none'}" for name in fit.names]
    lines = [f"Largest n that fits, of those tried: {', '.join(found)}."]
    lines += _lengths(fit)
    if fit.exact:
        n = fit.largest(fit.exact) or 0
        proved = any(row.n == n + 1 and row.ways[fit.exact].proved for row in fit.rows)
        why = "does not fit: proved" if proved else "was not found to fit"
        lines.append(f"{TITLES.get(fit.exact, fit.exact)}: no larger n fits than {n or 'none'}; {n + 1} {why}.")
    if fit.fastest is None:
        return [*lines, "Nothing fits."]
    n, way = fit.fastest
    row = next(row for row in fit.rows if row.n == n)
    added = f" with {percent(row.ways[way].added)} added time" if row.ways[way].added else ""
    rate = f"{row.per_second(way):,.1f} per second on {fit.device}, estimated"
    if row.ways[way].link_bytes:
        rate += f"; {human_bytes(row.ways[way].link_bytes)} over the link"
    return [*lines, f"Fastest within the memory: n = {n}, {TITLES.get(way, way)}{added}: {rate}."]


def _lengths(fit: Any) -> list[str]:
    """Say which batches of a run fit each way, and with which one it would end."""
    if not fit.lengths:
        return []
    total = len(fit.lengths)
    lines = [f"Of {total:,} batches, the longest of n = {max(fit.lengths):,}:"]
    for name in fit.names:
        least, most = fit.share(name)
        share = percent(least) if least == most else f"{percent(least)} to {percent(most)}"
        first = fit.first_too_long(name)
        known = "" if least == most else " known"
        end = "" if first is None else f"; the first{known} not to: batch {first + 1:,}, n = {fit.lengths[first]:,}"
        lines.append(f"  {TITLES.get(name, name)}: {share} fit{end}")
    return lines


def _table(fit: Any) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 1))
    for title in ("n", *(TITLES.get(name, name) for name in fit.names), "n per second"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in fit.rows:
        best = row.fastest
        peaks = [_peak(row.ways.get(name)) for name in fit.names]
        table.add_row(*cells(str(row.n), *peaks, f"{row.per_second(best):,.1f}" if best else "-"))
        program = f"program {human_bytes(row.program_peak_bytes)} "
        if bounds := [program if name == "eager" else _bound(row.ways.get(name)) for name in fit.names]:
            table.add_row(*cells("", *bounds, f"by {TITLES.get(best, best)}" if best else "", style="dim"))
        reserved = getattr(row.ways.get("eager"), "reserved_bytes", None)
        if reserved is not None:
            nothing = [""] * (len(fit.names) - 1)
            table.add_row(*cells("", f"reserved {human_bytes(reserved)} ", *nothing, "", style="dim"))
    return table


def _peak(way: Any) -> str:
    if way is None:
        return "-"
    size = "none" if way.peak_bytes is None else human_bytes(way.peak_bytes)
    if way.fits:
        return f"{size} "
    return f"({size})" if way.proved else f"({size})?"


def _bound(way: Any) -> str:
    if way is None or way.bound_bytes is None:
        return ""
    return f">= {human_bytes(way.bound_bytes)} "
