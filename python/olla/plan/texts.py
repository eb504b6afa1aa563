"""Ops and tensors of a planned graph in words, by their numbers in the graph that was given."""

from __future__ import annotations

from typing import Any


def op_text(plan: Any, op: int, name: str) -> str:
    """Return which op of the graph that was given an op of the planned graph is, and what became of it.

    Args:
        plan: an `olla.Plan`; not named by its type, since that prints itself through here.
        op: of the planned graph.
        name: of it.
    """
    remarks: list[str] = []
    for rewrite in reversed(plan.rewrites):
        remarks += filter(None, [rewrite.remark(op)])
        if rewrite.origin[op] < 0:
            ends = [*rewrite.graph.reads.of(op).tolist(), *rewrite.graph.writes.of(op).tolist()]
            called = next(filter(None, (rewrite.graph.tensor_names[t] for t in ends)), "")  # a handle has no name
            return f"{tensor_text(plan, ends[0], called)}, {remarks[-1]}"
        op = int(rewrite.origin[op])
    return ", ".join([f"op {op} ({name or 'unnamed'})", *reversed(remarks)])


def tensor_text(plan: Any, t: int, name: str) -> str:
    """Return which tensor of the graph that was given a tensor of the planned graph is, or is a part of."""
    origin = int(plan.tensor_origin[t])
    return " ".join(filter(None, (f"tensor {origin}" if origin >= 0 else "of a loss in chunks", name)))
