"""The ablation of the searches: a row for every part that is left out, and patches that are taken back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.recompute import ablate_search
from olla.base import rivals

SCRIPT = Path(ablate_search.__file__)


def test_ablation_has_a_row_for_every_part_of_the_searches(tmp_path: Path) -> None:
    out = tmp_path / "ablation.md"
    command = [sys.executable, SCRIPT, "--quick", "--markdown", out]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    page = out.read_text()
    assert "\n| nothing | 0 | 0 | 0.000 | " in page
    for name in (*ablate_search.REWRITING, *ablate_search.ORDERS):
        assert f"\n| {name} | " in page


def test_what_is_left_out_is_missing_for_that_long_alone() -> None:
    whole = rivals.orders
    for patches in (*ablate_search.REWRITING.values(), *ablate_search.ORDERS.values()):
        with ablate_search.left_out(patches):
            pass
        assert rivals.orders is whole


def test_a_change_is_counted_by_its_goal() -> None:
    slower, budget = ("max_slowdown", 0.1), ("budget", 0.8)
    first = {("a", slower): 100, ("b", slower): 100, ("a", budget): 2.0, ("b", budget): None}
    found = {("a", slower): 102, ("b", slower): 99, ("a", budget): 2.5, ("b", budget): 1.0}
    sides = [{key: ablate_search.Outcome(value, 1.0) for key, value in side.items()} for side in (first, found)]
    assert ablate_search.compared(*sides, [slower]) == pytest.approx([1, 1, 0.5, 2.0])
    assert ablate_search.compared(*sides, [budget]) == pytest.approx([1, 1, 0.5, 2.0])
    assert ablate_search.compared(*reversed(sides), [budget]) == pytest.approx([1, 1, -0.5, 2.0])
