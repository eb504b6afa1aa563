"""What a notebook shows: names and figures as they are, drawn to scale, and nothing that a name could smuggle in."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import olla
from olla.base import human_bytes, notebook
from tests.support.plans import training_step

EVIL = '<script>alert("1")</script>'


def parsed(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(html)  # well-formed, so that no tag is left open in the notebook


def words(element: ElementTree.Element) -> str:
    return " ".join(element.itertext())


def test_bars_are_to_scale() -> None:
    widths = [
        float(r.get("width", 0)) for r in parsed(notebook.bars([("a", 1000), ("b", 250), ("c", 0)], "t")).iter("rect")
    ]
    assert widths[1] / widths[0] == pytest.approx(0.25, abs=0.01)
    assert widths[2] <= 1


@pytest.mark.parametrize("num", [1, 3, 420, 421, 5000])
def test_a_curve_keeps_the_peak_however_many_steps_there_are(num: int) -> None:
    values = np.full(num, 10, dtype=np.int64)
    values[num // 2] = 1000
    path = next(parsed(notebook.curve(values, "t")).iter("path")).get("d", "")
    heights = [float(y) for y in re.findall(r"L\S+ (\S+)H", path)]
    assert min(heights) == 2
    assert len(heights) == min(num, 420)


def test_plan_graph_and_builder_show_their_figures() -> None:
    graph = training_step()
    plan = olla.plan(graph)
    shown: Any = plan
    text = words(parsed(shown._repr_html_()))
    for figure in (plan.program_peak_bytes, plan.peak_bytes, plan.lower_bound_bytes, plan.arena_bytes):
        assert human_bytes(figure) in text
    assert "none: nothing was laid out" in words(parsed(olla.plan(graph, layout=False)._repr_html_()))
    assert human_bytes(plan.program_peak_bytes) in words(parsed(graph._repr_html_()))
    assert repr(olla.Graph.builder("a name")) == "<olla.Graph.builder 'a name': 0 ops, 0 tensors so far>"


def test_names_cannot_become_tags() -> None:
    builder = olla.Graph.builder(EVIL)
    builder.op(EVIL, writes=[builder.tensor(8, name=EVIL)])
    graph = builder.build()
    for html in (graph._repr_html_(), olla.plan(graph)._repr_html_(), notebook.bars([(EVIL, 1)], EVIL)):
        assert EVIL in words(parsed(html)) or "&lt;script" in html
        assert not list(parsed(html).iter("script"))


def test_an_empty_graph_is_shown() -> None:
    assert "0 ops" in words(parsed(olla.Graph.builder("").build()._repr_html_()))


def test_reports_show_their_figures() -> None:
    from olla.report.step import StepReport

    report = StepReport(
        name="step", num_ops=5, num_steps=2, num_captures=1, in_arena=False, planned_peak_bytes=2**20,
        eager_peak_bytes=2**21, resident_bytes=1, seconds_per_step=None, capture_seconds=0.0, plan_seconds=0.0,
        note="why",
    )  # fmt: skip
    text = words(parsed(report._repr_html_()))
    for part in ("1.00 MiB", "2.00 MiB", "none: planned order", "why", "unknown"):
        assert part in text


@pytest.mark.torch
def test_the_report_of_a_pool_shows_its_figures() -> None:
    pytest.importorskip("torch")
    from olla.pytorch.pool import PoolReport

    report = PoolReport(
        state="planned", num_iterations=9, num_planned=7, num_plans=1, arena_bytes=2**20, load_bytes=2**19,
        requested_bytes=100, served_bytes=50, num_misses=0, missed_bytes=0, note="",
    )  # fmt: skip
    text = words(parsed(report._repr_html_()))
    for part in ("pool planned", "1.00 MiB", "512.00 KiB", "50.00%", "9, 7 planned"):
        assert part in text
