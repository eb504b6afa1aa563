"""Figures that are expected of measurements, and what came of each: ok, FAILED, not measured; or told, not judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.support.harness import Cell, Report, text
from bench.support.jobs import NO_TIME, Answer

OK, FAILED, NOT_MEASURED, TOLD = "ok", "FAILED", "not measured", "-"
COLUMNS = ["of", "figure", "expected", "found", "verdict", "note"]


class NotMeasured(Exception):
    """A figure says nothing, and why."""


class NotExpected(Exception):
    """Nothing is expected of a figure here, and why."""


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        subject: what it is of.
        name: of the figure.
        jobs: names of the jobs whose answers it is made of.
        value: makes it of what those found, in their order.
        expected: in words; empty where it is told and not judged.
        holds: whether a value is as expected.
    """

    subject: str
    name: str
    jobs: tuple[str, ...]
    value: Callable[..., Cell]
    expected: str = ""
    holds: Callable[[Any], bool] | None = None


@dataclass(frozen=True)
class Verdict:
    """What came of a figure."""

    figure: Figure
    found: Cell
    word: str
    note: str = ""


def exactly(wanted: Cell) -> tuple[str, Callable[[Any], bool]]:
    """Expect one value."""
    shown = {True: "yes", False: "no"}[wanted] if isinstance(wanted, bool) else str(wanted)
    return shown, lambda found: bool(found == wanted)


def at_most(most: float) -> tuple[str, Callable[[Any], bool]]:
    """Expect a number no higher than another."""
    return f"<= {most:g}", lambda found: bool(found <= most)


def judge(figure: Figure, answers: Mapping[str, Answer]) -> Verdict:
    """Return what came of a figure.

    A job that failed fails what is expected of it. One that time ran out for, or that never began, leaves its figures
    "not measured", unless what it found by then is wrong already.
    """
    given = [answers.get(job, Answer(None, NO_TIME)) for job in figure.jobs]
    faults = [f"{job}: {answer.fault}" for job, answer in zip(figure.jobs, given, strict=True) if answer.fault]
    note = "; ".join(faults)
    found: Cell = None
    if all(answer.found is not None for answer in given):
        try:
            found = figure.value(*(answer.found for answer in given))
        except NotMeasured as reason:
            return Verdict(figure, None, NOT_MEASURED, note or str(reason))
        except NotExpected as reason:
            return Verdict(figure, None, TOLD, note or str(reason))
        except (KeyError, ZeroDivisionError) as error:
            note = note or f"the answer lacks {error}"
            return Verdict(figure, None, NOT_MEASURED if faults else FAILED, note)
        if found is None and figure.holds is not None:
            return Verdict(figure, None, NOT_MEASURED if faults else FAILED, note or "nothing was measured")
    is_wrong = found is not None and figure.holds is not None and not figure.holds(found)
    if is_wrong or any(answer.is_failure for answer in given):
        return Verdict(figure, found, FAILED, note)
    if faults:
        return Verdict(figure, found, NOT_MEASURED, note)
    return Verdict(figure, found, TOLD if figure.holds is None else OK)


def table(title: str, verdicts: Sequence[Verdict], facts: Mapping[str, Cell]) -> Report:
    """Return one row per figure, and how many came to which verdict."""
    rows: list[list[Cell]] = [
        [v.figure.subject, v.figure.name, v.figure.expected, v.found, v.word, v.note] for v in verdicts
    ]
    counts = {word: sum(v.word == word for v in verdicts) for word in (OK, FAILED, NOT_MEASURED)}
    wrong = [f"{v.figure.subject}: {v.figure.name}" for v in verdicts if v.word == FAILED]
    return Report(title, COLUMNS, rows, {**facts, **counts, "which failed": "; ".join(wrong) or "none"})


def overview(title: str, verdicts: Sequence[Verdict]) -> str:
    """Return a page's table with a row per subject and a column per figure; what failed or is missing says so."""
    names = list(dict.fromkeys(v.figure.name for v in verdicts))
    cells: dict[str, dict[str, Cell]] = {}
    for v in verdicts:
        shown: Cell = v.found
        if v.word in (FAILED, NOT_MEASURED):
            shown = v.word if v.found is None else f"{text(v.found)} ({v.word})"
        cells.setdefault(v.figure.subject, {})[v.figure.name] = shown
    report = Report(title, ["of", *names], [[s, *(row.get(n) for n in names)] for s, row in cells.items()], machine={})
    return report.markdown().rpartition("\n\nMeasured on")[0]
