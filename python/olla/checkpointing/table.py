"""Table of the choice of `olla.checkpoint`. Importing this does not import torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from olla.base import human_bytes, percent, plain

if TYPE_CHECKING:
    from olla.checkpointing.candidates import Candidate

_MOST_ROWS = 40  # that are printed
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class ModuleRow:
    """A module.

    Attributes:
        name: in the model.
        kind: its class.
        num_bytes: that it saves for backward where it is not checkpointed.
        seconds: that its recomputation takes, as estimated, where nothing of it is saved.
        is_checkpointed: whether it is.
        saved_bytes: of operators inside of it that are saved.
        saved_seconds: that these would take to recompute.
        reason: why it is, or is not.
    """

    name: str
    kind: str
    num_bytes: int
    seconds: float
    is_checkpointed: bool
    saved_bytes: int
    saved_seconds: float
    reason: str


@dataclass(frozen=True)
class Checkpoints:
    """What `olla.checkpoint` chose.

    Attributes:
        name: the model's class.
        modules: that are checkpointed: name -> operators inside whose results are saved, each with how many operators
            the module ran before it.
        rows: the modules that were looked at.
        eager_peak_bytes: most bytes alive in forward and backward without checkpoints: parameters, gradients, the
            batch and activations.
        peak_bytes: the same as chosen, measured on fake tensors.
        needed_bytes: with the optimizer's state and its step, where it was given.
        bound_bytes: no choice of modules and operators is estimated to need less within the slowdown; None: there was
            a budget.
        bound_seconds: none that fits the budget is estimated to add less; None: there was none.
        base_seconds: of forward and backward without checkpoints, as estimated.
        added_seconds: of recomputation, as estimated.
        device: that seconds were estimated for.
        is_real: whether the step ran on the model's own tensors, and not on fake ones.
    """

    name: str
    modules: dict[str, tuple[tuple[str, int], ...]]
    rows: tuple[ModuleRow, ...]
    eager_peak_bytes: int
    peak_bytes: int
    needed_bytes: int
    bound_bytes: int | None
    bound_seconds: float | None
    base_seconds: float
    added_seconds: float
    device: str
    is_real: bool = False

    @property
    def summary(self) -> list[str]:
        """The figures above the table, a line each."""
        base = self.base_seconds or 1.0
        saved = 1 - self.peak_bytes / self.eager_peak_bytes if self.eager_peak_bytes else 0.0
        peaks = f"peak {human_bytes(self.eager_peak_bytes)} -> {human_bytes(self.peak_bytes)} (-{percent(saved)})"
        slower = f"{percent(self.added_seconds / base)} slower as estimated for {self.device}"
        lines = [f"{self.name}: {len(self.modules)} modules checkpointed, {peaks}, {slower}"]
        if self.needed_bytes != self.peak_bytes:
            lines.append(f"with the optimizer: {human_bytes(self.needed_bytes)}")
        if self.bound_bytes is not None:
            lines.append(
                f"bound: no choice within that time is estimated to need less than {human_bytes(self.bound_bytes)}"
            )
        if self.bound_seconds is not None:
            lines.append(
                f"bound: no choice that fits is estimated to add less than {percent(self.bound_seconds / base)}"
            )
        return lines

    def __str__(self) -> str:
        """Return figures and table as text; modules alike are one line."""
        from rich.table import Column, Table

        names = "bytes", "recomputed in"
        table = Table(
            "module",
            "class",
            *(Column(n, justify="right") for n in names),
            "checkpointed",
            "why",
            box=None,
            padding=(0, 2, 0, 0),
            pad_edge=False,
        )
        merged = _merged(self.rows)
        for label, row, count in merged[:_MOST_ROWS]:
            chosen = "no"
            if row.is_checkpointed:
                chosen = f"yes, {human_bytes(row.saved_bytes)} saved" if row.saved_bytes else "yes"
            times = f"{count} x " if count > 1 else ""
            table.add_row(
                label,
                row.kind,
                f"{times}{human_bytes(row.num_bytes)}",
                f"{times}{row.seconds * 1e3:.2f} ms",
                chosen,
                row.reason,
            )
        lines: list[Any] = [*self.summary, "", table]
        if len(merged) > _MOST_ROWS:
            lines.append(f"and {len(merged) - _MOST_ROWS} more lines")
        return plain(*lines, width=140)


def rows_of(
    model: Any, candidates: list[Candidate], saved: dict[int, list[int]], reasons: dict[str, str]
) -> tuple[ModuleRow, ...]:
    """Return a row for every module that was looked at.

    Args:
        model: has the modules.
        candidates: those that could have been checkpointed.
        saved: the numbers of those that are; which groups of operators are saved in each.
        reasons: of other modules, why they could not be.
    """
    chosen = {candidates[i].name for i in saved}
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    rows = []
    for i, candidate in enumerate(candidates):
        groups = [candidate.groups[g] for g in saved.get(i, ())]
        num_bytes, seconds = sum(g.num_bytes for g in groups), sum(g.seconds for g in groups)
        if i in saved:
            freed, added = max(0, candidate.num_bytes - num_bytes), candidate.seconds - seconds
            why = f"frees {human_bytes(freed)} for {added * 1e3:.2f} ms"
        elif outer := next((n for n in chosen if candidate.name.startswith(f"{n}.")), ""):
            why = f"is part of {outer}"
        elif any(n.startswith(f"{candidate.name}.") for n in chosen):
            why = "parts of it are"
        else:
            why = "others free more for their time, or are enough"
        rows.append(
            ModuleRow(
                candidate.name,
                kinds[candidate.name],
                candidate.num_bytes,
                candidate.seconds,
                i in saved,
                num_bytes,
                seconds,
                why,
            )
        )
    rows += [ModuleRow(name, kinds[name], 0, 0.0, False, 0, 0.0, why) for name, why in reasons.items()]
    return tuple(rows)


def _merged(rows: tuple[ModuleRow, ...]) -> list[tuple[str, ModuleRow, int]]:
    """Return rows to print: label, one row, and how many are alike but for the numbers in their names."""
    alike: dict[Any, list[ModuleRow]] = {}
    for row in rows:
        reason = _NUMBER.sub("#", row.reason) if row.reason.startswith("is part of") else row.reason
        key = (_NUMBER.sub("#", row.name), row.kind, row.num_bytes, row.saved_bytes, row.is_checkpointed, reason)
        alike.setdefault(key, []).append(row)
    return [(_label([row.name for row in same]), same[0], len(same)) for same in alike.values()]


def _label(names: list[str]) -> str:
    """Return one name for names that differ in numbers, such as "layers.0-3,5.mlp"."""
    text, *rest = _NUMBER.split(names[0])
    for k, part in enumerate(rest):
        text += _ranges(sorted({int(_NUMBER.findall(name)[k]) for name in names})) + part
    return text


def _ranges(numbers: list[int]) -> str:
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ",".join("-".join(map(str, part)) for part in ranges)
