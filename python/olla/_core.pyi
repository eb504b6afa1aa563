"""
The C++ core of olla: arrays in, arrays out. Use the functions of the olla package instead.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray


class Limits:
    """
    What ends a search before it is done: seconds, units of work (None: any number), and a callback that may answer False.
    """

    def __init__(self, *, time_limit: float, max_work: int | None, progress: object | None) -> None: ...

def check(graph: CoreGraph, order: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], workspace_offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], alignment: int, figures: dict[str, int], before: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], after: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], given: CoreGraph | None) -> None:
    """
    Raise PlanError with the broken rule unless the plan is valid: order, offsets (-1: not in the arena), workspace offsets, alignment, the figures it reports, and the extra precedences before[i] -> after[i]. Its program_peak_bytes are of the graph `given`; None: they are not checked.
    """

class CoreGraph:
    """Dataflow graph of a training step; see olla.Graph."""

    def __init__(self, *, tensor_bytes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], donated: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], reads: tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]], writes: tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]], mutates: tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]], after: tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]], workspace_bytes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], random: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], outputs: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """Lists as (offset, item)."""

    def constrained(self, before: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], after: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> CoreGraph:
        """The same graph with precedences before[i] -> after[i] added."""

    @property
    def num_ops(self) -> int: ...

    @property
    def num_tensors(self) -> int: ...

    @property
    def resident_bytes(self) -> int: ...

    def preds(self, op: int) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]:
        """Direct dependencies of an op, sorted."""

    def precedences(self) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C')], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]]:
        """
        Direct dependencies of all ops as (offset, item): op v comes after item[offset[v]:offset[v + 1]].
        """

    def is_order(self, order: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> bool:
        """
        Whether order is a permutation of the ops that respects every dependency.
        """

class Profile:
    """When tensors are live, and how much memory, under an order."""

    @property
    def first(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]:
        """int32[tensors]: the step from which tensor t is live."""

    @property
    def last(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]:
        """int32[tensors]: the step from which it no longer is."""

    @property
    def live_bytes(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C')]:
        """int64[ops], live during step s."""

    @property
    def peak_bytes(self) -> int:
        """The most of them."""

    @property
    def peak_step(self) -> int:
        """The first step with the most."""

def profile(graph: CoreGraph, order: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Profile:
    """Lifetimes and memory under an order; see cpp/olla/graph/profile.hpp."""

def nearest_order(graph: CoreGraph, wanted: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]:
    """
    int32[ops]: the valid order that runs, at every step, the ready op that comes first in wanted, a permutation of the ops.
    """

def spans(graph: CoreGraph) -> tuple[Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]]:
    """(earliest, latest) step of every op when one op runs per step."""

class IlpFigures:
    """What happened on the way; the sizes are those of the last program."""

    @property
    def message(self) -> str:
        """Why it ended, for a person."""

    @property
    def num_columns(self) -> int: ...

    @property
    def num_rows(self) -> int: ...

    @property
    def num_nonzeros(self) -> int: ...

    @property
    def num_nodes(self) -> int: ...

    @property
    def seconds_build(self) -> float: ...

    @property
    def seconds_solve(self) -> float: ...

class MipResult:
    """What HiGHS says of a program."""

    @property
    def status(self) -> str:
        """optimal, feasible, infeasible, unknown."""

    @property
    def objective(self) -> float: ...

    @property
    def bound(self) -> float:
        """No answer is below it."""

    @property
    def values(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C')]:
        """float64[columns]; empty without an answer."""

class OrderIlpResult:
    """What the ordering program found and proved."""

    @property
    def status(self) -> str:
        """optimal, exactly when value and bound meet; feasible; infeasible."""

    @property
    def cancelled(self) -> bool:
        """Whether the progress callback, or Ctrl-C, ended the search."""

    @property
    def figures(self) -> IlpFigures: ...

    @property
    def order(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]:
        """int32[ops]: the op that runs at step i; never worse than the start."""

    @property
    def peak_bytes(self) -> int:
        """Its simulated peak, resident memory included."""

    @property
    def lower_bound_bytes(self) -> int:
        """No order of the graph has a lower peak."""

class AddressIlpResult:
    """What the address program found and proved."""

    @property
    def status(self) -> str:
        """optimal, exactly when value and bound meet; feasible; infeasible."""

    @property
    def cancelled(self) -> bool:
        """Whether the progress callback, or Ctrl-C, ended the search."""

    @property
    def figures(self) -> IlpFigures: ...

    @property
    def offsets(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C')]:
        """
        int64[m], bytes: where buffer i begins; 0 where it is never alive or has no bytes.
        """

    @property
    def height_bytes(self) -> int:
        """The largest end of a buffer, sizes rounded up to the alignment."""

    @property
    def load_bytes(self) -> int:
        """Most bytes alive at once, of the same sizes."""

    @property
    def lower_bound_bytes(self) -> int:
        """No layout that keeps the fixed offsets is lower."""

class JointIlpResult:
    """What the joint program found and proved."""

    @property
    def status(self) -> str:
        """optimal, exactly when value and bound meet; feasible; infeasible."""

    @property
    def cancelled(self) -> bool:
        """Whether the progress callback, or Ctrl-C, ended the search."""

    @property
    def figures(self) -> IlpFigures: ...

    @property
    def order(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]:
        """int32[ops]: the op that runs at step i."""

    @property
    def offsets(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C')]:
        """
        int64[tensors], bytes: where tensor i begins in the arena; -1 where no op writes it.
        """

    @property
    def workspace_offsets(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C')]:
        """int64[ops], bytes: the same of workspaces; -1 where op i has none."""

    @property
    def arena_bytes(self) -> int:
        """The largest end of a tensor or workspace."""

    @property
    def lower_bound_bytes(self) -> int:
        """No order and layout have a smaller arena."""

class RecomputeIlpResult:
    """
    What the recomputation program proved; the decisions it found are in force.
    """

    @property
    def status(self) -> str:
        """optimal, exactly when value and bound meet; feasible; infeasible."""

    @property
    def cancelled(self) -> bool:
        """Whether the progress callback, or Ctrl-C, ended the search."""

    @property
    def figures(self) -> IlpFigures: ...

    @property
    def bound(self) -> float:
        """
        No drops on the base order have less added time or, where that is limited, a lower peak.
        """

    @property
    def pruned(self) -> bool:
        """
        That, and the status, hold for drops of values idle at a step above the target alone.
        """

class Program:
    """
    Minimise cost x, row_lower <= A x <= row_upper, lower <= x <= upper, with A by rows.
    """

    @property
    def cost(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', writable=False)]:
        """float64[columns]."""

    @property
    def lower(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', writable=False)]:
        """float64[columns]."""

    @property
    def upper(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', writable=False)]:
        """float64[columns]."""

    @property
    def integer(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', writable=False)]:
        """int32[columns]: 1 where x is a whole number."""

    @property
    def row_lower(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', writable=False)]:
        """float64[rows]."""

    @property
    def row_upper(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', writable=False)]:
        """float64[rows]."""

    @property
    def row_start(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', writable=False)]:
        """int32[rows + 1]: where the entries of a row begin."""

    @property
    def index(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', writable=False)]:
        """int32[entries]: the column of an entry."""

    @property
    def value(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', writable=False)]:
        """float64[entries]."""

class HighsProgress:
    """What a run of HiGHS says while it lasts."""

    def note(self, bound: float, objective: float, values: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)] | None) -> bool:
        """
        Note a bound and, where there is a new best answer, its value and float64[columns]. True: the run should stop.
        """

class HighsEnd:
    """What HiGHS says at the end of a run, in its own numbers."""

    def __init__(self, *, model_status: int, primal_status: int, num_nodes: int, bound: float, objective: float, values: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

class Solver:
    """HiGHS, and how it searches."""

    def __init__(self, *, highs: object, time_limit: float, seed: int, num_threads: int, progress: object | None) -> None:
        """
        highs: the path of its shared library, or an olla.ilp.extension.HighsExtension.
        """

    @property
    def highs_version(self) -> str: ...

def solve_mip(cost: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], lower: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], upper: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], integer: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], row_lower: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], row_upper: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], row_start: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], index: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], value: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], start: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], solver: Solver) -> MipResult:
    """
    Minimise cost x, row_lower <= A x <= row_upper, lower <= x <= upper, with A by rows. start: a value per column, or empty.
    """

def order_ilp(graph: CoreGraph, start: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], lower_bound: int, reduce: bool, solver: Solver) -> OrderIlpResult:
    """
    The order of least peak by OLLA's lifetime program; see olla.ilp.order_ilp. reduce=False leaves every op at every step of its span.
    """

def address_ilp(lower: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], upper: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], size: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], alignment: int, fixed: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], start: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], lower_bound: int, solver: Solver) -> AddressIlpResult:
    """
    The layout of least height by OLLA's address program; see olla.ilp.address_ilp.
    """

def arena_graph(graph: CoreGraph, alignment: int) -> CoreGraph:
    """
    The graph whose peaks are the loads of the arena: tensors no op writes have no bytes, all other sizes are rounded up.
    """

def joint_ilp(arena: CoreGraph, order: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], workspace_offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], lower_bound: int, solver: Solver) -> JointIlpResult:
    """
    The order and layout of the smallest arena by OLLA's joint program; see olla.ilp.joint_ilp.
    """

def recompute_ilp(search: CoreRecomputeSearch, target: RecomputeTarget, solver: Solver) -> RecomputeIlpResult:
    """
    Put the best decisions for the base order in force, by integer program; see olla.recompute.ilp.
    """

class LayoutOptions:
    """
    How to look for a layout: alignment in bytes, a capacity in bytes that is enough (0: as low as can be found), the effort, and a switch for every search.
    """

    def __init__(self, *, alignment: int = 1, seed: int = 0, capacity: int = 0, num_threads: int = 1, max_placements: int = 2000000, max_nodes: int = 4000000, use_enumeration: bool = True, use_keys: bool = True, use_births: bool = True, use_squeaky_wheel: bool = True, use_foresight: bool = True, use_exact: bool = True, use_neighbourhood: bool = True, use_beam: bool = True) -> None: ...

class LayoutResult:
    """Offsets for buffers, and how good they are."""

    @property
    def offsets(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C')]:
        """int64[m], bytes: where buffer i begins."""

    @property
    def height_bytes(self) -> int:
        """The largest end of a buffer, sizes rounded up to the alignment."""

    @property
    def load_bytes(self) -> int:
        """Most bytes alive at once, of the same rounded sizes."""

    @property
    def bound_bytes(self) -> int:
        """No layout is lower; at least the load."""

    @property
    def cancelled(self) -> bool:
        """Whether the progress callback, or Ctrl-C, ended the search."""

class FitResult:
    """Offsets for buffers that were placed one after the other."""

    @property
    def offsets(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C')]:
        """int64[m], bytes: where buffer i begins."""

    @property
    def height_bytes(self) -> int:
        """The largest end of a buffer, sizes rounded up to the alignment."""

    @property
    def cancelled(self) -> bool:
        """Whether the progress callback, or Ctrl-C, ended the search."""

def layout(lower: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], upper: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], size: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], fixed: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, preferred: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, options: LayoutOptions, time_limit: float, progress: object | None) -> LayoutResult:
    """
    Offsets for buffers: buffer i is alive during [lower[i], upper[i]), must lie at fixed[i], and lies at preferred[i] where that costs no height; -1: anywhere. Use olla.layout.place instead.
    """

def fit_in_order(lower: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], upper: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], size: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], order: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], lowest: bool, alignment: int, time_limit: float, progress: object | None) -> FitResult:
    """
    Buffers placed one after the other, each into the smallest hole that is large enough, or into the lowest.
    """

def smartpool(lower: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], upper: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], size: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], outlives: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], alignment: int, time_limit: float, progress: object | None) -> FitResult:
    """Best fit of what outlives the iteration, then by falling size."""

class OrderResult:
    """The best order found, and what is proved of all others."""

    @property
    def order(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]:
        """int32[ops]: the op that runs at step i."""

    @property
    def peak_bytes(self) -> int: ...

    @property
    def lower_bound_bytes(self) -> int:
        """No order has a lower peak."""

    @property
    def cancelled(self) -> bool:
        """Whether the progress callback, or Ctrl-C, ended the search."""

def order(graph: CoreGraph, starts: Sequence[Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]], seed: int, limits: Limits) -> OrderResult:
    """
    The best order found from the given ones, and its proof. Work: ops of the windows cut, and nodes of the networks at every phase of their flows.
    """

def lower_bound(graph: CoreGraph, order: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], max_cuts: int, time_limit: float, progress: object | None) -> tuple[int, bool]:
    """
    (bound, cancelled): no order needs less than bound, from the cuts of at most max_cuts ops of one order.
    """

def least_peak_order(graph: CoreGraph) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]:
    """Inductor's list schedule: least peak memory first."""

def breadth_first_order(graph: CoreGraph) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]:
    """Inductor's list schedule: first in, first out."""

def depth_first_order(graph: CoreGraph) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]:
    """Inductor's list schedule: what an op needs right before it."""

class CoreRules:
    """
    What may be done with each op, and what it costs; see cpp/olla/graph/values.hpp.
    """

    def __init__(self, *, seconds: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], rerun: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], rerun_seconds: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], rerun_reads: tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]], in_place: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], fusion: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, store_seconds: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, keep_seconds: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, unsaved: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, reduced_in_place: bool, split: int) -> None: ...

class RecomputeTarget:
    """
    Either the least added time within a peak, or the least peak within an added time; of an integer program, the other one is a proven bound.
    """

    def __init__(self, *, least_time: bool, peak: int, added_seconds: float) -> None: ...

class Values:
    """
    What tensors hold between two mutations; see cpp/olla/graph/values.hpp.
    """

    @property
    def tensor(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', writable=False)]:
        """int32[values]: the tensor that holds it."""

    @property
    def producer(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', writable=False)]:
        """int32[values]: the op that makes it; -1: none."""

    @property
    def reads(self) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', writable=False)], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', writable=False)]]:
        """Of op v, as (offset, item), like all that follow."""

    @property
    def overwrites(self) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', writable=False)], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', writable=False)]]: ...

    @property
    def makes(self) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', writable=False)], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', writable=False)]]: ...

    @property
    def rerun_makes(self) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', writable=False)], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', writable=False)]]: ...

class GreedyCurve:
    """The state after every step of the greedy."""

    @property
    def peak_bytes(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C')]: ...

    @property
    def added_seconds(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C')]: ...

    @property
    def num_decisions(self) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C')]:
        """In force."""

class Decisions:
    """Drops in force; decision i is those from offset[i] to offset[i + 1]."""

    @property
    def values(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]:
        """int32[drops]: not kept past steps[d]."""

    @property
    def steps(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]: ...

    @property
    def offset(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C')]: ...

class Runs:
    """
    What runs under the decisions in force, in order, and the copies of values that this makes.
    """

    @property
    def op(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]:
        """int32[runs]."""

    @property
    def position(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]:
        """int32[runs]: the base step it serves."""

    @property
    def again(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C')]:
        """uint8[runs]: 0 in its own place in the base order."""

    @property
    def live_bytes(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C')]:
        """int64[runs]."""

    @property
    def reads(self) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C')], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]]:
        """Copies that run r reads, as (offset, item)."""

    @property
    def makes(self) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C')], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]]:
        """Copies that it makes."""

    @property
    def value(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]:
        """int32[copies]."""

    @property
    def fused(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C')]:
        """uint8[copies]: 1 where it is in no memory."""

class Rewritten:
    """
    The graph that decisions make, as columns like those of Graph, and where it comes from.
    """

    @property
    def tensor_bytes(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C')]: ...

    @property
    def donated(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C')]: ...

    @property
    def reads(self) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C')], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]]: ...

    @property
    def writes(self) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C')], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]]: ...

    @property
    def mutates(self) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C')], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]]: ...

    @property
    def after(self) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C')], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]]: ...

    @property
    def workspace_bytes(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C')]: ...

    @property
    def random(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C')]: ...

    @property
    def outputs(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]: ...

    @property
    def origin(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]:
        """int32[ops]: the op of the original graph."""

    @property
    def rerun(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C')]:
        """uint8[ops]: how it is recomputed, a Rerun; 0: in its own place."""

    @property
    def tensor_origin(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]:
        """int32[tensors]: the original tensor that it holds first."""

class CoreRecomputeSearch:
    """Which values not to keep, on top of a base order; see olla.recompute."""

    def __init__(self, graph: CoreGraph, order: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], rules: CoreRules) -> None: ...

    def run(self, peak: int, added_seconds: float, limits: Limits) -> bool:
        """
        Drop greedily until the peak is reached or a limit is met; whether it was cancelled.
        """

    def improve(self, target: RecomputeTarget, ops: Sequence[int], max_rounds: int, seed: int, limits: Limits) -> bool:
        """
        Search around the decisions in force, and those that the bounds of ops suggest, for less time within the peak, or less peak within the time; whether cancelled.
        """

    def reverse(self, most: int, least: int, time_limit: float, max_work: int) -> bool:
        """
        Take drops back, dearest first, where the peak stays between the limits and no time is added.
        """

    def curve(self) -> GreedyCurve:
        """The state after every step of the greedy."""

    def front(self) -> GreedyCurve:
        """
        All choices that were simulated and that no other one is better than; rising peaks.
        """

    def recall(self, target: RecomputeTarget) -> bool:
        """
        Put the best choice in force that was ever simulated and meets the target's limit; false where there is none.
        """

    def least_peak(self, ops: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], added_seconds: float, time_limit: float, progress: object | None) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C')], bool]:
        """
        (bounds, cancelled): no rewriting that adds at most added_seconds has a lower peak than any of the bounds, one per op.
        """

    def least_added_seconds(self, ops: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], peak: int, time_limit: float, progress: object | None) -> tuple[Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C')], bool]:
        """
        (bounds, cancelled): no rewriting with at most this peak adds less than any of the bounds, one per op.
        """

    def reset(self, values: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], steps: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> bool:
        """
        Put other drops in force: value i is not kept past steps[i]; false, and none are, if one can neither be kept nor made.
        """

    def set_absent(self, absent: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """
        Bytes that are in host memory while each base step runs, and count nothing.
        """

    def made_again(self, op: int, price: float, time_limit: float) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]:
        """
        Values that the cheapest way to go on after the op makes again, at a price of time in bytes per second.
        """

    def decisions(self) -> Decisions:
        """The drops in force."""

    def runs(self) -> Runs:
        """What runs under the decisions in force."""

    def rewritten(self) -> Rewritten:
        """The graph that the decisions in force make; not of fused ops."""

    @property
    def values(self) -> Values: ...

    @property
    def peak(self) -> int: ...

    @property
    def added_seconds(self) -> float: ...

class SwapTimeline:
    """When swaps run beside ops, in seconds; see cpp/olla/swap/timeline.hpp."""

    @property
    def start(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C')]:
        """float64[steps]: of the op of step s."""

    @property
    def out_start(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C')]:
        """float64[swaps], like all that follow but the figures."""

    @property
    def out_end(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C')]: ...

    @property
    def in_start(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C')]: ...

    @property
    def in_end(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C')]: ...

    @property
    def freed(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]:
        """int32[swaps]: the first step without the block."""

    @property
    def peak_bytes(self) -> int: ...

    @property
    def stall_seconds(self) -> float:
        """That ops wait."""

    @property
    def host_bytes(self) -> int:
        """Most in host memory at once."""

class SwapChoice:
    """Blocks that are swapped, in the order of their copies out, and when."""

    @property
    def block(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]:
        """int32[swaps]; a block that wraps has two."""

    @property
    def ready(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]:
        """int32[swaps], steps, as those that follow; see Swap in timeline.hpp."""

    @property
    def last(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]: ...

    @property
    def issue(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]: ...

    @property
    def next(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]: ...

    @property
    def timeline(self) -> SwapTimeline: ...

class CoreLink:
    """How fast copies are, each way; see olla.Link."""

    def __init__(self, *, out_bytes_per_second: float, out_latency_seconds: float, in_bytes_per_second: float, in_latency_seconds: float) -> None: ...

class IdleBlocks:
    """Gaps between two uses of a tensor."""

    def __init__(self, *, tensor: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], num_bytes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], made: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], last: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], next: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    @property
    def tensor(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]:
        """int32[blocks]."""

    @property
    def made(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]:
        """int32[blocks]: the last step that changed it."""

    @property
    def last(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]:
        """int32[blocks]: the step of its use before the gap."""

    @property
    def next(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]:
        """int32[blocks]: that of its use after; next <= last: in the next step."""

def idle_blocks(graph: CoreGraph, order: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], min_bytes: int, lasting: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> IdleBlocks:
    """
    Every gap between two uses, in steps of the order; of what lasts, also the one to the next step.
    """

class CoreSwapSearch:
    """Which idle blocks to copy to host memory; see olla.swap."""

    def __init__(self, *, live: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], seconds: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], blocks: IdleBlocks, link: CoreLink, host_bytes: int) -> None: ...

    def evaluate(self, blocks: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], limit: int, stalls: bool, by_last: bool) -> SwapChoice:
        """Of these blocks, those that fit."""

    def fit(self, limit: int, most_stall_seconds: float, limits: Limits) -> SwapChoice:
        """Blocks with which the peak is at most the limit, or the best found."""

    def least_peak(self, most_stall_seconds: float, starts: list, seed: int, num_rounds: int, limits: Limits) -> SwapChoice:
        """Blocks with the least peak found within that stall."""

def first_changed(containers: list, num_dicts: int, ends: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], ids: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], start: int, versions: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu')] | None) -> int:
    """
    Index of the first container from `start` on that holds other objects than expected; -1: none. The first num_dicts are dicts, the others lists. ends: uint32[containers], where the ids of each end; ids: uint64[items], id() of the items of a list, of key, value, key, value, ... of a dict in its order. The caller keeps these objects. versions: uint64[num_dicts], what CPython before 3.13 counted of each dict when it was last as expected, kept up to date; None elsewhere. Complexity: O(items), O(containers) with versions.
    """

def first_other(dicts: list, expected: list, missing: object, start: int) -> int:
    """
    Index of the first dict from `start` on that holds, by the keys of its expected dict, other objects than that one; -1: none. A key that maps to `missing` must not be there. Complexity: O(keys).
    """

def same_objects(objects: list, ids: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> bool:
    """
    Whether a list holds the very objects it held before. ids: uint64[items], id() of each, 0 for any object; the caller keeps these objects. Complexity: O(items).
    """

def same_kinds(objects: list, types: tuple, dicts: tuple) -> bool:
    """
    Whether objects are of the very types they were, and keep their attributes in the very dicts; None: in none. Complexity: O(objects).
    """
