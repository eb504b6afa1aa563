"""Shared state of searches: the best order and bound so far, the time used, and the reason for the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from olla._core import Limits, lower_bound, profile
from olla._core import order as best_order
from olla.base import rivals
from olla.errors import SolverError
from olla.layout import Placement
from olla.order import warm_starts
from olla.order.base_orders import inductor_schedules
from olla.order.method import Answer, Problem

_LAYOUT_SHARE = 0.2  # of the time limit, kept for the layout

Order = NDArray[np.int32]


class OrderSearch:
    """A search under way; every stage leaves its best order and bound here, so that Ctrl-C loses nothing.

    Attributes:
        problem: what is asked.
        order: the best order so far.
        peak: its peak, in bytes.
        bound: no valid order has a lower peak.
        interrupted: Ctrl-C, or the progress callback, ended the search.
        note: a sentence for the plan's message.
        details: lines on what the parts of the search found.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.order = problem.order
        self.peak = self.peak_of(problem.order)
        self.bound: int = problem.core.resident_bytes
        self.interrupted = False
        self.note = ""
        self.details: list[str] = []
        self._seconds: dict[str, float] = {}
        self._order_share = 1.0 - _LAYOUT_SHARE if problem.options.layout else 1.0

    def left(self, share: float | None = None) -> float:
        """Seconds left of a share of the time limit, by default that to order the ops; none once interrupted."""
        return 0.0 if self.interrupted else self.problem.left(self._order_share if share is None else share)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage that Ctrl-C ends early: what was found before stays."""
        start = time.perf_counter()
        try:
            yield
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def peak_of(self, order: Order) -> int:
        """Return the peak of an order."""
        return profile(self.problem.core, order).peak_bytes

    def keep(self, order: Order) -> None:
        """Take the order if it is better than the best so far.

        Raises:
            SolverError: it is no valid order.
        """
        if rivals.valid(self.problem.core, order) is None:
            raise SolverError("a search returned no valid order of the ops: this is a defect of olla, please report it")
        peak = self.peak_of(order)
        if peak < self.peak:
            self.order, self.peak = order, peak

    def orders(self, schedules: Mapping[str, Callable[[], Order]], *, in_time: bool = False) -> dict[str, Order]:
        """Run heuristics, with `in_time` while there is time; a line in the details says which of them failed."""
        found: dict[str, Order] = {}
        for name, schedule in schedules.items():
            if in_time and self.left() <= 0.0:
                break
            found |= rivals.orders(self.problem.core, {name: schedule}, self.details)
        return found

    def warm_starts(self) -> list[Order]:
        """Return the program order hoisted and Inductor's schedules, as long as there is time."""
        problem = self.problem
        starts = dict(inductor_schedules(problem.core))
        if warm_starts.is_loaded() or self.left() > warm_starts.LOAD_SECONDS:
            hoisted = {"hoisting": lambda: warm_starts.hoist(problem.graph, problem.core, problem.order)}
            starts = {**hoisted, **starts}
        return list(self.orders(starts, in_time=True).values())

    def schedules(self) -> list[Order]:
        """Return Inductor's list schedules, as long as there is time."""
        return list(self.orders(inductor_schedules(self.problem.core), in_time=True).values())

    def raise_bound(self, limit: float) -> None:
        """Raise the bound by minimum cuts around the ops of the best order."""
        core = self.problem.core
        bound, cancelled = lower_bound(core, self.order, core.num_ops, limit, self.problem.progress)
        self.interrupted |= cancelled
        self.bound = max(self.bound, bound)

    def refine(self, starts: list[Order], limit: float) -> None:
        """Refine the starts, then branch and bound."""
        problem = self.problem
        options = problem.options
        limits = Limits(time_limit=limit, max_work=options.max_work, progress=problem.progress)
        found = best_order(problem.core, starts, options.seed, limits)
        self.interrupted |= found.cancelled
        self.bound = max(self.bound, found.lower_bound_bytes)
        self.keep(found.order)

    def answer(self, placement: Placement | None = None) -> Answer:
        """Return the best order and bound, with its layout if there is one."""
        return Answer(
            self.order,
            self.bound,
            placement=placement,
            seconds=self._seconds,
            note=self.note,
            details=tuple(self.details),
            interrupted=self.interrupted,
        )
