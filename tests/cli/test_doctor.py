"""`olla doctor`: it tries what it reports, and says how to get what is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from olla.cli.parser import main
from olla.errors import SolverError


def findings(capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[str, str]]:
    """Return by part what was found, and the words about it."""
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()[1:]]
    return {name: (found, words) for found, name, words in lines}


@pytest.mark.torch
def test_all_is_well_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    found = findings(capsys)
    assert [found[name][0] for name in ("planner", "HiGHS", "cache", "torch", "step")] == ["ok"] * 5
    assert "bit for bit" in found["step"][1]


@pytest.mark.torch
def test_a_missing_compiler_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from olla.pytorch.memory import extension

    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.setenv("OLLA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(extension, "_modules", {})
    assert main(["doctor"]) == 1
    found, words = findings(capsys)["step"]
    assert found == "failed"
    assert "/nowhere/c++" in words
    assert "apt install g++" in words


def test_without_torch_plans_are_still_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["doctor"]) == 0
    found = findings(capsys)
    assert found["planner"][0] == "ok"
    remedy = 'pip install "olla-planner[torch]", to capture and run steps'
    assert found["torch"] == ("none", f"torch is not installed: {remedy}")
    assert found["step"][0] == "none"


def test_a_solver_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> str:
        raise SolverError('highspy is not installed; pip install "highspy>=1.15"')

    monkeypatch.setattr("olla.ilp.highs.find_highs", broken)
    assert main(["doctor"]) == 1
    found, words = findings(capsys)["HiGHS"]
    assert found == "failed"
    assert words.endswith('highspy is not installed; pip install "highspy>=1.15"')
