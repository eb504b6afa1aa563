"""The page in a browser: what a person does with keys, pointer and wheel, and what is seen then."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import olla
from tests.picture import browser
from tests.support.plans import training_step

pytestmark = pytest.mark.skipif(bool(browser.MISSING), reason=browser.MISSING)


@pytest.fixture(scope="module")
def window() -> Iterator[browser.Browser]:
    with browser.browser() as opened:
        opened.show(1200, 1000)
        yield opened


@pytest.fixture(scope="module")
def plan() -> tuple[olla.Graph, olla.plan.Plan]:
    graph = training_step()
    modules = [f"layers.{v % 2}.linear" if v % 3 else "" for v in range(graph.num_ops)]
    graph = dataclasses.replace(graph, modules=modules, sources=[f"train.py:{v}" for v in range(graph.num_ops)])
    return graph, olla.plan(graph)


@pytest.fixture
def page(window: browser.Browser, plan: Any, tmp_path: Path) -> browser.Browser:
    olla.plot(*plan, tmp_path / "page.html")
    window.show(1200, 1000)
    window.open(tmp_path / "page.html")
    return window


def text(page: browser.Browser, selector: str) -> str:
    return str(page.run("return document.querySelector(arguments[0]).innerText", selector))


def box(page: browser.Browser, place: str) -> tuple[float, float, float, float]:
    """Return left, top, width and height of a chart in the window."""
    found = page.run(
        "const b = document.querySelector(arguments[0] + ' canvas').getBoundingClientRect();"
        "return [b.left, b.top, b.width, b.height]",
        place,
    )
    return tuple(found)  # type: ignore[return-value]


def window_of_steps(page: browser.Browser) -> list[float]:
    return list(page.run("return app.x"))


def test_a_search_finds_ops_tensors_modules_and_lines(page: browser.Browser, plan: Any) -> None:
    graph, made = plan
    name = graph.op_names[int(made.order[2])]
    for query, expected in ((name, name), ("layers.1.linear", "layers.1.linear"), ("train.py:4", "train.py:4")):
        page.run("app.letGo(); document.activeElement.blur()")
        page.press("/")
        page.type(query)
        found = text(page, "#hits")
        assert expected in found, query
    page.press("Escape")
    page.type("no such thing")
    assert "Nothing has this in its name" in text(page, "#hits")
    assert text(page, "#status") == "0 ops, 0 tensors"


def test_what_was_found_is_selected_by_arrows_and_enter_and_let_go_by_escape(page: browser.Browser) -> None:
    page.press("/")
    page.type("linear")
    page.press("Down", "Down")
    option = text(page, "#hits [aria-selected=true]").split("\n")[0]
    active = page.run("return document.getElementById('query').getAttribute('aria-activedescendant')")
    assert page.run("return document.getElementById(arguments[0]).innerText", active).startswith(option)
    page.press("Enter")
    assert text(page, "#selected b") == option
    assert f"Selected: {option}" in text(page, "#status")
    page.press("Escape")
    assert text(page, "#selected").startswith("Nothing")
    assert page.run("return document.getElementById('query').value") == ""


def test_the_arrows_go_from_op_to_op_and_enter_selects_one(page: browser.Browser, plan: Any) -> None:
    graph, made = plan
    page.run("document.querySelector('#timeline canvas').focus()")
    page.press("Home", "Right", "Right")
    slider = "return document.querySelector('#timeline canvas').getAttribute(arguments[0])"
    op = graph.op_names[int(made.order[2])]
    assert page.run(slider, "aria-valuenow") == "2"
    assert op in page.run(slider, "aria-valuetext")
    page.press("Enter")
    assert text(page, "#selected b").startswith(op)
    assert f"step\n2 of {graph.num_ops}" in text(page, "#selected")
    assert "step 2" in text(page, "#largest")
    page.press("End", "Right")  # there is nothing behind it
    assert page.run(slider, "aria-valuenow") == str(graph.num_ops - 1)
    page.press("Escape")
    assert text(page, "#selected").startswith("Nothing")
    assert "at the peak" in text(page, "#largest")


def test_the_arrows_go_from_block_to_block_of_the_arena(page: browser.Browser, plan: Any) -> None:
    graph, made = plan
    page.run("document.querySelector('#arena canvas').focus()")
    page.press("p", "Up")
    said = page.run("return document.querySelector('#arena canvas').getAttribute('aria-valuetext')")
    assert " at 0 bytes" in said  # the lowest one first
    page.press("Enter")
    assert "place\nat 0 bytes of the arena" in text(page, "#selected")
    first = text(page, "#selected b")
    page.press("Up", "Enter")
    assert text(page, "#selected b") != first
    tensors = [name for t, name in enumerate(graph.tensor_names) if made.offsets[t] >= 0]
    assert {first, text(page, "#selected b")} & {*tensors, *graph.op_names}


def test_every_part_that_does_something_is_reached_by_tab_and_shows_its_focus(page: browser.Browser) -> None:
    reached = []
    for _ in range(40):
        page.press("Tab")
        now = page.run(
            "const a = document.activeElement, name = a.id || a.className || a.parentElement.id || a.tagName;"
            "const told = a.ariaLabel || a.title || a.innerText;"
            "return [a === document.body ? '' : name, getComputedStyle(a).outlineStyle, told]"
        )
        if now[0] == "":
            break
        reached.append(now[0])
        assert now[1] != "none", now
        assert now[2], now  # a reader has something to say
    assert [part for part in reached if part != "link"][:7] == [
        "query",
        "in",
        "out",
        "all",
        "after",
        "timeline",
        "arena",
    ]
    assert "link" in reached  # the list of the largest tensors


def test_a_click_selects_a_tensor_or_an_op(page: browser.Browser, plan: Any) -> None:
    left, top, _, _ = box(page, "#arena")
    block, x, y = page.run(
        "const p = app.panels[1], i = app.run.at(app.run.peakStep).find(i => p.blocks.includes(i)), b = p.box(i);"
        "return [app.run.blockName(i), b[0] + b[2] / 2, b[1] + b[3] / 2]"
    )
    page.click(left + x, top + y)
    assert text(page, "#selected b") == block
    assert block in text(page, "#rows tr[aria-current=true]")
    left, top, _width, height = box(page, "#timeline")
    page.click(left + 69, top + height / 2)
    assert "step\n0 of" in text(page, "#selected")
    page.run("document.querySelector('#rows button').click()")
    assert text(page, "#selected b") == text(page, "#rows button")


def test_the_wheel_scrolls_the_page_and_zooms_with_control_alone(page: browser.Browser, plan: Any) -> None:
    page.show(1200, 500)
    whole = [0, plan[0].num_ops]
    left, top, width, height = box(page, "#timeline")
    x, y = left + width / 2, top + height / 2
    page.wheel(x, y, 200)
    assert page.run("return scrollY") > 0
    assert window_of_steps(page) == whole
    page.run("scrollTo(0, 0)")
    page.wheel(x, y, -200, control=True)
    assert page.run("return scrollY") == 0
    near = window_of_steps(page)
    assert 0 < near[0] < near[1] < whole[1]
    page.drag(x, y, 60)
    assert window_of_steps(page)[0] < near[0]
    assert text(page, "#selected").startswith("Nothing")  # to move is not to select
    page.run("document.getElementById('all').click()")
    assert window_of_steps(page) == whole
    page.run("document.getElementById('in').click()")
    assert window_of_steps(page) != whole
    assert page.run("return getComputedStyle(document.querySelector('canvas')).touchAction") == "pan-y pinch-zoom"


def test_the_run_before_is_shown_when_asked_for(page: browser.Browser, plan: Any) -> None:
    page.run("document.getElementById('after').focus()")
    page.press("Right")
    checked = "return document.querySelector('[aria-checked=true]').id"
    assert page.run(checked) == "before"
    assert "in program order" in text(page, "#largest")
    page.press("Left")
    assert page.run(checked) == "after"
    assert "as planned" in text(page, "#largest")


def test_bytes_of_the_chart_are_those_of_the_plan(page: browser.Browser, plan: Any) -> None:
    _graph, made = plan
    assert page.run("return [app.before.peak, app.after.peak]") == [made.program_peak_bytes, made.peak_bytes]
    sizes = page.run("return app.after.at(app.after.peakStep).map(i => app.after.size[i])")
    assert sum(sizes) == made.peak_bytes
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("bytes_", "expected"), [(265, [0, 100, 200]), (1, [0, 0.5, 1]), (999, [0, 500]), (30, [0, 10, 20, 30])]
)
def test_ticks_are_round(page: browser.Browser, bytes_: int, expected: list[float]) -> None:
    assert page.run("return ticks(0, arguments[0], 3)", bytes_) == expected


@pytest.mark.parametrize("width", [320, 390, 820, 1440])
def test_nothing_is_wider_than_the_window(page: browser.Browser, width: int) -> None:
    page.show(width, 900)
    assert page.run("return [document.documentElement.scrollWidth, innerWidth]") == [width, width]


def test_without_an_arena_the_page_says_why(window: browser.Browser, tmp_path: Path) -> None:
    graph = training_step()
    olla.plot(graph, olla.plan(graph, layout=False), tmp_path / "page.html")
    window.open(tmp_path / "page.html")
    assert text(window, "#places") == "Arena: none"
    assert "The plan has no layout" in text(window, "#none")
    assert window.run("return document.querySelectorAll('canvas').length") == 1


def test_a_graph_without_ops_is_shown(window: browser.Browser, tmp_path: Path) -> None:
    builder = olla.Graph.builder("nothing")
    builder.tensor(8, kind="parameter")
    graph = builder.build()
    olla.plot(graph, olla.plan(graph), tmp_path / "page.html")
    window.open(tmp_path / "page.html")
    assert text(window, "h1").startswith("nothing")
