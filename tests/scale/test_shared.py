"""One folder for several runs and versions: what is damaged is planned again, and work is shared."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import olla
from olla.scale import Folder, plan_file, plan_files
from tests.support.plans import training_step

SHORT = {"time_limit": 1.0}
GRAPH = "graph.json.gz"


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Plan a graph; return the files of its result and of its plan."""
    monkeypatch.chdir(tmp_path)
    training_step().save(GRAPH)
    result = plan_file(GRAPH, "plans", SHORT)
    return Path("plans", f"{result.key}.json"), Path(result.plan)


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_keys_and_figures_of_a_later_version_are_read_over(planned: tuple[Path, Path]) -> None:
    changed(planned[0], lambda content: content.update(note="later", nested={"a": [1]}, plan="elsewhere"))
    changed(planned[0], lambda content: content["figures"].update(later=1))
    again = plan_file(GRAPH, "plans", SHORT)
    assert (again.status, again.is_new, again.plan) == ("planned", False, str(planned[1]))
    assert "later" not in again.figures


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(version=4),
        lambda content: content.update(format="other"),
        lambda content: content.update(key="0" * 32),
        lambda content: content.update(status="interrupted"),
        lambda content: content.update(status=None),
        lambda content: content.update(seconds="1"),
        lambda content: content.update(figures=[]),
        lambda content: content.update(plan_sha256=7),
        lambda content: content.pop("plan_sha256"),
        lambda content: content.pop("message"),
        lambda content: content["figures"].pop("peak_bytes"),
    ],
)
def test_a_result_that_says_something_else_counts_as_missing(
    planned: tuple[Path, Path], change: Callable[[dict[str, Any]], object], caplog: pytest.LogCaptureFixture
) -> None:
    changed(planned[0], change)
    with caplog.at_level(logging.WARNING, "olla"):
        again = plan_file(GRAPH, "plans", SHORT)
    assert (again.status, again.is_new) == ("planned", True)
    assert [record.getMessage().startswith(f"{planned[0]} is planned again: ") for record in caplog.records] == [True]
    assert not plan_file(GRAPH, "plans", SHORT).is_new


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 255]) + data[middle + 1 :]


@pytest.mark.parametrize("which", [0, 1], ids=["result", "plan"])
@pytest.mark.parametrize(
    "damage", [flipped, lambda data: data[:-9], lambda data: b"", lambda data: data + b"x", lambda data: b"[" * 200_000]
)
def test_a_damaged_file_counts_as_missing(
    planned: tuple[Path, Path], which: int, damage: Callable[[bytes], bytes]
) -> None:
    planned[which].write_bytes(damage(planned[which].read_bytes()))
    again = plan_file(GRAPH, "plans", SHORT)
    assert (again.status, again.is_new) == ("planned", True)
    olla.check(olla.Graph.load(GRAPH), olla.Plan.load(again.plan))
    assert not plan_file(GRAPH, "plans", SHORT).is_new


def test_another_plan_in_its_place_counts_as_missing(planned: tuple[Path, Path]) -> None:
    other = plan_file(GRAPH, "plans", {**SHORT, "method": "program"})
    planned[1].write_bytes(Path(other.plan).read_bytes())
    assert plan_file(GRAPH, "plans", SHORT).is_new


def in_another_process(body: str) -> subprocess.Popen[str]:
    """Start a process that runs the body, and wait until it has printed a line."""
    process = subprocess.Popen([sys.executable, "-c", body], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


HOLD = """
import time
from olla.scale import Folder
with Folder("plans").claimed("KEY", wait=True):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_claim_ends_with_its_process(planned: tuple[Path, Path]) -> None:
    key = planned[0].stem
    planned[0].unlink()
    with in_another_process(HOLD.replace("KEY", key)) as holder:
        assert plan_file(GRAPH, "plans", SHORT, wait=False).status == "elsewhere"
        with Folder("plans").claimed("another", wait=False) as is_ours:
            assert is_ours
        holder.send_signal(signal.SIGKILL)
    assert plan_file(GRAPH, "plans", SHORT, wait=False).is_new
    assert set(os.listdir("plans")) == {planned[0].name, planned[1].name}


def test_what_was_killed_while_it_wrote_is_planned_again(planned: tuple[Path, Path]) -> None:
    before = set(os.listdir("plans"))
    for path in planned:
        path.unlink()
    body = f"""
import os, signal
from olla.scale import plan_file
print("begun", flush=True)
os.replace = os.rename = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # all is written but the name
plan_file({GRAPH!r}, "plans", {SHORT!r})
"""
    with in_another_process(body) as process:
        assert process.wait(timeout=120) == -signal.SIGKILL
    assert not set(os.listdir("plans")) & before
    assert plan_file(GRAPH, "plans", SHORT, wait=False).is_new
    assert before <= set(os.listdir("plans"))


def test_two_runs_at_once_share_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for i in range(4):
        builder = olla.Graph.builder(f"graph {i}")
        a = builder.tensor(64 + i)
        builder.op("make", writes=[a])
        builder.build().save(f"g{i}.json")
    command = [sys.executable, "-m", "olla", "plan", *(f"g{i}.json" for i in range(4)), "--output-folder", "plans"]
    runs = [subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    rows = [[json.loads(line) for line in run.communicate(timeout=300)[0].splitlines()] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert [{row["graph"] for row in found} for found in rows] == [{f"g{i}.json" for i in range(4)}] * 2
    assert sum(row["is_new"] for found in rows for row in found) == 4


def test_what_another_run_plans_is_waited_for_when_all_else_is_done(planned: tuple[Path, Path]) -> None:
    key = planned[0].stem
    planned[0].unlink()
    goals = [SHORT, {**SHORT, "seed": 1}, {**SHORT, "seed": 2}]
    with in_another_process(HOLD.replace("KEY", key)) as holder:
        results = plan_files([GRAPH], "plans", goals)
        assert [next(results).options, next(results).options] == goals[1:]
        holder.kill()
        (last,) = results
    assert (last.options, last.status, last.is_new) == (SHORT, "planned", True)
