"""The ordering integer program: OLLA's lifetime program, solved by HiGHS."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from olla import _core
from olla.errors import SolverError

Progress = Callable[[str, float, int, int], bool | None]

_REMEDY = 'install it: pip install "highspy>=1.15"'
_PATTERNS = ("libhighs.so*", "libhighs*.dylib")
_FOLDERS = (".", "lib", "lib64", ".libs", "../highspy.libs")


class OrderIlp(NamedTuple):
    """What the ordering program found and proved.

    Attributes:
        order: int32[ops], the op that runs at step i; valid, and never worse than the start.
        peak_bytes: its simulated peak, resident memory included.
        lower_bound_bytes: no order of the graph has a lower peak.
        status: ``"optimal"`` exactly when peak and bound meet, else ``"feasible"``: a limit came first, or the program
            was too large.
        info: num_columns, num_rows, num_nonzeros, num_nodes, seconds_build, seconds_solve and message, why it ended.
    """

    order: npt.NDArray[np.int32]
    peak_bytes: int
    lower_bound_bytes: int
    status: str
    info: dict[str, int | float | str]


def highs_library() -> str:
    """Find the HiGHS shared library inside the installed highspy package, without importing highspy.

    Returns:
        Its path.

    Raises:
        SolverError: highspy is not installed, or is older than 1.15 and brings no library.

    Example:
        >>> "highs" in highs_library()
        True
    """
    spec = importlib.util.find_spec("highspy")
    if spec is None or spec.origin is None:
        raise SolverError(f"the package highspy, which brings the HiGHS solver, is not installed; {_REMEDY}")
    package = Path(spec.origin).parent
    for folder in _FOLDERS:
        for pattern in _PATTERNS:
            for path in sorted((package / folder).glob(pattern)):
                return str(path.resolve())
    raise SolverError(
        f"no HiGHS library ({' or '.join(_PATTERNS)}) in {package}: highspy older than 1.15 has none; {_REMEDY}"
    )


def order_ilp(
    graph: _core.Graph,
    start: npt.NDArray[np.int32],
    *,
    lower_bound_bytes: int = 0,
    time_limit: float = 60.0,
    seed: int = 0,
    num_threads: int = 1,
    progress: Progress | None = None,
) -> OrderIlp:
    """Find the order of least peak by OLLA's lifetime program with exactly one op per step.

    First it asks for an order that meets the lower bound, then, in the time left, for the best one, with the start as
    incumbent. Safe moves, precedences and steps that the peak asked for rules out are left out of the program. Every
    answer is simulated again. A program of more than two million entries is not built: the start comes back.

    Args:
        graph: the core graph.
        start: int32[ops], a valid order; its peak is what the program must beat.
        lower_bound_bytes: a proven lower bound of the peak, or 0.
        time_limit: seconds, for building and solving.
        seed: of HiGHS.
        num_threads: of HiGHS.
        progress: called with (stage, seconds, peak, bound) about ten times a second; False stops with the best order
            so far.

    Returns:
        The order, its peak, the bound and the status; see OrderIlp.

    Raises:
        PlanError: start is no order of the graph.
        SolverError: HiGHS is missing or failed, its answer does not hold, or the lower bound is above a peak that was
            reached.

    Complexity:
        One integer variable for each op and each step of its span but one: up to ops squared, far less in deep graphs.

    Source:
        Steiner et al., OLLA (arXiv 2210.12924), equations (1)-(5) and (10)-(14).

    Example:
        >>> import numpy as np
        >>> none = np.zeros(3, np.int64), np.zeros(0, np.int32)
        >>> writes = np.array([0, 1, 2], np.int64), np.array([0, 1], np.int32)
        >>> graph = _core.Graph(  # two ops that write 4 and 6 bytes for nobody
        ...     np.array([4, 6], np.int64), np.zeros(2, np.uint8), *none, *writes, *none, *none,
        ...     np.zeros(2, np.int64), np.zeros(2, np.uint8), np.zeros(0, np.int32))
        >>> order_ilp(graph, np.array([0, 1], np.int32)).peak_bytes
        6
    """
    return OrderIlp(
        *_core.order_ilp(graph, start, lower_bound_bytes, highs_library(), time_limit, seed, num_threads, progress)
    )
