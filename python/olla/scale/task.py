"""One graph and one goal: planned, unless the folder has the plan already."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from olla.base import files, parse_bytes
from olla.errors import BudgetError, OllaError
from olla.graph import Graph
from olla.plan import Options, Plan, asked
from olla.planner import plan
from olla.report.interrupt import Interrupt
from olla.scale.folder import Folder, load
from olla.scale.result import ELSEWHERE, FAILED, FIGURES, INTERRUPTED, NOTHING_FITS, PLANNED, Result

FORMAT, VERSION = "olla-result", 3
_NOT_GIVEN = ("graph", "precedences", "order", "progress")  # arguments of `olla.plan` that are not for many graphs
DEFAULTS = {
    name: parameter.default for name, parameter in inspect.signature(plan).parameters.items() if name not in _NOT_GIVEN
}
# Of a result, in its file. What else is there is of a later version, and not needed.
_KEPT: dict[str, Any] = {"status": str, "message": str, "key": str, "seconds": (int, float), "figures": dict}
_FIGURES = (*FIGURES, "gap", "status")
_logger = logging.getLogger("olla")
_OF_ORDER = ("time_limit", "seed", "alignment", "layout", "updates_may_move")


def plan_file(
    graph: str | os.PathLike[str],
    folder: Folder | str | os.PathLike[str],
    options: Mapping[str, Any] | None = None,
    *,
    wait: bool = True,
) -> Result:
    """Plan the graph of a file and keep the plan in a folder, unless it is there: what a job of a cluster calls.

    Two files belong to every key: `KEY.plan.json.gz`, which `olla show` reads, and `KEY.json`, the result. The second
    is written last and whole: where both are as they were written, nothing is planned again. What another process plans
    at the moment is waited for.

    Args:
        graph: path or URL of a graph file.
        folder: path or URL, or a `Folder`; it is made where it is missing.
        options: arguments of `olla.plan` that are numbers, text, true or false.
        wait: False answers "elsewhere" at once for what another process plans at the moment.

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
        base = Result(graph=path, options=options, status=ELSEWHERE, message="another process plans it", key=key)
        kept = _kept(folder, base)
        if kept is not None:
            return kept
        with folder.claimed(key, wait=wait) as is_ours:
            if not is_ours:
                return base
            return _kept(folder, base, says_why=True) or _planned(folder, content, complete, base)
    except Exception as error:  # of one graph among many: the others go on
        what = str(error) if isinstance(error, OllaError) else f"{path}: {type(error).__name__}: {error}"
        seconds = time.perf_counter() - start
        return Result(graph=path, options=options, status=FAILED, message=what, key=key, seconds=seconds)


def _planned(folder: Folder, graph: Graph, complete: Mapping[str, Any], base: Result) -> Result:
    """Plan a graph and keep what is found."""
    start = time.perf_counter()
    with Interrupt() as interrupt:
        try:
            found = plan(graph, **complete, progress=interrupt.ends(lambda *_: True))
            status, message = PLANNED, found.message
        except BudgetError as error:
            found, status, message = None, NOTHING_FITS, str(error)
    if interrupt.seen:
        return replace(base, status=INTERRUPTED, message="ended by Ctrl-C")
    return _keep(folder, found, replace(base, status=status, message=message, seconds=time.perf_counter() - start))


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


def _kept(folder: Folder, base: Result, *, says_why: bool = False) -> Result | None:
    """Return what the folder has of a result, by its key; None where it is missing or damaged, which a log may say."""
    name = f"{base.key}.json"
    data = folder.read(name)
    if data is None:
        return None
    try:
        content = json.loads(data)
        if (content["format"], content["version"]) != (FORMAT, VERSION) or content["key"] != base.key:
            raise ValueError("it is of another version of olla")
        kept = {name: content[name] for name in _KEPT}
        if not all(isinstance(kept[name], kind) for name, kind in _KEPT.items()):
            raise TypeError("its values are of other types")
        if kept["status"] == PLANNED:
            plan_data = folder.read(plan_name(base.key))
            if plan_data is None or _digest(plan_data) != content["plan_sha256"]:
                raise ValueError("its plan is missing or damaged")
            kept |= {"plan": folder.place(plan_name(base.key)), "figures": {n: kept["figures"][n] for n in _FIGURES}}
        elif kept["status"] != NOTHING_FITS:
            raise ValueError(f"its status is {kept['status']!r}")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        if says_why:
            _logger.warning("%s is planned again: %s", folder.place(name), " ".join(str(error).split())[:100])
        return None
    return replace(base, is_new=False, **kept)


def _keep(folder: Folder, found: Plan | None, result: Result) -> Result:
    """Write the plan, then the result; return the result with the figures of the plan."""
    more = {}
    if found is not None:
        gap = found.gap if math.isfinite(found.gap) else None
        figures = {**{name: getattr(found, name) for name in FIGURES}, "gap": gap, "status": found.status.value}
        data, name = _json(found.to_object()), plan_name(result.key)
        folder.write(name, data)
        more["plan_sha256"] = _digest(files.packed(name, data))
        result = replace(result, plan=folder.place(name), figures=figures)
    kept = {name: getattr(result, name) for name in _KEPT}
    folder.write(f"{result.key}.json", _json({"format": FORMAT, "version": VERSION, **kept, **more}))
    return result


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _json(content: object) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"
