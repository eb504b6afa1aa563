"""Recomputation by integer program: the best choice for a base order, with a proof; see docs/model.md."""

from __future__ import annotations

import math

from olla._core import CoreRecomputeSearch, RecomputeIlpResult, RecomputeTarget, recompute_ilp
from olla.base import Progress
from olla.ilp import solver


def proof(found: RecomputeIlpResult, least_time: bool) -> str:
    """Say in one line what is proved."""
    what = f"{1e3 * found.bound:.6g} ms added" if least_time else f"peak {round(found.bound)} bytes"
    of = "values idle above the target dropped" if found.pruned else "any values dropped"
    if found.status == "infeasible":
        return f"budget program: proved, nothing fits with {of} from the base order"
    proved = f"{what} is the least" if found.status == "optimal" else f"at least {what}"
    return f"budget program: {proved} with {of} from the base order; {found.figures.message}"


def solve_choice(
    evictor: CoreRecomputeSearch,
    *,
    peak_bytes: int,
    added_seconds: float | None = None,
    bound: float = 0.0,
    time_limit: float = 15.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> RecomputeIlpResult:
    """Solve for the best decisions on the evictor's base order, and apply them; they are never worse than before.

    Args:
        evictor: the decisions in force are where it starts.
        peak_bytes: the limit; where added_seconds is given, a proven bound of every peak.
        added_seconds: limit within which the least peak is sought; None: the least added time is sought.
        bound: where the added time is sought, a proven bound of it.
        time_limit: in seconds.
        seed: of HiGHS.
        progress: as in `olla.plan`.

    Returns:
        What is proved. Status "optimal": no other drops on this base order are better; "feasible": a limit came first,
        or the program was too large; "infeasible": on this base order nothing reaches the peak.

    Raises:
        SolverError: HiGHS is missing or fails, or an answer does not hold.
    """
    least_time = added_seconds is None
    if added_seconds is None:
        added_seconds = bound if math.isfinite(bound) else 0.0
    target = RecomputeTarget(least_time=least_time, peak=peak_bytes, added_seconds=min(added_seconds, 1e30))
    return recompute_ilp(evictor, target, solver(time_limit, seed, progress))
