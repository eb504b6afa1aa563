"""The way from a graph to a plan: constrain, order, lay out, check."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from olla import _core
from olla.check import check
from olla.errors import SolverError
from olla.graph import Graph
from olla.plan import LiveTensor, OpAt, Plan, Status
from olla.precedences import nearest_order, require_order, updates_stay
from olla.window import window_graph

METHODS = ("auto", "ilp", "program")
Progress = Callable[[str, float, int, int], bool | None]

_LAYOUT_SHARE = 0.2  # of the time limit, kept for the layout
_ILP_MAX_OPS = 400  # larger graphs see the integer program on windows only, unless it is asked for
_WINDOW_OPS = 120  # steps around the peak that the integer program orders anew
_QUICK_SECONDS = 2.0  # most graphs need no more from the program order alone, and then no warm start, nor numba
_BOUND_SHARE = 0.2  # of the time to search, before the integer program
_ILP_SHARE = 0.4  # of the time to search, where the integer program may follow
_WINDOW_SHARE = 0.1  # the same, where it may follow on windows
_NUM_PEAK_TENSORS = 10


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a caller of `olla.plan` can choose; see there for the meaning.

    Raises:
        ValueError: an option is out of its range.
    """

    method: str = "auto"
    time_limit: float = 15.0
    seed: int = 0
    alignment: int = 512
    layout: bool = True
    updates_may_move: bool = True
    precedences: tuple[tuple[int, int], ...] = ()
    order: NDArray[Any] | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method is {self.method!r}, expected one of {', '.join(METHODS)}")
        if not 0 <= self.time_limit < math.inf:
            raise ValueError(f"time_limit is {self.time_limit}, expected a finite number of seconds from 0 on")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed is {self.seed}, expected 0 to 2^31 - 1")
        if not 1 <= self.alignment <= 2**30:
            raise ValueError(f"alignment is {self.alignment}, expected 1 to 2^30 bytes")
        if self.order is not None and (self.order.ndim != 1 or (self.order.size and self.order.dtype.kind != "i")):
            raise ValueError(
                f"order is an array of {self.order.dtype} with shape {self.order.shape}, expected one op id per step"
            )

    def record(self) -> dict[str, Any]:
        """Return the options as a plan keeps them: numbers, text, true or false."""
        return {
            "method": self.method,
            "time_limit": float(self.time_limit),
            "seed": int(self.seed),
            "alignment": int(self.alignment),
            "layout": self.layout,
            "updates_may_move": self.updates_may_move,
            "num_precedences": len(self.precedences),
            "order_given": self.order is not None,
        }


class Captured(Protocol):
    """Anything that carries the graph of a training step."""

    @property
    def graph(self) -> Graph:
        """The graph of the whole step."""


Source = Graph | str | os.PathLike[str] | Captured


def graph_of(source: Source) -> Graph:
    """Return the graph: itself, loaded from its path, or of a captured step.

    Raises:
        GraphError: the file is no valid graph.
        TypeError: source is none of these.
    """
    if isinstance(source, Graph):
        return source
    if isinstance(source, str | os.PathLike):
        return Graph.load(source)
    graph = getattr(source, "graph", None)
    if isinstance(graph, Graph):
        return graph
    raise TypeError(
        f"cannot plan a {type(source).__name__}: expected an olla.Graph, the path of a graph file, "
        "or a captured step from olla.capture"
    )


class _Placement(NamedTuple):
    """Where everything lies in the arena; see the attributes of `Plan`."""

    offsets: NDArray[np.int64]
    workspace_offsets: NDArray[np.int64]
    arena_bytes: int = 0
    load_bytes: int = 0


def run(source: Source, options: Options, progress: Progress | None) -> Plan:
    """Plan a graph; see `olla.plan`."""
    start = time.perf_counter()
    graph = graph_of(source)
    search = _Run(graph, options, progress, start)
    if isinstance(source, str | os.PathLike):
        search.seconds["read"] = time.perf_counter() - start
    elif graph is not source:
        search.seconds["capture"] = float(sum(getattr(source, "seconds", {}).values()))
    return search.run()


class _Run:
    """One call of `olla.plan`: the best order and bound so far, and the time they took."""

    def __init__(self, graph: Graph, options: Options, progress: Progress | None, start: float) -> None:
        self.start = start
        self.graph = graph
        self.options = options
        self.progress = progress
        self.seconds: dict[str, float] = {}
        self.interrupted = False
        self.note = ""
        self.layout_bound = 0  # no arena of the order is smaller
        self.before, self.after = self._precedences()
        self.core = graph.core.constrained(self.before, self.after) if len(self.before) else graph.core
        program = np.arange(graph.num_ops, dtype=np.int32)
        self.program_peak: int = _core.profile(graph.core, program)[3]
        self.order = nearest_order(self.core, program)
        if options.order is not None:
            self.order = options.order.astype(np.int32)
            require_order(self.core, self.order)
        self.peak = self._peak_of(self.order)
        self.bound = self.core.resident_bytes

    def run(self) -> Plan:
        self._search()
        placement = self._place()
        status = Status.OPTIMAL if self.peak == self.bound else Status.FEASIBLE
        peak_op, peak_tensors = self._peak()
        plan = Plan(
            graph_name=self.graph.name,
            graph_digest=self.graph.digest,
            num_ops=self.graph.num_ops,
            num_tensors=self.graph.num_tensors,
            method=self.options.method if self.options.order is None else "given",
            status=status,
            message=self._message(status, placement),
            order=self.order,
            alignment=self.options.alignment,
            peak_bytes=self.peak,
            lower_bound_bytes=self.bound,
            program_peak_bytes=self.program_peak,
            resident_bytes=self.graph.resident_bytes,
            before=self.before,
            after=self.after,
            seconds=self.seconds,  # the check is still to come
            peak_op=peak_op,
            peak_tensors=peak_tensors,
            options=self.options.record(),
            **placement._asdict(),
        )
        with self._stage("check"):
            check(self.graph, plan)
        self.seconds["total"] = self._elapsed()
        return plan

    def _elapsed(self) -> float:
        return time.perf_counter() - self.start

    def _left(self, share: float = 1.0) -> float:
        """Seconds left of a share of the time limit; none once interrupted."""
        return 0.0 if self.interrupted else max(0.0, share * self.options.time_limit - self._elapsed())

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @contextmanager
    def _search_stage(self, name: str) -> Iterator[None]:
        """Time a stage that Ctrl-C ends early: what was found before stays."""
        with self._stage(name):
            try:
                yield
            except KeyboardInterrupt:
                self.interrupted = True

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

    def _search(self) -> None:
        share = 1.0 - _LAYOUT_SHARE if self.options.layout else 1.0
        if self.options.order is not None or self.options.method == "program":
            with self._search_stage("order"):
                self._raise_bound(self._left(share))
            return
        if self.options.method == "auto":
            with self._search_stage("order"):
                self._run_order([self.order], min(_QUICK_SECONDS, 0.5 * self._left(share)))
            if self.peak == self.bound:
                return
        starts = [self.order]
        with self._search_stage("warmstart"):
            starts += self._warm_starts()
        with self._search_stage("order"):
            if self.options.method == "ilp":
                self.order = min(starts, key=self._peak_of)
                self.peak = self._peak_of(self.order)
                self._raise_bound(_BOUND_SHARE * self._left(share))
            else:
                small = self.graph.num_ops <= _ILP_MAX_OPS
                self._run_order(starts, self._left(share) * (1.0 - (_ILP_SHARE if small else _WINDOW_SHARE)))
        if not self.interrupted and (self.options.method == "ilp" or self.peak > self.bound):
            with self._search_stage("ilp"):
                if self.graph.num_ops <= _ILP_MAX_OPS or self.options.method == "ilp":
                    self._run_ilp(self._left(share))
                else:
                    self._run_windows(share)

    def _peak_of(self, order: NDArray[np.int32]) -> int:
        peak: int = _core.profile(self.core, order)[3]
        return peak

    def _warm_starts(self) -> list[NDArray[np.int32]]:
        if self.interrupted:
            return []
        from olla import warmstart  # loads numba

        return warmstart.starts(self.graph, self.core, self.order)

    def _raise_bound(self, limit: float) -> None:
        bound, cancelled = _core.lower_bound(self.core, self.order, self.graph.num_ops, limit, self.progress)
        self.interrupted |= cancelled
        self.bound = max(self.bound, bound)

    def _run_order(self, starts: list[NDArray[np.int32]], limit: float) -> None:
        order, peak, bound, _, _, _, cancelled = _core.order(self.core, starts, limit, self.options.seed, self.progress)
        self.interrupted |= cancelled
        self.bound = max(self.bound, bound)
        self._keep(order, peak)

    def _run_ilp(self, limit: float) -> None:
        try:
            order, peak, bound = self._solve_ilp(self.core, self.order, self.bound, limit)
        except SolverError as error:
            if self.options.method == "ilp":
                raise
            self.note = f"The integer program did not run: {error}"
            return
        self.bound = max(self.bound, bound)
        self._keep(order, peak)

    def _run_windows(self, share: float) -> None:
        """Solve the integer program on the steps around the peak, as long as that lowers it."""
        before = self.peak + 1
        while self.bound < self.peak < before and self._left(share) > 0.0:
            before = self.peak
            peak_step = int(_core.profile(self.core, self.order)[4])
            lo = max(0, peak_step - _WINDOW_OPS // 2)
            hi = min(self.graph.num_ops, lo + _WINDOW_OPS)
            inside = window_graph(self.graph, self.core, self.order, lo, hi)
            start = np.arange(hi - lo, dtype=np.int32)
            try:
                steps, _, _ = self._solve_ilp(inside, start, 0, self._left(share))
            except SolverError as error:
                self.note = f"The integer program did not run: {error}"
                return
            order = self.order.copy()
            order[lo:hi] = self.order[lo:hi][steps]
            self._keep(order, self._peak_of(order))

    def _solve_ilp(
        self, core: _core.Graph, start: NDArray[np.int32], bound: int, limit: float
    ) -> tuple[NDArray[np.int32], int, int]:
        from olla.ilp import order_ilp

        found = order_ilp(
            core,
            start,
            lower_bound_bytes=bound,
            time_limit=limit,
            seed=self.options.seed,
            progress=self.progress,
        )
        self.interrupted |= bool(found.info.get("cancelled", False))
        return found.order, found.peak_bytes, found.lower_bound_bytes

    def _keep(self, order: NDArray[np.int32], peak: int) -> None:
        if peak < self.peak:
            self.order, self.peak = order, peak

    def _place(self) -> _Placement:
        offsets = np.full(self.graph.num_tensors, -1, dtype=np.int64)
        workspace_offsets = np.full(self.graph.num_ops, -1, dtype=np.int64)
        if not self.options.layout:
            return _Placement(offsets, workspace_offsets)
        first, last, *_ = _core.profile(self.core, self.order)
        step = np.argsort(self.order)
        written = np.unique(self.graph.writes.item)
        offsets[written] = 0  # what has no bytes lies anywhere
        tensors = written[self.graph.tensor_bytes[written] > 0]
        ops = np.flatnonzero(self.graph.workspace_bytes)
        lower = np.concatenate([first[tensors], step[ops]]).astype(np.int64)
        upper = np.concatenate([last[tensors], step[ops] + 1]).astype(np.int64)
        size = np.concatenate([self.graph.tensor_bytes[tensors], self.graph.workspace_bytes[ops]])
        size = -(-size // self.options.alignment) * self.options.alignment

        found = None
        with self._search_stage("layout"):
            found = self._run_layout(lower, upper, size, self._left())
        if found is None:  # interrupted before there was an answer
            found = self._run_layout(lower, upper, size, 0.0)
        places, height, load, self.layout_bound = found
        offsets[tensors] = places[: len(tensors)]
        workspace_offsets[ops] = places[len(tensors) :]
        return _Placement(offsets, workspace_offsets, height, load)

    def _run_layout(
        self, lower: NDArray[np.int64], upper: NDArray[np.int64], size: NDArray[np.int64], limit: float
    ) -> tuple[NDArray[np.int64], int, int, int]:
        if len(size) == 0:
            return size, 0, 0, 0
        places, height, load, bound, cancelled = _core.layout(
            lower, upper, size, self.options.alignment, limit, self.options.seed, self.progress
        )
        self.interrupted |= cancelled
        return places, height, load, bound

    def _peak(self) -> tuple[OpAt | None, tuple[LiveTensor, ...]]:
        """Find the first op at the peak and the largest tensors live there, resident ones left out."""
        graph = self.graph
        if graph.num_ops == 0:
            return None, ()
        first, last, _, _, peak_step = _core.profile(self.core, self.order)
        op = int(self.order[peak_step])
        producer = np.full(graph.num_tensors, -1, dtype=np.int64)
        producer[graph.writes.item] = np.repeat(np.arange(graph.num_ops), np.diff(graph.writes.offset))
        live = (first <= peak_step) & (peak_step < last) & ((producer >= 0) | graph.donated) & (graph.tensor_bytes > 0)
        ids = np.flatnonzero(live)
        ids = ids[np.argsort(-graph.tensor_bytes[ids], kind="stable")][:_NUM_PEAK_TENSORS]
        tensors = [
            LiveTensor(
                id=int(t),
                name=graph.tensor_names[t],
                bytes=int(graph.tensor_bytes[t]),
                kind=graph.tensor_kinds[t],
                producer=graph.op_names[producer[t]] if producer[t] >= 0 else "",
            )
            for t in ids
        ]
        if graph.workspace_bytes[op] > 0:
            tensors.append(LiveTensor(-1, "", int(graph.workspace_bytes[op]), "workspace", graph.op_names[op]))
        tensors.sort(key=lambda tensor: -tensor.bytes)
        return OpAt(op, graph.op_names[op]), tuple(tensors[:_NUM_PEAK_TENSORS])

    def _message(self, status: Status, placement: _Placement) -> str:
        options = self.options
        parts = [status.message]
        if self.interrupted:
            parts.append("The search was interrupted: this is the best plan it had; let it run on for a better one.")
        if status is Status.FEASIBLE and not self.interrupted:
            if options.order is not None:
                parts.append("The order was given and kept: leave it out to search for a better one.")
            elif options.method == "program":
                parts.append("The program order was kept: use method 'auto' to search for a better one.")
            else:
                parts.append(f"A longer time limit than {options.time_limit:g} s may close the gap.")
        if placement.arena_bytes > placement.load_bytes:
            excess = placement.arena_bytes - placement.load_bytes
            if placement.arena_bytes == self.layout_bound:
                parts.append(f"The arena is {excess} bytes above its load: no layout of this order is tighter.")
            else:
                advice = "a longer time limit or another seed may find a tighter layout"
                parts.append(f"The arena is {excess} bytes above its load: {advice}.")
        return " ".join([*parts, self.note]).strip()
