"""A graph that uses every key, variations of it, plain graphs of any size, and where captured graphs are found."""

import copy
import os
from pathlib import Path
from typing import Any

import numpy as np

from olla import Graph

SHARED = Path(os.environ.get("OLLA_SHARED", Path(__file__).parents[3] / "shared"))
FULL: dict[str, Any] = {
    "format": "olla-graph",
    "version": 1,
    "name": "full",
    "tensors": [
        {"bytes": 8, "kind": "parameter", "name": "weight"},
        {"bytes": 4, "kind": "input", "donated": True},
        {"bytes": 16},
    ],
    "ops": [
        {
            "name": "mm",
            "kind": "forward",
            "reads": [0, 1],
            "writes": [2],
            "workspace_bytes": 3,
            "seconds": 0.5,
            "flops": 10,
            "moved_bytes": 20,
            "launches": 2,
            "random": True,
            "recomputable": False,
            "target": "aten.mm.default",
            "shape": [2, 2],
        },
        {"kind": "update", "reads": [2], "writes": [], "mutates": [0], "after": [0]},
    ],
    "outputs": [2],
}


def changed(*path: str | int, to: Any) -> dict[str, Any]:
    """FULL with one value replaced."""
    content: Any = copy.deepcopy(FULL)
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return dict(content)


def without(*path: str | int) -> dict[str, Any]:
    """FULL with one key left out."""
    content: Any = copy.deepcopy(FULL)
    place = content
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return dict(content)


def chain(num_ops: int, **columns: Any) -> Graph:
    """Op v reads tensor v - 1 and writes tensor v."""
    reads = [[v - 1] if v else [] for v in range(num_ops)]
    return Graph.from_arrays(
        tensor_bytes=np.ones(num_ops, dtype=np.int64), reads=reads, writes=[[v] for v in range(num_ops)], **columns
    )


def fork(num_chains: int, length: int) -> Graph:
    """A source read by chains that end in one sink, each with its largest tensor first, larger from chain to chain."""
    builder = Graph.builder("fork")
    source = builder.tensor(10)
    builder.op("source", writes=[source])
    ends = []
    for chain in range(num_chains):
        end = source
        for step in range(length):
            new = builder.tensor((5 if step else 20) + chain)
            builder.op(f"chain_{chain}_{step}", reads=[end], writes=[new])
            end = new
        ends.append(end)
    builder.op("sink", reads=ends, writes=[builder.tensor(1)])
    return builder.build()


def wide_graph(num_ops: int) -> Graph:
    """Op v reads two of the 60 latest tensors and writes one, all of random sizes: many orders, few of them good."""
    rng = np.random.default_rng(1)
    builder = Graph.builder("wide")
    tensors = [builder.tensor(int(rng.integers(1, 1 << 20)), kind="input") for _ in range(4)]
    for _ in range(num_ops):
        reads = rng.choice(tensors[-60:], size=2)
        tensors.append(builder.tensor(int(rng.integers(1, 1 << 20))))
        builder.op("op", reads=reads.tolist(), writes=[tensors[-1]])
    return builder.build()


def scaled(graph: Graph, factor: int, extra: int = 0) -> Graph:
    """The graph with every tensor and workspace factor times as large; tensor t gets extra * t bytes more."""
    content = graph.to_dict()
    for t, tensor in enumerate(content["tensors"]):
        tensor["bytes"] = factor * tensor["bytes"] + extra * t
    for op in content["ops"]:
        op["workspace_bytes"] = factor * op.get("workspace_bytes", 0)
    return Graph.from_dict(content)
