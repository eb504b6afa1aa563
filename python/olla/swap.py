"""Swapping: which tensors to copy to host memory while nobody uses them, and the graph in which that is done."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from olla import _core, rivals
from olla.graph import Graph

if TYPE_CHECKING:
    from olla.devices import DeviceProfile

SWAP_OUT, SWAP_IN = "olla::swap_out", "olla::swap_in"
NO_OP = -1
_MIN_BYTES = 1 << 18  # smaller blocks take the link mostly for its latency
_NO_LIMIT = 1 << 62
ANY_WORK = (1 << 63) - 1
_NUM_ROUNDS = 30  # of the local search; on large graphs, time ends it earlier
_AUTOSWAP_SHARE = 0.8  # of the time limit, after which no other of its scores is tried as a start
_FREE_SHARE = 0.25  # of the time limit, for swaps that make nobody wait, where some may


@dataclass(frozen=True, kw_only=True)
class Link:
    """How fast pinned host memory is reached, each way; both directions may be busy at once.

    Attributes:
        out_bytes_per_second, in_bytes_per_second: from the device to the host, and back.
        out_latency_seconds, in_latency_seconds: of one copy.

    Example:
        >>> Link.of(25e9).in_bytes_per_second
        25000000000.0
    """

    out_bytes_per_second: float
    in_bytes_per_second: float
    out_latency_seconds: float = 10e-6
    in_latency_seconds: float = 10e-6

    def __post_init__(self) -> None:
        for field, value in vars(self).items():
            lowest_allowed = "bytes" not in field and value == 0
            if not (0.0 < value < float("inf") or lowest_allowed):
                raise ValueError(f"{field} of a link is {value}, expected a finite number above 0")

    @classmethod
    def of(cls, link: Link | float | DeviceProfile) -> Link:
        """Return the link itself, one with that many bytes per second both ways, or the link of a device.

        Raises:
            ValueError: the speed is no finite number above 0.
        """
        if isinstance(link, Link):
            return link
        if isinstance(link, int | float):
            return cls(out_bytes_per_second=float(link), in_bytes_per_second=float(link))
        return cls(
            out_bytes_per_second=link.to_host_bytes_per_second, in_bytes_per_second=link.from_host_bytes_per_second
        )

    def numbers(self) -> NDArray[np.float64]:
        """Return the link as the core takes it."""
        out, back = self.out_bytes_per_second, self.in_bytes_per_second
        return np.array([out, self.out_latency_seconds, back, self.in_latency_seconds], dtype=np.float64)


# What Zhang et al. (arXiv 1903.06631) saw with pinned memory over PCIe 3 x16.
PCIE3 = Link(
    out_bytes_per_second=13.2e9, out_latency_seconds=47e-6, in_bytes_per_second=12.2e9, in_latency_seconds=10e-6
)


@dataclass(frozen=True, eq=False)
class Swaps:
    """Tensors that leave the device between two uses, in the order of their copies out. Steps are those of an order.

    Attributes:
        tensor: int32[k], which.
        ready, last: int32[k], the copy out starts when op `ready` has ended; op `last` uses it last before. -1: it is
            in host memory when the step starts.
        freed: int32[k], the first op that runs without it.
        issue, next: int32[k], the copy in is issued when this op is reached, and must have ended for op `next`. Number
            of ops: it stays in host memory to the end of the step.
        start: float64[n], seconds: when the op at step s starts.
        out_start, out_end, in_start, in_end: float64[k], seconds, of the copies.
        peak_bytes: most bytes live at once.
        stall_seconds: what the ops wait for copies.
        host_bytes: most host memory in use at once.
        swapped_bytes: copied out in all.
        base_seconds: what the ops themselves take.
    """

    tensor: NDArray[np.int32]
    ready: NDArray[np.int32]
    last: NDArray[np.int32]
    freed: NDArray[np.int32]
    issue: NDArray[np.int32]
    next: NDArray[np.int32]
    start: NDArray[np.float64]
    out_start: NDArray[np.float64]
    out_end: NDArray[np.float64]
    in_start: NDArray[np.float64]
    in_end: NDArray[np.float64]
    peak_bytes: int
    stall_seconds: float
    host_bytes: int
    swapped_bytes: int
    base_seconds: float

    @property
    def slowdown(self) -> float:
        """The stall as a share of the ops' own time."""
        return self.stall_seconds / self.base_seconds if self.base_seconds > 0 else 0.0


class Blocks(NamedTuple):
    """Tensors idle between two uses; item b of every column is block b.

    Attributes:
        tensor: int32[m]; made, last, next: int32[m], steps: made there, used last before the gap, used next after it.
        num_bytes: int64[m].
    """

    tensor: NDArray[np.int32]
    made: NDArray[np.int32]
    last: NDArray[np.int32]
    next: NDArray[np.int32]
    num_bytes: NDArray[np.int64]


class Search:
    """Swaps for one order: how given ones turn out, and which are best.

    Args:
        graph: the training step.
        order: int32[n], valid.
        seconds: float64[n], of op v.
        link: see `Link`.
        host_bytes: host memory there is; None: as much as it takes.
        min_bytes: smaller tensors stay.
        early_copies: copy out as soon as a value is made, not only once it is idle.
        lasting: int32[m], resident tensors that may wait in host memory from their last use to their first one in the
            next step.
    """

    def __init__(
        self,
        graph: Graph,
        order: NDArray[np.int32],
        seconds: NDArray[np.float64],
        link: Link,
        *,
        host_bytes: int | None = None,
        min_bytes: int = _MIN_BYTES,
        early_copies: bool = True,
        lasting: NDArray[np.int32] | None = None,
    ) -> None:
        self.live: NDArray[np.int64] = _core.profile(graph.core, order)[2]
        self.seconds = np.ascontiguousarray(seconds[order])
        kept = np.zeros(0, dtype=np.int32) if lasting is None else lasting
        tensor, made, last, after = _core.idle_blocks(graph.core, order, min_bytes, kept)
        self.blocks = Blocks(tensor, made if early_copies else last, last, after, graph.tensor_bytes[tensor])
        b = self.blocks
        most_host = _NO_LIMIT if host_bytes is None else host_bytes
        self._core = _core.SwapSearch(
            self.live, self.seconds, b.tensor, b.num_bytes, b.made, b.last, b.next, link.numbers(), most_host
        )
        self.base_seconds = float(self.seconds.sum())

    def evaluate(self, blocks: NDArray[np.int32], limit: int | None = None, *, by_last: bool = True) -> Swaps:
        """Simulate the swaps of these blocks. With a limit, ops wait while more is live; blocks that cannot go stay."""
        bound = _NO_LIMIT if limit is None else limit
        return self._swaps(self._core.evaluate(blocks, bound, limit is not None, by_last))

    def fit(
        self,
        limit: int,
        most_stall_seconds: float,
        time_limit: float,
        progress: Any = None,
        max_work: int = ANY_WORK,
    ) -> Swaps:
        """Choose swaps with which the peak is at most the limit, or the lowest that was found."""
        return self._swaps(self._core.fit(limit, most_stall_seconds, time_limit, progress, max_work))

    def least_peak(
        self,
        most_stall_seconds: float,
        time_limit: float,
        *,
        starts: Sequence[NDArray[np.int32]] = (),
        seed: int = 0,
        num_rounds: int = _NUM_ROUNDS,
        progress: Any = None,
        max_work: int = ANY_WORK,
    ) -> Swaps:
        """Choose swaps of least peak for that stall, no worse than with the blocks of any of `starts`."""
        return self._swaps(
            self._core.least_peak(most_stall_seconds, list(starts), seed, num_rounds, time_limit, progress, max_work)
        )

    def chosen(self, swaps: Swaps) -> NDArray[np.int32]:
        """Return the blocks of swaps that this search answered."""
        gaps = zip(self.blocks.tensor.tolist(), self.blocks.last.tolist(), strict=True)
        index = {gap: b for b, gap in enumerate(gaps)}
        pairs = zip(swaps.tensor.tolist(), swaps.last.tolist(), strict=True)
        return np.array([index[pair] for pair in pairs if pair[1] >= 0], dtype=np.int32)

    def _swaps(self, answer: tuple[Any, ...]) -> Swaps:
        chosen, columns, t = answer
        b = self.blocks
        figures = {name: t[name] for name in ("freed", "out_start", "out_end", "in_start", "in_end")}
        useless = (t["freed"] >= columns["issue"]) & (columns["next"] < len(self.seconds))
        used = ~np.isin(chosen, chosen[useless])
        sizes = b.num_bytes[chosen][used & (columns["next"] < len(self.seconds))]
        return Swaps(
            tensor=b.tensor[chosen][used],
            start=t["start"],
            **{name: values[used] for name, values in (columns | figures).items()},
            peak_bytes=t["peak_bytes"],
            stall_seconds=t["stall_seconds"],
            host_bytes=t["host_bytes"],
            swapped_bytes=int(sizes.sum()),
            base_seconds=self.base_seconds,
        )


def plan_swaps(
    graph: Graph,
    order: NDArray[np.int32],
    seconds: NDArray[np.float64],
    link: Link | float | DeviceProfile,
    *,
    limit: int | None = None,
    max_slowdown: float = 0.0,
    host_bytes: int | None = None,
    lasting: NDArray[np.int32] | None = None,
    time_limit: float = 5.0,
    seed: int = 0,
    num_rounds: int = _NUM_ROUNDS,
    progress: Any = None,
    max_work: int | None = None,
) -> Swaps:
    """Choose which tensors to swap, for an order.

    Args:
        graph: the training step.
        order: int32[n], valid; item s is the op at step s.
        seconds: float64[n], of op v.
        link: to host memory: a `Link`, bytes per second both ways, or a device.
        limit: bytes; swaps are found for the least stall with which the peak is at most this. None: for the least peak.
        max_slowdown: share of the ops' time that they may wait for copies.
        host_bytes: host memory there is.
        lasting: int32[m], resident tensors that may wait in host memory from step to step.
        time_limit: seconds for the search.
        seed: for its random choices.
        num_rounds: of the local search.
        progress: as in `olla.plan`.
        max_work: for the search, in steps of the order whose memory is simulated; a million take about 0.04 s. None: as
            time allows.

    Returns:
        The swaps; with a limit that was not reached, those of least peak.

    Source:
        The greedy, and why it is run again for every limit: Zhang et al. (arXiv 1903.06631) choose by scores alone.

    Example:
        >>> import olla
        >>> b = olla.Graph.builder("gap")
        >>> x, y, z, w = b.tensor(1 << 20), b.tensor(1 << 20), b.tensor(8), b.tensor(8)
        >>> _ = b.op("make", writes=[x], seconds=1.0), b.op("wait", writes=[z], seconds=1.0)
        >>> _ = b.op("large", reads=[z], writes=[y], seconds=1.0)
        >>> _ = b.op("rest", reads=[y], writes=[w], seconds=1.0), b.op("more", reads=[w], seconds=1.0)
        >>> _ = b.op("use", reads=[x], seconds=1.0)
        >>> g = b.build()
        >>> plan_swaps(g, np.arange(6, dtype=np.int32), g.seconds, 1e8, time_limit=0.1).peak_bytes
        1048584
    """
    speed = Link.of(link)
    search = Search(graph, order, seconds, speed, host_bytes=host_bytes, min_bytes=_MIN_BYTES, lasting=lasting)
    most_stall = max_slowdown * search.base_seconds
    work = ANY_WORK if max_work is None else max_work
    if limit is None:
        from olla.autoswap import SCORES, AutoSwap  # imports this module

        begin = time.perf_counter()
        deadline = begin + _AUTOSWAP_SHARE * time_limit
        method, found = AutoSwap(graph, order, seconds, Link.of(link), host_bytes, deadline), []
        for score in SCORES if max_work is None else SCORES[:-1]:  # the last one takes longer than all others
            if time.perf_counter() < deadline:
                with rivals.optional(f"AutoSwap by {score}", []):
                    found.append(method.least_peak(score, max_slowdown))
        how: dict[str, Any] = {"seed": seed, "num_rounds": num_rounds, "progress": progress}
        if most_stall > 0:
            part = int(_FREE_SHARE * work)
            found.append(search.least_peak(0.0, _FREE_SHARE * time_limit, max_work=part, **how))
            work -= part
        starts = [search.chosen(swaps) for swaps in found]
        left = max(0.0, time_limit - (time.perf_counter() - begin))
        found.append(search.least_peak(most_stall, left, starts=starts, max_work=work, **how))
        return min(reversed(found), key=lambda swaps: swaps.peak_bytes)
    allowed = [share * most_stall for share in (0.0, 0.125, 0.25, 0.5, 1.0)] if most_stall > 0 else [0.0]
    for stall in allowed:
        swaps = search.fit(limit, stall, time_limit / len(allowed), progress, work // len(allowed))
        if swaps.peak_bytes <= limit:
            break
    return swaps


class Swapped(NamedTuple):
    """A graph that swaps.

    Attributes:
        graph: its program order is the order that the swaps were chosen for.
        origin: int32[num_ops], op of the graph it was made from; NO_OP where op i is a swap-out or a swap-in.
    """

    graph: Graph
    origin: NDArray[np.int32]


def swapped_graph(graph: Graph, order: NDArray[np.int32], swaps: Swaps) -> Swapped:
    """Return the graph in which the swaps are ordinary ops.

    A swap-out reads a tensor and writes a handle of no bytes: the copy in host memory. It stands where the copy has
    ended. A swap-in reads the handle and writes a new tensor, which later ops use; it stands where the copy is issued.
    Both are kept there by `after`. Tensors of the graph keep their ids; handles and new tensors follow.

    A resident tensor that waits in host memory from step to step is its own handle, of no bytes: the swap-in reads it,
    the swap-out changes it.

    Complexity:
        O(graph + swaps).
    """
    n, k = graph.num_ops, len(swaps.tensor)
    outs: list[list[int]] = [[] for _ in range(n + 1)]
    ins: list[list[int]] = [[] for _ in range(n + 1)]
    for i in np.flatnonzero(swaps.last >= 0).tolist():
        outs[swaps.freed[i]].append(i)
    for i in np.lexsort((swaps.next, swaps.issue)).tolist():
        ins[swaps.issue[i]].append(i)
    parts = _Parts(graph, swaps)
    now = list(range(graph.num_tensors))  # id of the tensor that holds what tensor t would
    place: dict[int, int] = {}  # op of the graph -> new position

    def leave(s: int, before: list[int]) -> None:
        for i in outs[s]:
            t = int(swaps.tensor[i])
            lasts = bool(swaps.next[i] == n)
            written, changed = ([], [t]) if lasts else ([parts.handle[i]], [])
            parts.add(NO_OP, f"swap_out {graph.tensor_names[t] or t}", [now[t]], written, changed, before)
            now[t] = t if lasts else now[t]

    for s, v in enumerate(order.tolist()):
        before = [place[int(order[s - 1])]] if s else []
        leave(s, before)
        issued = []
        for i in ins[s]:
            t = int(swaps.tensor[i])
            now[t] = parts.device[i]
            name = f"swap_in {graph.tensor_names[t] or t}"
            issued.append(parts.add(NO_OP, name, [parts.handle[i]], [now[t]], [], before))
        after = [place[u] for u in graph.after.of(v).tolist()]
        used, changed = ([now[t] for t in column.of(v).tolist()] for column in (graph.reads, graph.mutates))
        place[v] = parts.add(v, graph.op_names[v], used, graph.writes.of(v).tolist(), changed, after + issued)
    if n and k:
        leave(n, [place[int(order[n - 1])]])
    return Swapped(parts.assemble(now), np.array(parts.origin, dtype=np.int32))


class _Parts:
    """A graph that swaps while it is put together."""

    def __init__(self, graph: Graph, swaps: Swaps) -> None:
        self.graph = graph
        self.origin: list[int] = []
        self.names: list[str] = []
        self.lists: dict[str, list[list[int]]] = {name: [] for name in ("reads", "writes", "mutates", "after")}
        self.tensors: list[tuple[int, str, str]] = []  # bytes, kind and name of those that follow the graph's
        self.handle: dict[int, int] = {}  # of swap i, and the tensor that it brings back
        self.device: dict[int, int] = {}
        self.num_bytes = graph.tensor_bytes.copy()
        for i, t in enumerate(swaps.tensor.tolist()):
            lasts = bool(swaps.last[i] < 0 or swaps.next[i] == graph.num_ops)
            self.handle[i] = t if lasts else self._tensor(0, "temporary", "")
            if lasts:
                self.num_bytes[t] = 0
            if swaps.next[i] < graph.num_ops:
                self.device[i] = self._tensor(int(graph.tensor_bytes[t]), graph.tensor_kinds[t], graph.tensor_names[t])

    def _tensor(self, num_bytes: int, kind: str, name: str) -> int:
        self.tensors.append((num_bytes, kind, name))
        return self.graph.num_tensors + len(self.tensors) - 1

    def add(self, v: int, name: str, reads: list[int], writes: list[int], mutates: list[int], after: list[int]) -> int:
        """Add an op; return its position."""
        for column, items in zip(self.lists.values(), (reads, writes, mutates, after), strict=True):
            column.append(items)
        self.origin.append(v)
        self.names.append(name)
        return len(self.origin) - 1

    def assemble(self, now: list[int]) -> Graph:
        """Return the graph; now: the tensor that holds at the end what tensor t would."""
        graph, origin = self.graph, self.origin
        of = np.array(origin)
        own = of != NO_OP
        numbers = {}
        for name in ("workspace_bytes", "seconds", "flops", "moved_bytes", "launches", "random", "recomputable"):
            column = getattr(graph, name)
            numbers[name] = np.where(own, column[of], np.zeros(1, dtype=column.dtype)) if graph.num_ops else column
        targets = [
            graph.targets[v] if v != NO_OP else SWAP_OUT if name.startswith("swap_out ") else SWAP_IN
            for v, name in zip(origin, self.names, strict=True)
        ]
        sizes, kinds, names = zip(*self.tensors, strict=True) if self.tensors else ((), (), ())
        return Graph.from_arrays(
            name=graph.name,
            tensor_bytes=np.concatenate([self.num_bytes, np.array(sizes, dtype=np.int64)]),
            donated=np.concatenate([graph.donated, np.zeros(len(sizes), dtype=np.bool_)]),
            tensor_kinds=[*graph.tensor_kinds, *kinds],
            tensor_names=[*graph.tensor_names, *names],
            op_names=self.names,
            op_kinds=[graph.op_kinds[v] if v != NO_OP else "other" for v in origin],
            targets=targets,
            shapes=[graph.shapes[v] if v != NO_OP else () for v in origin],
            outputs=[now[t] for t in graph.outputs.tolist()],
            **self.lists,
            **numbers,
        )
