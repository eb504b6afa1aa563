"""Report on a compiled step: bytes and arithmetic of olla's choice beside torch's. Nothing is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from olla.base import human_bytes, percent, plain
from olla.graph import DeviceProfile
from olla.inductor.compat import compat
from olla.inductor.saving.partition import Partitioner
from olla.inductor.saving.saving import SavedChoice
from olla.inductor.settings import patches
from olla.inductor.simulate.split import Split
from olla.inductor.simulate.step import SimulatedStep, replay, sweep

if TYPE_CHECKING:
    from rich.table import Table

_SHARES = (0.9, 0.7, 0.5, 0.3, 0.1)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A simulated training step compiled with olla's decisions, and the same step with torch's.

    Attributes:
        ours: the replayed step with olla's decisions; ``ours.splits[i]`` is what became of graph i.
        choices: choices[i] is what olla expected of graph i; None where the graph was left to torch.
        default: the replayed step as torch.compile has it.
        best_share: the activation_memory_budget of lowest peak among those tried.
        best: the replayed step with that budget.
    """

    ours: SimulatedStep
    choices: list[SavedChoice | None]
    default: SimulatedStep
    best_share: float
    best: SimulatedStep

    def __str__(self) -> str:
        """Return the two tables a person wants: the graphs, and the step under olla and under torch."""
        return plain(self._graphs(), "", self._steps(), width=120)

    def _graphs(self) -> Table:
        figures = "ops", "saved", "of bytes", "recomputed", "flops recomputed", "planned peak", "all saved", "bound"
        waits = ("in host memory",) if any(split.host_bytes for split in self.ours.splits) else ()
        table = _table("graph", *figures, *waits)
        for i, (split, choice) in enumerate(zip(self.ours.splits, self.choices, strict=True)):
            host = [human_bytes(split.host_bytes)] if waits else []
            table.add_row(str(i), *_split(split), *_planned(choice), *host)
        return table

    def _steps(self) -> Table:
        table = _table("step", "peak", "of torch's", "saved", "recomputed", "flops recomputed")
        rows = {
            "olla": self.ours,
            "torch.compile": self.default,
            f"activation_memory_budget={self.best_share:g}": self.best,
        }

        def peak(num_bytes: int) -> tuple[str, str]:
            return human_bytes(num_bytes), percent(num_bytes / max(1, self.default.peak_bytes))

        table.add_row("eager", *peak(self.ours.eager_peak_bytes), "", "", "")
        for name, run in rows.items():
            saved = sum(split.saved_bytes for split in run.splits)
            again = sum(split.num_recomputed for split in run.splits)
            figures = (human_bytes(saved), f"{again:,} ops", percent(run.recomputed_flops / max(1, run.flops)))
            table.add_row(name, *peak(run.peak_bytes), *figures)
        return table


def explain(
    model: torch.nn.Module,
    batch: Any,
    loss: Callable[[Any, Any], Any],
    *,
    budget: int | str | None = None,
    max_slowdown: float | None = None,
    minimise: str | None = None,
    device: str | DeviceProfile | None = None,
    max_recomputed: float | None = None,
    chunked_loss: int | str | None = None,
    host_budget: int | str | None = None,
    shares: Sequence[float] = _SHARES,
    state_bytes: int = 0,
) -> Explanation:
    """Explain what olla saves and recomputes in a compiled training step, beside torch's own choices.

    The step is compiled on fake tensors with olla, with torch's default and once per share: no kernel is compiled or
    run, no memory is taken. Earlier results of torch.compile are dropped; functions recompile when next called.

    Args:
        model: real, or on the meta device; in the mode (train or eval) it shall run in.
        batch: tensors in any structure of dicts, lists and tuples.
        loss: ``loss(model, batch)`` returns the loss, or a tuple that starts with it.
        budget, max_slowdown, minimise, device, max_recomputed, chunked_loss, host_budget: as of
            `olla.inductor.enable`.
        shares: values of ``activation_memory_budget`` to try for torch.
        state_bytes: bytes of anything else resident throughout, such as an optimizer's state.

    Returns:
        The figures; ``print`` shows them as tables.

    Raises:
        BudgetError, ValueError: as `olla.inductor.enable`.
        CaptureError: the step does not run on fake tensors.

    Complexity: up to ``2 + len(shares)`` compilations without kernels, each of seconds to minutes.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
        >>> found = explain(model, torch.ones(4, 8), lambda model, x: model(x).sum(), shares=(0.5,))
        >>> len(found.ours.splits), found.best_share
        (1, 1.0)
    """
    settings = patches(
        budget, max_slowdown, minimise, device, max_recomputed, chunked_loss=chunked_loss, host_budget=host_budget
    )
    partitioner: Partitioner = settings["custom_partitioner_fn"]
    made: list[SavedChoice] = []
    partitioner.choices = made
    choices: list[SavedChoice | None] = []

    def watch(_: Split) -> None:
        choices.append(made.pop() if made else None)

    with compat.config.patch(settings):
        ours = replay(model, batch, loss, state_bytes=state_bytes, watch=watch)
    torchs = sweep(model, batch, loss, (1.0, *shares), state_bytes=state_bytes)
    share = min(torchs, key=lambda s: (torchs[s].peak_bytes, torchs[s].recomputed_flops, -s))
    return Explanation(ours=ours, choices=choices, default=torchs[1.0], best_share=share, best=torchs[share])


def _table(first: str, *others: str) -> Table:
    from rich.table import Column, Table

    columns = (Column(name, justify="right") for name in others)
    return Table(first, *columns, box=None, padding=(0, 2, 0, 0), pad_edge=False)


def _split(split: Split) -> tuple[str, ...]:
    again = f"{split.num_recomputed:,}", percent(split.recomputed_flops / max(1, split.flops))
    return f"{split.num_ops:,}", f"{split.num_saved:,}", human_bytes(split.saved_bytes), *again


def _planned(choice: SavedChoice | None) -> tuple[str, ...]:
    if choice is None:
        return "left to torch", "", ""
    figures = (choice.peak_bytes, choice.saved_peak_bytes, choice.lower_bound_bytes)
    return tuple(human_bytes(figure) for figure in figures)
