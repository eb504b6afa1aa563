"""Generated layout problems: what they promise; and the benchmarks that lay them out."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench.layout import ablate_layout, bench_layout
from olla.layout import read_buffers
from olla.layout.layout import layout
from tests.support import buffers
from tests.support.overlap import highest_end, overlapping

BENCH = Path(bench_layout.__file__).parent


@pytest.mark.parametrize("family", buffers.FAMILIES)
@pytest.mark.parametrize("seed", range(4))
def test_generated_problem_is_about_as_large_as_asked_and_the_same_again(family: str, seed: int) -> None:
    one, same = (buffers.generate(family, 12_000, seed) for _ in range(2))
    assert 0.8 * 12_000 <= one.num_buffers <= 1.25 * 12_000
    assert all(
        np.array_equal(a, b) for a, b in ((one.lower, same.lower), (one.upper, same.upper), (one.size, same.size))
    )
    assert (one.lower < one.upper).all()
    assert (one.size > 0).all()
    other = buffers.generate(family, 12_000, seed + 1)
    assert not np.array_equal(one.size, other.size)


@pytest.mark.parametrize("seed", range(6))
def test_tight_problem_has_its_optimum_as_load(seed: int) -> None:
    made = buffers.generate("tight", 400, seed)
    assert made.load_bytes == made.optimum_bytes == buffers.CAPACITY
    area = int(((made.upper - made.lower) * made.size).sum())
    full = buffers.CAPACITY * int(made.upper.max() - made.lower.min())
    assert area == full if seed % 3 != 2 else area < full


def test_load_is_what_the_planner_says_it_is() -> None:
    for family in buffers.FAMILIES:
        made = buffers.generate(family, 500, 1)
        assert layout(made.lower, made.upper, made.size, time_limit=0.0).load_bytes == made.load_bytes


def test_recomputation_and_pipelines_keep_less_alive_than_they_make() -> None:
    step, again = (buffers.generate(family, 3000, 0) for family in ("training", "recomputation"))
    assert again.load_bytes / again.size.sum() < 0.5 * step.load_bytes / step.size.sum()
    short, long = (buffers.generate("pipeline", count, 0) for count in (12_000, 48_000))
    assert long.load_bytes == short.load_bytes  # more microbatches, but no more at once


def test_problem_survives_its_file(tmp_path: Path) -> None:
    made = buffers.generate("random", 50, 3)
    buffers.save(made, tmp_path / "p.csv")
    read = read_buffers(tmp_path / "p.csv")
    assert np.array_equal(read.size, made.size)
    assert np.array_equal(buffers.load(tmp_path / "p.csv").upper, made.upper)


def test_overlap_is_found_exactly_where_two_buffers_overlap() -> None:
    draw = random.Random(0)
    outcomes = set()
    for _ in range(400):
        rows = [(draw.randrange(8), draw.randrange(9), draw.randrange(5), draw.randrange(22)) for _ in range(6)]
        overlaps = any(
            max(a, a2) < min(b, b2) and max(o, o2) < min(o + s, o2 + s2)
            for (a, b, s, o), (a2, b2, s2, o2) in itertools.combinations(rows, 2)
        )
        columns = np.array(rows, dtype=np.int64).T.copy()
        assert (overlapping(*columns) >= 0) == overlaps
        assert highest_end(*columns) == max((o + s for a, b, s, o in rows if a < b and s), default=0)
        outcomes.add(overlaps)
    assert outcomes == {True, False}


def test_bench_layout_checks_and_reports_every_set(tmp_path: Path) -> None:
    out = tmp_path / "layout.json"
    command = [sys.executable, BENCH / "bench_layout.py", "--quick", "--time-limit", "1", "--threads", "1"]
    path = tmp_path / "own_set.csv"
    path.write_text("id,lower,upper,size\na,0,2,3\nb,1,3,4\n")
    done = subprocess.run(
        [*command, "--families", "training", "tight", "--files", path, "--json", out],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert [row["set"] for row in result["rows"]] == ["own_set", "training_300_s0", "tight_300_s0"]
    assert result["rows"][0]["olla height"] == result["rows"][0]["load"] == 7
    assert result["summary"]["answers that are wrong"] == 0


def test_ablation_weighs_every_search_by_checked_layouts(tmp_path: Path) -> None:
    out = tmp_path / "ablation.md"
    command = [sys.executable, BENCH / "ablate_layout.py", "--quick", "--seconds", "0.1", "--markdown", out]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    page = out.read_text()
    assert "| planned order | 1 | 1 | 0.000 | 0.000 |" in page
    for name in ("nothing", *ablate_layout.OTHERS, *ablate_layout.GREEDY):
        assert f"\n| {name} | " in page


def test_ablation_stops_at_a_wrong_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = buffers.generate("random", 50, 0)
    wrong = SimpleNamespace(offsets=np.zeros(problem.num_buffers, np.int64))
    monkeypatch.setattr(ablate_layout, "place", lambda *_: wrong)
    with pytest.raises(SystemExit, match="overlaps"):
        ablate_layout.gap(problem, 0.1, ())


def test_an_overlapping_answer_is_reported(tmp_path: Path) -> None:
    cheat = tmp_path / "python"
    cheat.write_text(
        f"#!{sys.executable}\nimport sys, json, numpy as np\n"
        "count = len(np.load(sys.argv[3])['size'])\n"
        "facts = {'status': 'optimal', 'seconds': 0.0, 'cpu_seconds': 0.0, 'mebibytes': 0.0}\n"
        "np.savez(sys.argv[4], offsets=np.zeros(count, np.int64), facts=json.dumps(facts))\n"
    )
    cheat.chmod(0o755)
    limits = bench_layout.Limits(time_limit=1.0, threads=1)
    result = bench_layout.compare(buffers.generate("random", 50, 0), {"olla": str(cheat)}, limits)
    assert "overlaps" in result.answers["olla"].wrong
    assert list(bench_layout.wrong_answers([result])) == [f"random_50_s0: {result.answers['olla'].wrong}"]
