"""Which sizes fit: the same plans as made by hand, sizes that are the largest, and errors that name the size."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import olla
from olla.cli.parser import main
from olla.errors import BudgetError, CaptureError
from olla.fit.largest import next_size
from tests.support.pytorch.steps import nn, torch


def chain(n: int) -> olla.Graph:
    """A step in which dropping the first result pays."""
    builder = olla.Graph.builder("chain")
    a, b, c, d = (builder.tensor(n * size) for size in (100, 10, 100, 1))
    for name, reads, writes in (("a", [], [a]), ("b", [a], [b]), ("c", [b], [c]), ("d", [c], [d]), ("e", [a, d], [])):
        builder.op(name, reads=reads, writes=writes, moved_bytes=n)
    return builder.build()


def test_ways_are_the_plans_made_by_hand() -> None:
    found = olla.fit(chain, memory=10**6, sizes=(512, 1024), slowdowns=(0.1,))
    assert [row.n for row in found.rows] == [512, 1024]
    for row in found.rows:
        graph = chain(row.n)
        planned = olla.plan(graph)
        assert row.ways["eager"].peak_bytes == planned.program_peak_bytes
        assert row.ways["planned"].peak_bytes == planned.resident_bytes + planned.arena_bytes
        for name, goal in (("10%", {"max_slowdown": 0.1}), ("least", {"minimise": "peak"})):
            plan = olla.plan(graph, **goal)
            assert row.ways[name].peak_bytes == plan.resident_bytes + plan.arena_bytes
            assert row.ways[name].bound_bytes == plan.peak_lower_bound_bytes


@pytest.mark.parametrize("way", ["eager", "planned", "least"])
def test_the_largest_size_is_the_largest(way: str) -> None:
    memory = 150_000
    found = olla.fit(chain, memory=memory, sizes=(64, 128), slowdowns=(), exact=way)
    largest = found.largest(way)
    assert found.exact == way
    assert largest is not None
    rows = olla.fit(chain, memory=memory, sizes=(largest, largest + 1), slowdowns=()).rows
    assert [row.ways[way].fits for row in rows] == [True, False]


def test_nothing_fits() -> None:
    found = olla.fit(chain, memory=100, sizes=(64,))
    assert found.fastest is None
    assert [found.largest(name) for name in found.names] == [None] * len(found.names)


@given(st.integers(1, 300), st.integers(0, 2000), st.integers(1, 50))
def test_sizes_close_in_on_the_largest(slope: int, base: int, first: int) -> None:
    memory = 10_000
    tried: dict[int, tuple[bool, int]] = {}
    n: int | None = first
    while n is not None:
        assert n not in tried
        tried[n] = (base + slope * n <= memory, base + slope * n)
        assert len(tried) < 30
        n = next_size([(k, *tried[k]) for k in sorted(tried)], memory)
    expected = (memory - base) // slope
    assert max((k for k, (fits, _) in tried.items() if fits), default=0) == expected


@pytest.mark.torch
def test_models_have_no_weights_while_they_are_captured() -> None:
    seen = []

    def make_step(n: int) -> tuple[Any, ...]:
        model = nn.Sequential(nn.Linear(1 << 14, 1 << 14), nn.Linear(1 << 14, 4))  # 1 GiB
        seen.append({parameter.device.type for parameter in model.parameters()})
        batch = torch.ones(n, 1 << 14)
        return model, batch, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).square().mean()

    found = olla.fit(make_step, memory="4GB", device="cpu", sizes=(1,), slowdowns=())
    assert seen == [{"meta"}]
    assert found.rows[0].resident_bytes > 2**30


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"memory": "many"}, BudgetError, "many"),
        ({"sizes": ()}, ValueError, "sizes are empty"),
        ({"sizes": (0,)}, ValueError, "size is 0, expected a whole number from 1 on"),
        ({"slowdowns": (-1.0,)}, ValueError, "slowdown is -1.0"),
        ({"exact": "most"}, ValueError, "exact is 'most', expected one of eager"),
        ({"device": "abacus"}, ValueError, "abacus"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        olla.fit(chain, **{"memory": 1000, "sizes": (1,), **options})


@pytest.mark.torch
def test_a_step_that_fails_is_named_with_its_size() -> None:
    def make_step(n: int) -> Any:
        raise RuntimeError("no data")

    with pytest.raises(CaptureError, match=r"make_step\(3\) failed with RuntimeError: no data"):
        olla.fit(make_step, memory=1000, sizes=(3,))
    with pytest.raises(CaptureError, match=r"make_step\(3\) returned a str, expected"):
        olla.fit(lambda n: "step", memory=1000, sizes=(3,))


@given(st.lists(st.integers(1, 400), min_size=1, max_size=40), st.integers(1_000, 100_000))
@settings(max_examples=20, deadline=None)
def test_which_batches_of_a_run_fit_is_known_of_each(lengths: list[int], memory: int) -> None:
    found = olla.fit(chain, memory=memory, lengths=lengths, slowdowns=(), exact="least")
    assert max(lengths) in {row.n for row in found.rows}
    for way, peak in (("eager", program_peak), ("least", least_peak)):
        too_long = [i for i, n in enumerate(lengths) if peak(n) > memory]
        share = 1 - len(too_long) / len(lengths)
        assert found.share(way) == pytest.approx((share, share))
        assert found.first_too_long(way) == (too_long[0] if too_long else None)
    low, high = found.share("planned")  # type: ignore[misc]
    assert low <= sum(planned_peak(n) <= memory for n in lengths) / len(lengths) <= high


def program_peak(n: int) -> int:
    return chain(n).program_peak_bytes


@functools.cache
def planned_peak(n: int) -> int:
    plan = olla.plan(chain(n))
    return plan.resident_bytes + plan.arena_bytes


@functools.cache
def least_peak(n: int) -> int:
    plan = olla.plan(chain(n), minimise="peak")
    return plan.resident_bytes + plan.arena_bytes


def test_the_report_says_with_which_batch_a_run_would_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(["128"] * 99 + ["512"] + ["64"] * 100))
    command = ["fit", "tests.fit.test_fit:chain", "--memory", "100000", "--lengths", str(path)]
    assert main([*command, "-o", str(tmp_path / "fit.json")]) == 0
    printed = capsys.readouterr().out
    assert "Of 200 batches, the longest of n = 512:" in printed
    assert "eager: 99.50 % fit; the first not to: batch 100, n = 512" in printed
    content = json.loads((tmp_path / "fit.json").read_text())
    assert content["lengths"]["share"]["eager"] == [0.995, 0.995]
    assert content["lengths"]["first_too_long"]["eager"] == 99
    path.write_text("128 long")
    assert main(command) == 2
    assert "'long' is no length, expected whole numbers between blanks" in capsys.readouterr().err
    with pytest.raises(ValueError, match="length is 0, expected a whole number from 1 on"):
        olla.fit(chain, memory=1000, lengths=[4, 0])
    assert olla.fit(chain, memory=1000, sizes=(1,)).share("eager") is None


def test_the_command_prints_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    given_options = ["--memory", "150000", "--sizes", "64,128", "-o", "fit.json"]
    assert main(["fit", "tests.fit.test_fit:chain", *given_options]) == 0
    assert "64" in capsys.readouterr().out
    assert [row["n"] for row in json.loads((tmp_path / "fit.json").read_text())["rows"]] == [64, 128]
    assert main(["fit", "tests.fit.test_fit:chain", "--memory", "10", "--sizes", "64"]) == 1


@pytest.mark.torch
def test_sizes_are_those_of_one_of_many_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.fit.sharded import make_step

    options: dict[str, Any] = {"memory": "1GB", "sizes": (4,), "slowdowns": (), "time_limit": 2.0}
    alone, found = olla.fit(make_step, **options), olla.fit(make_step, **options, world_size=8, parallel="fsdp")
    (one,), (row,) = alone.rows, found.rows
    assert one.ways["least"].link_bytes == 0
    assert row.resident_bytes < one.resident_bytes / 7
    model, batch, optimizer, loss = make_step(4)
    graph = olla.capture(model, batch, optimizer=optimizer, loss=loss, world_size=8, parallel="fsdp").graph
    assert row.ways["planned"].link_bytes == graph.message_bytes.sum()
    assert row.ways["least"].link_bytes > row.ways["planned"].link_bytes  # it gathers again
    plan = olla.plan(graph, minimise="peak", time_limit=2.0)
    assert row.ways["least"].peak_bytes == plan.resident_bytes + plan.arena_bytes
    assert "one of 8 ranks (fsdp)" in str(found)
    out = tmp_path / "fit.json"
    source = "tests.fit.sharded:make_step"
    main(["fit", source, "--memory", "1GB", "--sizes", "4", "--world-size", "8", "--slowdowns", "0.1", "-o", str(out)])
    content = json.loads(out.read_text())
    assert (content["world_size"], content["parallel"]) == (8, "fsdp")
    assert "over the link" in capsys.readouterr().out


def test_progress_is_a_line_for_every_size_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", "tests.fit.test_fit:chain", "--memory", "1MB", "--sizes", "8,16", "--device", "cpu"])
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [f"olla: fitting tests.fit.test_fit:chain: n = {n}" for n in (8, 16)]
    assert "chain on cpu with" in printed.out
