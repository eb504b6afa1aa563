"""The examples in docstrings run and give what they show."""

import ast
import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import olla

PACKAGE = Path(__file__).resolve().parents[2] / "python/olla"
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


def test_the_docstring_of_a_module_names_what_the_module_is() -> None:
    words = ("What", "Whether", "Who", "Where", "How")  # a relative clause names nothing
    texts = {path: ast.get_docstring(ast.parse(path.read_text())) or "" for path in PACKAGE.rglob("*.py")}
    assert [str(path) for path, text in texts.items() if text.startswith(words)] == []


def test_no_class_of_the_package_and_its_bindings_has_the_name_of_another() -> None:
    places: dict[str, list[str]] = {}
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(path.relative_to(PACKAGE).as_posix())
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
