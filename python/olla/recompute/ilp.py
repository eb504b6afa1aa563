"""What not to keep, by integer program: the best for a base order, with a proof; see docs/model.md."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from olla._core import RecomputeTarget, Solver, recompute_ilp
from olla.ilp import highs_library

if TYPE_CHECKING:
    from olla._core import RecomputeSearch

Progress = Callable[[str, float, int, int], bool | None]


class ChoiceIlp(NamedTuple):
    """What the budget program found and proved; the decisions are in force in the evictor.

    Attributes:
        status: ``"optimal"``: no other drops on this base order are better; ``"feasible"``: a limit came first, or the
            program was too large; ``"infeasible"``: on this base order nothing reaches the peak.
        bound: no drops on this base order have less added time (or, where that is limited, a lower peak).
        pruned: whether all of the above holds for drops of values that lie idle at a step above the target alone.
        cancelled: whether Ctrl-C or the progress callback ended it.
        message: why it ended, for a person.
    """

    status: str
    bound: float
    pruned: bool
    cancelled: bool
    message: str

    def line(self, least_time: bool) -> str:
        """Say in one line what is proved."""
        what = f"{1e3 * self.bound:.6g} ms added" if least_time else f"peak {round(self.bound)} bytes"
        of = "values idle above the target dropped" if self.pruned else "any values dropped"
        if self.status == "infeasible":
            return f"budget program: proved, nothing fits with {of} from the base order"
        proved = f"{what} is the least" if self.status == "optimal" else f"at least {what}"
        return f"budget program: {proved} with {of} from the base order; {self.message}"


def solve_choice(
    evictor: RecomputeSearch,
    *,
    peak_bytes: int,
    added_seconds: float | None = None,
    bound: float = 0.0,
    time_limit: float = 15.0,
    seed: int = 0,
    num_threads: int = 1,
    progress: Progress | None = None,
) -> ChoiceIlp:
    """Put the best decisions for the evictor's base order in force; they are never worse than those that were.

    Args:
        evictor: the decisions in force are where it starts.
        peak_bytes: the limit; where added_seconds is given, a proven bound of every peak.
        added_seconds: given: the limit within which the least peak is sought. None: the least added time is.
        bound: where the added time is sought, a proven bound of it.
        time_limit: in seconds.
        seed, num_threads: of HiGHS.
        progress: as in `olla.plan`.

    Raises:
        SolverError: HiGHS is missing or fails, or an answer does not hold.
    """
    least_time = added_seconds is None
    seconds = min(bound, 1e30) if added_seconds is None else min(added_seconds, 1e30)
    if least_time and not math.isfinite(bound):
        seconds = 0.0
    solver = Solver(
        highs_library=highs_library(), time_limit=time_limit, seed=seed, num_threads=num_threads, progress=progress
    )
    target = RecomputeTarget(least_time=least_time, peak=peak_bytes, added_seconds=seconds)
    found = recompute_ilp(evictor, target, solver)
    return ChoiceIlp(found.status, found.bound, found.pruned, found.cancelled, found.figures.message)
