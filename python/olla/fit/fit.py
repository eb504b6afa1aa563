"""`olla.fit`: which sizes of a training step fit a memory, and how. Importing this module does not import torch."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from olla.base import Progress, parse_bytes
from olla.base.files import naming
from olla.errors import BudgetError, CaptureError, OllaError
from olla.fit import eager
from olla.fit.caching import Request
from olla.fit.largest import next_size
from olla.fit.result import Fit, SizeRow, Way
from olla.fit.updates import update_of, with_update
from olla.graph import DeviceProfile, Graph, profile_of, rules
from olla.plan import Plan
from olla.planner import plan
from olla.rewriting import needed_bytes

SIZES = (1, 2, 4, 8, 16, 32)
SLOWDOWNS = (0.05, 0.1)
QUANTILES = (0.5, 0.9, 0.99, 1.0)  # of lengths, which are sizes
_MOST_TRIES = 30  # captures for the exact largest n
_MOST_GUESSES = 6  # of them, by interpolating peaks; the others bisect


def fit(
    make_step: Callable[[int], Any],
    *,
    memory: int | str,
    device: str | DeviceProfile = "a100",
    sizes: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    slowdowns: Sequence[float] = SLOWDOWNS,
    exact: str | None = None,
    weights: bool = False,
    world_size: int | None = None,
    parallel: str | None = None,
    time_limit: float = 10.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Fit:
    """Say which sizes of a training step fit a memory, as it is, planned and rewritten; nothing is run.

    For every size the step is captured on fake tensors and planned in several ways, see `olla.fit.Fit`. What is said to
    fit was planned for that size, arena included, and the plan was checked.

    Args:
        make_step: `make_step(n)` returns (model, batch, optimizer, loss), the arguments of `olla.capture`, or a
            captured step or an `olla.Graph`. What n counts is its own matter: samples, tokens, micro-batches.
        memory: that there is, "80GB", "80GiB" or bytes. What the driver and other programs take is not in it.
        device: what time is estimated for: "h100", "h200", "a100", "rtx4090", "cpu" or a `DeviceProfile`.
        sizes: values of n; by default 1, 2, 4, 8, 16, 32, or those that `lengths` gives.
        lengths: of the batches of a run, in their order, where n is the length of a batch: for each way the result then
            tells what share of them fits, and the first that does not. Sizes are by default their median, their 90th
            and 99th percentile and the longest; further ones are tried until it is known of each whether it fits the
            eager loop, and the way that ``exact`` names.
        slowdowns: shares of added time within which the least peak is wanted; 0.05 is 5 %.
        exact: a way, such as "eager" or "budget": further sizes are tried until its largest n is known.
        weights: whether make_step may allocate what it likes. By default it runs under `torch.device("meta")`: a model
            made there has no weights.
        world_size, parallel: of `olla.capture`: how many ranks run the step, and what they share. Memory and n are of
            one rank.
        time_limit: seconds for each plan, of up to four for a size.
        seed: for the random choices of plans.
        progress: as in `olla.plan`; False ends it with the sizes and ways done so far.

    Returns:
        Rows as data, with `largest(way)`, `fastest`, `save(path)` and `plot(path)`; `print` shows a table.

    Raises:
        BudgetError: memory is no number of bytes.
        CaptureError: make_step failed, or a step cannot be captured; the message names n.
        ValueError: an option is out of its range.

    Complexity: for each size a capture (about 1 ms per operator) and up to four plans.

    Example:
        >>> import olla
        >>> def make_step(n):
        ...     builder = olla.Graph.builder("chain")
        ...     a, b, c, d = (builder.tensor(n * size) for size in (100, 10, 100, 1))
        ...     _ = builder.op("a", writes=[a]), builder.op("b", reads=[a], writes=[b])
        ...     _ = builder.op("c", reads=[b], writes=[c]), builder.op("d", reads=[c], writes=[d])
        ...     _ = builder.op("e", reads=[a, d])
        ...     return builder.build()
        >>> found = olla.fit(make_step, memory=200_000, sizes=(512, 1024), exact="least")
        >>> found.largest("eager"), found.largest("least")
        (512, 1812)
    """
    names = ("eager", "planned", *(_name(share) for share in slowdowns), "least", "budget")
    if not callable(make_step):
        raise ValueError(f"make_step is a {type(make_step).__name__}, expected a function of n")
    if exact is not None and exact not in names:
        raise ValueError(f"exact is {exact!r}, expected one of {', '.join(names)}")
    if len(set(names)) < len(names):
        raise ValueError(f"slowdowns are {list(slowdowns)}, expected different ones")
    if not 0 <= time_limit < math.inf:
        raise ValueError(f"time_limit is {time_limit}, expected a finite number of seconds from 0 on")
    search = _SizeSearch(
        make_step,
        parse_bytes(memory, "memory"),
        profile_of(device),
        weights,
        progress,
        ranks={"world_size": world_size, "parallel": parallel},
        options={"time_limit": time_limit, "seed": seed},
        goals={_name(share): {"max_slowdown": share} for share in slowdowns},
    )
    run = () if lengths is None else tuple(_numbers(lengths, "lengths", "length"))
    if sizes is None:
        sizes = sorted({sorted(run)[math.ceil(share * len(run)) - 1] for share in QUANTILES}) if run else SIZES
    for n in sorted(set(_numbers(sizes, "sizes", "size"))):
        search.add(n, names)
    if run and exact != "eager":
        search.find_largest("eager", sorted(set(run)))
    is_exact = exact is not None and search.find_largest(exact)
    return Fit(
        memory_bytes=search.memory_bytes,
        device=search.device.name,
        world_size=world_size or 1,
        parallel=parallel or "",
        names=names,
        rows=tuple(search.rows[n] for n in sorted(search.rows)),
        exact=exact if exact is not None and is_exact else "",
        lengths=run,
        interrupted=search.is_stopped,
        seconds=time.perf_counter() - search.start,
    )


def _name(share: object) -> str:
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < math.inf:
        raise ValueError(f"slowdown is {share!r}, expected a share of the step's time: 0.05 for 5 %")
    return f"{100 * share:g}%"


def _numbers(given: Sequence[int], names: str, name: str) -> list[int]:
    """Check sizes or lengths; whole numbers of numpy and torch count."""
    found = list(given)
    if not found:
        raise ValueError(f"{names} are empty, expected whole numbers such as (8, 16, 32)")
    for n in found:
        if _whole(n) < 1:
            raise ValueError(f"{name} is {n!r}, expected a whole number from 1 on")
    return [_whole(n) for n in found]


def _whole(n: Any) -> int:
    """Return a whole number as one of Python's; 0 for what is none."""
    with contextlib.suppress(TypeError):
        return 0 if isinstance(n, bool) else operator.index(n)
    return 0


class _Stopped(Exception):
    """Somebody asked for the end."""


@dataclass
class _SizeSearch:
    """The rows so far, and the means to make one more."""

    make_step: Callable[[int], Any]
    memory_bytes: int
    device: DeviceProfile
    weights: bool
    progress: Progress | None
    ranks: Mapping[str, Any]
    options: Mapping[str, Any]
    goals: Mapping[str, Mapping[str, Any]]
    rows: dict[int, SizeRow] = field(default_factory=dict)
    is_stopped: bool = False
    start: float = field(default_factory=time.perf_counter)

    @property
    def on_gpu(self) -> bool:
        """Whether the step is to run on a GPU."""
        return not self.device.name.startswith("cpu")

    def add(self, n: int, names: Sequence[str]) -> None:
        """Make the row of a size, or complete it, unless stopped; a stop on the way keeps the ways done so far."""
        if self.is_stopped:
            return
        ways: dict[str, Way] = dict(self.rows[n].ways) if n in self.rows else {}
        start = middle = time.perf_counter()
        graph: Graph | None = None
        try:
            self._tell(f"n = {n}: capture")
            graph, update = self._captured(n)
            middle = time.perf_counter()
            for name in names:
                self._tell(f"n = {n}: {name}")
                ways[name] = self._way(n, graph, name, ways, update)
        except _Stopped:
            self.is_stopped = True
        if graph is not None and ways:
            seconds = {"capture": middle - start, "plan": time.perf_counter() - middle}
            self.rows[n] = SizeRow(
                n=n,
                graph_name=graph.name,
                num_ops=graph.num_ops,
                program_peak_bytes=graph.program_peak_bytes,
                resident_bytes=graph.resident_bytes,
                ways=ways,
                seconds=seconds,
            )

    def find_largest(self, way: str, among: Sequence[int] | None = None) -> bool:
        """Try further sizes until one fits a way and the next does not; return whether that is so.

        Args:
            way: of Fit.
            among: rising sizes that are of interest; None: all.
        """
        by = "least" if way == "budget" else way  # a plan that fills the memory says nothing of the next size's peak
        names = ["least", "budget"] if way == "budget" else [way]
        for i in range(_MOST_TRIES):
            if self.is_stopped:
                return False
            rows = [(n, row.ways) for n, row in sorted(self.rows.items()) if way in row.ways]
            tried = [(n, ways[way].fits, ways[by].peak_bytes) for n, ways in rows]
            n = next_size(tried, self.memory_bytes, bisect=i >= _MOST_GUESSES, among=among)
            if n is None:
                return True
            self.add(n, names)
        return False

    def _tell(self, stage: str, seconds: float = 0.0, value: int = 0, bound: int = 0) -> None:
        """Ask the progress callback whether to go on."""
        if self.progress is not None and self.progress(stage, seconds, value, bound) is False:
            raise _Stopped

    def _captured(self, n: int) -> tuple[Graph, list[Request] | None]:
        """Return the graph of a size, and what its optimizer's step requests, if that is known."""
        try:
            with naming(f"make_step({n})"), contextlib.nullcontext() if self.weights else _meta():
                made = self.make_step(n)
        except (OllaError, MemoryError):
            raise
        except Exception as error:  # whatever the user's own code raises
            remedy = "" if self.weights else ". It ran without weights, on the meta device; weights=True allows them"
            raise CaptureError(f"make_step({n}) failed with {type(error).__name__}: {error}{remedy}") from error
        if isinstance(made, Graph):
            return made, None
        if isinstance(made, tuple) and len(made) == 4:
            return self._capture(n, *made)
        graph = getattr(made, "graph", None)
        if isinstance(graph, Graph):
            return graph, None
        what = f"{len(made)} values" if isinstance(made, tuple) else f"a {type(made).__name__}"
        expected = "(model, batch, optimizer, loss), a captured step or an olla.Graph"
        raise CaptureError(f"make_step({n}) returned {what}, expected {expected}")

    def _capture(self, n: int, model: Any, batch: Any, optimizer: Any, loss: Any) -> tuple[Graph, list[Request] | None]:
        import torch

        from olla.pytorch.capture.capture import capture

        where = "cuda" if self.on_gpu and torch.cuda.is_available() else None
        update = None if optimizer is None else update_of(optimizer, on_gpu=self.on_gpu)
        requests = None if update is None else list(update.requests)
        try:
            graph = capture(model, batch, optimizer=optimizer, loss=loss, device=where, **self.ranks).graph
        except CaptureError as error:
            refused = CaptureError(f"the step of make_step({n}): {error}")
            if update is None or self.ranks["world_size"] is not None:
                raise refused from error
            try:  # the update as it is, behind what can be planned, as `olla.compile` does it
                return with_update(capture(model, batch, loss=loss, device=where), update), requests
            except CaptureError:  # so it was not the optimizer
                raise refused from error
        if requests is not None and self.ranks["parallel"] == "fsdp":
            size = self.ranks["world_size"]  # the optimizer has a shard of each parameter
            requests = [(t, num_bytes if num_bytes < 0 else -(-num_bytes // size)) for t, num_bytes in requests]
        return graph, requests

    def _way(self, n: int, graph: Graph, name: str, ways: Mapping[str, Way], update: Sequence[Request] | None) -> Way:
        seconds = float(rules(graph, self.device).seconds.sum())  # with what gathers parameters
        if name == "eager":
            found = self._judged(eager.eager_peak(graph, update), None, seconds, 0.0, graph)
            # What collectives take, on streams of their own, is not known.
            is_known = self.on_gpu and not graph.communicates.any()
            return replace(found, reserved_bytes=eager.reserved_bytes(graph, update) if is_known else None)
        if name == "planned":
            planned = self._plan(n, name, graph, {})
            return self._judged(needed_bytes(planned), planned.lower_bound_bytes, seconds, 0.0, graph)
        if name == "budget":
            return self._within(n, graph, ways)
        return self._rewritten(self._plan(n, name, graph, self.goals.get(name, {"minimise": "peak"})))

    def _within(self, n: int, graph: Graph, ways: Mapping[str, Way]) -> Way:
        """Return the way of least added time that fits; one with `fits` False if none does, or none is found."""
        least = ways["least"]
        nothing = replace(least, peak_bytes=None, seconds=None, added=None, fits=False, link_bytes=None)
        if not least.fits and least.proved:
            return nothing
        try:
            return self._rewritten(self._plan(n, "budget", graph, {"budget": self.memory_bytes}))
        except BudgetError:
            return nothing

    def _rewritten(self, found: Plan) -> Way:
        added = found.added_seconds / found.base_seconds if found.base_seconds else 0.0
        seconds = found.base_seconds + found.added_seconds
        assert found.graph is not None
        return self._judged(needed_bytes(found), found.peak_lower_bound_bytes, seconds, added, found.graph)

    def _judged(self, peak: int, bound: int | None, seconds: float, added: float, graph: Graph) -> Way:
        fits = peak <= self.memory_bytes
        return Way(
            peak_bytes=peak,
            bound_bytes=bound,
            seconds=seconds,
            added=added,
            fits=fits,
            proved=fits or bound is None or bound > self.memory_bytes,
            link_bytes=int(graph.message_bytes.sum()),
        )

    def _plan(self, n: int, name: str, graph: Graph, goal: Mapping[str, Any]) -> Plan:
        stopped = False

        def tell(stage: str, seconds: float, value: int, bound: int) -> bool:
            nonlocal stopped
            with contextlib.suppress(_Stopped):
                self._tell(f"n = {n}: {name}: {stage}", seconds, value, bound)
                return True
            stopped = True
            return False

        found = plan(graph, device=self.device, progress=tell, **self.options, **goal)
        if stopped:
            raise _Stopped
        return found


def _meta() -> contextlib.AbstractContextManager[Any]:
    """Let what is made have no memory, where torch is installed."""
    if importlib.util.find_spec("torch") is None:
        return contextlib.nullcontext()
    import torch

    return torch.device("meta")
