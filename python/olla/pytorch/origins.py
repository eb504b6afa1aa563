"""Where code comes from - torch, Python's own library, an installed package, the user - and what it names."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STDLIB = tuple({os.path.abspath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib")})
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
# Packages that fetch files and show progress: not followed, since they compute nothing, and number their sessions.
_BESIDE = (
    "anyio", "certifi", "filelock", "fsspec", "h11", "h2", "hf_xet", "httpcore", "httpcore2", "httpx", "httpx2",
    "huggingface_hub", "idna", "packaging", "requests", "rich", "safetensors", "sniffio", "tokenizers", "tqdm",
    "truststore", "urllib3", "yaml",
)  # fmt: skip


@functools.cache
def origin(file: str) -> str:
    """Return "torch", "stdlib", "installed" or "user" for a source file; packages beside the matter count as stdlib."""
    if file.startswith("<frozen "):
        return "stdlib"
    if file.startswith(_TORCH):
        return "torch"
    for folder in _INSTALLED:
        _, found, inside = file.rpartition(folder)
        if found:
            return "stdlib" if inside.split(os.sep)[0] in _BESIDE else "installed"
    return "stdlib" if file.startswith(_STDLIB) else "user"


def module_origin(name: str) -> str:
    """Return the origin of a loaded module; "user" if nothing is known of it."""
    if name == "torch" or name.startswith("torch."):
        return "torch"
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if file is None:
        return "stdlib" if name.partition(".")[0] in sys.stdlib_module_names and name != "__main__" else "user"
    return origin(file)


def is_foundation(value: Any) -> bool:
    """Whether a class is torch's or Python's own, and found under its own name: its version says all about it."""
    if module_origin(value.__module__) not in ("torch", "stdlib"):
        return False
    found: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value or not value.__flags__ & (1 << 9)  # a static type cannot be made at run time


class Named(NamedTuple):
    """What a code object, with those nested in it, refers to by name."""

    names: tuple[str, ...]
    texts: tuple[str, ...]


@functools.cache
def named(code: types.CodeType) -> Named:
    """Return names of globals, attributes and modules in a code object, and its text constants, in order."""
    names: dict[str, None] = {}
    texts: dict[str, None] = {}
    waiting = [code]
    while waiting:
        part = waiting.pop()
        names.update(dict.fromkeys(part.co_names))
        for constant in part.co_consts:
            for item in constant if isinstance(constant, tuple) else (constant,):
                if isinstance(item, types.CodeType):
                    waiting.append(item)
                elif isinstance(item, str) and len(item) < 80:
                    texts[item] = None
    return Named(tuple(names), tuple(texts))


def imported(code: types.CodeType, scope: dict[str, Any]) -> Iterator[types.ModuleType]:
    """Return the loaded modules that a function imports by itself, whatever their level."""
    package = str(scope.get("__package__") or "")
    prefixes = [""]
    while package:
        prefixes.append(package + ".")
        package = package.rpartition(".")[0]
    for name in named(code).names:
        for prefix in prefixes if name not in scope else ():
            module = sys.modules.get(prefix + name)
            if isinstance(module, types.ModuleType):
                yield module


def patches() -> Iterator[tuple[str, types.FunctionType]]:
    """Return, with its place, every function that someone else put into torch's layers, optimizers and tensors."""
    places: list[Any] = [torch, torch.Tensor, torch.functional, torch.nn.functional, torch.nn.init, torch.autograd]
    places += [torch.nn.Module, torch.nn.Parameter, torch.autograd.Function, torch.optim.Optimizer]
    for space in (torch.nn, torch.optim, torch.nn.functional):
        places += [c for c in vars(space).values() if isinstance(c, type) and is_foundation(c)]
    for place in dict.fromkeys(places):
        for name, value in list(vars(place).items()):
            function = getattr(value, "__func__", value)
            if isinstance(function, types.FunctionType) and origin(function.__code__.co_filename) in (
                "installed",
                "user",
            ):
                yield f"{place.__name__}.{name}", function


def source_files() -> list[Path]:
    """Return the files of all loaded modules outside torch and Python's own library, sorted."""
    loaded = [m for name, m in list(sys.modules.items()) if module_origin(name) in ("installed", "user")]
    files = {getattr(module, "__file__", None) for module in loaded}
    return sorted(Path(file).absolute() for file in files if isinstance(file, str))
