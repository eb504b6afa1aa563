"""OLLA's integer programs, solved by HiGHS: the order, the addresses, and both in one."""

import numpy as np
import numpy.typing as npt

from olla._core import AddressIlpResult, CoreGraph, JointIlpResult, OrderIlpResult
from olla._core import address_ilp as run_address_ilp
from olla._core import joint_ilp as run_joint_ilp
from olla._core import order_ilp as run_order_ilp
from olla.base import Progress
from olla.graph import nearest_order
from olla.ilp.highs import solver


def order_ilp(
    graph: CoreGraph,
    start: npt.NDArray[np.int32] | None = None,
    *,
    lower_bound_bytes: int = 0,
    time_limit: float = 60.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> OrderIlpResult:
    """Find the order of least peak by OLLA's lifetime program with exactly one op per step.

    First it asks for an order that meets the lower bound, then, in the time left, for the best one, with the start as
    incumbent. Safe moves, precedences and steps that the peak asked for rules out are left out of the program. Every
    answer is simulated again. A program of more than two million entries is not built: the start comes back.

    Args:
        graph: the core graph.
        start: int32[ops], a valid order; its peak is what the program must beat. Default: the program order, or the
            valid order nearest to it.
        lower_bound_bytes: a proven lower bound of the peak, or 0.
        time_limit: seconds, for building and solving.
        seed: of HiGHS.
        progress: called with (stage, seconds, peak, bound) about ten times a second; False stops with the best order
            so far.

    Returns:
        The order, its peak, the bound and the status; see `OrderIlpResult`.

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
        >>> graph = CoreGraph(  # two ops that write 4 and 6 bytes for nobody
        ...     tensor_bytes=np.array([4, 6], np.int64), donated=np.zeros(2, np.uint8),
        ...     reads=none, writes=writes, mutates=none, after=none,
        ...     workspace_bytes=np.zeros(2, np.int64), random=np.zeros(2, np.uint8), outputs=np.zeros(0, np.int32))
        >>> order_ilp(graph, np.array([0, 1], np.int32)).peak_bytes
        6
    """
    if start is None:
        start = nearest_order(graph, np.arange(graph.num_ops, dtype=np.int32))
    return run_order_ilp(graph, start, lower_bound_bytes, True, solver(time_limit, seed, progress))


def address_ilp(
    lower: npt.NDArray[np.int64],
    upper: npt.NDArray[np.int64],
    size: npt.NDArray[np.int64],
    *,
    alignment: int = 1,
    fixed: npt.NDArray[np.int64] | None = None,
    start: npt.NDArray[np.int64] | None = None,
    lower_bound_bytes: int = 0,
    time_limit: float = 60.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> AddressIlpResult:
    """Find the layout of least height for given lifetimes by OLLA's address program.

    First it asks for a layout that meets the bound, then, in the time left, for the best one. Sizes count units: their
    common divisor. Every answer is simulated again. A program of more than two million entries, or of a height of more
    than 2^26 units, is not built: the start comes back.

    Args:
        lower: int64[m], first step at which buffer i is alive.
        upper: int64[m], first step at which it no longer is.
        size: int64[m], bytes, rounded up to the alignment.
        alignment: bytes; every offset is a multiple of it.
        fixed: int64[m], bytes: an offset that buffer i keeps, or -1.
        start: int64[m], bytes: a layout that keeps the fixed offsets; without one, a first fit is made.
        lower_bound_bytes: a proven lower bound of the height, or 0; the load is known anyway.
        time_limit: seconds, for building and solving.
        seed: of HiGHS.
        progress: called with ("address", seconds, height, bound) about ten times a second; False stops the search.

    Returns:
        The layout, its height, the bound and the status; see `AddressIlpResult`.

    Raises:
        PlanError: sizes, fixed offsets or the start are no valid input.
        SolverError: HiGHS is missing or failed, or its answer does not hold.

    Complexity:
        One integer variable for every two buffers alive together that either one may lie below.

    Source:
        Steiner et al., OLLA (arXiv 2210.12924), equations (6)-(8) and (15).

    Example:
        >>> import numpy as np
        >>> lower, upper, size = np.array([[0, 0, 1], [1, 2, 2], [4, 8, 2]])
        >>> address_ilp(lower, upper, size).height_bytes
        12
    """
    none = np.zeros(0, dtype=np.int64)
    fixed, start = none if fixed is None else fixed, none if start is None else start
    highs = solver(time_limit, seed, progress)
    return run_address_ilp(lower, upper, size, alignment, fixed, start, lower_bound_bytes, highs)


def joint_ilp(
    arena: CoreGraph,
    order: npt.NDArray[np.int32],
    *,
    offsets: npt.NDArray[np.int64] | None = None,
    workspace_offsets: npt.NDArray[np.int64] | None = None,
    lower_bound_bytes: int = 0,
    time_limit: float = 60.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> JointIlpResult:
    """Find the order and the layout of the smallest arena by OLLA's joint program.

    First it asks for an arena that meets the bound, then, in the time left, for the smallest one, with the start as
    incumbent. Every answer is simulated again. A program of more than two million entries is not built: the start
    comes back.

    Args:
        arena: the graph that `olla._core.arena_graph` makes for an alignment; its sizes are rounded already.
        order: int32[ops], a valid order to start from.
        offsets: int64[tensors], bytes: its layout, as in `JointIlpResult`; without one, a first fit is made.
        workspace_offsets: int64[ops], bytes: the same for workspaces; given exactly where offsets is.
        lower_bound_bytes: a proven lower bound of the arena, or 0.
        time_limit: seconds, for building and solving.
        seed: of HiGHS.
        progress: called with ("joint", seconds, arena, bound) about ten times a second; False stops the search.

    Returns:
        The order, the layout, the arena, the bound and the status; see `JointIlpResult`.

    Raises:
        PlanError: the start is no order, or no layout of it.
        SolverError: HiGHS is missing or failed, its answer does not hold, or the lower bound is above an arena that
            was reached.

    Complexity:
        The variables of the order program, and up to four for every two buffers that some order has alive together.

    Source:
        Steiner et al., OLLA (arXiv 2210.12924), equation (9).

    Example:
        >>> import numpy as np, olla
        >>> from olla._core import arena_graph
        >>> builder = olla.Graph.builder("fork")
        >>> a, b = builder.tensor(100), builder.tensor(10)
        >>> _ = builder.op("large", writes=[a]), builder.op("small", writes=[b]), builder.op("use", reads=[a])
        >>> arena = arena_graph(builder.build().core, 1)
        >>> found = joint_ilp(arena, np.arange(3, dtype=np.int32))
        >>> found.arena_bytes, found.status
        (100, 'optimal')
    """
    none = np.zeros(0, dtype=np.int64)
    offsets = none if offsets is None else offsets
    workspace_offsets = none if workspace_offsets is None else workspace_offsets
    highs = solver(time_limit, seed, progress)
    return run_joint_ilp(arena, order, offsets, workspace_offsets, lower_bound_bytes, highs)
