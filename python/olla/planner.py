"""`olla.plan`: from a request to a plan. The only caller of the searches that rewrite a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

from olla.base import Progress
from olla.check.check import check
from olla.graph import DeviceProfile, Graph, Rules
from olla.graph.precedences import with_precedences
from olla.plan import BudgetPlan, Goal, Link, Options, Plan, Source, Swapping, SwapPlan, graph_of

_AnyPlan = TypeVar("_AnyPlan", BudgetPlan, SwapPlan)


def plan(
    graph: Source,
    *,
    method: str = "auto",
    time_limit: float = 15.0,
    seed: int = 0,
    alignment: int = 512,
    layout: bool = True,
    updates_may_move: bool = True,
    precedences: Iterable[tuple[int, int]] = (),
    order: ArrayLike | None = None,
    budget: int | str | None = None,
    max_slowdown: float | None = None,
    minimise: str | None = None,
    device: str | DeviceProfile = "a100",
    in_place: bool = True,
    recompute: bool = True,
    chunked_loss: int | None = None,
    swap: bool | None = None,
    link: Link | float | None = None,
    host_budget: int | str | None = None,
    swap_state: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """Plan the memory of a training step: order its ops, lay out its tensors, prove how good that is.

    With `budget`, `max_slowdown` or `minimise` the graph is rewritten as well: ops run again instead of keeping what
    they make, and pointwise results take over inputs that die. The answer is then a `BudgetPlan`.

    The plan has passed the independent checker. It is never worse than the program order, unless extra precedences
    forbid that order or another one was given. Ctrl-C returns the best plan so far.

    Args:
        graph: a `Graph`, the path of a graph file, or a captured step (anything whose `.graph` is a `Graph`).
        method: "auto", ours: min-cut refinement and branch and bound, then the order program where a gap is left. The
            others are there to compare with: "ilp" (OLLA's order program, then its address program), "joint" (order
            and addresses in one program), "model" (MODeL's devices), "roam" (segments at narrow waists, ordered and
            laid out one by one), "smartpool" (the program order; best fit by falling size), "inductor" (the best of
            PyTorch Inductor's four orders), "program" (the program order, our layout). See docs/model.md.
            "autoswap": the program order, tensors swapped to host memory by AutoSwap; the answer is a `SwapPlan`.
        time_limit: seconds for the whole call; what is not proved by then ends as FEASIBLE with its gap.
        seed: for every random choice. Same input, options and seed give the same plan, time-limited stages aside.
        alignment: every offset is a multiple of it, in bytes; 512 on CUDA.
        layout: whether to place tensors in an arena; False leaves all offsets at -1.
        updates_may_move: whether weight updates may run early; False keeps them in program order, behind all ops
            that precede the first of them.
        precedences: extra pairs of op ids (before, after).
        order: int32[num_ops], the op that runs at step i: keep this order; only its tensors are laid out.
        budget: the memory there is, "16GB", "16GiB" or bytes: least added time with which everything fits, the arena
            included.
        max_slowdown: least peak within this share of added time; 0.05 is 5 %.
        minimise: "peak": least peak at whatever time.
        device: what time is estimated for where the graph has no measured seconds: "h100", "h200", "a100", "rtx4090",
            "cpu" or a `DeviceProfile`.
        in_place, recompute: which levers a rewriting may use.
        chunked_loss: with a goal: compute large linear layers with their cross-entropy in so many chunks of rows. This
            changes rounding. See `BudgetPlan.chunked`.
        swap: whether a rewriting may swap tensors to host memory; the answer is then a `SwapPlan`. Default: where
            `host_budget` says how much of it there is. True without that: as much as it takes.
        link: to host memory: a `Link`, or bytes per second both ways; default: the device's, and for "autoswap" PCIe 3.
        host_budget: the host memory there is for swapping, "64GB", "64GiB" or bytes.
        swap_state: whether optimizer state may wait in host memory from one step to the next as well. Such a plan is
            for those who run it themselves: `olla.compile` keeps the state of the user's optimizer on the device.
        progress: called some ten times a second with (stage, seconds, value, bound) in bytes; False stops the search
            with its best answer.

    Returns:
        The plan; `plan.order[i]` is the op that runs at step i, `plan.offsets[t]` the first byte of tensor t.

    Raises:
        GraphError: the graph is invalid, or the precedences form a cycle with its dependencies.
        PlanError: the given order breaks a dependency.
        BudgetError: the budget is no number of bytes, or no plan fits it.
        ValueError: an option is out of its range.

    Example:
        >>> import olla
        >>> builder = olla.Graph.builder("fork")
        >>> a, b = builder.tensor(100), builder.tensor(10)
        >>> _ = builder.op("large", writes=[a]), builder.op("small", writes=[b]), builder.op("use", reads=[a])
        >>> plan = olla.plan(builder.build(), time_limit=1.0)
        >>> plan.program_peak_bytes, plan.peak_bytes, plan.gap
        (110, 100, 0.0)
    """
    autoswap = method == "autoswap"  # keeps the order, and rewrites the graph
    options = Options(
        method="program" if autoswap else method,
        time_limit=time_limit,
        seed=seed,
        alignment=alignment,
        layout=layout,
        updates_may_move=updates_may_move,
        precedences=tuple(precedences),
        order=None if order is None else np.array(order),
    )
    goal = Goal.of(budget, max_slowdown, minimise, device, in_place, recompute, chunked_loss)
    swapping = Swapping.of(swap, host_budget, link, method, goal, swap_state)
    if swapping is not None and (autoswap or goal is None):
        return by_autoswap(graph, options, goal, swapping, progress, device=device)
    if swapping is not None and goal is not None:
        return with_swaps(graph, options, goal, swapping, progress)
    if goal is not None:
        return recomputed(graph, options, goal, progress)
    from olla import pipeline

    return pipeline.run(graph, options, progress)


def recomputed(
    source: Source,
    options: Options,
    goal: Goal,
    progress: Progress | None,
    narrow: Callable[[Rules], Rules] | None = None,
) -> BudgetPlan:
    """Plan towards a goal by recomputation and in-place results.

    Args:
        source, options, goal, progress: as in `plan`.
        narrow: takes away what whoever runs the plan cannot do.

    Raises:
        BudgetError: no plan was found that fits the budget.
    """
    from olla.recompute.search import Run

    graph = graph_of(source)
    if options.precedences:
        bound = with_precedences(graph, options.precedences)
        plan = recomputed(bound, replace(options, precedences=()), goal, progress, narrow)
        plan = replace(plan, source_digest=graph.digest, options={**plan.options, **options.record()})
        check(graph, plan)
        return plan

    def search(graph: Graph, options: Options, goal: Goal) -> BudgetPlan:
        return Run(graph, options, goal, progress, narrow).run()

    return _chunked(graph, options, goal, progress, search)


def with_swaps(
    source: Source,
    options: Options,
    goal: Goal,
    swapping: Swapping,
    progress: Progress | None,
    narrow: Callable[[Rules], Rules] | None = None,
) -> SwapPlan:
    """Plan towards a goal by recomputation, in-place results and swaps.

    Args:
        source, options, goal, progress: as in `plan`.
        swapping: how tensors may be swapped.
        narrow: takes away what whoever runs the plan cannot do.

    Raises:
        BudgetError: no plan was found that fits the budget.
    """
    from olla.swap import combine

    def search(graph: Graph, options: Options, goal: Goal) -> SwapPlan:
        return combine.run(
            graph,
            options,
            goal,
            link=swapping.link,
            host_bytes=swapping.host_bytes,
            state=swapping.state,
            progress=progress,
            narrow=narrow,
        )

    return _chunked(graph_of(source), options, goal, progress, search)


def by_autoswap(
    source: Source,
    options: Options,
    goal: Goal | None,
    swapping: Swapping,
    progress: Progress | None,
    *,
    device: str | DeviceProfile,
) -> SwapPlan:
    """Plan by AutoSwap; see `olla.swap.combine.autoswap`. The device counts where there is no goal."""
    from olla.swap import combine

    link, host_bytes = swapping.link, swapping.host_bytes
    return combine.autoswap(source, options, goal, device=device, link=link, host_bytes=host_bytes, progress=progress)


def _chunked(
    graph: Graph,
    options: Options,
    goal: Goal,
    progress: Progress | None,
    search: Callable[[Graph, Options, Goal], _AnyPlan],
) -> _AnyPlan:
    """Search in the graph with its losses in chunks, where the goal asks for that."""
    if goal.chunked_loss is None:
        return search(graph, options, goal)
    from olla.chunk.search import run

    return run(graph, options, goal, progress, search)
