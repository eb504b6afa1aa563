"""What people write as a budget, device profiles and what operators allow."""

from __future__ import annotations

import math

import numpy as np
import pytest

import olla
from olla import BudgetError, DeviceProfile, Graph
from olla.base import parse_bytes
from olla.graph import PROFILES, Rerun, operator, profile_of, rules
from olla.plan import Goal


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        ("16GB", 16 * 10**9),
        ("16GiB", 16 * 2**30),
        ("16 GiB", 16 * 2**30),
        ("0.5GB", 5 * 10**8),
        ("1.5KiB", 1536),
        ("123", 123),
        ("7B", 7),
        (4096, 4096),
    ],
)
def test_bytes_are_read_as_people_write_them(written: object, num_bytes: int) -> None:
    assert parse_bytes(written) == num_bytes


@pytest.mark.parametrize(
    "written",
    [
        0, -1, "0", "0GB", "-3GB", "16G", "16XB", "GB", "", "nan", "NaN", "inf", math.nan, math.inf, 1.5, True,
        None, "1e9", "1.5", "16GBs", "1 6GB", "0.1B", 2**62 + 1, "99999999TB", "٣GB",
    ],
)  # fmt: skip
def test_what_is_no_budget_is_refused_with_its_value_and_a_remedy(written: object) -> None:
    with pytest.raises(BudgetError, match='write "16GB"') as caught:
        parse_bytes(written)
    assert repr(written) in str(caught.value)


def test_a_goal_is_one_of_three_and_its_options_are_checked() -> None:
    a100 = PROFILES["a100"]
    assert Goal.of(None, None, None, a100, True, True) is None
    for options, message in (
        ((None, -0.1, None), "max_slowdown is -0.1"),
        ((None, math.nan, None), "max_slowdown is nan"),
        ((None, None, "time"), "minimise is 'time'"),
        (("1GB", None, "peak"), "budget and minimise are given"),
    ):
        with pytest.raises(ValueError, match=message):
            Goal.of(*options, a100, True, True)  # type: ignore[arg-type]


def test_an_unknown_device_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"device is 'b100', expected .* a100"):
        profile_of("b100")
    with pytest.raises(ValueError, match="launch_seconds"):
        DeviceProfile(
            name="x",
            flops_per_second=1.0,
            bytes_per_second=1.0,
            launch_seconds=0.0,
            to_host_bytes_per_second=1.0,
            from_host_bytes_per_second=1.0,
        )


def test_time_is_measured_where_it_was_and_a_roofline_elsewhere() -> None:
    b = Graph.builder("costs")
    b.op("compute", flops=156_000_000_000, moved_bytes=1500, launches=1)
    b.op("traffic", flops=1, moved_bytes=1_500_000_000, launches=2)
    b.op("measured", flops=1, moved_bytes=1, seconds=0.25)
    assert PROFILES["a100"].op_seconds(b.build()).tolist() == pytest.approx([1e-3 + 5e-6, 1e-3 + 1e-5, 0.25])


def test_operators_say_what_may_overwrite_and_what_may_run_again() -> None:
    b = Graph.builder("operators")
    state, x = b.tensor(8, kind="parameter"), b.tensor(8)
    b.op("make", writes=[x], target="aten.randn.default", random=True)
    y = b.tensor(8)
    b.op("add", reads=[x], writes=[y], target="aten.add.Tensor")
    b.op("mul_", reads=[y], mutates=[y], target="aten.mul_.Tensor", moved_bytes=16)
    b.op("half", reads=[y], mutates=[y], target="aten.mul_.Tensor", moved_bytes=8)  # a view of one half
    b.op("update", reads=[state, y], mutates=[state], target="aten.add_.Tensor", moved_bytes=24)
    found = rules(b.build(), PROFILES["a100"])
    assert found.in_place.tolist() == [0, 1, 1, 0, 1]
    assert found.rerun.tolist() == [Rerun.REPLAY, Rerun.WHOLE, Rerun.WHOLE, Rerun.WHOLE, Rerun.WHOLE]
    off = rules(b.build(), PROFILES["a100"], in_place=False, recompute=False)
    assert not off.in_place.any()
    assert not off.rerun.any()
    assert operator("aten.add.Tensor") == "aten.add"


def test_a_budget_that_everything_fits_adds_no_time() -> None:
    b = Graph.builder("small")
    x = b.tensor(100)
    b.op("write", writes=[x])
    b.op("read", reads=[x])
    found = olla.plan(b.build(), budget="1MB", time_limit=1.0)
    assert (found.peak_bytes, found.added_seconds, found.num_recomputed) == (100, 0.0, 0)
    assert np.array_equal(found.origin, [0, 1])


def test_a_measured_profile_describes_this_machine_and_plans() -> None:
    pytest.importorskip("torch")
    profile = olla.device_profile("cpu")
    assert 1e8 < profile.flops_per_second < 1e14
    assert 1e8 < profile.bytes_per_second < 1e13
    assert 1e-8 < profile.launch_seconds < 1e-2
    assert 1e8 < profile.to_host_bytes_per_second < 1e13
    builder = Graph.builder("one")
    tensor = builder.tensor(8)
    builder.op("make", writes=[tensor], moved_bytes=8)
    plan = olla.plan(builder.build(), max_slowdown=0.1, device=profile)
    assert plan.base_seconds == pytest.approx(8 / profile.bytes_per_second + profile.launch_seconds)


def test_measuring_what_is_no_device_of_ours_is_refused() -> None:
    pytest.importorskip("torch")
    with pytest.raises(ValueError, match="expected 'cpu' or a CUDA device"):
        olla.device_profile("meta")
