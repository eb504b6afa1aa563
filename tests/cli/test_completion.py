"""`olla completion`: what it prints completes commands, options and files in a real shell."""

from __future__ import annotations

import builtins
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from olla.cli.parser import main


def completed(script: str, words: list[str], folder: Path) -> list[str]:
    """Return what bash offers for the last word."""
    ask = f"""{script}
COMP_WORDS=({" ".join(f'"{word}"' for word in words)}) COMP_CWORD={len(words) - 1}
_shtab_olla; printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", ask], cwd=folder, capture_output=True, text=True, timeout=60)
    return sorted(set(done.stdout.split()))


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["olla", "co"], "completion"),
        (["olla", "plan", "--max-s"], "--max-slowdown"),
        (["olla", "plan", "--method", "sm"], "smartpool"),
        (["olla", "check", "ste"], "step.json"),
    ],
)
def test_bash_completes(
    words: list[str], offered: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("shtab")
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    (tmp_path / "step.json").touch()
    assert main(["completion", "bash"]) == 0
    assert offered in completed(capsys.readouterr().out, words, tmp_path)


def test_what_makes_it_is_named_where_it_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name == "shtab":
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["completion", "zsh"]) == 2
    assert 'pip install "olla-planner[completion]"' in capsys.readouterr().err
