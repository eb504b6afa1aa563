"""The dataflow graph of one training step: columns of arrays, a builder, files."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from olla._core import CoreGraph, profile
from olla.base import files, human_bytes, notebook
from olla.errors import GraphError
from olla.graph import columns, rows
from olla.graph.columns import COLLECTIVES, Lists, shown
from olla.graph.rows import FORMAT, OF_COLLECTIVES, VERSION

# Which of the ids of a GraphError are ops, by rule (see cpp/olla/graph/graph.hpp).
_OPS_AMONG_IDS = {
    "ids": slice(0, -1),
    "two_writers": slice(1, None),
    "writes_donated": slice(1, None),
    "cycle": slice(None),
    "program_order": slice(None),
}


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Graph:
    """What runs in a training step: n ops in program order, and the T tensors (storages) they read, write and mutate.

    Make one with `Graph.builder`, `Graph.from_arrays`, `Graph.from_dict` or `Graph.load`; all of them check everything.
    Index i of a tensor column (op column) is tensor (op) i. Arrays are read-only.

    Attributes:
        name: what the graph is called.
        tensor_bytes: int64[T], size of each storage.
        tensor_kinds: T times parameter, buffer, optimizer_state, input, constant or temporary.
        tensor_names: T names, empty where unknown.
        donated: bool[T], resident tensors that the step may overwrite or free after their last use.
        op_names, op_kinds: n names; n times forward, backward, update or other.
        targets: n operators called, such as aten.add.Tensor; empty where unknown.
        modules: n paths of the modules of a model that compute, such as layers.0.linear1; empty where unknown.
        sources: n lines of code that ask for it, such as train.py:25; empty where unknown.
        reads, writes, mutates: tensors each op reads, creates, changes in place. A tensor no op writes is resident.
        after: further ops each op must come after.
        workspace_bytes: int64[n], memory an op needs while it runs only.
        seconds: float64[n], measured time; 0 where unknown.
        flops, moved_bytes, launches: int64[n], arithmetic operations, bytes read and written, kernels started.
        random: bool[n], draws from a generator: random ops keep their program order among themselves.
        recomputable: bool[n], whether recomputing the op gives the same values.
        shapes: n shapes, of the first output.
        collectives: n times all_reduce, all_gather, reduce_scatter, broadcast, all_to_all or wait; empty where the op
            does not communicate. A wait ends what an earlier op began, and changes the tensor that it made.
        groups: n names of the process groups that ops communicate in.
        ranks: int64[n], how many ranks are in the group; 0 where the op does not communicate.
        message_bytes: int64[n], the whole message: the larger of what one rank gives and gets.
        outputs: int32[k], tensors live to the end of the step.
        core: the same graph in the C++ core, with all dependencies derived.

    Raises:
        GraphError: the message names the place and what was expected; `rule` and `ids` name the broken rule.

    Complexity: O(size of the graph), apart from sorting each op's lists.

    Example:
        >>> b = Graph.builder("tiny")
        >>> weight, x = b.tensor(400, kind="parameter"), b.tensor(100)
        >>> forward = b.op("forward", reads=[weight], writes=[x])
        >>> update = b.op("update", reads=[x], mutates=[weight], kind="update")
        >>> b.build()
        <olla.Graph 'tiny': 2 ops, 2 tensors, 400 resident bytes>
    """

    name: str
    tensor_bytes: NDArray[np.int64]
    tensor_kinds: list[str]
    tensor_names: list[str]
    donated: NDArray[np.bool_]
    op_names: list[str]
    op_kinds: list[str]
    reads: Lists
    writes: Lists
    mutates: Lists
    after: Lists
    workspace_bytes: NDArray[np.int64]
    seconds: NDArray[np.float64]
    flops: NDArray[np.int64]
    moved_bytes: NDArray[np.int64]
    launches: NDArray[np.int64]
    random: NDArray[np.bool_]
    recomputable: NDArray[np.bool_]
    targets: list[str]
    modules: list[str]
    sources: list[str]
    shapes: list[tuple[int, ...]]
    collectives: list[str]
    groups: list[str]
    ranks: NDArray[np.int64]
    message_bytes: NDArray[np.int64]
    outputs: NDArray[np.int32]
    core: CoreGraph = field(init=False)

    def __post_init__(self) -> None:
        for value in vars(self).values():
            for array in value if isinstance(value, Lists) else (value,):
                if isinstance(array, np.ndarray):
                    array.setflags(write=False)
        try:
            core = CoreGraph(
                tensor_bytes=self.tensor_bytes,
                donated=self.donated.view(np.uint8),
                reads=self.reads,
                writes=self.writes,
                mutates=self.mutates,
                after=self.after,
                workspace_bytes=self.workspace_bytes,
                random=self.random.view(np.uint8),
                outputs=self.outputs,
            )
        except GraphError as error:
            raise self._with_op_names(error) from None
        object.__setattr__(self, "core", core)

    def _with_op_names(self, error: GraphError) -> GraphError:
        ops = error.ids[_OPS_AMONG_IDS.get(error.rule, slice(0, 0))][:12]
        names = ", ".join(f"op {v} is {shown(self.op_names[v])}" for v in dict.fromkeys(ops) if self.op_names[v])
        return GraphError(f"{error} ({names})" if names else str(error), rule=error.rule, ids=error.ids)

    @property
    def num_ops(self) -> int:
        """How many ops there are."""
        return len(self.workspace_bytes)

    @property
    def num_tensors(self) -> int:
        """How many tensors there are."""
        return len(self.tensor_bytes)

    @property
    def resident_bytes(self) -> int:
        """Bytes of the tensors that are live throughout: neither written by an op nor donated."""
        return self.core.resident_bytes

    @cached_property
    def program_peak_bytes(self) -> int:
        """Most bytes live at once in program order: what an ordinary loop of these ops takes."""
        return int(profile(self.core, np.arange(self.num_ops, dtype=np.int32)).peak_bytes)

    @cached_property
    def communicates(self) -> NDArray[np.bool_]:
        """bool[n], whether op i begins a collective or waits for one."""
        return np.array(self.collectives, dtype=np.str_) != "" if self.num_ops else np.zeros(0, dtype=np.bool_)

    @cached_property
    def writer(self) -> NDArray[np.int64]:
        """int64[T], the op that writes tensor t; -1: the step begins with it."""
        found = np.full(self.num_tensors, -1, dtype=np.int64)
        found[self.writes.item] = self.writes.owner
        return found

    @cached_property
    def digest(self) -> str:
        """SHA-256, as hex, of all that matters to a plan; names, kinds and the order of ids inside a list do not."""
        digest = hashlib.sha256(f"{FORMAT} {VERSION} {self.num_tensors} {self.num_ops}".encode())
        parts = [self.tensor_bytes, self.donated, self.workspace_bytes, self.random, np.unique(self.outputs)]
        for lists in (self.reads, self.writes, self.mutates, self.after):
            parts.append(np.unique(lists.owner << 32 | lists.item))
        if self.communicates.any():  # which group has which name does not matter
            number = {name: i for i, name in enumerate(dict.fromkeys(self.groups))}
            kinds = [COLLECTIVES.index(kind) for kind in self.collectives]
            parts += [np.array(kinds), np.array([number[name] for name in self.groups]), self.ranks, self.message_bytes]
        for part in parts:
            digest.update(f" {len(part)}:".encode())
            digest.update(part.astype(part.dtype.newbyteorder("<")).tobytes())
        return digest.hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:  # the core does not pickle; a copy in another process builds its own
        return Graph.from_dict, (self.to_dict(),)

    def __repr__(self) -> str:
        return (
            f"<olla.Graph {self.name!r}: {self.num_ops:,} ops, {self.num_tensors:,} tensors, "
            f"{self.resident_bytes:,} resident bytes>"
        )

    def _repr_html_(self) -> str:
        return _html(self)

    @staticmethod
    def builder(name: str = "") -> Builder:
        """Return an empty builder."""
        return Builder(name)

    @classmethod
    def from_arrays(cls, *, name: str = "", outputs: object = (), **values: Any) -> Graph:
        """Make a graph from columns, named and meant like the attributes of `Graph`.

        Args:
            name: what the graph is called.
            outputs: whole numbers[k], tensors live to the end of the step.
            values: columns as one-dimensional arrays or lists, which are copied; reads, writes, mutates and after as
                pairs (offset, item) of arrays, where op v has item[offset[v]:offset[v + 1]], or as one list of ids
                per op; shapes as one list per op. All but tensor_bytes, reads and writes may be left out, and in
                place of writes there may be writer: whole numbers[T], the op that writes tensor t, or -1.

        Raises:
            GraphError: see `Graph`.
            TypeError: a column is unknown, or one that is needed is missing.

        Complexity: O(size of the graph), apart from sorting each op's lists.

        Example:
            >>> reads = np.array([0, 0, 1]), np.array([0])
            >>> Graph.from_arrays(tensor_bytes=np.array([8, 4]), reads=reads, writer=np.array([0, 1])).writes.to_lists()
            [[0], [1]]
        """
        columns.require_known(values)
        with files.naming("graph"):
            return cls._of_columns(name, values, outputs)

    def to_arrays(self) -> dict[str, Any]:
        """Return all columns by name, as `from_arrays` takes them: the graph's own arrays and lists, not copies.

        Example:
            >>> graph = Graph.from_arrays(tensor_bytes=[8], reads=[[]], writes=[[0]])
            >>> columns = graph.to_arrays()
            >>> columns["writes"].offset, Graph.from_arrays(**columns).digest == graph.digest
            (array([0, 1]), True)
        """
        return {key: getattr(self, key) for key in ("name", "outputs", *sorted(columns.NAMES))}

    @classmethod
    def from_dict(cls, content: object) -> Graph:
        """Make a graph from the content of a graph file.

        Raises:
            GraphError: see `Graph`.

        Example:
            >>> rows = {"tensors": [{"bytes": 8}], "ops": [{"reads": [], "writes": [0]}]}
            >>> Graph.from_dict({"format": "olla-graph", "version": 1, **rows}).num_tensors
            1
        """
        with files.naming("graph"):
            return cls._of_columns(*rows.read(content))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Graph:
        """Read a graph file, version 1 or 2, plain or gzip.

        Raises:
            GraphError: the file is missing, unreadable, or not a valid graph. The message starts with the path.
        """
        with files.naming(os.fsdecode(path)):
            return cls._of_columns(*rows.read(files.read_json(path, GraphError)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a graph file, through gzip where the name ends in `.gz`: version 2 where ops communicate, else 1.

        The same graph gives the same bytes.

        Raises:
            GraphError: the file cannot be written, or its name does not end in .json or .json.gz. The message starts
                with the path.
        """
        with files.naming(os.fsdecode(path)):
            files.write_json(path, self.to_dict(), GraphError)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a graph file; what equals its default is left out."""
        return rows.written(self.name, vars(self))

    @classmethod
    def _of_columns(cls, name: object, values: dict[str, object], outputs: object) -> Graph:
        (checked_name,) = columns.texts([name], "name")
        return cls(name=checked_name, outputs=columns.ids(outputs, "outputs[]"), **columns.converted(values))


def _html(graph: Graph) -> str:
    """Return what a notebook shows of a graph: the bytes over the steps in program order."""
    live = profile(graph.core, np.arange(graph.num_ops, dtype=np.int32))
    peak = human_bytes(live.peak_bytes)
    rows = [("peak in program order", peak), ("resident", human_bytes(graph.resident_bytes))]
    rows += [(f"{kind} ops", f"{num:,}") for kind, num in Counter(graph.op_kinds).items()]
    title = f"{graph.name or 'unnamed graph'}: {graph.num_ops:,} ops, {graph.num_tensors:,} tensors"
    return notebook.shown(title, rows, notebook.curve(live.live_bytes, f"bytes over steps, at most {peak}"))


class Builder:
    """Collects tensors and ops one by one, in program order; `build` checks them all.

    Example:
        >>> b = Builder("one op")
        >>> t = b.tensor(16)
        >>> v = b.op("fill", writes=[t])
        >>> b.output(t)
        >>> b.build().outputs.tolist()
        [0]
    """

    def __init__(self, name: str = "") -> None:
        self._content: dict[str, Any] = {"format": FORMAT, "version": OF_COLLECTIVES, "name": name}
        self._tensors: list[dict[str, Any]] = []
        self._ops: list[dict[str, Any]] = []
        self._outputs: list[int] = []
        self._issued: dict[str, int] = {}  # group -> its last collective

    def __repr__(self) -> str:
        """Return name and counts, in one line."""
        name, ops, tensors = self._content["name"], len(self._ops), len(self._tensors)
        return f"<olla.Graph.builder {name!r}: {ops} ops, {tensors} tensors so far>"

    def tensor(self, bytes: int, *, kind: str = "temporary", donated: bool = False, name: str = "") -> int:
        """Add a tensor (one storage) and return its id."""
        self._tensors.append({"bytes": bytes, "kind": kind, "donated": donated, "name": name})
        return len(self._tensors) - 1

    def op(
        self,
        name: str,
        *,
        reads: Iterable[int] = (),
        writes: Iterable[int] = (),
        mutates: Iterable[int] = (),
        after: Iterable[int] = (),
        kind: str = "other",
        workspace_bytes: int = 0,
        seconds: float = 0.0,
        flops: int = 0,
        moved_bytes: int = 0,
        launches: int = 1,
        random: bool = False,
        recomputable: bool = True,
        target: str = "",
        module: str = "",
        source: str = "",
        shape: Iterable[int] = (),
        collective: str = "",
        group: str = "",
        ranks: int = 0,
        message_bytes: int = 0,
    ) -> int:
        """Add an op after those added so far and return its id. Arguments are meant like the attributes of `Graph`.

        A collective comes after the one before it in its group: all ranks issue them in this order.
        """
        row = {**locals()}  # an argument has the name of its key
        del row["self"]
        row |= {key: list(row[key]) for key in ("reads", "writes", "mutates", "after", "shape")}
        if collective not in ("", "wait"):
            row["after"] += [self._issued[group]] if group in self._issued else []
            self._issued[group] = len(self._ops)
        self._ops.append(row)
        return len(self._ops) - 1

    def output(self, tensor: int) -> None:
        """Keep a tensor live to the end of the step."""
        self._outputs.append(tensor)

    def build(self) -> Graph:
        """Return the graph of all tensors and ops added so far.

        Raises:
            GraphError: see `Graph`.
        """
        return Graph.from_dict({**self._content, "tensors": self._tensors, "ops": self._ops, "outputs": self._outputs})
