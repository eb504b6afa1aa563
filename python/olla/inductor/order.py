"""The order of the fused kernels: Inductor's scheduler asks, olla plans, and says how good the answer is."""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from olla.errors import CaptureError, OllaError
from olla.inductor import compat, scheduler
from olla.inductor.fused import Storages

TIME_LIMIT = 2.0  # seconds per graph; nearly all are proved in a small part of it
_KEPT_RECORDS = 1000

_log = logging.getLogger("olla.inductor")


@dataclass(frozen=True, kw_only=True)
class OrderRecord:
    """What became of the order of one compiled graph.

    All bytes are those of inputs that the code frees and of what it allocates; what stays throughout is left out.

    Attributes:
        name: the graph, and whether it is a forward, a backward or an inference graph.
        num_kernels: fused nodes that were ordered.
        given_peak_bytes: the peak of the order that fusion left.
        peak_bytes: the peak of the order that was taken.
        lower_bound_bytes: no order has a lower peak.
        seconds: wall-clock time it took.
    """

    name: str
    num_kernels: int
    given_peak_bytes: int
    peak_bytes: int
    lower_bound_bytes: int
    seconds: float

    @property
    def gap(self) -> float:
        """How far the peak can be from the best: (peak - bound) / bound."""
        difference = self.peak_bytes - self.lower_bound_bytes
        return difference / self.lower_bound_bytes if difference else 0.0

    def __str__(self) -> str:
        """Say it on one line."""
        mib = [f"{value / 2**20:.1f}" for value in (self.given_peak_bytes, self.peak_bytes, self.lower_bound_bytes)]
        return (
            f"{self.name}: {self.num_kernels} kernels, peak {mib[0]} MiB before and {mib[1]} MiB after, bound {mib[2]} "
            f"MiB, gap {self.gap:.2%}, {self.seconds:.2f} s"
        )


_records: deque[OrderRecord] = deque(maxlen=_KEPT_RECORDS)


def records() -> list[OrderRecord]:
    """Return what became of the graphs compiled so far in this process, oldest first.

    Graphs that came out of Inductor's cache were ordered when they were compiled, and are not among them.
    """
    return list(_records)


def forget() -> None:
    """Forget these records, and what has been warned of."""
    _records.clear()
    _warn.cache_clear()


class KernelOrder(compat.CustomSchedulerPass):  # type: ignore[misc]
    """Orders the fused kernels of every graph that Inductor compiles by their peak.

    Args:
        time_limit: seconds per graph. What is not proved by then is the best order found, never worse than the one
            fusion left.
    """

    def __init__(self, time_limit: float = TIME_LIMIT) -> None:
        self.time_limit = time_limit

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Return the nodes in an order of the least peak found; as they were, with a warning, where that fails."""
        try:
            return self._ordered(nodes)
        except OllaError as error:
            _warn(str(error))
            return nodes

    def _ordered(self, nodes: Sequence[Any]) -> list[Any]:
        from olla import plan

        start = time.perf_counter()
        try:
            name = scheduler.graph_name()
            scheduler.prepare(nodes)
            storages = Storages(nodes)
            graph = storages.graph(name)
        except (AttributeError, KeyError, TypeError) as error:  # a private part of torch that has changed
            reason = f"the scheduler of torch {torch.__version__} is not as expected: {error!r}"
            raise CaptureError(reason, rule="torch_version") from error
        found = plan(graph, layout=False, time_limit=self.time_limit)
        record = OrderRecord(
            name=name,
            num_kernels=len(nodes),
            given_peak_bytes=found.program_peak_bytes,
            peak_bytes=found.peak_bytes,
            lower_bound_bytes=found.lower_bound_bytes,
            seconds=time.perf_counter() - start,
        )
        _records.append(record)
        _log.info("%s", record)
        ordered = list(nodes)
        if found.peak_bytes != found.program_peak_bytes:  # else the order fusion left has its reasons
            ordered = [nodes[op] for op in found.order]
            scheduler.prepare(ordered)
        compat.before_codegen(scheduler.scheduler(), storages.tell)
        return ordered

    def __getstate__(self) -> object:
        """Return what pickles: torch before 2.13 hashes that, not `uuid`, as a part of its configuration."""
        return {"time_limit": self.time_limit, "code": compat.code_digest()}

    def uuid(self) -> tuple[str, float]:
        """Return what identifies the decisions, for Inductor's caches."""
        return compat.code_digest(), self.time_limit


@functools.cache
def _warn(reason: str) -> None:
    """Say once per reason why kernels keep their order."""
    _log.warning("kernels stay in the order in which torch.compile leaves them: %s", reason)


def patches(time_limit: float = TIME_LIMIT) -> Mapping[str, Any]:
    """Return what this changes in Inductor's configuration, by name; its own search for an order is not needed then."""
    return {"_post_fusion_custom_pass": KernelOrder(time_limit), "reorder_for_peak_memory": False}
