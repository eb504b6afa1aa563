"""Clocks, files and other sources of values that differ at every call and can be neither compared nor repeated."""

from __future__ import annotations

import datetime
import dis
import genericpath
import inspect
import io
import os
import pathlib
import random
import secrets
import shelve
import sys
import time
import types
import uuid
from typing import Any

import torch

WHAT = "a clock, a file or a source of unique values"
_CLOCKS = {
    id(f)
    for f in (
        time.time, time.time_ns, time.perf_counter, time.perf_counter_ns, time.monotonic, time.monotonic_ns,
        time.process_time, time.process_time_ns, time.thread_time, time.localtime, time.gmtime, time.strftime,
        os.urandom, uuid.uuid1, uuid.uuid4, io.open, input, secrets.randbelow, secrets.token_hex, secrets.token_bytes,
        secrets.choice, secrets.randbits, torch.seed, torch.initial_seed, os.stat, os.lstat, os.listdir, os.scandir,
        os.open, os.getpid, sys._getframe, sys.getrefcount,
    )
}  # fmt: skip
_OF_CLASSES = {id(datetime.datetime): {"now", "utcnow", "today"}, id(datetime.date): {"today"}}
# Library functions that read files or other outside state, by their code.
_READERS = (
    pathlib.Path.open, pathlib.Path.stat, torch.load, genericpath.exists, genericpath.isfile, genericpath.isdir,
    genericpath.getsize, genericpath.getmtime, inspect.currentframe, inspect.stack, shelve.Shelf.__getitem__,
    random.SystemRandom.random,
)  # fmt: skip
FILES = {f.__code__: f"a file or another thing outside Python ({f.__qualname__})" for f in _READERS}


def offsets(code: types.CodeType, scope: dict[str, Any]) -> frozenset[int]:
    """Return the offsets of instructions that load such a source, in code with these globals."""
    found: set[int] = set()
    last: Any = None  # what the instruction before has loaded
    for i in dis.get_instructions(code):
        if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            builtins = scope.get("__builtins__", {})
            builtins = vars(builtins) if isinstance(builtins, types.ModuleType) else builtins
            last = scope.get(i.argval, builtins.get(i.argval))
        elif i.opname in ("LOAD_ATTR", "LOAD_METHOD") and last is not None:
            if i.argval in _OF_CLASSES.get(id(last), ()):
                found.add(i.offset)
            last = vars(last).get(i.argval) if isinstance(last, types.ModuleType) else None
        elif i.opname not in ("CACHE", "PRECALL", "PUSH_NULL"):
            last = None
        if id(last) in _CLOCKS:
            found.add(i.offset)
    return frozenset(found)


def is_clock(value: Any) -> bool:
    """Whether a function gives another value at every call."""
    return id(value) in _CLOCKS
