"""The examples in docstrings run and give what they show."""

import doctest
import importlib
import pkgutil

import pytest

import olla

MODULES = [
    "olla",
    *(m.name for m in pkgutil.walk_packages(olla.__path__, "olla.") if not m.name.endswith(("__main__", "_core"))),
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_show(name: str) -> None:
    if name.startswith("olla.pytorch"):
        pytest.importorskip("torch")
    package, _, _ = name.removeprefix("olla.integrations.").partition("_")
    if name.startswith("olla.integrations."):  # named after the package it is for, and what of it
        pytest.importorskip(package)
    if package == "transformers":
        pytest.importorskip("accelerate")
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
