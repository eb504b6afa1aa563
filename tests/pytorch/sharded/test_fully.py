"""Models in FSDP2's fully_shard through olla.compile: processes of a gloo group, beside the same in ordinary loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from tests.support.ranks.parallel import clipped
from tests.support.ranks.processes import Raised, ranks
from tests.support.ranks.sharded import beside_eager

pytestmark = pytest.mark.torch
_LEAST = {"olla": {"minimise": "peak"}}
_HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
_TWO = {
    "gpt2": {"model": "gpt2"},
    "resnet": {"model": "resnet", "then": 2},
    "momentum": {"model": "small", "optimizer": "SGD"},
    "least": {"model": "gpt2", **_LEAST},
    "half": {"model": "gpt2", "steps": 5, "fsdp": {"mp_policy": _HALF}, **_LEAST},
    "half throughout": {"model": "gpt2", "steps": 5, "fsdp": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}},
}
_FOUR = {  # ten classes are no multiple of four: the last rank has none
    "gpt2": {"model": "gpt2"},
    "resnet": {"model": "resnet", "then": 2},
    "gone on with": {"model": "resnet", "before": 2, "then": 2},
    "least": {"model": "resnet", **_LEAST},
}
_CASES: dict[int, dict[str, dict[str, Any]]] = {2: _TWO, 4: _FOUR}
_HALVES = [MixedPrecisionPolicy(torch.float16, torch.float16), MixedPrecisionPolicy(torch.float16)]
if hasattr(FSDPParam, "unsharded_grad_dtype"):  # since torch 2.15 the second averages in float32
    _HALVES.pop()
_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{f"float16, {i}": ({"fsdp": {"mp_policy": p}}, "reduce_dtype=torch.float32") for i, p in enumerate(_HALVES)},
    "a step function": ({"olla": {"step": clipped}}, "no step function"),
    "whole parameters": ({"optimizer": "Adafactor"}, "updates element by element"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What ranks found in all cases, by how many there are."""
    folder = tmp_path_factory.mktemp("ranks")
    return {size: ranks(beside_eager, size, folder, cases=cases) for size, cases in _CASES.items()}


@pytest.mark.parametrize(("size", "case"), [(size, case) for size, cases in _CASES.items() for case in cases])
def test_steps_are_those_of_fsdp2_and_planned_peaks_are_measured(
    found: dict[int, list[dict[str, Any]]], size: int, case: str
) -> None:
    assert None not in found[size], "a rank's process ended"
    for rank in found[size]:
        eager, ours = rank[case]["eager"], rank[case]["olla"]
        assert not isinstance(ours, Raised), ours
        if size == 2:  # what two ranks add has one order
            assert (ours["losses"], ours["tensors"]) == (eager["losses"], eager["tensors"])
        assert ours["losses"] == pytest.approx(eager["losses"], rel=1e-5)
        for mine, theirs in zip(ours["tensors"], eager["tensors"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5)
        num_misses, planned, measured = ours["report"]
        assert (num_misses, planned, ours["captures"]) == (0, measured, 1), ours["told"]
        assert ours["order"] == found[size][0][case]["olla"]["order"]


@pytest.mark.parametrize("size", _CASES)
def test_at_the_least_peak_parameters_are_gathered_again(found: dict[int, list[dict[str, Any]]], size: int) -> None:
    usual = "gpt2" if size == 2 else "resnet"
    for rank in found[size]:
        (once, peak), (again, lower) = [
            (ours["order"].count("all_gather"), ours["report"][1])
            for ours in (rank[usual]["olla"], rank["least"]["olla"])
        ]
        assert again > once
        assert lower < peak


def test_what_no_captured_step_computes_is_refused_on_every_rank(tmp_path: Any) -> None:
    cases = {name: {"model": "small", "steps": 1, **options} for name, (options, _) in _REFUSED.items()}
    for rank in ranks(beside_eager, 2, tmp_path, cases=cases):
        for name, (_, remedy) in _REFUSED.items():
            error = rank[name]["olla"]
            assert isinstance(error, Raised), name
            assert (error.kind, remedy in error.text) == ("CaptureError", True), error.text
