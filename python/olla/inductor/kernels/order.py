"""Order Inductor's fused kernels by peak memory, and record how close each order is to its lower bound."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from olla._core import profile
from olla.errors import CaptureError
from olla.graph import Graph
from olla.inductor.compat import codegen, compat, fallback, whole
from olla.inductor.kernels import scheduler, segment
from olla.inductor.kernels.fused import Storages
from olla.inductor.kernels.unfuse import LEAST_GAIN, Unfusing
from olla.plan import Plan

_TIME_LIMIT = 2.0  # seconds per graph, for the best order found; nearly all are proved in a fraction of it
_KEPT_RECORDS = 1000
_UNORDERED = "kernels stay in torch's own order"
_MAX_ROUNDS = 4  # of undoing fusions; two are nearly always enough

_log = logging.getLogger("olla.inductor")


@dataclass(frozen=True, kw_only=True)
class OrderRecord:
    """What became of the order of one compiled graph.

    Bytes count inputs that the code frees and buffers it allocates; memory that lives throughout is left out.

    Attributes:
        name: the graph, and whether it is a forward, a backward or an inference graph.
        num_kernels: fused nodes that were ordered.
        given_peak_bytes: the peak of the order that fusion left.
        fused_peak_bytes: the peak of the best order found with all fusions.
        peak_bytes: the peak of the order that was taken.
        lower_bound_bytes: no order has a lower peak, with the fusions that are left.
        num_unfused: fusions taken back because they raised the peak.
        seconds: wall-clock time it took.
    """

    name: str
    num_kernels: int
    given_peak_bytes: int
    fused_peak_bytes: int
    peak_bytes: int
    lower_bound_bytes: int
    num_unfused: int
    seconds: float

    @property
    def gap(self) -> float:
        """How far the peak can be from the best: (peak - bound) / bound."""
        difference = self.peak_bytes - self.lower_bound_bytes
        return difference / self.lower_bound_bytes if difference else 0.0

    def __str__(self) -> str:
        """Say it on one line."""
        values = (self.given_peak_bytes, self.peak_bytes, self.lower_bound_bytes, self.fused_peak_bytes)
        mib = [f"{value / 2**20:.1f}" for value in values]
        unfused = f"{self.num_unfused} fusions taken back (peak {mib[3]} MiB with them), " if self.num_unfused else ""
        return (
            f"{self.name}: {self.num_kernels} kernels, peak {mib[0]} MiB before and {mib[1]} MiB after, bound {mib[2]} "
            f"MiB, gap {self.gap:.2%}, {unfused}{self.seconds:.2f} s"
        )


@dataclass(frozen=True)
class _PlannedOrder:
    """Kernels, what is known of their buffers, and the plan of their order."""

    nodes: Sequence[Any]
    storages: Storages
    graph: Graph
    plan: Plan

    def order(self) -> NDArray[np.int32]:
        """Return the ops of the graph in planned order."""
        if self.plan.peak_bytes == self.plan.program_peak_bytes:  # no gain: keep the order that fusion left
            return np.arange(len(self.nodes), dtype=np.int32)
        return self.plan.order

    def ordered(self) -> list[Any]:
        """Return the kernels in planned order."""
        return [self.nodes[op] for op in self.order()]


_records: deque[OrderRecord] = deque(maxlen=_KEPT_RECORDS)


def records() -> list[OrderRecord]:
    """Return what became of the graphs compiled so far in this process, oldest first.

    Graphs that came out of Inductor's cache were ordered when they were compiled, and are not among them.
    """
    return list(_records)


def forget() -> None:
    """Forget these records."""
    _records.clear()


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Compile in a block without leaving records, for code that is no part of a step."""
    before = list(_records)
    try:
        yield
    finally:
        _records.clear()
        _records.extend(before)


class KernelOrder(compat.CustomSchedulerPass):  # type: ignore[misc]
    """Orders the fused kernels of every graph that Inductor compiles by their peak.

    Args:
        readers_only: whether only readers count as users of a buffer. Inductor also counts kernels that merely have to
            run later, such as a parameter's update behind its readers, and then does not reuse the buffer in place.
    """

    def __init__(self, readers_only: bool = False) -> None:
        self.readers_only = readers_only

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Return the nodes in an order of the least peak found; in torch's own, with a warning, where that fails."""
        try:
            return self._ordered(nodes)
        except CaptureError as error:
            fallback.warn(f"{_UNORDERED}: {error}")
        except Exception as error:
            fallback.failed(_UNORDERED, error)
        with fallback.tried("kernels stay in the order in which torch.compile fuses them"):
            scheduler.name_kernels(nodes)  # as they were
            return scheduler.torchs_order(nodes)
        return nodes

    def _ordered(self, nodes: Sequence[Any]) -> list[Any]:
        start = time.perf_counter()
        name = scheduler.graph_name()
        if self.readers_only:
            scheduler.count_readers_only()
        taken = given = self._plan(nodes, name)
        with fallback.tried("fusions stay as they are"):
            taken = self._unfused(given, name)
            taken = self._fused_anew(given, taken, name)
        record = OrderRecord(
            name=name,
            num_kernels=len(taken.nodes),
            given_peak_bytes=given.plan.program_peak_bytes,
            fused_peak_bytes=given.plan.peak_bytes,
            peak_bytes=taken.plan.peak_bytes,
            lower_bound_bytes=taken.plan.lower_bound_bytes,
            num_unfused=len(taken.nodes) - len(nodes),
            seconds=time.perf_counter() - start,
        )
        ordered = taken.ordered()
        scheduler.name_kernels(ordered)  # also where better ones were sought
        scheduler.prepare(ordered)
        _log.info("%s", record)
        _records.append(record)
        codegen.before_codegen(scheduler.scheduler(), lambda final: _tell(taken.storages, final))
        with fallback.tried("functions of kernels end where they do"):
            scheduler.end_functions(ordered, ends(ordered, taken.graph, taken.order()))
        segment.install()
        return ordered

    def _plan(self, nodes: Sequence[Any], name: str) -> _PlannedOrder:
        from olla.planner import plan

        scheduler.name_kernels(nodes)
        scheduler.prepare(nodes)
        storages = Storages(nodes)
        graph = storages.graph(name)
        return _PlannedOrder(nodes, storages, graph, plan(graph, layout=False, time_limit=_TIME_LIMIT))

    def _unfused(self, planned: _PlannedOrder, name: str) -> _PlannedOrder:
        """Undo fusions as long as that lowers the peak."""
        for _ in range(_MAX_ROUNDS):
            nodes = Unfusing(planned.ordered(), planned.storages).search()
            if nodes is None:
                break
            better = self._plan(nodes, name)
            if better.plan.peak_bytes >= planned.plan.peak_bytes:
                break
            planned = better
        return planned

    def _fused_anew(self, given: _PlannedOrder, best: _PlannedOrder, name: str) -> _PlannedOrder:
        """Undo all fusions, fuse again what the peak allows; keep that if it beats undoing single ones."""
        search = Unfusing(given.ordered(), given.storages)
        nodes = search.apart()
        if len(nodes) == len(given.nodes):
            return best
        apart = self._plan(nodes, name)
        if apart.plan.peak_bytes > best.plan.peak_bytes * (1 - 2 * LEAST_GAIN):
            return best
        found = self._plan(search.together(apart.order().tolist()), name)
        return found if found.plan.peak_bytes < best.plan.peak_bytes else best

    def __getstate__(self) -> object:
        """Return what pickles: torch before 2.13 hashes that, not `uuid`, as a part of its configuration."""
        return {**vars(self), "code": compat.code_digest()}

    def uuid(self) -> tuple[str, bool]:
        """Return what identifies the decisions, for Inductor's caches."""
        return compat.code_digest(), self.readers_only


def ends(nodes: Sequence[Any], graph: Graph, order: NDArray[np.int32]) -> set[str]:
    """Return the names of the kernels behind which a function must end to stay within the graph's peak.

    Inductor's CPU backend puts consecutive kernels into one function, and all buffers that they use stay alive until it
    returns.

    Args:
        nodes: scheduler nodes in the order in which they run.
        graph: of these nodes.
        order: int32[num_ops], the op that node i is.

    Complexity:
        O(nodes + tensors).
    """
    lives = profile(graph.core, order)
    first, live = lives.first, lives.live_bytes
    made = np.zeros(graph.num_ops, dtype=np.int64)
    at = (first >= 0) & ~graph.donated
    np.add.at(made, first[at], graph.tensor_bytes[at])
    found: set[str] = set()
    needed, newest = 0, None  # of the function that is open: its bytes, and its last kernel
    for i, node in enumerate(nodes):
        if not scheduler.shares_function(node):
            newest = None
            continue
        needed = int(live[i]) if newest is None else needed + int(made[i])
        if newest is not None and needed > lives.peak_bytes:
            found.add(newest.get_name())
            needed = int(live[i])
        if not isinstance(node, compat.scheduler_classes().NopKernelSchedulerNode):  # a name for what others write
            newest = node
    return found


def _tell(storages: Storages, ordered: Sequence[Any]) -> None:
    """Give Inductor olla's sizes of buffers; if that fails, it goes on with its own."""
    with fallback.tried("buffers are reused by torch's own figures"):
        storages.tell(ordered)
    if scheduler.counts_readers_only():
        whole.drop_weak_users(scheduler.scheduler())


def patches(readers_only: bool = False) -> Mapping[str, Any]:
    """Return what this changes in Inductor's configuration, by name; its own search for an order is not needed then."""
    return {"_post_fusion_custom_pass": KernelOrder(readers_only), "reorder_for_peak_memory": False}
