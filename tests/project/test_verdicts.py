"""What `make gpu` is made of: jobs within a time limit, and verdicts on what they and a table found. No GPU needed."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.support.jobs import NO_TIME, Answer, Job, last_json, run
from bench.support.verdicts import (
    FAILED,
    NOT_MEASURED,
    OK,
    TOLD,
    Figure,
    NotExpected,
    NotMeasured,
    at_most,
    exactly,
    judge,
    overview,
    table,
)


def figure(value: Any, *expected: Any) -> Figure:
    return Figure("net, sgd", "peak", ("job",), value, *expected)


def bytes_of(found: dict[str, Any]) -> int:
    return int(found["bytes"])


def verdict_of(answer: Answer | None, value: Any = bytes_of, *expected: Any) -> tuple[str, Any, str]:
    verdict = judge(figure(value, *(expected or exactly(3))), {"job": answer} if answer else {})
    return verdict.word, verdict.found, verdict.note


def test_an_expected_value_is_ok_and_another_fails() -> None:
    assert verdict_of(Answer({"bytes": 3})) == (OK, 3, "")
    assert verdict_of(Answer({"bytes": 4})) == (FAILED, 4, "")
    assert verdict_of(Answer({"bytes": 4}), bytes_of, *at_most(4)) == (OK, 4, "")
    assert judge(figure(bytes_of), {"job": Answer({"bytes": 4})}).word == TOLD


def test_what_did_not_run_is_not_measured_and_what_broke_failed() -> None:
    assert verdict_of(None) == (NOT_MEASURED, None, f"job: {NO_TIME}")
    assert verdict_of(Answer(None, "status 1: no", is_failure=True)) == (FAILED, None, "job: status 1: no")
    assert verdict_of(Answer({})) == (FAILED, None, "the answer lacks 'bytes'")
    assert verdict_of(Answer({}), lambda found: None) == (FAILED, None, "nothing was measured")


def test_what_was_cut_off_fails_only_where_it_is_wrong_already() -> None:
    assert verdict_of(Answer({"bytes": 3}, "cut")) == (NOT_MEASURED, 3, "job: cut")
    assert verdict_of(Answer({"bytes": 4}, "cut")) == (FAILED, 4, "job: cut")


@pytest.mark.parametrize(("reason", "word"), [(NotMeasured("why"), NOT_MEASURED), (NotExpected("why"), TOLD)])
def test_a_figure_that_says_nothing_says_why(reason: Exception, word: str) -> None:
    def value(found: dict[str, Any]) -> int:
        raise reason

    assert verdict_of(Answer({}), value) == (word, None, "why")


def test_a_page_counts_verdicts_and_shows_every_figure() -> None:
    figures = [figure(bytes_of, *exactly(3)), Figure("net, sgd", "time", ("other",), bytes_of, *exactly(1))]
    verdicts = [judge(f, {"job": Answer({"bytes": 4})}) for f in figures]
    report = table("Title", verdicts, {"device": "none"})
    assert report.summary == {
        "device": "none",
        OK: 0,
        FAILED: 1,
        NOT_MEASURED: 1,
        "which failed": "net, sgd: peak",
    }
    assert "| net, sgd | 4 (FAILED) | not measured |" in overview("Title", verdicts)
    assert "| net, sgd | time | 1 | - | not measured | other: no time was left |" in report.markdown()


def test_the_last_line_that_is_an_object_is_the_answer() -> None:
    assert last_json('{"a": 1}\n{"a": 2}\n3\n{"a": ') == {"a": 2}
    assert last_json("nothing\n") is None


def job(name: str, code: str, **options: Any) -> Job:
    return Job(name, [sys.executable, "-c", code], **options)


def answers_of(jobs: list[Job], folder: Path, seconds: float = 60.0) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    until = time.monotonic() + seconds
    run(jobs, until=until, num_at_once=2, folder=folder, tell=lambda job, answer: answers.update({job.name: answer}))
    return answers


def test_jobs_answer_and_failures_are_told_by_their_last_line(tmp_path: Path) -> None:
    answers = answers_of(
        [
            job("well", "import os; print('so'); print('{\"n\": ' + os.environ['N'] + '}')", environment={"N": "5"}),
            job("alone", "print('{}')", is_alone=True),
            job("broken", "import sys; print('{}'); sys.exit('it broke')"),
            job("silent", "pass"),
            job("hangs", "import time; print('{}', flush=True); time.sleep(100)", most_seconds=2),
        ],
        tmp_path,
    )
    assert answers["well"] == Answer({"n": 5})
    assert answers["alone"] == Answer({})
    assert answers["broken"] == Answer({}, "status 1: it broke", is_failure=True)
    assert answers["silent"] == Answer(None, "it printed no answer", is_failure=True)
    assert answers["hangs"].is_failure
    assert answers["hangs"].fault.startswith("stopped after")


def test_when_time_is_over_what_runs_is_stopped_and_what_waits_is_told(tmp_path: Path) -> None:
    begin = time.monotonic()
    jobs = [
        job("first", "import time; print('{\"n\": 1}', flush=True); time.sleep(100)", is_alone=True),
        job("next", ""),
    ]
    answers = answers_of(jobs, tmp_path, seconds=3)
    assert time.monotonic() - begin < 30
    assert answers["first"].found == {"n": 1}
    assert answers["first"].fault.startswith(NO_TIME)
    assert not answers["first"].is_failure
    assert answers["next"] == Answer(None, NO_TIME)


RESERVED = {"eager": 500, "expandable": 600, "olla": 400, "olla 5 %": 300, "olla 10 %": 300, "pool": 500}


def faults_of_reserved(changed: dict[str, dict[str, Any]], **equal: bool | None) -> list[str]:
    """Return what the table of reserved bytes finds wrong with answers that are well but for what is changed."""
    pytest.importorskip("torch")
    from bench.pytorch import bench_reserved

    found: dict[str, dict[str, Any]] = {}
    for way, num_bytes in RESERVED.items():
        found[way] = {"allocated": 1, "reserved": num_bytes, "in step": 1, "reserved in step": 1}
        if way in bench_reserved.OURS:
            found[way] |= {"saved": 0.1, "planned addresses": "all", "misses": 0}
        found[way] |= changed.get(way, {})
    same = dict.fromkeys(bench_reserved.OURS, True) | equal
    return bench_reserved.faults_of(bench_reserved.rows_of("gpt2:1:256", "adamw", found, same))


def test_equal_reserved_bytes_are_well_and_expandable_segments_are_not_judged() -> None:
    assert faults_of_reserved({}) == []


@pytest.mark.parametrize(
    ("way", "changed", "wrong"),
    [
        ("olla", {"reserved": 501}, "olla.compile: at or below the loop"),
        ("olla 5 %", {"reserved": 401}, "olla.compile, max_slowdown=0.05: at or below no goal"),
        ("pool", {"reserved": 501}, "olla.pool: at or below the loop"),
        ("pool", {"misses": 1}, "olla.pool: misses"),
    ],
)
def test_one_reserved_byte_or_miss_too_many_fails_its_cell(way: str, changed: dict[str, Any], wrong: str) -> None:
    assert faults_of_reserved({way: changed}) == [f"gpt2:1:256 adamw {wrong}"]


@pytest.mark.parametrize(("equal", "wrong"), [(False, "losses as the loop's"), (None, "losses not compared")])
def test_losses_that_differ_or_were_not_compared_fail_their_cell(equal: bool | None, wrong: str) -> None:
    assert faults_of_reserved({}, pool=equal) == [f"gpt2:1:256 adamw olla.pool: {wrong}"]
