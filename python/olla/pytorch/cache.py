"""Plans and recorded requests of compiled steps on disk, so that a later process need not search and record again.

Entries are keyed by a digest of the captured step. Each process captures its own step, and no entry decides what a step
computes. A plan is checked before it is used; requests that do not fit the recorded offsets are counted as misses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import operator
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from olla.base import files
from olla.base.folders import cache_folder, own_folder
from olla.graph import Graph
from olla.plan import Plan
from olla.plan.plan import of_last_graph
from olla.pytorch.capture import Captured
from olla.pytorch.memory.arrange import Arranged
from olla.pytorch.memory.replay import Table
from olla.pytorch.ranks.agreement import checked_plan, digest, without_addresses

MAX_BYTES, MAX_ENTRIES = 2**30, 512
VERSION = 3
_MAGIC = "olla-step"
_logger = logging.getLogger("olla")
T = TypeVar("T")


class RecordedStep(NamedTuple):
    """Results of recording a step.

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
        name: of the files; empty: nowhere.
        note: why the step is not kept; empty if it is.

    Attributes:
        loaded: whether the plan came from the disk.
        note: see above.
    """

    def __init__(self, name: str, note: str = "") -> None:
        self.loaded = False
        self.note = note
        self._name = name
        self._plan_file = f"{name}.plan"
        self._made_for = ""  # the plan that a table belongs to

    def load(self, graph: Graph, accept: Callable[[Plan], None]) -> Plan | None:
        """Return the plan of a captured graph, or None where the disk has none.

        Args:
            graph: of the step.
            accept: raises an OllaError for a plan that the step cannot run.
        """

        def decode(content: Any) -> Plan:
            plan = checked_plan(content, graph)
            accept(plan)
            return plan

        found = self._read(self._plan_file, decode)
        if found is not None:
            self.loaded = True
            self._made_for = _identity(found)
        return found

    def save(self, plan: Plan) -> None:
        """Save the plan of the captured graph; what was recorded for another plan is not used with it."""
        self.loaded = False
        self._made_for = _identity(plan)
        if self._name:
            _write(self._plan_file, plan.to_object())

    def load_recorded(self, graph: Graph) -> RecordedStep | None:
        """Return what an earlier process recorded of the step, or None; ``graph``: of the step, before recording."""
        if not self.loaded:
            return None
        return self._read(self._table_file, lambda content: self._decode_recorded(content, graph))

    def save_recorded(self, recorded: RecordedStep) -> None:
        """Keep what was found out by recording the step."""
        if not self._name:
            return
        arranged = recorded.arranged
        content = {
            "made_for": self._made_for,
            "plan": of_last_graph(recorded.plan).to_object(),
            "workspace_bytes": recorded.graph.workspace_bytes,
            "seconds": recorded.graph.seconds,
            "eager_peak_bytes": recorded.eager_peak_bytes,
            "load_bytes": arranged.load_bytes,
            "output_bytes": arranged.output_bytes,
            "peak_bytes": arranged.peak_bytes,
            "freed_in": arranged.freed_in,
            "freed_after": arranged.freed_after,
            **arranged.table._asdict(),
        }
        _write(self._table_file, content)

    @property
    def _table_file(self) -> str:
        # Kernels' workspaces depend on these.
        facts = [torch.get_num_threads(), torch.get_num_interop_threads(), torch.__config__.show()]
        return f"{self._name}.{digest(json.dumps(facts))[:16]}.table"

    def _read(self, name: str, decode: Callable[[Any], T | None]) -> T | None:
        """Return the decoded entry, or None; a damaged one is deleted, and the next save replaces it."""
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

    def _decode_recorded(self, content: dict[str, Any], graph: Graph) -> RecordedStep | None:
        if content["made_for"] != self._made_for:
            return None
        workspace_bytes = np.array(content["workspace_bytes"], dtype=np.int64)
        seconds = np.array(content["seconds"], dtype=np.float64)
        graph = dataclasses.replace(graph, workspace_bytes=workspace_bytes, seconds=seconds)
        plan = checked_plan(content["plan"], graph)
        op_offset, num_bytes, offsets = (np.array(content[n], np.int64) for n in ("op_offset", "num_bytes", "offsets"))
        table = Table(content["arena_bytes"], op_offset, num_bytes, offsets, content["alignment"])
        freed = np.array(content["freed_in"], np.int32), np.array(content["freed_after"], np.int64)
        arranged = Arranged(table, content["load_bytes"], content["output_bytes"], content["peak_bytes"], *freed)
        return RecordedStep(graph, plan, arranged, content["eager_peak_bytes"])


def find(captured: Captured, options: Mapping[str, Any]) -> Place:
    """Return where the plan of a captured step with these options is kept."""
    if os.environ.get("OLLA_DISK_CACHE") == "0":
        return Place("", "The plan is not kept on disk: OLLA_DISK_CACHE is 0.")
    try:
        own_folder(folder())
    except OSError as reason:
        note = f"The plan is not kept on disk: {reason}."
        _logger.info("%s", note)
        return Place("", note)
    settings = sorted((k, repr(v)) for k, v in options.items())
    facts = [VERSION, olla_digest(), torch.__version__, identity(captured), settings]
    return Place(digest(json.dumps(facts))[:32])


def identity(captured: Captured) -> str:
    """Return a digest of a captured step: operators, their arguments, and what they are computed on.

    Complexity: O(nodes).
    """
    text = hashlib.sha256(captured.graph.digest.encode())
    for node in captured.module.graph.nodes:
        facts = (node.op, str(node.target), node.args, node.kwargs, node.meta.get("val"))
        text.update(without_addresses(repr(facts)).encode())
    return text.hexdigest()


@functools.cache
def olla_digest() -> str:
    """Return a digest of this olla: another one may plan otherwise."""
    own = hashlib.sha256()
    package = Path(__file__).parents[1]
    for path in sorted([*package.rglob("*.py"), *package.glob("_core*.so")]):
        own.update(path.read_bytes())
    return own.hexdigest()


def folder() -> Path:
    """Return the folder of the entries."""
    return cache_folder() / "steps"


def _write(name: str, content: dict[str, Any]) -> None:
    """Write an entry atomically, and delete the least recently used ones beyond the limits."""
    place = folder()
    try:
        tolist = operator.methodcaller("tolist")  # of numpy's arrays and numbers
        body = json.dumps(content, separators=(",", ":"), allow_nan=False, default=tolist).encode()
        files.write(place / name, _head(body).encode() + b"\n" + body)
        _prune(place)
    except (OSError, AttributeError, TypeError, ValueError) as error:
        _logger.warning("the step cannot be kept in %s: %s", place, error)


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


def _identity(plan: Plan) -> str:
    """Return what the numbering of a table depends on: the graph and the order."""
    return digest(f"{plan.graph_digest} {plan.order.tolist()}")
