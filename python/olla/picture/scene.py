"""Data of a page: a step as given and as run, the memory blocks of both, and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from olla.base import human_bytes, percent
from olla.graph import Graph
from olla.picture.blocks import Block, blocks_of, planned_graph
from olla.plan import Plan


@dataclass(frozen=True)
class Scene:
    """A step as it was given and as it runs.

    Attributes:
        title: of the page.
        figures: a name and a value for each, for people.
        given: the graph that was given; what runs before is its program order.
        planned: the graph that runs.
        plan: its plan.
        before: the blocks of the given graph in program order.
        after: the blocks of the planned one. Those that begin below `arena_bytes` lie in the arena.
        arena_bytes: size of the arena; 0: there is none.
        no_arena: why there is none.
    """

    title: str
    figures: Sequence[tuple[str, str]]
    given: Graph
    planned: Graph
    plan: Plan
    before: list[Block]
    after: list[Block]
    arena_bytes: int
    no_arena: str = ""


def scene_of(graph: Graph, plan: Plan) -> Scene:
    """Return what the page of a plan shows.

    Args:
        graph: that was given, or the one that was planned.
        plan: of it.

    Raises:
        PlanError: rule "digest"; the plan belongs to another graph.
    """
    planned = planned_graph(graph, plan)
    before = blocks_of(graph, program_order(graph))
    bound = ("lower bound", plan.peak_lower_bound_bytes if plan.rewrites else plan.lower_bound_bytes)
    program = "program order" if plan.source_digest == graph.digest else "program order, as rewritten"
    peaks = [(program, peak_bytes(before, graph.num_ops)), ("as planned", plan.peak_bytes)]
    figures = [(name, amount(n)) for name, n in (*peaks, bound, ("resident", plan.resident_bytes))]
    return Scene(
        title=f"{graph.name or 'a training step'}: {plan.method}, {plan.status.value}",
        figures=[*figures, ("arena", amount(plan.arena_bytes)), *changes(plan)],
        given=graph,
        planned=planned,
        plan=plan,
        before=before,
        after=blocks_of(planned, plan.order, plan),
        arena_bytes=plan.arena_bytes,
        no_arena="The plan has no layout, so there is no arena: it was made for the order alone.",
    )


def changes(plan: Plan) -> list[tuple[str, str]]:
    """Return what a plan has changed beside the order, and what that costs, as figures."""
    return [
        ("recomputed", f"{plan.num_recomputed:,} ops" if plan.num_recomputed else "none"),
        ("in place", f"{plan.num_in_place:,} results" if plan.num_in_place else "none"),
        ("swapped", amount(plan.swapped_bytes)),
        ("added time", percent(plan.slowdown) if plan.added_seconds else "none"),
    ]


def amount(num_bytes: int) -> str:
    """Return a byte count for a reader; "none" for 0."""
    return human_bytes(num_bytes) if num_bytes else "none"


def program_order(graph: Graph) -> NDArray[np.int32]:
    """Return the order in which the ops of a graph were given."""
    return np.arange(graph.num_ops, dtype=np.int32)


def peak_bytes(blocks: Sequence[Block], num_steps: int) -> int:
    """Return the most bytes that blocks take at once in the steps of a run."""
    at = np.array([[b.first, b.last] for b in blocks if b.first < num_steps]).reshape(-1, 2)
    size = np.array([b.size for b in blocks if b.first < num_steps], dtype=np.int64)
    change = np.concatenate([-size, size])  # of what happens at one time, ends come first
    by_time = np.argsort(np.concatenate([at[:, 1], at[:, 0]]), kind="stable")
    return int(np.cumsum(change[by_time]).max(initial=0))
