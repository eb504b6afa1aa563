"""Code of a step: what it names is read from its instructions, and functions of equal code are told apart."""

from __future__ import annotations

import argparse
import decimal
import importlib
import operator
import tarfile
import types
import typing
from pathlib import Path
from typing import Any

import pytest

import olla
from olla.pytorch.guards import code
from tests.support.pytorch.steps import nn, torch

pytestmark = pytest.mark.torch


def functions(space: Any) -> list[types.FunctionType]:
    """Those of a module, and of the classes in it."""
    found = [value for value in vars(space).values() if isinstance(value, types.FunctionType)]
    kinds = [value for value in vars(space).values() if isinstance(value, type)]
    return found + [value for kind in kinds for value in vars(kind).values() if isinstance(value, types.FunctionType)]


@pytest.mark.parametrize("space", [argparse, decimal, tarfile, torch.nn.functional, torch.nn.Module, typing, code])
def test_names_are_read_as_dis_reads_them(space: Any) -> None:
    assert code.knows_instructions()
    for function in functions(space):
        found = code.named(function.__code__)
        assert found == code.named_by_dis(function.__code__), function
        if not found.is_open and code._GETTERS.isdisjoint(function.__code__.co_names):
            assert code.named_quickly(function.__code__) == found, function


def test_a_name_behind_many_others_is_read() -> None:
    scope: dict[str, Any] = {}
    lines = [f"    a{i}.b{i}" for i in range(700)]  # numbers of names take two bytes and more
    exec("def long():\n" + "\n".join(lines), scope)
    found = code.named_quickly(scope["long"].__code__)
    assert found == code.named_by_dis(scope["long"].__code__)
    assert found.variables[-1] == "a699"
    assert "b699" in found.loaded


def test_where_instructions_are_not_known_dis_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "_FLAGS", dict.fromkeys(code._FLAGS, 3))
    code.knows_instructions.cache_clear()
    try:
        assert not code.knows_instructions()
        scope: dict[str, Any] = {}
        exec("def small(x):\n    return names.of(x)", scope)
        assert code.named(scope["small"].__code__).variables == ("names",)
    finally:
        monkeypatch.undo()
        code.knows_instructions.cache_clear()


def test_functions_of_equal_code_in_two_files_read_their_own_globals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("scale_one", "scale_two"):
        (tmp_path / f"{name}.py").write_text("SCALE = 1.0\n\n\ndef scaled(x):\n    return x * SCALE\n")
    one, two = (importlib.import_module(name) for name in ("scale_one", "scale_two"))
    inner, outer = one.scaled, two.scaled
    assert inner.__code__ == outer.__code__
    step = olla.compile(
        nn.Linear(3, 2), loss=lambda m, x: outer(inner(m(x))).sum(), arena=False, disk_cache=False, time_limit=0.05
    )
    batch = torch.ones(4, 3)
    before = step(batch)
    monkeypatch.setattr(two, "SCALE", 4.0)
    torch.testing.assert_close(step(batch), 4 * before)
    monkeypatch.setattr(one, "SCALE", 0.5)
    torch.testing.assert_close(step(batch), 2 * before)


@pytest.mark.parametrize(
    "getter",
    [
        operator.attrgetter("brook.ripple"),
        operator.methodcaller("ripples", "brook"),
        operator.methodcaller("flow", at=0),
    ],
    ids=["attributes", "method", "method with a keyword"],
)
def test_names_that_only_a_getter_holds_count(getter: Any) -> None:
    class River:
        def __init__(self) -> None:
            self.brook = types.SimpleNamespace(ripple=1.0)

        def ripples(self, name: str) -> float:
            return getattr(self, name).ripple  # type: ignore[no-any-return]

        def flow(self, at: int) -> float:
            return self.brook.ripple + at  # type: ignore[no-any-return]

    river = River()
    step = olla.compile(
        nn.Linear(3, 2), loss=lambda m, x: m(x).sum() * getter(river), arena=False, disk_cache=False, time_limit=0.05
    )
    batch = torch.ones(4, 3)
    before = step(batch)
    river.brook.ripple = 3.0
    torch.testing.assert_close(step(batch), 3 * before)
