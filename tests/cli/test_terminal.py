"""The command line in a terminal: what files hold is shown, not obeyed, and whatever is wrong is one line."""

from __future__ import annotations

import gzip
import json
import os
import pty
import re
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import olla
from olla.base import visible
from olla.cli.parser import main
from olla.plan.peak import LiveTensor, OpAt
from olla.plan.table import text
from olla.report.step import StepReport
from tests.support.plans import training_step

EVIL = "\x1b]0;owned\x07\x1b[2J[red]a[/nothing]\rb\nc\x9b5m\u202ed"
SHOWN = r"\x1b]0;owned\x07\x1b[2J[red]a[/nothing]\rb\nc\x9b5m\u202ed"


STYLES = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\x1b\[2K|\x1b\[1A|\r")  # what rich itself sends


def controls(printed: str) -> set[str]:
    return {c for c in STYLES.sub("", printed) if not c.isprintable()} - {"\n"}


def evil_graph() -> olla.Graph:
    builder = olla.Graph.builder(EVIL)
    made = builder.tensor(10, name=EVIL)
    builder.op(EVIL, writes=[made], workspace_bytes=4)
    builder.op(EVIL, reads=[made])
    return builder.build()


def evil_plan() -> olla.Plan:
    return replace(
        olla.plan(evil_graph(), time_limit=1.0),
        method=EVIL,
        message=EVIL,
        details=(EVIL,),
        seconds={EVIL: 1.0},
        peak_op=OpAt(0, EVIL),
        peak_tensors=(LiveTensor(0, EVIL, 1, EVIL, EVIL), LiveTensor(-1, EVIL, 1, EVIL, EVIL)),
    )


def in_a_terminal(*command: str) -> str:
    """What a command prints to a terminal as wide as its lines."""
    leader, follower = pty.openpty()
    pieces: list[bytes] = []

    def read() -> None:
        try:
            while piece := os.read(leader, 4096):
                pieces.append(piece)
        except OSError:  # what Linux says when the other side is closed
            pass

    thread = threading.Thread(target=read)
    thread.start()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "400", "NO_COLOR": "1"}
    subprocess.run(command, stdout=follower, stderr=follower, env=environment, timeout=120, check=False)
    os.close(follower)
    thread.join()
    os.close(leader)
    return b"".join(pieces).decode().replace("\r\n", "\n")


def test_control_characters_are_shown_as_escapes() -> None:
    assert visible(EVIL) == SHOWN
    assert visible("a\tb\ud800\x85\u2028") == r"a\tb\ud800\x85\u2028"
    plain = "é 木 🙂 [red] \\x1b naïve\u00a0name"
    assert visible(plain) == plain


def test_a_plan_of_evil_names_is_text_and_not_markup() -> None:
    shown = text(evil_plan(), verbose=True)
    assert controls(shown) == set()
    assert shown.replace("\n", "").count("owned") >= 9
    assert r"\x1b]0;owned" in shown
    assert "[red]a[/nothing]" in shown


def test_a_step_report_of_evil_names_is_text_and_not_markup() -> None:
    numbers = ["num_ops", "num_steps", "num_captures", "planned_peak_bytes", "eager_peak_bytes", "resident_bytes"]
    numbers += ["output_bytes", "arena_bytes", "num_misses", "missed_bytes"]
    numbers += ["capture_seconds", "plan_seconds", "record_seconds"]
    fields: dict[str, Any] = dict.fromkeys(numbers, 1)
    fields |= {"in_arena": True, "cached": False, "measured_peak_bytes": None, "seconds_per_step": None}
    report = StepReport(name=EVIL, misses=(EVIL,), slowest=((EVIL, 1.0),), note=EVIL, **fields)
    assert controls(str(report)) == set()
    assert str(report).replace("\n", "").count("[red]a[/nothing]") == 4


def test_no_control_character_of_a_file_reaches_a_terminal(tmp_path: Path) -> None:
    graph, plan = tmp_path / "graph.json", tmp_path / "plan.json"
    evil_graph().save(graph)
    evil_plan().save(plan)
    cyclic = json.loads(graph.read_text())
    cyclic["ops"][0]["after"] = [1]
    (tmp_path / f"{EVIL}.json".replace("/", "|")).write_text(json.dumps(cyclic))
    csv_file = tmp_path / "buffers.csv"
    csv_file.write_text(f'id,lower,upper,size\n"{EVIL}",0,1,2\n"{EVIL}",0,1,2\n', newline="")
    programs: list[list[str]] = [
        ["plan", str(graph)],
        ["show", "-v", str(plan)],
        ["check", str(graph), str(plan)],
        ["plan", str(next(path for path in tmp_path.iterdir() if "owned" in path.name))],
        ["layout", str(csv_file)],
        ["plan", EVIL],
        ["plan", str(graph), "-o", str(tmp_path / EVIL / "plan.json")],
        ["show", str(plan), EVIL],
        ["plan", str(graph), "--seed", EVIL],
        ["capture", f"json:{EVIL}", "-o", str(tmp_path / "out.json")],
    ]
    for program in programs:
        printed = in_a_terminal(sys.executable, "-m", "olla", *program)
        assert "owned" in printed
        assert controls(printed) == set(), (program, printed)
        assert "Traceback" not in printed


def test_a_progress_line_shows_names_as_they_are(tmp_path: Path) -> None:
    program = (
        "import time\nfrom olla.report.progress import ProgressLine\n"
        f"with ProgressLine({EVIL!r}) as line:\n"
        "    time.sleep(1.3)\n    line('order', 1.0, 2, 1)\n    time.sleep(0.3)\n"
    )
    printed = in_a_terminal(sys.executable, "-c", program)
    assert SHOWN in printed
    assert f"{SHOWN}: order 1 s" in printed


def test_json_output_keeps_names_exactly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil_graph().save(tmp_path / "graph.json")
    assert main(["plan", str(tmp_path / "graph.json"), "--json", "-o", str(tmp_path / "plan.json")]) == 0
    assert json.loads(capsys.readouterr().out)["graph"] == EVIL
    assert olla.Plan.load(tmp_path / "plan.json").graph_name == EVIL


# What is wrong with a file is one line, whatever the command and the file

COMMANDS = {
    "plan": ["plan", "{bad}"],
    "plan -o": ["plan", "{graph}", "-o", "{bad}/plan.json"],
    "check graph": ["check", "{bad}", "{plan}"],
    "check plan": ["check", "{graph}", "{bad}"],
    "show": ["show", "{bad}"],
    "layout": ["layout", "{bad}"],
    "layout -o": ["layout", "{buffers}", "-o", "{bad}/out.csv"],
    "capture": ["capture", "{bad}:step", "-o", "{folder}/out.json"],
    "capture -o": ["capture", "time:time", "-o", "{bad}/out.json"],
}
ANY = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 8
BAD: dict[str, bytes | None] = {
    "missing": None,
    "folder": None,
    "loop": None,
    "socket": None,
    "empty": b"",
    "one byte": b"\0",
    "binary": ANY,
    "gzip of binary": gzip.compress(ANY),
    "cut gzip": gzip.compress(ANY)[:40],
    "text": b"hello\nworld\n",
    "number": b"1",
    "list": b"[]",
    "null": b"null",
    "object": b"{}",
    "utf-16": '{"format": "olla-graph"}'.encode("utf-16"),
    "wide csv": b"id,lower,upper,size\n" + b"x" * 200_000 + b",0,1,2\n",
    "nul in csv": b"id,lower,upper,size\na\0b,0,1,\0\n",
    "csv without rows": b"id,lower,upper\n",
    "lone surrogate": b'{"format": "olla-graph", "version": 1, "name": "\\ud800", "tensors": [], "ops": []}',
    "deep": b"[" * 100_000,
}
FORMATS = ("graph", "plan", "buffers")
RIGHT = {"plan": "graph", "check graph": "graph", "check plan": "plan", "show": "plan", "layout": "buffers"}


def make_bad(kind: str, path: Path) -> None:
    data = BAD[kind]
    if kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "socket":
        import socket

        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    elif data is not None:
        path.write_bytes(data)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("good")
    training_step().save(folder / "graph")
    olla.plan(training_step(), time_limit=1.0).save(folder / "plan")
    (folder / "buffers").write_text("id,lower,upper,size\na,0,3,4\n")
    return {name: str(folder / name) for name in FORMATS}


def refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("olla: error: ")
    assert captured.err.count("\n") == 1
    assert len(captured.err) < 1000
    return captured.err


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", BAD)
def test_whatever_is_wrong_with_a_file_is_one_line_and_status_2(
    kind: str,
    command: str,
    good: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    bad = Path("bad")
    make_bad(kind, bad)
    if kind == "folder" and command.endswith("-o"):
        bad.rmdir()
    line = refused([arg.format(bad=bad, folder=tmp_path, **good) for arg in COMMANDS[command]], capsys)
    if command in RIGHT:
        assert "bad" in line


@pytest.mark.parametrize("command", RIGHT)
@pytest.mark.parametrize("given", FORMATS)
def test_a_file_of_another_format_is_one_line_that_names_it(
    given: str, command: str, good: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    if given == RIGHT[command]:
        return
    args = [arg.format(bad=good[given], **good) for arg in COMMANDS[command]]
    assert good[given] in refused(args, capsys)


FULL = "olla: error: standard output: cannot be written: the disk is full; free some space, or write elsewhere\n"


@pytest.mark.parametrize(
    ("where", "given", "status", "said"),
    [
        (">&-", "graph", 0, ""),
        (">&-", "none", 2, "olla: error: {none}: cannot be read: No such file or directory\n"),
        (">{full}", "graph", 2, FULL),
        ("2>&-", "graph", 0, None),
        ("2>&-", "none", 2, None),
        ("2>{full}", "graph", 0, None),
        ("2>{full}", "none", 2, None),
        (">&- 2>&-", "none", 2, None),
        ("<&- >&- 2>&-", "graph", 0, None),
    ],
)
def test_the_status_holds_where_nothing_can_be_printed(
    where: str, given: str, status: int, said: str | None, good: dict[str, str], tmp_path: Path
) -> None:
    full = tmp_path / "full"
    try:
        os.mknod(full, stat.S_IFCHR | 0o666, os.makedev(1, 7))  # not /dev/full, lest a writer replaces that
    except OSError:
        pytest.skip("device nodes cannot be made here")
    none = str(tmp_path / "none")
    path = good.get(given, none)
    script = f"{sys.executable} -m olla plan {path} {where.format(full=full)}"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    if said is not None:
        assert done.stderr == said.format(none=none)


def test_a_step_that_ends_the_program_is_no_capture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ending_step.py").write_text("import sys\ndef step():\n    sys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    line = refused(["capture", "ending_step:step", "-o", str(tmp_path / "out.json")], capsys)
    assert "ending_step:step failed with SystemExit: 0" in line
