"""The private names of torch that the package uses, and which of them a torch has no more.

Not a pytest module: `python tests/project/private_names.py` says what the installed torch lacks; olla need not be
installed. What the package takes only where it is there, behind `hasattr` or by `getattr` with a default, does not
count.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = Path(__file__).parents[2] / "python" / "olla"
TORCH = "torch"


class Use(NamedTuple):
    """A private name, and the first line that uses it."""

    name: str  # torch._inductor.config
    file: str
    line: int


class _Names(ast.NodeVisitor):
    """Collects the dotted names of torch in a file."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int]] = []
        self._modules: dict[str, str] = {}  # name in the file -> in torch
        self._texts: dict[str, str] = {}  # constants of the file

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.partition(".")[0] == TORCH:
                self._modules[alias.asname or TORCH] = alias.name if alias.asname else TORCH
                self.found.append((alias.name, node.lineno))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module and node.module.partition(".")[0] == TORCH:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                self._modules[alias.asname or alias.name] = name
                self.found.append((name, node.lineno))

    def visit_Assign(self, node: ast.Assign) -> None:
        if isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Constant):
            self._texts[node.targets[0].id] = str(node.value.value)
        self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        if "hasattr" not in ast.unparse(node.test):
            self.generic_visit(node)

    visit_IfExp = visit_If

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id == "private":
            self._note_pair(node.args, node.lineno)
        self.generic_visit(node)

    def visit_Tuple(self, node: ast.Tuple) -> None:
        self._note_pair(node.elts, node.lineno)
        self.generic_visit(node)

    def _note_pair(self, parts: list[ast.expr], line: int) -> None:
        """Note a module of torch and a name in it."""
        texts = [
            self._texts.get(part.id) if isinstance(part, ast.Name) else getattr(part, "value", None) for part in parts
        ]
        if len(texts) == 2 and all(isinstance(text, str) for text in texts) and f"{texts[0]}.".startswith("torch."):
            self.found.append((f"{texts[0]}.{texts[1]}", line))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        parts, inner = [node.attr], node.value
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name) and inner.id in self._modules:
            self.found.append((".".join([self._modules[inner.id], *reversed(parts)]), node.lineno))
        else:
            self.visit(inner)


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def uses(package: Path = PACKAGE) -> list[Use]:
    """Return the private names of torch that a package uses, in alphabetical order, each once."""
    first: dict[str, Use] = {}
    for path in sorted(package.rglob("*.py")):
        names = _Names()
        names.visit(ast.parse(path.read_text()))
        for name, line in names.found:
            if _is_private(name):
                first.setdefault(name, Use(name, path.relative_to(package).as_posix(), line))
    return sorted(first.values())


def lacks(name: str) -> bool:
    """Return whether the installed torch has no such module, class, function or operator."""
    done, *rest = name.split(".")
    value: Any = importlib.import_module(done)
    for part in rest:
        done = f"{done}.{part}"
        try:
            value = getattr(value, part) if hasattr(value, part) else importlib.import_module(done)
        except ImportError:
            return True
    return False


def gone(package: Path = PACKAGE) -> Iterator[Use]:
    """Yield the private names that the installed torch lacks."""
    return (use for use in uses(package) if lacks(use.name))


def main() -> int:
    import torch

    missing = list(gone())
    for use in missing:
        print(f"{use.file}:{use.line}: torch {torch.__version__} has no {use.name}")
    print(f"torch {torch.__version__}: {len(uses())} private names are used, {len(missing)} are gone")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
