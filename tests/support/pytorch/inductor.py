"""The rival: the four orders PyTorch Inductor tries, on our graphs.

``torch/_inductor/memory.py`` picks the best of the present order and three list schedules: least peak memory first
(LPMF), breadth first and depth first. Its own functions run here, on objects that carry exactly what they read: for
every op its direct dependencies (those that follow from mutation, extra precedences and random draws included) and the
buffers it frees, for every buffer its size and the ops that use it. As in Inductor, inputs that may not be freed are
left out; donated ones are its "freeable input buffers".

Read and run with torch 2.13; other versions may have moved these functions.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch._inductor import memory
from torch.utils._ordered_set import OrderedSet

import olla
from olla import _core


@dataclass(eq=False)
class Buffer:
    """What Inductor's heuristics ask of a buffer."""

    name: str
    mpi_buffer: Any = None  # memory.MemoryPlanningInfoForBuffer

    def get_name(self) -> str:
        return self.name


@dataclass(frozen=True)
class Dependency:
    """A dependency by the name of what is waited for."""

    name: str


@dataclass(eq=False)
class Node:
    """What Inductor's heuristics ask of a scheduler node.

    Its name doubles as the name of a buffer without memory that every op after it waits for: so the depth-first sort,
    which follows buffer names, sees all dependencies.
    """

    name: str
    outputs: list[Buffer] = field(default_factory=list)
    unmet_dependencies: list[Dependency] = field(default_factory=list)
    mpi_node: Any = None  # memory.MemoryPlanningInfoForNode

    def get_name(self) -> str:
        return self.name

    def get_outputs(self) -> list[Buffer]:
        return self.outputs

    def get_buffer_names(self) -> list[str]:
        return [self.name]


@dataclass
class Problem:
    """A graph in Inductor's terms; nodes[v] is op v. Untyped: these objects stand in for Inductor's own."""

    nodes: list[Any]
    freeable_inputs: dict[str, Any]  # name -> memory.FreeableInputBuffer
    buffers: dict[str, Any]
    outputs: Any  # set of names


@dataclass(frozen=True)
class Heuristic:
    """One of Inductor's orders under our memory model.

    Attributes:
        order: int32[num_ops], op at step s.
        peak_bytes: resident memory and workspaces included.
        seconds: time of Inductor's own function.
    """

    order: NDArray[np.int32]
    peak_bytes: int
    seconds: float


def problem(graph: olla.Graph) -> Problem:
    """Describe a graph in Inductor's terms. Complexity: O(ops + tensors + dependencies)."""
    nodes: list[Any] = [Node(f"op{v}") for v in range(graph.num_ops)]
    uses, users = _uses(graph)
    produced = {int(t): v for v in range(graph.num_ops) for t in graph.writes.of(v)}
    outputs = OrderedSet(f"t{int(t)}" for t in graph.outputs)

    buffers: dict[str, Any] = {}
    freeable_inputs: dict[str, Any] = {}
    by_tensor: dict[int, Any] = {}
    for t in range(graph.num_tensors):
        size, name = int(graph.tensor_bytes[t]), f"t{t}"
        succ_nodes = OrderedSet(nodes[v] for v in users[t])
        if t in produced:
            info = memory.MemoryPlanningInfoForBuffer(size, size, succ_nodes, succ_nodes)
            by_tensor[t] = buffers[name] = Buffer(name, info)
            nodes[produced[t]].outputs.append(buffers[name])
        elif graph.donated[t] and (users[t] or name in outputs):
            info = memory.MemoryPlanningInfoForBuffer(0, size, succ_nodes, succ_nodes)
            by_tensor[t] = freeable_inputs[name] = memory.FreeableInputBuffer(name, info)

    offset, item = graph.core.precedences()
    succs: list[list[Node]] = [[] for _ in nodes]
    for v, node in enumerate(nodes):
        preds = [int(u) for u in item[offset[v] : offset[v + 1]]]
        for u in preds:
            succs[u].append(node)
        node.unmet_dependencies = [Dependency(f"op{u}") for u in preds]
        node.mpi_node = memory.MemoryPlanningInfoForNode(
            index=v,
            size=sum(buffer.mpi_buffer.size_alloc for buffer in node.outputs),
            pred_buffers=OrderedSet(by_tensor[t] for t in uses[v] if t in by_tensor),
            pred_nodes=OrderedSet(nodes[u] for u in preds),
        )
    for node, after in zip(nodes, succs, strict=True):
        node.mpi_node.succ_nodes = OrderedSet(after)
    return Problem(nodes, freeable_inputs, buffers, outputs)


def _uses(graph: olla.Graph) -> tuple[list[list[int]], list[list[int]]]:
    """Return the tensors each op reads or mutates but does not write, and the ops that use each tensor."""
    uses = []
    users: list[list[int]] = [[] for _ in range(graph.num_tensors)]
    for v in range(graph.num_ops):
        used = {int(t) for t in (*graph.reads.of(v), *graph.mutates.of(v))} - {int(t) for t in graph.writes.of(v)}
        uses.append(sorted(used))
        for t in uses[v]:
            users[t].append(v)
    return uses, users


def heuristics(graph: olla.Graph) -> dict[str, Heuristic]:
    """Run Inductor's heuristics on a graph: name -> order, its peak under our memory model, seconds.

    Names: ``present`` (the program order), ``lpmf``, ``bfs``, ``dfs``. Inductor takes the one with the least peak.

    Complexity: LPMF scans all ready ops at every step, O(ops * ready).

    Example:
        >>> from generate import random_graph
        >>> sorted(heuristics(random_graph(8, seed=1)))
        ['bfs', 'dfs', 'lpmf', 'present']
    """
    p = problem(graph)
    sorts: dict[str, Callable[[], list[Any]]] = {
        "present": lambda: p.nodes,
        "lpmf": lambda: memory.topological_sort_lpmf(p.nodes, p.freeable_inputs, p.buffers, p.outputs),
        "bfs": lambda: memory.topological_sort_bfs(p.nodes),
        "dfs": lambda: _deep(lambda: memory.topological_sort_dfs(p.nodes), graph.num_ops),
    }
    found = {}
    for name, sort in sorts.items():
        begin = time.perf_counter()
        nodes = sort()
        seconds = time.perf_counter() - begin
        order = np.array([node.mpi_node.index for node in nodes], dtype=np.int32)
        found[name] = Heuristic(order, _core.profile(graph.core, order).peak_bytes, seconds)
    return found


def _deep(sort: Callable[[], list[Any]], num_ops: int) -> list[Any]:
    """Run a sort that recurses once per op: Inductor's depth-first sort does, and fails beyond 1,000 ops otherwise."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + 4 * num_ops)
    try:
        return sort()
    finally:
        sys.setrecursionlimit(limit)
