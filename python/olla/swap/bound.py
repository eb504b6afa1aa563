"""Lower bounds for plans that recompute and swap: bounds by cuts, less what a link can carry meanwhile.

When op t first starts, everything needed later is on the device, in host memory, or recomputed. Bytes in host memory
were copied out before and are copied in after. By then all that t needs has run once and nothing that needs t has, so
the link had at most the rest of the step's time to copy out, and has at most the rest of it to copy in. At most that
many bytes come off the minimum cut that bounds the peak without swaps.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from olla.graph import Lists
from olla.recompute.bounds import busiest

if TYPE_CHECKING:
    from olla import _core
    from olla.graph import Graph, Rules
    from olla.plan import Link, Plan

_NUM_FINE, _NUM_PARTS = 3, 8  # ops whose bound is refined, and into how many cases
_SECONDS = 1.0  # for the cuts of one kind
_ROUNDING = 1e-9  # of floating-point sums of seconds


class SwapBound:
    """Lower bounds for one graph, whatever the order, the reruns and the swaps of what ops write.

    Args:
        graph: the training step.
        rules: of that graph.
        link: to host memory.
        host_bytes: host memory there is; None: as much as it takes.
        lasting: resident tensors that may wait in host memory from step to step.

    Complexity:
        One walk over the graph and some minimum cuts per op that is asked for.
    """

    def __init__(
        self, graph: Graph, rules: Rules, link: Link, host_bytes: int | None = None, lasting: Any = ()
    ) -> None:
        self._cuts = rules.evictor(graph, np.arange(graph.num_ops, dtype=np.int32))
        self.graph, self.seconds, self.link = graph, rules.seconds, link
        self.host_bytes = float("inf") if host_bytes is None else host_bytes
        self._rules, self._lasting = rules, lasting
        self.lasting_bytes = int(graph.tensor_bytes[np.asarray(lasting, dtype=np.int32)].sum())
        self._before, self._after = self._dependencies(self._cuts.values)

    def _dependencies(self, values: _core.Values) -> tuple[list[list[int]], list[list[int]]]:
        """Return the ops that make what each op uses, and the converse: these precede it in every rewriting."""
        before: list[list[int]] = [[] for _ in range(self.graph.num_ops)]
        after: list[list[int]] = [[] for _ in range(self.graph.num_ops)]
        for lists in (Lists(*values.reads), Lists(*values.overwrites)):
            for u, v in zip(values.producer[lists.item].tolist(), lists.owner.tolist(), strict=True):
                if u >= 0:
                    before[v].append(u)
                    after[u].append(v)
        return before, after

    def _reached(self, t: int, lists: list[list[int]]) -> float:
        """Return the seconds of all ops reached from op t, itself included."""
        seen, queue = {t}, [t]
        while queue:
            for u in lists[queue.pop()]:
                if u not in seen:
                    seen.add(u)
                    queue.append(u)
        return float(self.seconds[list(seen)].sum())

    def capacity(self, t: int, added_before: float, added_after: float) -> float:
        """Return the most bytes that can be in host memory when op t first runs, with time added before and after."""
        total = float(self.seconds.sum()) * (1 + _ROUNDING)
        out = max(0.0, total - self._reached(t, self._after) + added_before - self.link.out_latency_seconds)
        back = max(0.0, total - self._reached(t, self._before) + added_after - self.link.in_latency_seconds)
        out, back = out * self.link.out_bytes_per_second, back * self.link.in_bytes_per_second
        # Of what ops write, `both` bytes go out before t and come in after it; what lasts takes one of the two copies.
        both = min(max(0.0, (out + back - self.lasting_bytes) / 2), out, back)
        return min(both + self.lasting_bytes, out + back - both, self.host_bytes)

    def _cut(self, t: int, added_seconds: float) -> float:
        peaks, _ = self._cuts.least_peak(np.array([t], dtype=np.int32), added_seconds, _SECONDS, None)
        return float(peaks[0])

    def least_peak(self, ops: NDArray[np.int32], added_seconds: float) -> int:
        """Return bytes: no plan that adds at most these seconds has a lower peak. More ops make a better bound."""
        if len(ops) == 0:
            return self.graph.resident_bytes - self.lasting_bytes
        cuts, _ = self._cuts.least_peak(ops, added_seconds, _SECONDS, None)
        if added_seconds == math.inf:  # all that an op does not use can be in host memory while it runs
            most = max(
                float(cuts.max()) - self.host_bytes, int(working_sets(self.graph, self._rules, self._lasting).max())
            )
            return max(self.graph.resident_bytes - self.lasting_bytes, math.ceil(most))
        rough = cuts - np.array([self.capacity(t, added_seconds, added_seconds) for t in ops.tolist()])
        best = float(rough.max())
        parts = added_seconds * np.arange(_NUM_PARTS + 1) / _NUM_PARTS
        for i in np.argsort(-rough, kind="stable")[:_NUM_FINE].tolist():
            t = int(ops[i])
            # Time added before t makes more room for copies out, and leaves less for what is recomputed after it.
            cases = (
                self._cut(t, added_seconds - least) - self.capacity(t, most, added_seconds)
                for least, most in zip(parts[:-1].tolist(), parts[1:].tolist(), strict=True)
            )
            best = max(best, min(cases))
        return max(self.graph.resident_bytes - self.lasting_bytes, int(np.floor(best)))

    def least_added_seconds(self, ops: NDArray[np.int32], peak_bytes: int, reached_seconds: float) -> float:
        """Return seconds: no plan with at most this peak adds less.

        Args:
            ops: int32[k]; more ops make a better bound.
            peak_bytes: which some plan reaches.
            reached_seconds: that this plan adds. A plan that adds less gives the link no more time than this one.
        """
        best = 0.0
        for t in ops.tolist():
            room = peak_bytes + int(np.ceil(self.capacity(t, reached_seconds, reached_seconds)))
            found, _ = self._cuts.least_added_seconds(np.array([t], dtype=np.int32), room, _SECONDS, None)
            best = max(best, float(found[0]))
        return min(best, reached_seconds)

    def of(self, plan: Plan, added_seconds: float, most_seconds: float, peak_bytes: int) -> tuple[int, float]:
        """Return what is proved about every other plan; see `RecomputeSearch.bounds`."""
        ops = busiest(self.graph, np.arange(self.graph.num_ops, dtype=np.int32), plan)
        return self.least_peak(ops, most_seconds), self.least_added_seconds(ops, peak_bytes, added_seconds)


def working_sets(graph: Graph, rules: Rules, lasting: Any = ()) -> NDArray[np.int64]:
    """Return what every op needs at least while it runs, whatever else is dropped or swapped.

    Args:
        graph: the training step.
        rules: of that graph.
        lasting: resident tensors that may be swapped.

    Returns:
        int64[num_ops], bytes: resident tensors, workspace, what it uses and what it writes over nothing.
    """
    planned = graph.tensor_bytes.copy()
    made = graph.writer >= 0
    resident = ~made & ~graph.donated
    resident[np.asarray(lasting, dtype=np.int32)] = False
    planned[resident] = 0
    least = np.empty(graph.num_ops, dtype=np.int64)
    for v in range(graph.num_ops):
        used = np.union1d(graph.reads.of(v), graph.mutates.of(v))
        written = int(planned[graph.writes.of(v)].sum())
        may = rules.in_place[v] and bool(np.any(made[used] & (graph.tensor_bytes[used] == written)))
        least[v] = planned[used].sum() + (0 if may else written)
    return np.asarray(least + graph.tensor_bytes[resident].sum() + graph.workspace_bytes)
