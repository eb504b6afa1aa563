"""What the README shows runs, and prints what it says."""

import functools
import re
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
WRAPPED, LOOP, *PYTHON_BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
CONSOLE_BLOCKS = re.findall(r"^```console\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run_first_example() -> dict[str, Any]:
    """Return the names it leaves; it also leaves a graph file in the current folder."""
    names: dict[str, Any] = {}
    exec(compile(PYTHON_BLOCKS[0], "README.md", "exec"), names)
    return names


def test_first_example_prints_what_its_comment_says(capsys: pytest.CaptureFixture[str]) -> None:
    (expected,) = re.findall(r"^print\(.*\n# (.*)$", PYTHON_BLOCKS[0], re.MULTILINE)
    run_first_example()
    assert capsys.readouterr().out == expected + "\n"


def test_command_lines_run() -> None:
    run_first_example()
    lines = [shlex.split(line) for block in CONSOLE_BLOCKS for line in block.splitlines()]
    assert len(lines) == 4
    for command, *arguments in lines:
        script = Path(sysconfig.get_path("scripts"), command)
        done = subprocess.run([script, *arguments], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), f"{command} {arguments}: {done.stderr}"


@pytest.mark.torch
def test_two_lines_around_a_loop_plan_it(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    exec(compile(WRAPPED, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "3 calls, 0 of them without a graph" in printed
    assert "of eager's" in printed


@pytest.mark.torch
def test_the_compiled_loop_of_the_first_screen_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    config = functools.partial(transformers.GPT2Config, n_layer=1, n_embd=32, n_head=2)
    monkeypatch.setattr(transformers, "GPT2Config", config)  # as printed it takes gigabytes
    exec(compile(LOOP, "README.md", "exec"), {})
    assert "measured peak" in capsys.readouterr().out


@pytest.mark.torch
def test_capture_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    names = run_first_example()
    capsys.readouterr()
    (block,) = PYTHON_BLOCKS[1:]
    exec(compile(block, "README.md", "exec"), names)
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", ".ci/run"])
def test_make_targets_named_exist(document: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^\s*|`|exec )make (?:--\S+ )?([a-z-]+)\b", (ROOT / document).read_text(), re.MULTILINE))
    assert named
    assert named <= targets


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_linked_files_exist(document: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / document).read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
