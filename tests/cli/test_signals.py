"""What the command does when it is interrupted, and when its output finds no room."""

from __future__ import annotations

import errno
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import olla
from olla.cli.parser import main
from olla.report.interrupt import Interrupt
from tests.support.fans import idle
from tests.support.plans import hard_graph

TERMINAL = {**os.environ, "TERM": "xterm"}


def interrupted(command: list[str], until: bytes) -> tuple[int, bytes, bytes]:
    """Run a command, with Ctrl-C as soon as its progress line says so much; return status, stdout, stderr."""
    leader, follower = pty.openpty()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=follower, env=TERMINAL) as process:
        os.close(follower)
        seen, sent = b"", False
        try:
            while piece := os.read(leader, 4096):
                seen += piece
                if until in seen and not sent:
                    process.send_signal(signal.SIGINT)
                    sent = True
        except OSError:  # what Linux says when the other side is closed
            pass
        assert process.stdout is not None
        out = process.stdout.read()
    os.close(leader)
    return process.returncode, out, seen


@pytest.mark.parametrize("goal", [[], ["--minimise", "peak"], ["--minimise", "peak", "--host-budget", "1GiB"]])
def test_ctrl_c_gives_the_best_plan_so_far_and_status_130(tmp_path: Path, goal: list[str]) -> None:
    graph, plan = str(tmp_path / "hard.json"), str(tmp_path / "plan.json")
    command = [sys.executable, "-m", "olla", "plan", graph, "-o", plan, "--time-limit", "300", *goal]
    for size in (8000, 32000, 128000):  # one takes longer than the second before the progress line
        (idle(size) if goal else hard_graph()).save(graph)
        status, out, err = interrupted(command, b"with the best so far")
        if b"with the best so far" in err:
            break
    assert status == 130, err
    assert err.splitlines()[-1].endswith(b"olla: interrupted: the plan is the best found so far")
    assert b"peak" in out
    olla.check(olla.Graph.load(graph), olla.Plan.load(plan))


def test_ctrl_c_gives_the_best_layout_so_far_and_status_130(tmp_path: Path) -> None:
    rows = "".join(f"{i},{i * 7 % 50},{i * 7 % 50 + 3 + i % 11},{100 + i * 37 % 91}\n" for i in range(300))
    (tmp_path / "buffers.csv").write_text("id,lower,upper,size\n" + rows)
    command = [sys.executable, "-m", "olla", "layout", str(tmp_path / "buffers.csv"), "--time-limit", "300"]
    status, out, err = interrupted(command, b"bound")
    assert status == 130, err
    assert err.splitlines()[-1].endswith(b"olla: interrupted: the layout is the best found so far")
    assert b"300 buffers: height" in out


@pytest.mark.usefixtures("interruptible")
def test_a_second_ctrl_c_ends_at_once() -> None:
    with Interrupt() as interrupt:
        progress = interrupt.ends(lambda *_: None)
        assert progress("order", 0.0, 0, 0)
        signal.raise_signal(signal.SIGINT)
        assert interrupt.seen
        assert not progress("order", 0.1, 0, 0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_before_a_search_has_begun_raises() -> None:
    with Interrupt() as interrupt:
        interrupt.ends(lambda *_: True)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert not interrupt.seen


@pytest.mark.usefixtures("interruptible")
def test_who_asked_for_a_search_hears_of_ctrl_c_too() -> None:
    with Interrupt() as outer:
        with Interrupt() as inner:
            progress = inner.ends(outer.ends(lambda *_: True))
            assert progress("order", 0.0, 0, 0)
            signal.raise_signal(signal.SIGINT)
        assert outer.seen


def test_another_handler_of_ctrl_c_stays() -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        with Interrupt() as interrupt:
            interrupt.ends(lambda *_: True)("order", 0.0, 0, 0)
            signal.raise_signal(signal.SIGINT)
        assert (calls, interrupt.seen) == ([signal.SIGINT], False)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_behind_standard_output_is_called_that(tmp_path: Path) -> None:
    olla.plan(hard_graph(), time_limit=0.1).save(tmp_path / "plan.json")
    command = [sys.executable, "-m", "olla", "show", "-v", str(tmp_path / "plan.json")]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    expected = "standard output: cannot be written: the disk is full; free some space, or write elsewhere"
    assert (done.returncode, done.stderr) == (2, f"olla: error: {expected}\n")


def test_a_full_disk_is_named_with_its_file(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def full(_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "plan.json")

    monkeypatch.setattr("olla.cli.parser._silence_stdout", lambda: None)
    monkeypatch.setattr("olla.cli.commands.show_plan", full)
    assert main(["show", "plan.json"]) == 2
    assert "plan.json: cannot be written: the disk is full" in capfd.readouterr().err
