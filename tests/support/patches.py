"""Functions of the core replaced for a test, wherever a module holds them under a name of its own."""

import importlib
import pkgutil
import sys
from typing import Any

import pytest

import olla.methods
import olla.order
from olla import _core


def patch_core(patch: pytest.MonkeyPatch, name: str, function: Any) -> None:
    """Replace a function of the core in all modules of the package, methods that nobody has imported yet included."""
    for room in (olla.order, olla.methods):
        for module in pkgutil.iter_modules(room.__path__, f"{room.__name__}."):
            importlib.import_module(module.name)
    real = getattr(_core, name)
    for module_name, loaded in list(sys.modules.items()):
        if module_name.partition(".")[0] == "olla":
            for attribute in [key for key, value in vars(loaded).items() if value is real]:
                patch.setattr(loaded, attribute, function)
