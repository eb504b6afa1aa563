"""A number that the loss computes with, changed between steps, in places that are harder to see."""

from __future__ import annotations

import builtins
import configparser
import importlib
import json
import os
import shelve
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.odd.loops import cleanup, number_at, patch
from tests.support.pytorch.steps import torch

from .places_usual import Place, place

NAME = "ODD_SCALE"
either = place(must_be_equal=False, num_captures=None)  # equal, or a clear error


def folder() -> Path:
    return Path(cleanup.enter_context(tempfile.TemporaryDirectory()))


def in_environment(value: float) -> None:
    os.environ["ODD_SCALE"] = str(value)


@either
def in_the_environment_by_getenv() -> Place:
    patch(os.environ, "ODD_SCALE", "1")
    return in_environment, lambda: float(os.getenv("ODD_SCALE", "3"))


@either
def in_the_environment_by_item() -> Place:
    patch(os.environ, "ODD_SCALE", "1")
    return in_environment, lambda: float(os.environ["ODD_SCALE"])


@either
def in_the_environment_by_a_name_in_a_variable() -> Place:
    patch(os.environ, "ODD_SCALE", "1")
    name = "_".join(["ODD", "SCALE"])
    return in_environment, lambda: float(os.environ.get(name) or 3)


@either
def in_the_environment_by_a_copy_of_it() -> Place:
    patch(os.environ, "ODD_SCALE", "1")
    return in_environment, lambda: float(dict(os.environ)[NAME])


@either
def in_the_environment_read_by_a_helper() -> Place:
    patch(os.environ, "ODD_SCALE", "1")
    environment = os.environ

    class Config:
        def __getattr__(self, name: str) -> float:
            return float(environment["ODD_" + name.upper()])

    config = Config()
    return in_environment, lambda: config.scale


@either
def in_the_arguments_of_the_process() -> Place:
    return lambda value: sys.argv.__setitem__(slice(1, None), [str(value)]), lambda: float(sys.argv[1])


@either
def in_sys_by_getattr() -> Place:
    patch(sys, "odd_scale", 1.0)
    return lambda value: setattr(sys, "odd_scale", value), lambda: getattr(sys, "odd_scale", 3.0)


@either
def in_builtins() -> Place:
    patch(builtins, "odd_scale", 1.0)
    return lambda value: setattr(builtins, "odd_scale", value), lambda: odd_scale  # type: ignore[name-defined]  # noqa: F821


@either
def behind_a_replaced_builtin() -> Place:
    known = globals()
    patch(known, "abs", abs)
    return lambda value: known.update(abs=lambda x: x * value), lambda: abs(1.0)


@either
def in_globals_by_name() -> Place:
    known = globals()
    patch(known, "WEIGHT", 1.0)
    return lambda value: known.update(WEIGHT=value), lambda: globals()["WEIGHT"]


@either
def in_an_attribute_of_torch() -> Place:
    patch(torch, "odd_scale", 1.0)
    return lambda value: setattr(torch, "odd_scale", value), lambda: torch.odd_scale  # type: ignore[attr-defined]


@either
def in_a_file() -> Place:
    path = folder() / "scale.txt"
    return lambda value: path.write_text(str(value)), lambda: float(path.read_text())


@either
def in_a_file_by_open() -> Place:
    path = folder() / "scale.json"

    def read() -> Any:
        with open(path) as file:
            return json.load(file)["scale"]

    return lambda value: path.write_text(json.dumps({"scale": value})), read


@either
def in_the_size_of_a_file() -> Place:
    path = folder() / "scale"
    return lambda value: path.write_bytes(bytes(int(value * 4))), lambda: path.stat().st_size / 4


@either
def as_whether_a_file_exists() -> Place:
    path = folder() / "strong"

    def write(value: float) -> None:
        if value == number_at(0):
            path.unlink(missing_ok=True)
        else:
            path.touch()

    return write, lambda: 2.0 if path.exists() else 1.0


@either
def in_a_configuration_parser() -> Place:
    config = configparser.ConfigParser()
    config.read_dict({"loss": {"scale": "1"}})
    return lambda value: config.set("loss", "scale", str(value)), lambda: config.getfloat("loss", "scale")


@either
def in_a_shelf() -> Place:
    shelf = cleanup.enter_context(shelve.open(str(folder() / "shelf")))  # noqa: SIM115
    return lambda value: shelf.update(scale=value), lambda: shelf["scale"]


@either
def in_a_module_written_and_reloaded() -> Place:
    path = folder() / "odd_written.py"
    patch(sys, "path", [str(path.parent), *sys.path])
    cleanup.callback(lambda: sys.modules.pop("odd_written", None))

    def write(value: float) -> None:
        path.write_text(f"def scale():\n    return {value}\n")
        sys.modules.pop("odd_written", None)
        importlib.invalidate_caches()
        sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
        importlib.import_module("odd_written")
        sys.dont_write_bytecode = before

    return write, lambda: sys.modules["odd_written"].scale()


@either
def in_code_put_together_from_text() -> Place:
    known: dict[str, Any] = {}
    return lambda value: exec(f"def read(): return {value}", known), lambda: known["read"]()


@either
def in_code_of_a_function_that_is_replaced() -> Place:
    def read() -> float:
        return 1.0

    def other() -> float:
        return 2.0

    first = read.__code__

    def write(value: float) -> None:
        read.__code__ = first if value == number_at(0) else other.__code__

    return write, read
