"""Compile the planning allocator of a device against the installed torch at first use, and keep it.

One more module, "addresses", checks quickly whether tensors are still at their recorded addresses.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import json
import logging
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

from olla.base.folders import NotTrusted, cache_folder, check_own, own_folder, private_folder
from olla.errors import ReplayError

SOURCES = Path(__file__).parents[1] / "native"

_ADDRESSES = "addresses"
_REMEDY = "Install one (Debian, Ubuntu: apt install g++; macOS: xcode-select --install) or name yours: CXX=/path/to/g++"
_OVERRIDE = r"(\w+)\((?:[^;{}()]|\([^()]*\))*\)(?: const)? override"
_ALLOCATORS = {
    "core/Allocator.h": "struct C10_API Allocator {",
    "core/CachingDeviceAllocator.h": "struct C10_API DeviceAllocator ",
    "cuda/CUDACachingAllocator.h": "class CUDAAllocator ",
}
_LACKED = (
    *("No space left on device", "Disk quota exceeded", "Read-only file system", "File too large"),
    *("Cannot allocate memory", "virtual memory exhausted", "Killed signal", "SIGKILL"),
)
_logger = logging.getLogger("olla")
_lock = threading.Lock()
_modules: dict[str, Any] = {}


def load_module(device_type: str) -> Any:
    """Load the extension module of a device type, or "addresses", once per process; compile it where none has before.

    Raises:
        ReplayError: it cannot be compiled, kept or loaded; the message says what to install or set.
    """
    with _lock:
        if device_type not in _modules:
            path = build(device_type)
            name = "_olla_addresses" if device_type == _ADDRESSES else "_olla_replay"
            loader = importlib.machinery.ExtensionFileLoader(name, str(path))
            spec = importlib.util.spec_from_loader(name, loader)
            assert spec is not None
            try:
                module = importlib.util.module_from_spec(spec)
                loader.exec_module(module)
            except ImportError as error:
                raise ReplayError(
                    f"the compiled module does not load: {error}. Remove {path} and try again."
                ) from error
            _modules[device_type] = module
        return _modules[device_type]


def _forked() -> None:
    """In a child: the thread of the parent that holds the lock, if one does, is not there to let it go."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)


def build(device_type: str) -> Path:
    """Find the compiled module of a device type in the cache, or compile it.

    Its name holds a hash of everything it was made from (torch, Python, compiler, sources) and one of its content:
    what fits neither is compiled again. Processes that compile at the same time do not disturb each other.

    Returns:
        The path of the module.

    Raises:
        ReplayError: no compiler, no headers, no folder to write to, or the compiler failed.
    """
    parts = ["addresses.cpp"] if device_type == _ADDRESSES else ["module.cpp", f"{device_type}_allocator.cpp"]
    files = [SOURCES / part for part in parts]
    if not files[-1].is_file():
        raise ReplayError(f"planned addresses on {device_type!r} are not supported: {SOURCES} has no {parts[-1]}")
    compiler = _compiler()
    flags = _flags(device_type)
    libraries = _link_flags(device_type)
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    stem = f"{device_type}-{_key([compiler, flags, libraries])}"
    folder = cache_folder() / "replay"
    try:
        folder = _trusted(folder)
        if (found := _find(folder, stem, suffix)) is not None:
            return found
        what = "what compares addresses" if device_type == _ADDRESSES else "the allocator for planned addresses"
        _logger.warning("compiling %s against torch %s (once)", what, torch.__version__)
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / "module"
            _compile([*compiler, *flags, *map(str, files), "-o", str(made), *libraries])
            made.chmod(0o700)  # whatever umask says: what others can write to is not loaded
            path = folder / f"{stem}-{_digest(made)}{suffix}"
            made.replace(path)
    except OSError as error:
        raise ReplayError(
            f"the compiled allocator cannot be kept in {folder}: {error}. Set OLLA_CACHE_DIR to a folder to write to."
        ) from error
    _logger.warning("compiled in %.1f s, kept as %s", time.perf_counter() - start, path)
    return path


def _trusted(folder: Path) -> Path:
    """Return the folder, or one of this process where others could have put a module of theirs there."""
    try:
        own_folder(folder)
    except NotTrusted as reason:
        place = private_folder()
        own_folder(place)
        _logger.warning("%s. Nothing is loaded from there: the allocator is compiled for this process alone", reason)
        return place
    return folder


def _find(folder: Path, stem: str, suffix: str) -> Path | None:
    """Return an intact module that an earlier process compiled; delete damaged and untrusted ones."""
    for path in sorted(folder.glob(f"{stem}-*{suffix}")):
        with contextlib.suppress(OSError):
            try:
                check_own(path)
            except NotTrusted as reason:
                _logger.warning("%s. It is not loaded: compiling it again", reason)
            else:
                if path.name == f"{stem}-{_digest(path)}{suffix}":
                    return path
                _logger.warning("%s is damaged: compiling it again", path)
            path.unlink()
    return None


def _compiler() -> list[str]:
    """Return the command of the C++ compiler: CXX, or the first of c++, g++, clang++ on the PATH."""
    named = shlex.split(os.environ.get("CXX", ""))
    if named:
        if shutil.which(named[0]) is None:
            raise ReplayError(f"the C++ compiler named by CXX, {named[0]!r}, is not there. {_REMEDY}")
        return named
    if found := next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None):
        return [found]
    raise ReplayError(
        f"planned addresses need a C++20 compiler, and none of c++, g++, clang++ is on the PATH. {_REMEDY}"
    )


def _flags(device_type: str) -> list[str]:
    python = Path(sysconfig.get_paths()["include"])
    if not (python / "Python.h").is_file():
        raise ReplayError(
            f"Python's C headers are not in {python}. Install them (Debian, Ubuntu: apt install python3-dev)."
        )
    includes = [*cpp_extension.include_paths(), str(python)]
    if device_type == "cuda":
        includes.append(str(_cuda_headers()))
        check_virtuals(Path(includes[0]) / "c10")
    abi = int(torch.compiled_with_cxx11_abi())
    flags = ["-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    return flags + [part for folder in includes for part in ("-isystem", folder)]


def check_virtuals(headers: Path) -> None:
    """Refuse a torch whose allocators have virtual functions that ours does not pass on: they would misbehave silently.

    Args:
        headers: the folder c10 of torch's headers.

    Raises:
        ReplayError: names the functions.
    """
    known = set(re.findall(_OVERRIDE, (SOURCES / "cuda_forward.hpp").read_text()))
    found: set[str] = set()
    for name, declared in _ALLOCATORS.items():
        text = (headers / name).read_text()
        start = text.find(declared)
        if start < 0:
            raise ReplayError(f"torch {torch.__version__} is too new or too old for olla: no {declared!r} in {name}")
        body = re.sub(r"//.*", "", text[start : text.index("\n};", start)])
        found |= set(re.findall(r"\bvirtual\s[^~(;]*?(\w+)\(", body))
    if found - known:
        raise ReplayError(
            f"torch {torch.__version__} has allocator functions that this olla does not know: "
            f"{', '.join(sorted(found - known))}. Update olla, or use a torch from 2.11 to 2.15."
        )


def _cuda_headers() -> Path:
    """Return a folder with CUDA's headers: of an installed toolkit, or what the wheels of triton or NVIDIA bring."""
    if torch.version.cuda is None:
        raise ReplayError(f"torch {torch.__version__} is built without CUDA; install a build for CUDA")
    packages = Path(torch.__file__).parents[1]
    folders = [Path(cpp_extension.CUDA_HOME) / "include"] if cpp_extension.CUDA_HOME else []
    folders += [packages / "triton/backends/nvidia/include", *packages.glob("nvidia/*/include")]
    for folder in folders:
        if (folder / "cuda_runtime_api.h").is_file() and (folder / "crt").is_dir():
            return folder
    raise ReplayError("CUDA's headers were not found. Install triton, or a CUDA toolkit and name it: CUDA_HOME=/path")


def _link_flags(device_type: str) -> list[str]:
    # torch has loaded its libraries before the module is: nothing has to be found at run time.
    if sys.platform == "darwin":
        return ["-bundle", "-undefined", "dynamic_lookup"]
    own = ["-lc10_cuda"] if device_type == "cuda" else []
    return ["-shared", *(f"-L{folder}" for folder in cpp_extension.library_paths()), *own, "-lc10"]


def _key(command: list[list[str]]) -> str:
    """Hash everything the module is made from; the command starts with the compiler."""
    version = _run([*command[0], "--version"]).stdout
    made_from = {
        "torch": [torch.__version__, torch.version.git_version, torch.version.cuda],
        "python": [sys.version, sysconfig.get_config_var("SOABI"), platform.machine()],
        "compiler": [command, version],
        "sources": {path.name: path.read_text() for path in sorted(SOURCES.iterdir())},
    }
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:16]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _compile(command: list[str]) -> None:
    done = _run(command)
    if done.returncode == 0:
        return
    lines = done.stderr.strip().splitlines()
    if done.returncode < 0:
        lines.append(f"error: {signal.Signals(-done.returncode).name} ended it")
    lacked = [line for line in lines if any(cause in line for cause in _LACKED)]
    if lacked:
        folder = Path(command[command.index("-o") + 1]).parents[1]
        raise ReplayError(
            f"{command[0]} lacked disk or memory to compile the allocator. It writes to {tempfile.gettempdir()} "
            f"(TMPDIR names another folder) and {folder} (OLLA_CACHE_DIR):\n" + "\n".join(lacked[:5])
        )
    errors = [line for line in lines if "error" in line] or lines[-5:]
    raise ReplayError(
        f"{command[0]} cannot compile the allocator against torch {torch.__version__} (a C++20 compiler is needed: "
        "GCC 11, Clang 14, Xcode 15 or later; CXX names another):\n" + "\n".join(errors[:5])
    )


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:  # LC_ALL: its messages are searched for English words
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, env=os.environ | {"LC_ALL": "C"}
        )
    except OSError as error:
        raise ReplayError(f"the C++ compiler {command[0]} cannot be run: {error.strerror}. {_REMEDY}") from error
