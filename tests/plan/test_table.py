from __future__ import annotations

from dataclasses import replace

import pytest

from olla import Graph
from olla.base import human_bytes, percent
from olla.plan import Plan, Status
from olla.plan.peak import LiveTensor, OpAt
from olla.planner import plan
from tests.support.plans import plan_of, training_step

EXPECTED = """\
two layers: 6 ops, 8 tensors
  peak before    1.82 KiB    1,868    in program order
  peak after     1.63 KiB    1,668    method auto
  saved             200 B      200    10.71 %
  lower bound    1.63 KiB    1,668    gap 0 %, optimal
  resident          800 B      800    live throughout, outside the arena
  arena          2.00 KiB    2,048    fragmentation 0 %
  load           2.00 KiB    2,048    offsets are multiples of 512
  arena bound    1.00 KiB    1,024    no order has a smaller arena
Proved: no valid order has a lower peak.

The peak is at op 2 (backward_1). Largest live there besides resident memory:
  400 B    tensor 7           temporary    written by backward_1
  200 B    tensor 3 hidden    temporary    written by forward_0
  200 B    tensor 5           temporary    written by backward_1
   64 B    tensor 1           input
    4 B    tensor 4           temporary    written by forward_1

Time: order 0.25 s, total 1.50 s"""


def small_plan() -> Plan:
    peak_tensors = (
        LiveTensor(7, "", 400, "temporary", "backward_1"),
        LiveTensor(3, "hidden", 200, "temporary", "forward_0"),
        LiveTensor(5, "", 200, "temporary", "backward_1"),
        LiveTensor(1, "", 64, "input", ""),
        LiveTensor(4, "", 4, "temporary", "forward_1"),
    )
    return plan_of(
        training_step(),
        [0, 1, 2, 5, 3, 4],
        alignment=512,
        method="auto",
        status=Status.OPTIMAL,
        message=Status.OPTIMAL.message,
        lower_bound_bytes=1668,
        arena_lower_bound_bytes=1024,
        seconds={"order": 0.25, "total": 1.5},
        peak_op=OpAt(2, "backward_1"),
        peak_tensors=peak_tensors,
    )


def test_a_plan_prints_as_the_table_a_person_wants() -> None:
    assert str(small_plan()) == EXPECTED


def test_the_planner_fills_the_table() -> None:
    shown = str(plan(training_step()))
    for word in ("two layers: 6 ops", "peak before", "200 B", "The peak is at op", "fragmentation", "order 0.0"):
        assert word in shown


def test_optimal_and_stopped_plans_never_print_the_same() -> None:
    optimal = small_plan()
    stopped = replace(optimal, status=Status.FEASIBLE, message=Status.FEASIBLE.message)
    assert "Proved" in str(optimal)
    assert "feasible" not in str(optimal)
    assert "Not proved" in str(stopped)
    assert "optimal" not in str(stopped)
    assert len({status.message for status in Status}) == len(Status)


def test_a_workspace_at_the_peak_is_shown_with_its_op() -> None:
    builder = Graph.builder("")
    builder.op("convolution", workspace_bytes=3 * 2**20)
    shown = " ".join(str(plan(builder.build())).split())
    assert "unnamed graph: 1 ops, 0 tensors" in shown
    assert "3.00 MiB workspace of convolution" in shown


def test_empty_plans_and_plans_without_a_layout_print() -> None:
    assert "nothing was laid out" in str(plan(training_step(), layout=False))
    assert "0 ops, 0 tensors" in str(plan(Graph.builder("empty").build()))


def test_names_that_look_like_markup_are_printed_as_they_are() -> None:
    named = replace(
        small_plan(),
        graph_name="[bold]model[/]",
        message="see [/nothing]",
        peak_tensors=(LiveTensor(0, "layers[0][/red]", 1, "temporary", "add[1]"),),
    )
    shown = str(named)
    for name in ("[bold]model[/]", "see [/nothing]", "tensor 0 layers[0][/red]", "written by add[1]"):
        assert name in shown


def test_long_names_stay_within_the_width_and_no_colour_codes_appear() -> None:
    long = replace(small_plan(), peak_tensors=(LiveTensor(0, "n" * 150, 1, "temporary", "p" * 150),))
    assert max(map(len, str(long).splitlines())) <= 100
    assert "\x1b" not in str(long)


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (-200, "-200 B"),
        (3 * 2**30 // 2, "1.50 GiB"),
        (2**62, "4.00 EiB"),
    ],
)
def test_bytes_are_written_for_people(num_bytes: int, expected: str) -> None:
    assert human_bytes(num_bytes) == expected


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(0.0, "0 %"), (1e-9, "<0.01 %"), (-1e-9, ">-0.01 %"), (0.5, "50.00 %"), (float("inf"), "unknown")],
)
def test_a_small_share_never_reads_as_zero(ratio: float, expected: str) -> None:
    assert percent(ratio) == expected
