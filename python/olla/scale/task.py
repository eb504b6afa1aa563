"""One graph and one goal: planned, unless the folder has the plan already."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from olla.base import parse_bytes
from olla.errors import BudgetError, OllaError
from olla.graph import Graph
from olla.plan import Options, Plan, asked
from olla.planner import plan
from olla.report.interrupt import Interrupt
from olla.scale.folder import Folder, load
from olla.scale.result import FAILED, FIGURES, INTERRUPTED, NOTHING_FITS, PLANNED, Result

FORMAT, VERSION = "olla-result", 2
_NOT_GIVEN = ("graph", "precedences", "order", "progress")  # arguments of `olla.plan` that are not for many graphs
DEFAULTS = {
    name: parameter.default for name, parameter in inspect.signature(plan).parameters.items() if name not in _NOT_GIVEN
}
_KEPT = ("status", "message", "key", "seconds", "figures")  # of a result, in its file
_OF_ORDER = ("time_limit", "seed", "alignment", "layout", "updates_may_move")


def plan_file(
    graph: str | os.PathLike[str],
    folder: Folder | str | os.PathLike[str],
    options: Mapping[str, Any] | None = None,
) -> Result:
    """Plan the graph of a file and keep the plan in a folder, unless it is there: what a job of a cluster calls.

    Two files belong to every key: `KEY.plan.json.gz`, which `olla show` reads, and `KEY.json`, the result. The second
    is written last and whole: where it is, nothing is planned again.

    Args:
        graph: path or URL of a graph file.
        folder: path or URL, or a `Folder`; it is made where it is missing.
        options: arguments of `olla.plan` that are numbers, text, true or false.

    Returns:
        The result. Whatever goes wrong with this graph is in it, and not raised.

    Raises:
        ValueError: an option is unknown or out of its range.
        BudgetError: a budget is no number of bytes.
        OllaError: the folder cannot be made.

    Example:
        >>> import tempfile, olla
        >>> place = tempfile.mkdtemp()
        >>> builder = olla.Graph.builder("fork")
        >>> a, b = builder.tensor(100), builder.tensor(10)
        >>> _ = builder.op("large", writes=[a]), builder.op("small", writes=[b]), builder.op("use", reads=[a])
        >>> builder.build().save(f"{place}/graph.json.gz")
        >>> for _ in range(2):
        ...     result = plan_file(f"{place}/graph.json.gz", f"{place}/plans", {"time_limit": 1.0})
        ...     print(result.status, result.figures["peak_bytes"], result.is_new)
        planned 100 True
        planned 100 False
    """
    path, options = os.fspath(graph), dict(options or {})
    complete = completed(options)
    if not isinstance(folder, Folder):
        folder = Folder(folder)
    start = time.perf_counter()
    key = ""
    try:
        content = load(path)
        key = key_of(content, complete)
        kept = _kept(folder, key)
        if kept is not None:
            return Result(graph=path, options=options, is_new=False, **kept)
        with Interrupt() as interrupt:
            try:
                found = plan(content, **complete, progress=interrupt.ends(lambda *_: True))
                status, message = PLANNED, found.message
            except BudgetError as error:
                found, status, message = None, NOTHING_FITS, str(error)
        seconds = time.perf_counter() - start
        if interrupt.seen:
            return Result(graph=path, options=options, status=INTERRUPTED, message="ended by Ctrl-C", key=key)
        result = Result(graph=path, options=options, status=status, message=message, key=key, seconds=seconds)
        return _keep(folder, found, result)
    except Exception as error:  # of one graph among many: the others go on
        what = str(error) if isinstance(error, OllaError) else f"{path}: {type(error).__name__}: {error}"
        seconds = time.perf_counter() - start
        return Result(graph=path, options=options, status=FAILED, message=what, key=key, seconds=seconds)


def completed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with the defaults of those that are not given, budgets in bytes.

    Raises:
        ValueError: an option is unknown, out of its range, or no number, text or boolean.
        BudgetError: a budget is no number of bytes.
    """
    for name, value in options.items():
        if name not in DEFAULTS:
            raise ValueError(f"there is no option {name!r} for many graphs, expected {', '.join(DEFAULTS)}")
        if value is not None and not isinstance(value, str | int | float):
            raise ValueError(f"{name} is a {type(value).__name__}, expected a number, text, True or False")
    complete = {**DEFAULTS, **options}
    for name in ("budget", "host_budget"):
        if complete[name] is not None:
            complete[name] = parse_bytes(complete[name], name)
    method = complete["method"]
    Options(method="program" if method == "autoswap" else method, **{name: complete[name] for name in _OF_ORDER})
    asked(**{name: value for name, value in complete.items() if name not in _OF_ORDER})
    return complete


def key_of(graph: Graph, options: Mapping[str, Any]) -> str:
    """Return the key of a graph and complete options: 32 hexadecimal digits, the same on every machine."""
    facts = [version("olla-planner"), graph.to_dict(), sorted(options.items())]
    return hashlib.sha256(json.dumps(facts, separators=(",", ":")).encode()).hexdigest()[:32]


def plan_name(key: str) -> str:
    """Return the name of the plan's file."""
    return f"{key}.plan.json.gz"


def _kept(folder: Folder, key: str) -> dict[str, Any] | None:
    """Return what the folder has of a key, as arguments of `Result`; None where it is missing or damaged."""
    data = folder.read(f"{key}.json")
    if data is None:
        return None
    try:
        content: dict[str, Any] = json.loads(data)
        if (content.pop("format"), content.pop("version")) != (FORMAT, VERSION) or content["key"] != key:
            return None
        if not content.keys() >= set(_KEPT):
            return None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    if content["status"] == PLANNED:
        if not folder.has(plan_name(key)):
            return None
        content["plan"] = folder.place(plan_name(key))
    return content


def _keep(folder: Folder, found: Plan | None, result: Result) -> Result:
    """Write the plan, then the result; return the result with the figures of the plan."""
    if found is not None:
        gap = found.gap if math.isfinite(found.gap) else None
        figures = {**{name: getattr(found, name) for name in FIGURES}, "gap": gap, "status": found.status.value}
        folder.write(plan_name(result.key), _json(found.to_object()))
        result = replace(result, plan=folder.place(plan_name(result.key)), figures=figures)
    kept = {name: getattr(result, name) for name in _KEPT}
    folder.write(f"{result.key}.json", _json({"format": FORMAT, "version": VERSION, **kept}))
    return result


def _json(content: object) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"
