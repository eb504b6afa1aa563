"""Models in DistributedDataParallel through olla.compile: processes of a gloo group, beside the same in ordinary loops.

What two ranks add does not depend on buckets. What more ranks add does, so with three and four the ordinary loop begins
with the buckets that it keeps, as olla does: those that DistributedDataParallel rebuilds after its first step.
"""

from __future__ import annotations

import inspect
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel

from tests.support.ranks.processes import Raised, ranks
from tests.support.ranks.work import killed, parallel

pytestmark = pytest.mark.torch
_WARM = {"eager": {"warm": True}}
_TWO = {
    "gpt2": {"model": "gpt2", "ddp": {"bucket_cap_mb": 0.05}},
    "resnet": {"model": "resnet", "ddp": {"bucket_cap_mb": 0.005}, "then": 2},
    "one bucket": {},
    "accumulated": {"model": "resnet", "body": "accumulated"},
    "clipped": {"body": "clipped"},
    "left in steps": {"body": "twice"},
    "views": {"body": "twice", "ddp": {"gradient_as_bucket_view": True}},
    "budget": {"model": "gpt2", "olla": {"minimise": "peak"}},
}
_THREE = {  # 1/3 is no number of a computer: multiplied by, or divided by, differs
    "scaled": _WARM,
    "divided": {"ddp": {"batched_grad_copy": True}, **_WARM},
    "views": {"body": "twice", "ddp": {"gradient_as_bucket_view": True}, **_WARM},
}
_FOUR = {
    "gpt2": {"model": "gpt2", "ddp": {"bucket_cap_mb": 0.05}, **_WARM},
    "resnet": {"model": "resnet", "ddp": {"bucket_cap_mb": 0.005}, **_WARM},
    "sizes": {"ddp": {"bucket_cap_mb_list": [0.0005, 0.002]}, **_WARM},
    "unused": {"model": "unused", "ddp": {"find_unused_parameters": True, "bucket_cap_mb": 0.001}},
    "static": {"model": "unused", "ddp": {"static_graph": True, "bucket_cap_mb": 0.001}, **_WARM},
    "rebuilt before": {"model": "gpt2", "ddp": {"bucket_cap_mb": 0.05}, "warm": True},
}
_OPTIONS = set(inspect.signature(DistributedDataParallel).parameters)  # torch 2.11 has less of them
_CASES = {
    size: {name: case for name, case in cases.items() if _OPTIONS.issuperset(case.get("ddp", ()))}
    for size, cases in ((2, _TWO), (3, _THREE), (4, _FOUR))
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What ranks found in all cases, by how many there are."""
    folder = tmp_path_factory.mktemp("ranks")
    return {size: ranks(parallel, size, folder, cases=cases) for size, cases in _CASES.items()}


@pytest.mark.parametrize(("size", "case"), [(size, case) for size, cases in _CASES.items() for case in cases])
def test_losses_and_parameters_are_equal_to_the_bit(
    found: dict[int, list[dict[str, Any]]], size: int, case: str
) -> None:
    for rank in found[size]:
        eager, ours = rank[case]["eager"], rank[case]["olla"]
        assert not isinstance(ours, Raised), ours
        assert ours["losses"] == eager["losses"]
        assert ours["tensors"] == eager["tensors"]
        assert len(ours["losses"]) >= 20


@pytest.mark.parametrize(("size", "case"), [(size, case) for size, cases in _CASES.items() for case in cases])
def test_the_planned_peak_is_measured_on_every_rank_and_buckets_are_those_of_the_wrapper(
    found: dict[int, list[dict[str, Any]]], size: int, case: str
) -> None:
    for rank in found[size]:
        num_misses, planned, measured = rank[case]["olla"]["report"]
        assert (num_misses, planned) == (0, measured)
        per_pass = rank[case]["eager"]["bucket_bytes"]
        sent = rank[case]["olla"]["all_reduce"]
        assert sent == per_pass * (len(sent) // len(per_pass))
        assert sent == found[size][0][case]["olla"]["all_reduce"]
    if case == "resnet":
        assert len(per_pass) > 2
        assert rank[case]["olla"]["broadcast"] == [4 * 6 * 2 * 8, 8 * 6]  # statistics, and counts


def test_one_rank_that_ends_in_the_middle_of_training_is_an_error_on_the_others(tmp_path: Path) -> None:
    start = time.monotonic()
    left, gone = ranks(killed, 2, tmp_path, timeout=15.0, per_rank={1: {"after": 0.5, "sends": int(signal.SIGKILL)}})
    assert gone is None
    assert isinstance(left, Raised)
    assert left.kind == "ReplayError", left
    assert "one of them ended" in left.text
    assert time.monotonic() - start < 90  # starting processes takes most of it


def test_ranks_that_use_different_parameters_say_so(tmp_path: Path) -> None:
    options = {"model": "branches", "ddp": {"find_unused_parameters": True}, "steps": 2}
    for rank in ranks(parallel, 2, tmp_path, cases={"branches": options}):
        error = rank["branches"]["olla"]
        assert isinstance(error, Raised)
        assert (error.kind, "the first op that differs" in error.text) == ("ReplayError", True)


def test_torchrun_starts_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.support.ranks.launched", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert (tmp_path / f"rank{rank}").read_text() == "equal, 0 misses"
