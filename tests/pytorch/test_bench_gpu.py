"""What `make gpu` expects of a GPU, judged on made-up answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from bench.pytorch import gpu_figures
from bench.support.jobs import Answer
from bench.support.verdicts import FAILED, NOT_MEASURED, OK, TOLD, Verdict, judge

pytestmark = pytest.mark.torch

NUMBERS = {"equal eager": True, "equal program": True, "repeats": True}
BYTES = {"in step": 90, "reserved": 100, "planned": 80, "measured": 80, "misses": 0, "saved": 0.1, "in arena": True}
SWAPS = {
    "equal": True,
    "holds": True,
    "saved %": 9.0,
    "swapped MiB": 7.0,
    "added by plan %": 1.0,
    "added by clock %": 3.0,
}


def plan(are_times_real: bool = True) -> gpu_figures.Plan:
    return gpu_figures.Plan(["net:1"], ["adamw"], ["net:1"], 3, are_times_real)


def verdicts(stage: Callable[[gpu_figures.Plan], Any], asked: gpu_figures.Plan, found: Any) -> dict[str, Verdict]:
    """Judge a stage whose jobs answer by ``found(name)``; figure -> verdict."""
    parts = list(stage(asked))
    jobs = Counter(job.name for part in parts for job in part.jobs)
    assert set(jobs.values()) == {1}
    figures = [figure for part in parts for figure in part.figures]
    assert {job for figure in figures for job in figure.jobs} <= set(jobs)
    return {figure.name: judge(figure, {name: Answer(found(name)) for name in jobs}) for figure in figures}


def memory_of(name: str) -> dict[str, Any]:
    if name.startswith("numbers"):
        return NUMBERS
    if name.endswith((" compile", "compile-olla")):
        return {"bytes": 100}
    return BYTES | {"expected in step": 90}


def test_numbers_and_bytes_as_planned_are_well() -> None:
    found = verdicts(gpu_figures.memory, plan(), memory_of)
    assert {v.word for v in found.values()} == {OK, TOLD}
    judged = {name for name, v in found.items() if v.word == OK}
    assert {"equal to an ordinary loop", "misses", "measured - planned bytes", "reserved / eager"} <= judged


@pytest.mark.parametrize(
    ("changed", "figure", "word"),
    [
        ({"equal eager": False}, "equal to an ordinary loop", FAILED),
        ({"equal eager": False, "repeats": False}, "equal to an ordinary loop", NOT_MEASURED),
        ({"equal program": False}, "equal to program order", FAILED),
        ({"misses": 1}, "misses", FAILED),
        ({"in arena": False}, "at planned addresses", FAILED),
        ({"measured": None}, "measured - planned bytes", FAILED),
        ({"measured": 81}, "measured - planned bytes", FAILED),
        ({"expected in step": 80}, "allocated in a step / by plan", FAILED),
        ({"saved": 0.01}, "reserved / eager", TOLD),
    ],
)
def test_what_is_not_as_expected_shows(changed: dict[str, Any], figure: str, word: str) -> None:
    assert verdicts(gpu_figures.memory, plan(), lambda name: memory_of(name) | changed)[figure].word == word


def times_of(name: str) -> dict[str, Any]:
    if name.startswith("swaps"):
        return {"rows": [SWAPS], "summary": {}}
    seconds = {mode: [1.0, 2.0, 3.0] for mode in ("eager", "program", "compile", "reduce-overhead", "olla-graphs")}
    return seconds | {"olla": [1.01, 2.02, 3.03], "compile-olla": [1.2, 2.4, 3.6]}


def test_times_are_judged_on_a_gpu_and_told_under_the_stand_in() -> None:
    found = verdicts(gpu_figures.times, plan(), times_of)
    assert {name: found[name].word for name in ("olla / program", "compile-olla / compile", "olla-graphs / eager")} == {
        "olla / program": OK,
        "compile-olla / compile": FAILED,
        "olla-graphs / eager": OK,
    }
    assert found["added by clock - by plan"].word == OK
    told = verdicts(gpu_figures.times, plan(are_times_real=False), times_of)
    assert {name for name, v in told.items() if v.word != TOLD} == {"equal", "as planned"}
    assert told["olla / program"].figure.expected == "time means nothing here"


def test_swaps_that_could_not_be_planned_are_not_measured() -> None:
    found = verdicts(
        gpu_figures.times, plan(), lambda name: times_of(name) | {"rows": [], "summary": {"net:1": "none"}}
    )
    assert found["equal"].word == NOT_MEASURED
    assert "none" in found["equal"].note
    found = verdicts(gpu_figures.times, plan(), lambda name: times_of(name) | {"rows": [SWAPS | {"swapped MiB": 0.0}]})
    assert (found["equal"].word, found["equal"].note) == (
        NOT_MEASURED,
        "within 10% of added time nothing can be swapped",
    )


def test_every_file_of_tests_that_need_a_gpu_is_a_job() -> None:
    names = {job.name for part in gpu_figures.tests(plan()) for job in part.jobs}
    assert {"tests/cuda/test_compile.py", "tests/pytorch/test_cudagraph.py"} <= names
    assert "tests/cuda/conftest.py" not in names
