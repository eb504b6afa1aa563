"""What is said where a package that an adapter is for is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

import olla
from olla.cli import main
from olla.errors import CaptureError
from olla.integrations.executorch import layout_algorithm, memory_planning


def test_a_missing_onnx_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.setitem(sys.modules, "onnx.parser", None)
    with pytest.raises(CaptureError, match=r"need the package onnx \(.*pip install \"olla-planner\[onnx\]\""):
        olla.from_onnx("model.onnx")
    assert main(["plan", "model.onnx"]) == 2
    assert "olla: error: ONNX models need the package onnx" in capsys.readouterr().err


@pytest.mark.parametrize("make", [memory_planning, layout_algorithm])
def test_a_missing_executorch_is_named_with_the_remedy(
    make: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("executorch", "executorch.exir"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ImportError, match=r"needs the package executorch \(.*pip install \"olla-planner\[executorch\]\""
    ):
        make()
