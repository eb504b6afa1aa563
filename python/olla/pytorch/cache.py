"""Captures, plans and tables of compiled steps on disk, so that a later process need not make them again.

Entries are JSON, with a checksum in front: nothing that is read is run. They still decide what a step computes, and so
the folder must belong to the user, and nobody else may write to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as pytree

from olla import budgetplan, planfile, swapplan
from olla.budgetplan import BudgetPlan
from olla.graph import Graph
from olla.plan import Plan
from olla.pytorch import encode
from olla.pytorch.capture import Captured
from olla.pytorch.extension import cache_folder
from olla.pytorch.fingerprint import are_unchanged, fingerprint, sources
from olla.pytorch.recording import Arranged
from olla.pytorch.replay import Table
from olla.pytorch.walk import NotUnderstood
from olla.swapplan import SwapPlan

MAX_BYTES, MAX_ENTRIES = 2**30, 512
VERSION = 1
_MAGIC = "olla-step"
_logger = logging.getLogger("olla")


class Known(NamedTuple):
    """What was found out by recording a step.

    Attributes:
        graph: of the step, with workspaces and seconds.
        plan: of this graph.
        arranged: the places of its requests.
        eager_peak_bytes: the peak of the program order.
    """

    graph: Graph
    plan: Plan
    arranged: Arranged
    eager_peak_bytes: int


class Place:
    """Where one step with one kind of batch is kept.

    Args:
        name: of the files.
        constants: tensors of the user's that the capture may hold, in the order in which every process meets them.

    Attributes:
        loaded: whether the step came from the disk.
        seconds: spent on looking, and on reading.
        note: why the step is not kept; empty if it is.
    """

    def __init__(self, name: str, constants: Sequence[torch.Tensor], seconds: float, note: str = "") -> None:
        self.loaded = False
        self.seconds = seconds
        self.note = note
        self._name = name
        self._constants = constants
        self._made_for = ""  # the plan that a table belongs to

    def load(self) -> tuple[Captured, Plan] | None:
        """Return the step as it was captured, and its plan, or None where the disk has none that is sure to fit."""
        start = time.perf_counter()
        found: tuple[Captured, Plan] | None = self._read(self._step_file, self._decode)
        if found is not None:
            self.loaded = True
            self._made_for = _identity(found[1])
        self.seconds += time.perf_counter() - start
        return found

    def save(self, captured: Captured, plan: Plan) -> None:
        """Keep a captured step and its plan."""
        self._made_for = _identity(plan)
        if not self._name:
            return
        try:
            content = {
                "sources": sources(),
                "step": encode.to_object(captured.original or captured, self._constants),
                "plan": _to_object(plan),
            }
        except (NotUnderstood, encode.NotStorable) as reason:
            self.note = _not_kept(reason)
            return
        _write(self._step_file, content)

    def load_known(self, graph: Graph) -> Known | None:
        """Return what an earlier process found out by recording the step.

        Args:
            graph: that runs, as it was before it was recorded.
        """
        if not self.loaded:
            return None
        found: Known | None = self._read(self._table_file, lambda content: self._decode_known(content, graph))
        return found

    def save_known(self, known: Known) -> None:
        """Keep what was found out by recording the step."""
        if not self._name or self.note:
            return
        arranged, table = known.arranged, known.arranged.table
        content = {
            "made_for": self._made_for,
            "plan": planfile.to_object(known.plan),
            "workspace_bytes": known.graph.workspace_bytes.tolist(),
            "seconds": known.graph.seconds.tolist(),
            "eager_peak_bytes": int(known.eager_peak_bytes),
            "load_bytes": int(arranged.load_bytes),
            "output_bytes": int(arranged.output_bytes),
            "arena_bytes": int(table.arena_bytes),
            "alignment": int(table.alignment),
            "op_offset": table.op_offset.tolist(),
            "num_bytes": table.num_bytes.tolist(),
            "offsets": table.offsets.tolist(),
        }
        _write(self._table_file, content)

    @property
    def _step_file(self) -> str:
        return f"{self._name}.step"

    @property
    def _table_file(self) -> str:
        # Kernels' workspaces depend on these.
        facts = [torch.get_num_threads(), torch.get_num_interop_threads(), torch.__config__.show()]
        return f"{self._name}.{_digest(json.dumps(facts))[:16]}.table"

    def _read(self, name: str, decode: Callable[[Any], Any]) -> Any:
        """Return what an entry holds, or None; one that is damaged goes away, and the next save replaces it."""
        if not self._name:
            return None
        path = folder() / name
        try:
            text = path.read_bytes()
        except OSError:
            return None
        try:
            head, _, body = text.partition(b"\n")
            if head.decode() != _head(body):
                raise ValueError("it is cut off, changed, or of another version")
            found = decode(json.loads(body))
        except Exception as error:  # whatever a damaged entry may lead to
            _logger.warning("%s is damaged and made again: %s: %s", path, type(error).__name__, error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the latest used are kept
        return found

    def _decode(self, content: dict[str, Any]) -> tuple[Captured, Plan] | None:
        if not are_unchanged(content["sources"]):
            _logger.info("source files have changed: the step is captured again")
            return None
        captured = encode.from_object(content["step"], self._constants)
        plan = Plan.from_object(content["plan"])
        plan.verify(captured.graph)
        return captured, plan

    def _decode_known(self, content: dict[str, Any], graph: Graph) -> Known | None:
        if content["made_for"] != self._made_for:
            return None
        workspace_bytes = np.array(content["workspace_bytes"], dtype=np.int64)
        seconds = np.array(content["seconds"], dtype=np.float64)
        graph = dataclasses.replace(graph, workspace_bytes=workspace_bytes, seconds=seconds)
        plan = Plan.from_object(content["plan"])
        plan.verify(graph)
        op_offset, num_bytes, offsets = (np.array(content[n], np.int64) for n in ("op_offset", "num_bytes", "offsets"))
        table = Table(content["arena_bytes"], op_offset, num_bytes, offsets, content["alignment"])
        arranged = Arranged(table, content["load_bytes"], content["output_bytes"])
        return Known(graph, plan, arranged, content["eager_peak_bytes"])


def find(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    loss: Callable[[Any, Any], Any] | None,
    step: Callable[[Any, Any, Any], Any] | None,
    leaves: Sequence[Any],
    spec: pytree.TreeSpec,
    options: Mapping[str, Any],
) -> Place:
    """Return where a step is kept; see olla.pytorch.fingerprint for what decides that.

    Args:
        model: see olla.compile.
        optimizer: see olla.compile.
        loss: see olla.compile.
        step: see olla.compile.
        leaves: of the batch.
        spec: of the batch.
        options: of the plan.
    """
    start = time.perf_counter()
    if os.environ.get("OLLA_DISK_CACHE") == "0":
        return Place("", (), 0.0, "The step is not kept on disk: OLLA_DISK_CACHE is 0.")
    try:
        _own_folder()
        found = fingerprint(model, optimizer, loss, step, leaves, spec)
    except (NotUnderstood, OSError) as reason:
        return Place("", (), time.perf_counter() - start, _not_kept(reason))
    facts = [VERSION, found.digest, sorted((k, repr(v)) for k, v in options.items())]
    return Place(_digest(json.dumps(facts))[:32], found.constants, time.perf_counter() - start)


def folder() -> Path:
    """Return the folder of the entries."""
    return cache_folder() / "steps"


def _own_folder() -> None:
    """Make the folder of the entries.

    Raises:
        OSError: it cannot be made, or others than the user can change what is in it.
    """
    place = folder()
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = place.stat()
    if hasattr(os, "getuid") and (facts.st_uid != os.getuid() or facts.st_mode & 0o022):
        raise PermissionError(f"others can write to {place}: chmod 700 it, or set OLLA_CACHE_DIR to a folder of yours")


def _write(name: str, content: dict[str, Any]) -> None:
    """Write an entry all or nothing, and remove those that were not used for the longest time."""
    place = folder()
    temporary = ""
    try:
        body = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
        handle, temporary = tempfile.mkstemp(dir=place, prefix=".", suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(_head(body).encode() + b"\n" + body)
        os.replace(temporary, place / name)
        _prune(place)
    except (OSError, TypeError, ValueError) as error:
        _logger.warning("the step cannot be kept in %s: %s", place, error)
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _prune(place: Path) -> None:
    entries = []
    for path in place.iterdir():
        with contextlib.suppress(OSError):  # another process may have removed it
            facts = path.stat()
            entries.append((facts.st_mtime_ns, facts.st_size, path))
    entries.sort(reverse=True)
    total = 0
    for i, (_, size, path) in enumerate(entries):
        total += size
        if i > 0 and (i >= MAX_ENTRIES or total > MAX_BYTES):
            with contextlib.suppress(OSError):
                path.unlink()


def _head(body: bytes) -> str:
    return f"{_MAGIC} {VERSION} {hashlib.sha256(body).hexdigest()}"


def _to_object(plan: Plan) -> dict[str, Any]:
    if isinstance(plan, SwapPlan):
        return swapplan.to_object(plan)
    return budgetplan.to_object(plan) if isinstance(plan, BudgetPlan) else planfile.to_object(plan)


def _identity(plan: Plan) -> str:
    """Return what the numbering of a table depends on: the graph and the order."""
    return _digest(f"{plan.graph_digest} {plan.order.tolist()}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _not_kept(reason: Exception) -> str:
    note = f"The step is not kept on disk: {reason}."
    _logger.info("%s", note)
    return note
