"""From a request with a goal to a plan: the searches that rewrite a graph, a layout of what they find, and bounds."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from olla import pipeline
from olla.base import rivals
from olla.errors import SolverError
from olla.graph import Graph, Rules, rules
from olla.graph.precedences import with_precedences
from olla.plan import Chunked, Costs, Goal, Options, Plan, Request, Rewrite, Swapped
from olla.plan.plan import with_figures
from olla.plan.swapped import SwapDecision

if TYPE_CHECKING:
    from olla.recompute.search import RecomputeSearch
    from olla.swap.autoswap import AutoSwapSearch
    from olla.swap.combine import CombinedSearch

    # For rewritings of one graph. It orders where it has to, but lays out nothing and makes no plan.
    RewriteSearch: TypeAlias = RecomputeSearch | AutoSwapSearch | CombinedSearch

_MAX_LAYOUTS = 6  # rewritten graphs laid out until the arena fits a budget
_ROUNDED_UP = 1 + 1e-12  # sums of seconds depend on their order


class Rewriting:
    """One request with a goal.

    Args:
        request: what is asked for.
        goal: of it.
        spent_seconds: of its time limit, so far.
    """

    def __init__(self, request: Request, goal: Goal, spent_seconds: float) -> None:
        self.start = time.perf_counter() - spent_seconds
        self.request, self.goal, self.options = request, goal, request.options
        self.graph = request.graph  # that is rewritten by a search
        if self.options.precedences:
            self.graph = with_precedences(self.graph, self.options.precedences)
            self.options = replace(self.options, precedences=())
        self.left_out: list[str] = []
        self.note = ""
        self.base_peak_bytes: int | None = None
        self.chunked = self._chunk()
        # What the graph with chunks takes beyond the original, and what it takes itself: as estimated.
        self.extra_seconds = self.chunked_seconds = 0.0
        if self.chunked is not None:
            self.graph, self.extra_seconds = self.chunked.graph, self.chunked.added_seconds
            self.chunked_seconds = float(goal.device.op_seconds(self.graph).sum())
        if request.costs is not None:
            self.graph = request.costs.on(self.graph)
        self.rules = self._rules()
        self.search, self.candidates = self._searches()

    def plan(self) -> Plan:
        """Return the plan; that it holds is for `olla.check` to say.

        Raises:
            BudgetError: no plan was found that fits the budget.
        """
        budget = self.goal.budget_bytes
        plan = self._made(self.search, self.search.least(self._most_seconds())) if budget is None else self._fit(budget)
        plan = self._bounded(plan)
        if self.request.costs is None:
            return plan
        costed = self.request.graph if self.chunked is None else self.chunked.graph
        return with_costs(plan, Costs.of(costed), self.request.graph)

    def _chunk(self) -> Chunked | None:
        """Put losses in chunks, where the goal asks for that and it serves it."""
        if self.goal.chunked_loss is None:
            return None
        if self.request.chunked is not None:
            return self.request.chunked
        from olla.chunk import chunk

        found = chunk(self.graph, self.options, self.goal, self.request.progress, self.request.suits)
        if isinstance(found, str):
            self.note = f"No loss was chunked: {found}. "
            return None
        chunked, self.base_peak_bytes = found
        return chunked

    def _rules(self) -> Rules:
        """Return what may be done with the ops of the graph that is rewritten."""
        if self.request.swapping is not None and self.request.swapping.by_autoswap:
            return rules(self.graph, self.goal.device, in_place=False, recompute=False)
        goal, restrict = self.goal, self.request.restrict
        allowed = rules(self.graph, goal.device, in_place=goal.in_place, recompute=goal.recompute)
        return allowed if restrict is None else restrict(allowed, self.chunked)

    def _searches(self) -> tuple[RewriteSearch, dict[str, RewriteSearch]]:
        """Return the search for the goal, and those that are tried for a budget in turn."""
        request, goal = self.request, self.goal
        passed = time.perf_counter() - self.start
        options = replace(self.options, time_limit=max(0.0, self.options.time_limit - passed))
        if request.swapping is None:
            from olla.recompute.search import RecomputeSearch

            search: RewriteSearch = RecomputeSearch(self.graph, self.rules, options, request.progress)
        elif request.swapping.by_autoswap:
            from olla.swap.autoswap import AutoSwapSearch

            search = AutoSwapSearch(self.graph, self.rules, options, request.swapping)
        else:
            from olla.swap.combine import CombinedSearch

            search = CombinedSearch(self.graph, self.rules, options, request.swapping, request.progress)
            if goal.budget_bytes is not None:
                return search, {"a plan without swaps": search.alone(), "a plan with swaps": search}
        return search, {"a plan": search}

    def _most_seconds(self) -> float:
        """Return what a search may add to the graph that it rewrites."""
        slowdown = self.goal.max_slowdown
        if slowdown is None:
            return math.inf
        if self.chunked is not None:
            estimated = self.chunked_seconds
            slowdown = (slowdown * (estimated - self.extra_seconds) - self.extra_seconds) / estimated
        return slowdown * self.search.base_seconds * _ROUNDED_UP

    def _fit(self, budget_bytes: int) -> Plan:
        """Return the plan of least added time, of all searches, with which everything fits."""
        if len(self.candidates) == 1:
            found = self._lowered(self.search, budget_bytes)
            if found is None:
                raise self.search.refused(budget_bytes)
            return found
        best, failed = None, list[Exception]()
        for name, search in self.candidates.items():
            found = None
            with rivals.optional(name, self.left_out, self.request.progress) as errors:
                found = self._lowered(search, budget_bytes)
            failed += errors
            self.search.lowest_bytes = min(self.search.lowest_bytes, search.lowest_bytes)
            if found is not None and (best is None or found.added_seconds < best.added_seconds):
                best = found
            if best is not None and best.added_seconds == 0:
                break
        if best is None:
            raise failed[0] if failed else self.search.refused(budget_bytes)
        return best

    def _lowered(self, search: RewriteSearch, budget_bytes: int) -> Plan | None:
        """Lower the peak until the arena fits as well: fragmentation and rounding come on top of the peak."""
        target, needs = budget_bytes, list[int]()
        for _ in range(_MAX_LAYOUTS):
            rewrites = search.within(target)
            if rewrites is None:
                break
            needs.append(needed_bytes(plan := self._fitted(search, rewrites, budget_bytes)))
            if needs[-1] > budget_bytes and (lower := search.lower()) is not None:  # before more time is paid
                needs.append(needed_bytes(plan := self._fitted(search, lower, budget_bytes)))
            if needs[-1] <= budget_bytes:
                return plan
            target = min(target, plan.peak_bytes) - (needs[-1] - budget_bytes)
        for rewrites in search.last_resorts(budget_bytes):
            needs.append(needed_bytes(plan := self._fitted(search, rewrites, budget_bytes)))
            if needs[-1] <= budget_bytes:
                return plan
        search.lowest_bytes = min(needs, default=search.lowest_bytes)  # of what was laid out, its peak says too little
        return None

    def _fitted(self, search: RewriteSearch, rewrites: Sequence[Rewrite], budget_bytes: int) -> Plan:
        """Order and lay out; collectives that begin as early as the peak allows may leave gaps in the arena."""
        plan, last = self._made(search, rewrites), rewrites[-1]
        overlaps = self.options.method == "auto" and not isinstance(last, Swapped) and any(last.graph.collectives)
        if needed_bytes(plan) <= budget_bytes or not overlaps:
            return plan
        return min(plan, self._made(search, rewrites, overlap=False), key=needed_bytes)

    def _made(self, search: RewriteSearch, rewrites: Sequence[Rewrite], *, overlap: bool = True) -> Plan:
        """Order and lay out the last graph."""
        request, options = self.request, search.final_options()
        last = rewrites[-1]
        swaps = isinstance(last, Swapped)
        if swaps:
            options = replace(options, order=np.arange(last.graph.num_ops, dtype=np.int32))
        figures = pipeline.run(last.graph, options, request.progress, overlap=overlap)
        added = math.fsum(rewrite.added_seconds for rewrite in rewrites)
        of_graph = "graph that swaps" if swaps else "rewritten graph"
        goal = {**self.goal.record(), **(request.swapping.record() if request.swapping else {})}
        return replace(
            figures,
            method="autoswap" if request.swapping and request.swapping.by_autoswap else request.options.method,
            message=f"{self.note}Of the {of_graph}: {figures.message}",
            details=(*figures.details, *search.details, *self.left_out),
            options=request.options.record(),
            rewrites=(*((self.chunked,) if self.chunked else ()), *rewrites),
            source_digest=request.graph.digest,
            program_peak_bytes=request.graph.program_peak_bytes,
            goal=goal,
            base_peak_bytes=search.base_peak_bytes if self.base_peak_bytes is None else self.base_peak_bytes,
            base_seconds=search.base_seconds - self.extra_seconds,
            added_seconds=max(0.0, added + self.extra_seconds),
        )

    def _bounded(self, plan: Plan) -> Plan:
        """Return the plan with what is proved about every other one, and a line on every tensor that is swapped."""
        added = max(0.0, math.fsum(made.added_seconds for made in plan.rewrites if made is not self.chunked))
        most = max(added, self._most_seconds())
        peak_bytes, seconds = self.search.bounds(plan, added, most, max(self.goal.budget_bytes or 0, plan.peak_bytes))
        if peak_bytes > plan.peak_bytes or seconds > added:
            raise SolverError(
                f"a plan with {plan.peak_bytes} bytes and {added} added seconds is below its lower bounds "
                f"({peak_bytes} bytes, {seconds} seconds): this is a defect of olla, please report it"
            )
        found = plan.decisions(self.graph, self.rules) if plan.swapped else []
        origin = plan.tensor_origin  # the graph with swaps has the tensors of the one without
        swaps = (line._replace(tensor=int(origin[line.tensor])) for line in found if isinstance(line, SwapDecision))
        return replace(
            plan,
            peak_lower_bound_bytes=peak_bytes,
            added_seconds_lower_bound=max(0.0, seconds + self.extra_seconds),
            details=(*plan.details, *map(str, swaps)),
        )


def with_costs(plan: Plan, costs: Costs, given: Graph) -> Plan:
    """Return a plan with the figures of other costs; nothing is laid out.

    Args:
        plan: with rewritings.
        costs: of the graph that was given, or of the one with its losses in chunks.
        given: the graph that was given, with these costs.
    """
    rewrites = list[Rewrite]()
    for rewrite in plan.rewrites:
        if not isinstance(rewrite, Chunked):
            costs = costs.through(rewrite)
            rewrite = replace(rewrite, graph=costs.on(rewrite.graph))
        rewrites.append(rewrite)
    may_move = bool(plan.options["updates_may_move"]) or plan.swapped is not None  # swaps keep the order in any case
    options = Options(layout=False, order=plan.order, time_limit=0.0, updates_may_move=may_move)
    figures = pipeline.run(rewrites[-1].graph, options, None)
    figures = replace(figures, method=plan.method, options=plan.options, seconds=plan.seconds, details=plan.details)
    return with_figures(replace(plan, rewrites=tuple(rewrites)), figures, rewrites[-1].graph, given)


def needed_bytes(plan: Plan) -> int:
    """Return total memory: arena plus resident and donated tensors; without a layout, the peak."""
    return max(plan.peak_bytes, plan.arena_bytes and plan.arena_bytes + plan.resident_bytes + plan.donated_bytes)
