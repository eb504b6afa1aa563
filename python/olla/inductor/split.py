"""What a partitioner made of a joint graph, in figures."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from olla.inductor import compat


@dataclass(frozen=True, kw_only=True)
class Split:
    """One graph, divided into forward and backward.

    Attributes:
        num_ops: of the graph before it was divided; elements of tuples are no ops.
        num_recomputed: runs of ops beyond that, in forward and backward together.
        num_saved: values the forward graph hands to the backward graph, parameters and inputs left out.
        saved_bytes: of their storages; views of parameters and inputs cost nothing, and no storage counts twice.
        flops: of matrix products and convolutions before the graph was divided, attention included.
        recomputed_flops: of those run beyond that.
        seconds: processor time of the partitioner and of the passes before it.
        digest: equal for equal pairs of graphs.
    """

    num_ops: int
    num_recomputed: int
    num_saved: int
    saved_bytes: int
    flops: int
    recomputed_flops: int
    seconds: float
    digest: str


def split_of(
    before: fx.Graph, joint: fx.Graph, forward: Any, backward: Any, settings: Mapping[str, Any], seconds: float
) -> Split:
    """Describe a divided graph.

    Args:
        before, joint: the graph as it came, and after the passes that simplified it, or added copies to it.
        forward, backward: graph modules.
        settings: what the partitioner was told; ``num_fwd_outputs`` of the forward graph's outputs are not saved values.
        seconds: processor time of dividing it.
    """
    base = min(_flops(before), _flops(joint))
    ops = min(_num_ops(before), _num_ops(joint))
    parts = forward.graph, backward.graph
    num_saved, saved_bytes = _saved(forward.graph, settings["num_fwd_outputs"])
    return Split(
        num_ops=ops,
        num_recomputed=max(0, sum(map(_num_ops, parts)) - ops),
        num_saved=num_saved,
        saved_bytes=saved_bytes,
        flops=base,
        recomputed_flops=max(0, sum(map(_flops, parts)) - base),
        seconds=seconds,
        digest=hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest(),
    )


def _ops(graph: fx.Graph) -> Iterable[fx.Node]:
    return (node for node in graph.nodes if node.op == "call_function" and not compat.is_getitem(node))


def _num_ops(graph: fx.Graph) -> int:
    return sum(1 for _ in _ops(graph))


def _flops(graph: fx.Graph) -> int:
    """Return the flops of all matrix products and convolutions of a graph; inner graphs of control flow are left out."""
    total = 0
    for node in _ops(graph):
        formula = compat.flop_formula(node.target)
        if formula is not None:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
            total += int(compat.hint(formula(*args, **kwargs, out_val=node.meta["val"])))
    return total


def _saved(forward: fx.Graph, num_outputs: int) -> tuple[int, int]:
    """Return how many values a forward graph saves, and the bytes of their storages."""
    given = {_storage(node) for node in forward.nodes if node.op == "placeholder"}
    saved = {}
    num_saved = 0
    for node in forward.output_node().args[0][num_outputs:]:  # type: ignore[index, union-attr]
        if isinstance(node, fx.Node) and node.op != "placeholder" and isinstance(node.meta.get("val"), torch.Tensor):
            key = _storage(node)
            if key not in given:
                num_saved += 1
                saved[key] = int(compat.hint(node.meta["val"].untyped_storage().nbytes()))
    return num_saved, sum(saved.values())


def _storage(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
