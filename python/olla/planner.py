"""`olla.plan`: from a request to a plan, checked once."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from olla import pipeline
from olla.base import Progress, watched
from olla.check.check import check
from olla.errors import BudgetError, PlanError, SolverError
from olla.graph import DeviceProfile
from olla.plan import (
    METHODS,
    Link,
    Options,
    Plan,
    Request,
    Source,
    asked,
    graph_of,
)
from olla.report.interrupt import Interrupt
from olla.rewriting import Rewriting, needed_bytes

_REWRITE_SECONDS = 5e-5  # that it takes per op, at least, to rewrite a graph and to check that
_LATEST = 1.5  # times the time limit, by which that must be done


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

    With `budget`, `max_slowdown` or `minimise` the graph is rewritten as well: ops are recomputed instead of keeping
    what they make, pointwise results take over inputs that die, and tensors wait in host memory where that is allowed.
    The plan then belongs to the last graph of `plan.rewrites`.

    The plan has passed the independent checker. It is never worse than the program order, unless extra precedences
    forbid that order or another one was given. Ctrl-C returns the best plan so far; before a search has begun it raises
    KeyboardInterrupt, as a second one does.

    Args:
        graph: a `Graph`, the path of a graph file, or a captured step (anything whose `.graph` is a `Graph`).
        method: "auto", ours: min-cut refinement and branch and bound, from several starts where a gap is left. The
            others are there to compare with: "ilp" (OLLA's order program, then its address program), "joint" (order
            and addresses in one program), "model" (MODeL's devices), "roam" (segments at narrow waists, ordered and
            laid out one by one), "smartpool" (the program order; best fit by falling size), "inductor" (the best of
            PyTorch Inductor's four orders), "program" (the program order, our layout). See docs/model.md.
            "autoswap": the program order, tensors swapped to host memory by AutoSwap.
        time_limit: seconds for the whole call, reading a file included; what is not proved by then ends as FEASIBLE
            with its gap. Where a graph could not be rewritten and checked by then, its order alone is planned.
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
            changes rounding. See `olla.plan.Chunked`.
        swap: whether a rewriting may swap tensors to host memory. Default: where `host_budget` says how much of it
            there is. True without that: as much as it takes.
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
        BudgetError: the budget is no number of bytes, no plan fits it, or none was found within the time limit.
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
    start = time.perf_counter()
    options = Options(
        method="program" if method == "autoswap" else method,
        time_limit=time_limit,
        seed=seed,
        alignment=alignment,
        layout=layout,
        updates_may_move=updates_may_move,
        precedences=tuple(precedences),
        order=None if order is None else np.array(order),
    )
    goal, swapping = asked(
        budget=budget,
        max_slowdown=max_slowdown,
        minimise=minimise,
        device=device,
        in_place=in_place,
        recompute=recompute,
        chunked_loss=chunked_loss,
        swap=swap,
        host_budget=host_budget,
        link=link,
        method=method,
        swap_state=swap_state,
    )
    found = graph_of(graph)
    seconds: dict[str, float] = {}
    if isinstance(graph, str | os.PathLike):
        seconds["read"] = time.perf_counter() - start
    elif found is not graph:
        seconds["capture"] = float(sum(getattr(graph, "seconds", {}).values()))
    return run(Request(graph=found, options=options, goal=goal, swapping=swapping, progress=progress, seconds=seconds))


def run(request: Request) -> Plan:
    """Plan what is asked for, and check the answer.

    Raises:
        BudgetError: no plan was found that fits the budget.
    """
    start = time.perf_counter()
    with Interrupt() as interrupt:
        progress = watched(interrupt.ends(request.progress or (lambda *_: True)))
        plan = _planned(replace(request, progress=progress))
    middle = time.perf_counter()
    try:
        check(request.graph, plan)
    except PlanError as error:
        if plan.method in pipeline.OURS or plan.method not in METHODS:  # the layout is ours
            raise
        why = f"its layout breaks rule {error.rule!r}: {error}"
        raise SolverError(f"method {plan.method!r} failed: {why}", rule=error.rule, ids=error.ids) from error
    end = time.perf_counter()
    total = end - start + request.seconds.get("read", 0.0)
    return replace(plan, seconds={**request.seconds, **plan.seconds, "check": end - middle, "total": total})


def _planned(request: Request) -> Plan:
    """Plan what is asked for; where there is no time to rewrite a graph, as it is."""
    graph, goal, spent = request.graph, request.goal, request.seconds.get("read", 0.0)
    if goal is None:
        return pipeline.run(graph, request.options, request.progress, spent_seconds=spent)
    needed = _REWRITE_SECONDS * graph.num_ops
    if request.restrict is not None or spent + needed <= _LATEST * request.options.time_limit:
        return Rewriting(request, goal, spent).plan()
    plan = pipeline.run(graph, request.options, request.progress, spent_seconds=spent)
    limit = f"the time limit of {request.options.time_limit:g} s is too short to rewrite a graph of {graph.num_ops} ops"
    if goal.budget_bytes is not None and needed_bytes(plan) > goal.budget_bytes:
        raise BudgetError(
            f"the budget is {goal.budget_bytes} bytes, and no plan was found that fits it: {limit}. The lowest found "
            f"needs {needed_bytes(plan)}: try a time limit of {math.ceil(2 * (spent + needed))} s or more",
            rule="budget",
        )
    swapping = request.swapping
    return replace(
        plan,
        method="autoswap" if swapping and swapping.by_autoswap else plan.method,
        message=f"Nothing was rewritten: {limit}. {plan.message}",
        goal={**goal.record(), **(swapping.record() if swapping else {})},
        base_seconds=float(goal.device.op_seconds(graph).sum()),
        peak_lower_bound_bytes=0 if swapping and swapping.state else graph.resident_bytes,
    )
