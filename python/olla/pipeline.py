"""The way of one graph, which stays as it is, to a plan: constrain, ask the method, lay out."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from olla import _core
from olla.base import Progress, ended, rivals, watched
from olla.errors import OllaError, SolverError
from olla.graph import PROFILES, Graph, nearest_order
from olla.graph.precedences import require_order, updates_stay
from olla.layout import ArenaBuffers, LayoutOptions, Placement, nothing_placed, place, rounded_up
from olla.order import Answer, Problem
from olla.order.overlap import overlapped
from olla.plan import Options, Plan, Status
from olla.plan.peak import LiveTensor, OpAt

_NUM_PEAK_TENSORS = 10
_LINK = PROFILES["a100"]  # by whose seconds collectives are begun early and waited for late
_LAYOUT_NODES = 200_000  # of the exact search: some seconds, where the greedy passes do not reach the load at once
OURS = {"auto": "order.auto", "program": "order.program", "inductor": "order.list_schedules"}  # the rest: methods


class Ordered(NamedTuple):
    """An order of a graph's ops, and what is known about it.

    Attributes:
        answer: of the method: the order and its proof.
        peak_bytes: of the order.
    """

    answer: Answer
    peak_bytes: int

    @property
    def order(self) -> NDArray[np.int32]:
        """int32[n], the op that runs at step i."""
        return self.answer.order


def find_order(graph: Graph, options: Options, progress: Progress | None, *, overlap: bool = True) -> Ordered:
    """Order a graph's ops; nothing is laid out.

    Collectives begin early and are waited for late, where the peak allows it; not so without `overlap`.
    """
    return _Run(graph, options, progress, overlap).ordered()


def run(
    graph: Graph, options: Options, progress: Progress | None, *, overlap: bool = True, spent_seconds: float = 0.0
) -> Plan:
    """Order a graph's ops, as `find_order`, and lay out its tensors; that the plan holds is for `olla.check` to say.

    So much of the time limit may be spent already.
    """
    return _Run(graph, options, progress, overlap, spent_seconds).plan()


class _Run:
    """One graph on its way to a plan."""

    def __init__(
        self, graph: Graph, options: Options, progress: Progress | None, overlap: bool, spent_seconds: float = 0.0
    ) -> None:
        self.start = time.perf_counter() - spent_seconds
        self.graph, self.options = graph, options
        self.overlap = overlap and options.method == "auto" and options.order is None
        self.progress = watched(progress)
        self.seconds: dict[str, float] = {}
        self.interrupted = False
        self.layout_bound = 0  # no arena of the order is smaller
        self.before, self.after = self._precedences()
        self.core = graph.core.constrained(self.before, self.after) if len(self.before) else graph.core
        self.order = nearest_order(self.core, np.arange(graph.num_ops, dtype=np.int32))
        if options.order is not None:
            self.order = options.order.astype(np.int32)
            require_order(self.core, self.order)

    def ordered(self) -> Ordered:
        answer = self._ask()
        if self.overlap:
            answer = answer._replace(order=overlapped(self.graph, self.core, answer.order, _LINK))
        self.order = answer.order
        self.profile = _core.profile(self.core, self.order)
        return Ordered(answer, self.profile.peak_bytes)

    def plan(self) -> Plan:
        answer, peak = self.ordered()
        bound = max(answer.lower_bound_bytes, self.core.resident_bytes)
        placement = self._place(answer)
        status = Status.OPTIMAL if peak == bound else Status.FEASIBLE
        peak_op, peak_tensors = self._peak()
        return Plan(
            graph_name=self.graph.name,
            graph_digest=self.graph.digest,
            num_ops=self.graph.num_ops,
            num_tensors=self.graph.num_tensors,
            method=self.options.method if self.options.order is None else "given",
            status=status,
            message=self._message(status, placement, answer.note),
            order=self.order,
            alignment=self.options.alignment,
            peak_bytes=peak,
            lower_bound_bytes=bound,
            program_peak_bytes=self.graph.program_peak_bytes,
            resident_bytes=self.graph.resident_bytes,
            donated_bytes=_donated_bytes(self.graph),
            arena_lower_bound_bytes=self._arena_bound(answer, bound),
            before=self.before,
            after=self.after,
            seconds=self.seconds,
            peak_op=peak_op,
            peak_tensors=peak_tensors,
            details=answer.details,
            options=self.options.record(),
            source_digest=self.graph.digest,
            goal={},
            base_peak_bytes=peak,
            peak_lower_bound_bytes=bound,
            **placement._asdict(),
        )

    def _left(self, share: float = 1.0) -> float:
        """Seconds left of a share of the time limit; none once interrupted."""
        passed = time.perf_counter() - self.start
        return 0.0 if self.interrupted or ended(self.progress) else max(0.0, share * self.options.time_limit - passed)

    def _precedences(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        try:
            pairs = np.array(self.options.precedences, dtype=np.int32).reshape(-1, 2)
        except (ValueError, TypeError, OverflowError) as cause:
            raise ValueError(f"precedences must be pairs of op ids (before, after): {cause}") from None
        before, after = pairs.T
        if not self.options.updates_may_move:
            chain_before, chain_after = updates_stay(self.graph)
            before, after = np.concatenate([before, chain_before]), np.concatenate([after, chain_after])
        return np.ascontiguousarray(before), np.ascontiguousarray(after)

    def _ask(self) -> Answer:
        """Ask the method. Should Ctrl-C reach this far, the order it began with is the answer."""
        method = self.options.method if self.options.order is None else "program"
        problem = Problem(self.graph, self.core, self.order, self.options, self._left, self.progress)
        try:
            answer = solver(method)(problem)
            if rivals.valid(self.core, answer.order) is None:
                raise SolverError("it returned no valid order of the ops")
        except KeyboardInterrupt:
            answer = Answer(self.order, interrupted=True)
        except Exception as error:
            answer = self._failed(method, error)
        self.interrupted = answer.interrupted
        self.seconds |= answer.seconds
        return answer

    def _failed(self, method: str, error: Exception) -> Answer:
        """Return the order that the search began with, unless a certain method was asked for: then raise."""
        why = rivals.failure(error, self.progress)
        if method == "auto":
            notes: list[str] = []
            rivals.leave_out("the search for an order", why, notes)
            return Answer(self.order, note="The search failed: its first order was kept.", details=tuple(notes))
        if isinstance(error, MemoryError):
            raise error
        if isinstance(error, OllaError):
            raise type(error)(f"method {method!r} failed: {error}", rule=error.rule, ids=error.ids) from error
        raise SolverError(f"method {method!r} failed: {why}; please report it, or choose another method") from error

    def _place(self, answer: Answer) -> Placement:
        if not self.options.layout:
            return nothing_placed(self.graph)
        if answer.placement is not None:
            self.layout_bound = answer.placement.load_bytes
            return answer.placement
        start = time.perf_counter()
        buffers = ArenaBuffers(self.graph, self.core, self.order, self.options.alignment)
        try:
            places = self._run_layout(buffers, self._left())
        except KeyboardInterrupt:  # before there was an answer
            self.interrupted = True
            places = self._run_layout(buffers, 0.0)
        self.seconds["layout"] = time.perf_counter() - start
        return buffers.placed(places)

    def _run_layout(self, buffers: ArenaBuffers, limit: float) -> NDArray[np.int64]:
        options = self.options
        effort = LayoutOptions(alignment=options.alignment, seed=options.seed, max_nodes=_LAYOUT_NODES)
        found = place(buffers.lower, buffers.upper, buffers.size, effort, limit, self.progress)
        self.layout_bound = found.bound_bytes
        self.interrupted |= found.cancelled
        return found.offsets

    def _arena_bound(self, answer: Answer, bound: int) -> int:
        """No order has a smaller arena: what lives at its peak, but for what keeps its own storage, lies there."""
        if not self.options.layout:
            return 0
        graph, alignment = self.graph, self.options.alignment
        elsewhere = graph.resident_bytes + _donated_bytes(graph)
        from_peak = rounded_up(max(0, bound - elsewhere), alignment)
        return max(answer.arena_lower_bound_bytes, from_peak)

    def _peak(self) -> tuple[OpAt | None, tuple[LiveTensor, ...]]:
        """Find the first op at the peak and the largest tensors live there, resident ones left out."""
        graph = self.graph
        if graph.num_ops == 0:
            return None, ()
        first, last, peak_step = self.profile.first, self.profile.last, self.profile.peak_step
        op = int(self.order[peak_step])
        producer = graph.writer
        live = (first <= peak_step) & (peak_step < last) & ((producer >= 0) | graph.donated) & (graph.tensor_bytes > 0)
        ids, tensors = np.flatnonzero(live), []
        for t in ids[np.argsort(-graph.tensor_bytes[ids], kind="stable")][:_NUM_PEAK_TENSORS].tolist():
            maker = graph.op_names[producer[t]] if producer[t] >= 0 else ""
            num_bytes = int(graph.tensor_bytes[t])
            tensors.append(LiveTensor(t, graph.tensor_names[t], num_bytes, graph.tensor_kinds[t], maker))
        if graph.workspace_bytes[op] > 0:
            tensors.append(LiveTensor(-1, "", int(graph.workspace_bytes[op]), "workspace", graph.op_names[op]))
        tensors.sort(key=lambda tensor: -tensor.bytes)
        return OpAt(op, graph.op_names[op]), tuple(tensors[:_NUM_PEAK_TENSORS])

    def _message(self, status: Status, placement: Placement, note: str) -> str:
        options = self.options
        parts = [status.message]
        if self.interrupted:
            parts.append("The search was interrupted: this is the best plan it had; let it run on for a better one.")
        if status is Status.FEASIBLE and not self.interrupted:
            if options.order is not None:
                parts.append("The order was given and kept: leave it out to search for a better one.")
            elif options.method in ("program", "smartpool"):
                parts.append("The program order was kept: use method 'auto' to search for a better one.")
            elif options.method in ("roam", "inductor"):
                parts.append("Method 'auto' may find a better order.")
            else:
                parts.append(f"A longer time limit than {options.time_limit:g} s may close the gap.")
        if placement.arena_bytes > placement.load_bytes:
            excess = placement.arena_bytes - placement.load_bytes
            if placement.arena_bytes == self.layout_bound:
                parts.append(f"The arena is {excess} bytes above its load: no layout of this order is tighter.")
            else:
                advice = "a longer time limit or another seed may find a tighter layout"
                if options.method in ("roam", "smartpool"):
                    advice = "method 'auto' may find a tighter layout"
                parts.append(f"The arena is {excess} bytes above its load: {advice}.")
        return " ".join([*parts, note]).strip()


def _donated_bytes(graph: Graph) -> int:
    return int(graph.tensor_bytes[graph.donated].sum())


def solver(method: str) -> Callable[[Problem], Answer]:
    """Return `solve` of a method, whose module is loaded when it is asked for.

    Args:
        method: one of `olla.plan.options.METHODS`.

    Example:
        >>> solver("program").__module__
        'olla.order.program'
    """
    module = OURS.get(method, f"methods.{method}")
    return cast(Callable[[Problem], Answer], importlib.import_module(f"olla.{module}").solve)
