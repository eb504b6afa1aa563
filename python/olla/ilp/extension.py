"""HiGHS as highspy's own extension runs it, for wheels of highspy that bring no shared library."""

from collections.abc import Callable, Mapping
from threading import Thread

import highspy
import numpy as np
import numpy.typing as npt
from highspy._core import _Highs

from olla._core import HighsEnd, HighsProgress, Program
from olla.errors import SolverError

_Type = highspy.cb.HighsCallbackType
_Input = highspy.cb.HighsCallbackInput
_Output = highspy.cb.HighsCallbackOutput


class HighsExtension:
    """Runs HiGHS for the core's `Solver`, as the core itself does where there is a shared library.

    Attributes:
        version: of HiGHS, such as "1.16.0".
    """

    version = f"{highspy.HIGHS_VERSION_MAJOR}.{highspy.HIGHS_VERSION_MINOR}.{highspy.HIGHS_VERSION_PATCH}"

    def begin(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run work in a thread of its own; return the function that waits for its end."""
        # No daemon: the interpreter waits for it at exit, because a callback that HiGHS makes later would find no
        # interpreter and end the process.
        thread = Thread(target=work, name="HiGHS")
        thread.start()
        return thread.join

    def run(
        self,
        program: Program,
        options: Mapping[str, bool | int | float],
        start: npt.NDArray[np.float64],
        progress: HighsProgress,
    ) -> HighsEnd:
        """Solve a program to its end or to a limit, in the thread that calls this.

        Args:
            program: what to minimise.
            options: values of HiGHS's options.
            start: float64[columns], an answer to start from, or empty.
            progress: told of every bound and every better answer; says when to stop.

        Raises:
            SolverError: HiGHS refuses the program or an option, or fails.
        """
        solver = _Highs()  # highspy.Highs sets callbacks of its own, and prints a line when it does
        for name, value in options.items():
            _require(solver.setOptionValue(name, value), f"set {name} to {value}")
        _require(_pass(solver, program), "accept the program")
        if start.size:
            every = np.arange(start.size, dtype=np.int32)
            _require(solver.setSolution(start.size, every, start), "accept the start")
        _require(solver.setCallback(_listener(progress), None), "accept a callback")
        for kind in (_Type.kCallbackMipImprovingSolution, _Type.kCallbackMipLogging, _Type.kCallbackMipInterrupt):
            _require(solver.startCallback(kind), "start a callback")
        status = solver.run()
        _require(status, f"solve the program (model status {int(solver.getModelStatus())})")
        info = solver.getInfo()
        return HighsEnd(
            model_status=int(solver.getModelStatus()),
            primal_status=info.primal_solution_status,
            num_nodes=info.mip_node_count,
            bound=info.mip_dual_bound,
            objective=info.objective_function_value,
            values=np.array(solver.getSolution().col_value, dtype=np.float64),
        )


def _pass(solver: _Highs, program: Program) -> highspy.HighsStatus:
    """Hand a program to HiGHS."""
    p = program
    sizes = p.cost.size, p.row_lower.size, p.index.size
    kind = int(highspy.MatrixFormat.kRowwise), int(highspy.ObjSense.kMinimize), 0.0
    bounds = p.lower, p.upper, p.row_lower, p.row_upper
    return solver.passModel(*sizes, *kind, p.cost, *bounds, p.row_start, p.index, p.value, p.integer)


def _listener(progress: HighsProgress) -> Callable[..., None]:
    """Return the callback that tells progress what HiGHS says, and HiGHS to stop."""

    def hear(kind: _Type, _: str, out: _Output, into: _Input | None, user: object) -> None:
        better = out.mip_solution if kind == _Type.kCallbackMipImprovingSolution else None
        if progress.note(out.mip_dual_bound, out.objective_function_value, better) and into is not None:
            into.user_interrupt = True

    return hear


def _require(status: highspy.HighsStatus, what: str) -> None:
    if status == highspy.HighsStatus.kError:
        raise SolverError(f"HiGHS failed to {what}")
