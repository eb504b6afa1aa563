"""Graphs that a command is given: files of olla, and ONNX models."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from olla.graph import Graph


def graph_at(args: argparse.Namespace) -> Graph:
    """Read the graph of a command: an ONNX model by its name's ending, a graph file otherwise."""
    if not args.graph.endswith(".onnx"):
        from olla.graph import Graph

        return Graph.load(args.graph)
    from olla.errors import CaptureError
    from olla.integrations.onnx import from_onnx

    try:
        return from_onnx(args.graph, shapes=dict(args.shape))
    except ValueError as error:
        raise CaptureError(f"{args.graph}: {error}") from error


def add_shapes(parser: argparse.ArgumentParser) -> None:
    """Let a command say the shapes that an ONNX model leaves open."""
    about = "of an input of an ONNX model that leaves dimensions open; one for each such input"
    parser.add_argument("--shape", action="append", default=[], type=_shape, metavar="NAME=N,N,...", help=about)


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, dims = text.rpartition("=")
    try:
        if name:
            return name, tuple(int(n) for n in dims.split(","))
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not NAME=N,N,..., such as pixels=1,3,224,224")
