"""Curve of memory over added time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from olla.base.packages import missing
from olla.graph import profile_of, rules
from olla.plan import Options, Source, graph_of
from olla.recompute.search import RecomputeSearch

if TYPE_CHECKING:
    from olla.base import Progress

_SLOWDOWNS = (0.02, 0.05, 0.1, 0.2, 0.4, math.inf)  # around which choices are improved


@dataclass(frozen=True)
class Curve:
    """Peak memory against added time: point i has a peak of peak_bytes[i] and adds added_seconds[i].

    Attributes:
        graph_name: of the graph.
        peak_bytes: int64[k], falling.
        added_seconds: float64[k], rising from 0.
        base_seconds: estimated time of the step itself.
        resident_bytes: no plan needs less.
    """

    graph_name: str
    peak_bytes: NDArray[np.int64]
    added_seconds: NDArray[np.float64]
    base_seconds: float
    resident_bytes: int

    def plot(self, axes: Any = None) -> Any:
        """Draw peak against added time with matplotlib; return the axes.

        Raises:
            ImportError: matplotlib is not installed.
        """
        if axes is None:
            try:
                import matplotlib.pyplot as plt
            except ImportError as cause:
                raise missing("matplotlib", "plot") from cause
            axes = plt.subplots()[1]
        percent = 100 * self.added_seconds / self.base_seconds if self.base_seconds > 0 else self.added_seconds
        axes.step(percent, self.peak_bytes / 2**30, where="post", label="peak")
        axes.axhline(self.resident_bytes / 2**30, linestyle=":", color="gray", label="resident")
        axes.set(xlabel="added time, %", ylabel="peak memory, GiB", title=self.graph_name)
        axes.legend()
        return axes


def pareto(
    graph: Source,
    *,
    device: Any = "a100",
    in_place: bool = True,
    recompute: bool = True,
    time_limit: float = 15.0,
    progress: Progress | None = None,
) -> Curve:
    """Return what memory costs in time: the least peaks found, by the time they add.

    Args:
        graph: a `Graph`, the path of a graph file, or a captured step.
        device: what seconds are estimated for: a name or a `DeviceProfile`.
        in_place, recompute: which levers may be used.
        time_limit: seconds for the whole call.
        progress: as in `olla.plan`.

    Returns:
        The curve: the best of all that was simulated on the way to the least peak, and to the least peaks within some
        added times. `olla.plan` with the goal of one point orders its graph anew, and may do better.

    Example:
        >>> import olla
        >>> builder = olla.Graph.builder("chain")
        >>> a, b, c, d = (builder.tensor(size) for size in (100, 10, 100, 1))
        >>> _ = builder.op("a", writes=[a]), builder.op("b", reads=[a], writes=[b])
        >>> _ = builder.op("c", reads=[b], writes=[c]), builder.op("d", reads=[c], writes=[d])
        >>> _ = builder.op("e", reads=[a, d])
        >>> olla.pareto(builder.build()).peak_bytes.tolist()
        [210, 110]
    """
    found = graph_of(graph)
    may = rules(found, profile_of(device), in_place=in_place, recompute=recompute)
    search = RecomputeSearch(found, may, Options(time_limit=time_limit), progress)
    search.choose(0, math.inf)
    work = search.improve_work // len(_SLOWDOWNS)
    for slowdown in _SLOWDOWNS:
        search.improve_work = work
        search.improve(0, slowdown * search.base_seconds)
    curves = [start.evictor.front() for start in search.seen]
    peak = np.concatenate([curve.peak_bytes for curve in curves])
    seconds = np.maximum(np.concatenate([curve.added_seconds for curve in curves]), 0.0)
    by_time = np.lexsort((peak, seconds))
    peak, seconds = peak[by_time], seconds[by_time]
    better = np.concatenate(([True], peak[1:] < np.minimum.accumulate(peak)[:-1]))
    return Curve(found.name, peak[better], seconds[better], search.base_seconds, found.resident_bytes)
