"""Code objects: where they come from (torch, Python's own library, an installed package, the user), what they name."""

from __future__ import annotations

import dis
import functools
import os
import sys
import sysconfig
import types
from typing import Any, NamedTuple

import torch

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_OWN = os.path.abspath(__file__).rpartition(os.sep + "pytorch" + os.sep)[0] + os.sep
_STDLIB = tuple({os.path.abspath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib")})
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
# Packages that decide nothing about a step: torch's own dependencies, and those that fetch files and show progress.
_BESIDE = {
    "_distutils_hack", "_pytest", "anyio", "certifi", "filelock", "fsspec", "h11", "h2", "hf_xet", "httpcore",
    "httpcore2", "httpx", "httpx2", "huggingface_hub", "hypothesis", "idna", "jinja2", "mpmath", "networkx", "numpy",
    "packaging", "pkg_resources", "pytest", "requests", "rich", "safetensors", "setuptools", "sniffio", "sympy",
    "tokenizers", "tqdm", "truststore", "typing_extensions", "yaml",
}  # fmt: skip
_HEAP_TYPE = 1 << 9
_GETTERS = {"getattr", "hasattr", "vars", "dir", "__dict__", "attrgetter", "__getattribute__", "getmembers", "eval"}


@functools.cache
def origin(file: str) -> str:
    """Return "torch", "olla", "stdlib", "installed" or "user" for a source file.

    Packages that decide nothing about a step count as stdlib.
    """
    for start, found in (("<frozen ", "stdlib"), (_OWN, "olla"), (_TORCH, "torch")):
        if file.startswith(start):
            return found
    for folder in _INSTALLED:
        _, found, inside = file.rpartition(folder)
        if found:
            return "stdlib" if inside.split(os.sep)[0].removesuffix(".py") in _BESIDE else "installed"
    return "stdlib" if file.startswith(_STDLIB) else "user"


def module_origin(name: str) -> str:
    """Return the origin of a loaded module; "user" if nothing is known of it."""
    top = name.partition(".")[0]
    if top == "torch":
        return "torch"
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return "stdlib" if top in sys.stdlib_module_names and name != "__main__" else "user"
    return origin(file)


def is_foundation(kind: type) -> bool:
    """Whether a class is torch's or Python's own, or of a package that decides nothing about a step."""
    return not kind.__flags__ & _HEAP_TYPE or module_origin(kind.__module__) in ("torch", "stdlib")


class Named(NamedTuple):
    """What a code object refers to by name."""

    variables: tuple[str, ...]  # that it reads from its globals, or from builtins
    loaded: frozenset[str]  # attributes it reads, and text constants that may name one
    modules: tuple[str, ...]  # that it imports by itself
    is_open: bool  # whether it may read attributes whose names are not written in it


_Found = tuple[dict[str, None], ...]  # variables, attributes, modules
_NAMING = (
    ("LOAD_GLOBAL", "LOAD_NAME"),
    ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"),
    ("IMPORT_NAME", "IMPORT_FROM"),
)
_KINDS = {dis.opmap[name]: kind for kind, names in enumerate(_NAMING) for name in names if name in dis.opmap}
# Bits of an instruction's argument below the number of the name.
_FLAGS = {dis.opmap["LOAD_GLOBAL"]: 1}
if sys.version_info >= (3, 12):
    _FLAGS |= {dis.opmap["LOAD_ATTR"]: 1, dis.opmap["LOAD_SUPER_ATTR"]: 2}


@functools.cache
def named(code: types.CodeType) -> Named:
    """Return the names in a code object, without those of nested code objects."""
    words = {*code.co_names, *code.co_varnames, *code.co_cellvars, *code.co_freevars, *_texts(code.co_consts)}
    return named_by_dis(code) if words & _GETTERS or not knows_instructions() else named_quickly(code)


@functools.cache
def knows_instructions() -> bool:
    """Whether the instructions of this Python are those that named_quickly knows."""

    class Sample(dict[Any, Any]):
        def method(self) -> Any:
            import collections.abc as found
            from collections import OrderedDict

            return [found.Sized.__mro__.count(self), super().keys(), super().items, OrderedDict, sorted]

    codes = (Sample.method.__code__, origin.__wrapped__.__code__, named_by_dis.__code__)
    return all(named_quickly(code) == named_by_dis(code) for code in codes)


def named_quickly(code: types.CodeType) -> Named:
    """Return the names in code that mentions no getter, in a tenth of the time that dis takes."""
    found: _Found = ({}, {}, {})
    extended = 0
    for number, argument in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument |= extended
        extended = argument << 8 if number == dis.EXTENDED_ARG else 0
        if number in _KINDS:
            found[_KINDS[number]][code.co_names[argument >> _FLAGS.get(number, 0)]] = None
    return _made(code, found, False)


def named_by_dis(code: types.CodeType) -> Named:
    """Return the names in any code, by dis."""
    found: _Found = ({}, {}, {})
    is_open = False
    before: list[Any] = []  # the last instructions
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if instruction.opcode in _KINDS:
            found[_KINDS[instruction.opcode]][instruction.argval] = None
        elif name.startswith("CALL") and not is_open:
            is_open = _is_open_call(before)
        if name not in ("CACHE", "PRECALL", "KW_NAMES", "NOP", "EXTENDED_ARG"):
            before = [*before[-5:], instruction]
    return _made(code, found, is_open or not found[1].keys().isdisjoint(("__dict__", "__getattribute__")))


def _made(code: types.CodeType, found: _Found, is_open: bool) -> Named:
    variables, loaded, modules = found
    return Named(tuple(variables), frozenset({*loaded, *_texts(code.co_consts)}), tuple(modules), is_open)


def _is_open_call(before: list[Any]) -> bool:
    """Whether a call looks attributes up by names that are computed: getattr(x, name), vars(x), attrgetter(name)."""
    getter = next((i for i, b in enumerate(before) if b.argval in _GETTERS and b.opname.startswith("LOAD")), None)
    if getter is None:
        return False
    found = before[getter].argval
    if found in ("getattr", "hasattr", "attrgetter"):
        return not any(b.opname == "LOAD_CONST" and isinstance(b.argval, str) for b in before[getter:])
    return True


def _texts(constants: tuple[Any, ...]) -> list[str]:
    """Return short texts among constants of code, and in tuples among them."""
    items = (item for constant in constants for item in (constant if isinstance(constant, tuple) else (constant,)))
    return [item for item in items if isinstance(item, str) and len(item) < 80]
