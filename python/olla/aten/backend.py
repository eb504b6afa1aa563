"""``kernels="aten"`` of the backend "olla": Dynamo's graphs, AOTAutograd's forward and backward, olla's plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from olla.aten.partition import Partitioner
from olla.aten.program import Program, compile_program
from olla.aten.record import Graph, WrapReport
from olla.graph import DeviceProfile
from olla.inductor.compat import compat, fallback
from olla.plan import Goal

_OPTIONS = ("budget", "max_slowdown", "minimise", "device", "time_limit")


def partitioner(
    budget: int | str | None = None,
    max_slowdown: float | None = None,
    minimise: str | None = None,
    device: str | DeviceProfile | None = None,
    time_limit: float = 15.0,
) -> Partitioner:
    """Return the partitioner for a goal; without one, nothing runs again.

    Raises:
        BudgetError: the budget is no number of bytes.
        ValueError: two goals are given, or one is out of its range.
    """
    if budget is None and max_slowdown is None and minimise is None:
        max_slowdown = 0.0
    goal = Goal.of(budget, max_slowdown, minimise, "a100" if device is None else device, True, True)
    assert goal is not None
    return Partitioner(goal, device=device, time_limit=time_limit)


def backend_of(options: Mapping[str, Any]) -> Backend:
    """Return the backend for the options of ``torch.compile``.

    Raises:
        ValueError: an option is unknown, or out of its range.
    """
    if options["kernels"] != "aten":
        raise ValueError(f"kernels is {options['kernels']!r}, expected 'inductor' or 'aten'")
    others = [name for name in options if name not in (*_OPTIONS, "kernels")]
    if others:
        raise ValueError(f"{others[0]} is no option of kernels='aten', which takes {', '.join(_OPTIONS)}")
    given = {name: value for name, value in options.items() if name != "kernels"}
    partition = partitioner(**given)
    return Backend(partition, WrapReport(name="", graphs=partition.graphs))


class Backend:
    """Compiles the graphs that Dynamo captures: torch's own kernels, forward and backward in planned order.

    Nothing is decomposed but what eager training decomposes as well, so that results are the same to the bit. A graph
    that AOTAutograd cannot take runs as Dynamo captured it, which is what the model would have done.

    Args:
        partition: divides forward and backward; its graphs are those of the report.
        report: takes graphs and graph breaks.

    Attributes:
        num_runs: of forward or inference graphs so far.
    """

    def __init__(self, partition: Partitioner, report: WrapReport) -> None:
        self.num_runs = 0
        self._partition = partition
        self._report = report

    def __call__(self, module: Any, inputs: Any) -> Callable[..., Any]:
        """Return what runs in place of a graph."""
        self._note_break(module)
        num_graphs = len(self._report.graphs)
        try:
            return compat.compile_aten(module, inputs, self._partition, self._forward, self._backward, self._inference)
        except compat.restarts:
            raise
        except Exception as error:
            reason = str(error).partition("\n")[0]
            fallback.warn(f"AOTAutograd does not take a graph, which runs as it is: {type(error).__name__}: {reason}")
            del self._report.graphs[num_graphs:]
            self._report.graphs.append(Graph(reason=f"AOTAutograd does not take it: {type(error).__name__}: {reason}"))
            return module.forward  # type: ignore[no-any-return]

    def settings(self) -> Any:
        """Return a context for calls of the model: what Dynamo is to see and how often it may compile."""
        return compat.dynamo_config.patch(skip_nnmodule_hook_guards=False)

    def _note_break(self, module: Any) -> None:
        reason = getattr(module, "compile_subgraph_reason", None)
        if reason is None or not reason.graph_break:
            return
        frame = reason.user_stack[-1] if reason.user_stack else None
        place = f"{frame.filename}:{frame.lineno}: " if frame is not None else ""
        line = place + str(reason.reason).strip().partition("\n")[0]
        if line not in self._report.breaks:
            self._report.breaks.append(line)

    def _forward(self, module: fx.GraphModule) -> Program:
        return self._counted(compile_program(module, "olla_forward"))

    def _backward(self, module: fx.GraphModule) -> Program:
        return compile_program(module, "olla_backward")

    def _inference(self, module: fx.GraphModule) -> Program:
        num_ops = sum(node.op == "call_function" for node in module.graph.nodes)
        self._report.graphs.append(Graph(kind="inference", num_ops=num_ops))
        return self._counted(compile_program(module, "olla_inference"))

    def _counted(self, program: Program) -> Program:
        def run(values: list[Any]) -> list[Any]:
            self.num_runs += 1
            return program(values)

        return run
