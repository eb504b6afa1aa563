"""One plan for all ranks: processes of a gloo group, and what they say where one is not like the others."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks.processes import Raised, ranks
from tests.support.ranks.work import interrupted, one_after_another

pytestmark = pytest.mark.torch
_TIMEOUT = 30.0


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two ranks that go through all cases in one pair of processes."""
    folder = tmp_path_factory.mktemp("ranks")
    cases = {
        "first": {},
        "again": {},
        "emptied": {1: {"empty": True}},
        "slow": {1: {"pause": 2.0}},
        "option": {1: {"seed": 1}},
        "model": {1: {"width": 32}},
        "batch": {1: {"rows": 16}},
        "goal": {"all": {"minimise": "peak"}},
        "budget": {"all": {"budget": 1000}},
    }
    caches = {rank: {"cache": folder / f"cache{rank}"} for rank in range(2)}
    return ranks(one_after_another, 2, folder, timeout=_TIMEOUT, per_rank=caches, cases=cases)


@pytest.mark.parametrize("case", ["first", "again", "emptied", "slow", "goal"])
def test_all_ranks_run_one_order_at_planned_addresses(found: list[dict[str, Any]], case: str) -> None:
    first, second = (rank[case] for rank in found)
    assert first["order"] == second["order"]
    for rank in found:
        assert rank[case]["misses"] == ()
        assert rank[case]["measured"] == rank[case]["planned"]
        assert rank[case]["losses"] == rank["first"]["losses"]
    assert first["losses"] != second["losses"]  # of different data


def test_a_plan_is_taken_from_the_disk_where_all_ranks_have_it(found: list[dict[str, Any]]) -> None:
    assert [rank["first"]["cached"] for rank in found] == [False, False]
    assert [rank["again"]["cached"] for rank in found] == [True, True]


def test_a_rank_whose_cache_was_emptied_gets_the_plan_of_the_first(found: list[dict[str, Any]]) -> None:
    assert [rank["emptied"]["cached"] for rank in found] == [True, False]
    # The step is recorded again, and the seconds measured then may order its collectives otherwise than before. What
    # the ranks decided then is on both disks.
    assert [rank["slow"]["cached"] for rank in found] == [True, True]
    assert all(rank["slow"]["order"] == rank["emptied"]["order"] for rank in found)


@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("option", ["different options: seed is 0 on rank 0 and 1 on rank 1"]),
        ("model", ["the first op that differs is input", "float32[64, 64]", "on rank 0", "float32[32, 64]", "rank 1"]),
        ("batch", ["the first op that differs is input", "float32[32, 64]", "float32[16, 64]", "drop_last=True"]),
    ],
)
def test_ranks_that_differ_say_so_on_every_rank(found: list[dict[str, Any]], case: str, texts: list[str]) -> None:
    for rank in found:
        error = rank[case]
        assert isinstance(error, Raised)
        assert error.kind == "ReplayError"
        assert all(text in error.text for text in texts), error.text


def test_a_budget_that_nothing_fits_is_an_error_on_every_rank(found: list[dict[str, Any]]) -> None:
    errors = [rank["budget"] for rank in found]
    assert [error.kind for error in errors] == ["BudgetError", "BudgetError"]
    assert errors[1].text.startswith("rank 0: ")


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_where_a_rank_ends_the_others_end_within_the_time_out(tmp_path: Path, sent: signal.Signals) -> None:
    start = time.monotonic()
    options = {"timeout": 10.0, "per_rank": {1: {"ends": 3, "sends": int(sent)}}}
    left, gone = ranks(interrupted, 2, tmp_path, **options)
    assert time.monotonic() - start < 60  # starting processes takes most of it
    assert (left.kind, "one of them ended" in left.text) == ("ReplayError", True)
    assert float(left.text.partition(":")[0]) < 40
    assert gone is None if sent == signal.SIGKILL else gone.kind == "KeyboardInterrupt"
