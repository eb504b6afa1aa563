"""The command plans, checks and shows swaps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from olla.cli.parser import main
from tests.support.swaps import chain


@pytest.fixture
def graph_file(tmp_path: Path) -> str:
    chain().save(tmp_path / "graph.json.gz")
    return str(tmp_path / "graph.json.gz")


def test_command_line_swaps_saves_checks_and_shows(
    graph_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = str(tmp_path / "plan.json")
    options = ["--time-limit", "1", "--host-budget", "8MiB"]
    assert main(["plan", graph_file, "--max-slowdown", "0.1", "--json", "-o", saved, *options]) == 0
    summary = json.loads(capsys.readouterr().out)
    for key in (
        "base_seconds",
        "added_seconds",
        "added_seconds_lower_bound",
        "peak_lower_bound_bytes",
        "num_recomputed",
        "swapped_bytes",
        "host_bytes",
    ):
        assert isinstance(summary[key], int | float), key
    assert 0 < summary["host_bytes"] <= 8 << 20
    assert main(["check", graph_file, saved]) == 0
    assert capsys.readouterr().out.startswith("ok: valid")
    assert main(["show", "-v", saved]) == 0
    shown = capsys.readouterr().out
    assert "in host memory at once" in shown
    assert "copied for" in shown


def test_command_line_tells_what_does_not_fit_from_what_is_wrong(
    graph_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", graph_file, "--budget", "1MB", "--host-budget", "1GB", "--time-limit", "1"]) == 1
    assert "no plan fits it" in capsys.readouterr().err
    assert main(["plan", graph_file, "--budget", "1GB", "--host-budget", "0"]) == 2
    assert "--host-budget '0'" in capsys.readouterr().err
    assert main(["plan", graph_file, "--host-budget", "1GB"]) == 2
    assert "is for a goal" in capsys.readouterr().err
    assert main(["plan", graph_file, "--method", "autoswap", "--no-swap"]) == 2
    options = ["--host-budget", "1GB", "--no-swap", "--max-slowdown", "0.1", "--json", "--time-limit", "1"]
    assert main(["plan", graph_file, *options]) == 0
    assert json.loads(capsys.readouterr().out)["swapped_bytes"] == 0


def test_autoswap_is_a_method_on_the_command_line(graph_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", graph_file, "--method", "autoswap", "--json", "--time-limit", "1"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["method"] == "autoswap"
    assert summary["swapped_bytes"] > 0
    assert summary["peak_bytes"] < summary["base_peak_bytes"]
