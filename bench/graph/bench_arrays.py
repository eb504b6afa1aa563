"""How long does a graph of a million ops take from arrays, and back, beside the builder?

Generated graphs: every op writes one tensor and reads up to two of those before it. The builder's graph of the same
rows must have the same digest.

    python bench/graph/bench_arrays.py --markdown bench/results/graph/arrays.md

Exit status: 0; 1 if the graphs differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench

import olla
from bench.support.harness import Report, measure


def columns_of(num_ops: int) -> dict[str, Any]:
    """Return columns as a compiler has them: offsets and items, the writer of every tensor, sizes, seconds."""
    rng = np.random.default_rng(0)
    num_reads = np.minimum(np.arange(num_ops), 2)
    reader = np.repeat(np.arange(num_ops), num_reads)
    read = np.maximum(reader - 1 - rng.integers(0, 50, len(reader)), 0)
    return {
        "tensor_bytes": rng.integers(1, 2**20, num_ops),
        "reads": (np.append(0, np.cumsum(num_reads)), read),
        "writer": np.arange(num_ops),
        "seconds": rng.random(num_ops),
        "outputs": np.array([num_ops - 1]),
    }


def built(columns: dict[str, Any]) -> olla.Graph:
    """Return the graph of columns, row by row through the builder."""
    builder = olla.Graph.builder()
    for size in columns["tensor_bytes"].tolist():
        builder.tensor(size)
    offset, item = (part.tolist() for part in columns["reads"])
    for v, seconds in enumerate(columns["seconds"].tolist()):
        builder.op("", reads=item[offset[v] : offset[v + 1]], writes=[v], seconds=seconds)
    builder.output(len(columns["tensor_bytes"]) - 1)
    return builder.build()


def main() -> int:
    """Run it; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=int, default=1_000_000, help="of the larger graph (default: 1000000)")
    parser.add_argument("--repeats", type=int, default=5, help="of every measurement (default: 5)")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    parser.add_argument("--json", type=Path, help="write the table there")
    args = parser.parse_args()
    report = Report("Graphs from arrays", ["ops", "from", "median s", "least s", "most s"])
    differ = False
    for num_ops in (args.ops // 10, args.ops):
        columns = columns_of(num_ops)
        graph = olla.Graph.from_arrays(**columns)
        ways: dict[str, Callable[[], Any]] = {
            "arrays": partial(olla.Graph.from_arrays, **columns),
            "what to_arrays returned, names and all": partial(olla.Graph.from_arrays, **graph.to_arrays()),
        }
        if num_ops < args.ops:
            ways["the builder"] = partial(built, columns)
        for way, make in ways.items():
            found, timing = measure(make, args.repeats)
            differ |= found.digest != graph.digest
            seconds = timing.median_seconds, timing.min_seconds, timing.max_seconds
            report.rows.append([num_ops, way, *seconds])
    report.summary["graphs that differ"] = differ
    report.print()
    for path in (args.markdown, args.json):
        if path:
            report.save(path)
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
