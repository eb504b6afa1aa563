"""A graph that uses every key, variations of it, and where captured graphs are found."""

import copy
import os
from pathlib import Path
from typing import Any

import numpy as np

from olla import Graph

SHARED = Path(os.environ.get("OLLA_SHARED", Path(__file__).parents[2] / "shared"))
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
