"""Result of one graph and one goal, and the table of many."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from olla.base import cells, human_bytes, percent, plain

if TYPE_CHECKING:
    from rich.console import Group

PLANNED, NOTHING_FITS, FAILED, INTERRUPTED = "planned", "nothing fits", "failed", "interrupted"
ELSEWHERE = "elsewhere"  # another process plans it at the moment
FIGURES = (
    *("graph_name", "num_ops", "num_tensors", "method", "program_peak_bytes", "peak_bytes", "lower_bound_bytes"),
    *("resident_bytes", "arena_bytes", "load_bytes", "base_peak_bytes", "base_seconds", "added_seconds"),
    *("peak_lower_bound_bytes", "num_recomputed", "num_in_place", "swapped_bytes", "host_bytes"),
)  # of a plan
WIDTH = 120
_NOTE = "Before: in program order, nothing rewritten. Bound: no such plan needs less."


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of one graph and one goal.

    Attributes:
        graph: path or URL of the graph.
        options: that were given, as arguments of `olla.plan`.
        status: "planned", "nothing fits" (the budget: an answer, and kept), "failed", "interrupted"
            or "elsewhere" (another process plans it; not kept).
        message: why, where nothing was planned; else what is known of the plan.
        key: names its files in the folder: a digest of the graph, of all options and of olla's version; empty where the
            graph cannot be read.
        plan: path or URL of the plan; empty where there is none.
        figures: of the plan, bytes and seconds; "status" and "gap" too.
        seconds: that it took.
        is_new: whether it was planned now; False: the folder had it.
    """

    graph: str
    options: Mapping[str, Any]
    status: str
    message: str
    key: str = ""
    plan: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    is_new: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return it as what `json.dumps` takes."""
        return asdict(self)


def text(results: Iterable[Result]) -> str:
    """Return results as a table of plain text: a row each, what failed below.

    Example:
        >>> print(text([Result(graph="a.json", options={}, status="failed", message="a.json: is empty")]))
        Planned: 0 of 1, 0 of them before; failed: 1.
        a.json: is empty
    """
    return plain(render(list(results)), width=WIDTH)


def render(results: Sequence[Result]) -> Group:
    """Return the table for a rich console."""
    from rich.console import Group
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 1))
    table.add_column("graph", overflow="fold")
    table.add_column("goal", overflow="fold")
    for title in ("before", "planned", "bound", "added", "seconds"):
        table.add_column(title, justify="right", no_wrap=True)
    answers = [result for result in results if result.status in (PLANNED, NOTHING_FITS)]
    for result in answers:
        table.add_row(*cells(result.graph, _goal(result.options), *_figures(result), f"{result.seconds:.2f}"))
    planned = [result for result in results if result.status == PLANNED]
    counts = f"Planned: {len(planned)} of {len(results)}, {sum(not r.is_new for r in planned)} of them before"
    for status in (NOTHING_FITS, FAILED, INTERRUPTED):
        if number := sum(result.status == status for result in results):
            counts += f"; {status}: {number}"
    wrong = dict.fromkeys(result.message for result in results if result.status == FAILED)
    notes = [_NOTE] if answers else []
    return Group(*([table] if answers else []), *cells(*notes, counts + ".", *wrong))


def _goal(options: Mapping[str, Any]) -> str:
    goals = {name: options.get(name) for name in ("budget", "max_slowdown", "minimise")}
    given = [f"{name} {value}" for name, value in goals.items() if value is not None]
    return given[0].replace("_", " ") if given else "order"


def _figures(result: Result) -> list[str]:
    if result.status == NOTHING_FITS:
        return ["", result.status, "", ""]
    figures = result.figures
    added = percent(figures["added_seconds"] / figures["base_seconds"]) if figures["base_seconds"] else ""
    before = figures["program_peak_bytes"]
    bound = figures["peak_lower_bound_bytes"] or figures["lower_bound_bytes"]
    return [*(human_bytes(num_bytes) for num_bytes in (before, figures["peak_bytes"], bound)), added]
