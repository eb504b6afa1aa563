"""``kernels="aten"`` of the backend "olla": Dynamo's graphs, AOTAutograd's forward and backward, olla's plan."""

from __future__ import annotations

import re
import types
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from olla.aten.double_backward import CallInputs, attach, changed_inputs, inner_results, watch, watch_inner
from olla.aten.partition import AtenPartitioner
from olla.aten.program import Program, compile_program
from olla.aten.record import GraphRecord, WrapReport
from olla.aten.refused import refused
from olla.graph import DeviceProfile
from olla.inductor.compat import dynamo
from olla.plan import Goal
from olla.pytorch.capture.costs import is_random
from olla.pytorch.dynamo.captured import as_captured
from olla.pytorch.dynamo.graph import NotFollowed
from olla.pytorch.dynamo.unseen import Probes

# Calls in which code is planned for inputs of the same kinds. A counter in Python makes every call a new graph, and a
# plan may take minutes; the modes that a model changes between are few.
_MOST_ALIKE = 5
SETTINGS = {  # of Dynamo, during calls of what is wrapped
    "skip_nnmodule_hook_guards": False,  # hooks that come later are seen
    "recompile_limit": 64,  # then code runs as it is
    "rewrite_assert_with_torch_assert": False,  # an assert of a tensor ends a graph, and raises what Python raises
    "trace_numpy": False,  # torch's operators do not round as numpy's
    "suppress_errors": True,  # of Dynamo's own: what it cannot take runs as it is
}
_INNER = (
    "retain_grad() or a hook asks for the gradient of a result from which other results of a planned graph are "
    "computed: in this backward it lacks what flows back from those. From the next call on the graph runs as it is, "
    "with all gradients."
)
_PLACE = re.compile(r".*?:\d+: ")  # a file and a line of it
_OPTIONS = ("budget", "max_slowdown", "minimise", "device", "time_limit")


def partitioner(
    budget: int | str | None = None,
    max_slowdown: float | None = None,
    minimise: str | None = None,
    device: str | DeviceProfile | None = None,
    time_limit: float = 15.0,
) -> AtenPartitioner:
    """Return the partitioner for a goal; without one, nothing is recomputed.

    Raises:
        BudgetError: the budget is no number of bytes.
        ValueError: two goals are given, or one is out of its range.
    """
    goal = Goal.of(budget, max_slowdown, minimise, "a100" if device is None else device, True, True)
    return AtenPartitioner(goal, device=device, time_limit=time_limit)


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
        num_graphs: that Dynamo has captured so far.
        probes: code object -> values that it has read and Dynamo's guards do not cover.
        suppressed: notes Dynamo's errors that are suppressed while it is entered.
        call: the number of the call that runs, where calls are counted.
    """

    def __init__(self, partition: AtenPartitioner, report: WrapReport) -> None:
        self.num_runs = 0
        self.num_graphs = 0
        self.call = 0
        self._alike: dict[tuple[Any, ...], set[int]] = {}
        self.probes: dict[types.CodeType, list[Probes]] = {}
        self.suppressed = dynamo.Suppressed(self.note_line)
        self._partition = partition
        self._report = report

    def __call__(self, module: Any, inputs: Any) -> Callable[..., Any]:
        """Return what runs in place of a graph."""
        self.num_graphs += 1
        self._note_break(module)
        num_graphs = len(self._report.graphs)
        if reason := self._note_probes() or refused(module, inputs) or self._note_alike(inputs):
            self._report.graphs.append(GraphRecord(reason=reason))
            raise dynamo.skip_frame(reason)
        graph = _Compiled(module, self)
        try:
            graph.program = dynamo.compile_aten(
                module, inputs, self._partition, graph.forward, graph.backward, graph.inference
            )
        except dynamo.restarts:
            raise
        except Exception as error:
            reason = str(error).partition("\n")[0]
            del self._report.graphs[num_graphs:]
            self._report.graphs.append(
                GraphRecord(reason=f"AOTAutograd does not take it: {type(error).__name__}: {reason}")
            )
            raise dynamo.skip_frame(reason) from None
        graph.places = list(range(num_graphs, len(self._report.graphs)))
        return torch.compiler.disable(graph.__call__)  # type: ignore[no-any-return,no-untyped-call]

    def _note_probes(self) -> str:
        """Record values read that Dynamo's guards do not cover; return why they cannot be watched, or ""."""
        code, scope = dynamo.frame()
        try:
            if probes := Probes(scope):
                self.probes.setdefault(code, []).append(probes)
        except NotFollowed as error:
            return str(error)
        return ""

    def _note_alike(self, inputs: Any) -> str:
        """Return why code is planned no more, if it was for inputs of the same kinds in several calls; else ""."""
        code, scope = dynamo.frame()
        kinds = [
            (t.shape, t.dtype, t.device, t.requires_grad) if isinstance(t, torch.Tensor) else type(t) for t in inputs
        ]
        key = (code, id(scope["L"].get("self")), torch.is_grad_enabled(), *kinds)
        calls = self._alike.setdefault(key, set())
        calls.add(self.call)
        if len(calls) <= _MOST_ALIKE:
            return ""
        return "a value that it reads in Python keeps changing: modules of your own in it are planned instead"

    def _note_break(self, module: Any) -> None:
        reason = getattr(module, "compile_subgraph_reason", None)
        if reason is None or not reason.graph_break:
            return
        frame = reason.user_stack[-1] if reason.user_stack else None
        place = f"{frame.filename}:{frame.lineno}: " if frame is not None else ""
        self.note_line(place + str(reason.reason).strip().partition("\n")[0])

    def note_line(self, line: str) -> None:
        """Record where, and why, Dynamo does not follow; the first reason for each line of code."""
        place = _PLACE.match(line)
        if not any(known.startswith(place[0] if place else line) for known in self._report.breaks):
            self._report.breaks.append(line)

    def note(self, reason: str, graphs: list[int]) -> None:
        """Note why graphs of the report are not planned any more."""
        for i in graphs:
            self._report.graphs[i] = replace(self._report.graphs[i], reason=reason)

    def note_inference(self, module: fx.GraphModule) -> None:
        """Note a graph that needs no backward."""
        num_ops = sum(node.op == "call_function" for node in module.graph.nodes)
        self._report.graphs.append(GraphRecord(kind="inference", num_ops=num_ops))


def _is_free(value: Any) -> bool:
    """Whether an input is a leaf that requires a gradient, as a gradient penalty has it, which differentiates that."""
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


class _Compiled:
    """One graph of Dynamo's as it runs.

    Args:
        module: the graph.
        backend: that compiles it.

    Attributes:
        program: what AOTAutograd made of it.
        places: of it in the report.
    """

    def __init__(self, module: fx.GraphModule, backend: Backend) -> None:
        self.program: Callable[..., Any] | None = None
        self._module = as_captured(module)
        self._backend = backend
        self._draws = False
        self._is_captured: bool | None = None  # whether it runs as captured; None: nothing is known yet
        self._others: list[int] | None = None  # inputs that are no parameters
        self.places: list[int] = []
        self._statistics = sorted(changed_inputs(module))
        self._inner = inner_results(module)

    def __call__(self, *args: Any) -> Any:
        """Run the graph."""
        assert self.program is not None
        if len({id(args[i]) for i in self._statistics}) < len(self._statistics):  # two buffers have become one
            return self._module(*args)
        if not torch.is_grad_enabled():
            return self.program(*args)
        if self._others is None:
            self._others = [i for i, a in enumerate(args) if not isinstance(a, torch.nn.Parameter)]
        if self._is_captured or (self._is_captured is None and any(_is_free(args[i]) for i in self._others)):
            return self._as_it_is(args)
        given = CallInputs(self._module, args, self._others, self._draws, self._differentiated)
        outputs = self.program(*args)
        attach(outputs, given)
        if self._inner:
            watch_inner(outputs, self._inner, self._looked_into)
        return outputs

    def _as_it_is(self, args: tuple[Any, ...]) -> Any:
        """Run the graph as Dynamo captured it, and see whether its gradients are differentiated."""
        outputs = self._module(*args)
        watch(outputs, self._watched)
        return outputs

    def _watched(self) -> None:
        """Note whether a backward through the captured graph records gradients of its own (double backward)."""
        if torch.is_grad_enabled():
            self._differentiated()
        elif self._is_captured is None:
            self._is_captured = False

    def _differentiated(self) -> None:
        """Run as captured from now on: double backward through one graph then equals eager's to the bit."""
        self._run_captured("its gradients are differentiated")

    def _looked_into(self) -> None:
        """Run as captured from now on: autograd sees all values then."""
        if self._run_captured("gradients of values inside are asked for"):
            warnings.warn(_INNER, stacklevel=2)

    def _run_captured(self, reason: str) -> bool:
        """Run as captured from now on; return whether it did not do so yet."""
        if self._is_captured:
            return False
        self._is_captured = True
        self._backend.note(f"{reason}: from then on it runs as it is", self.places)
        return True

    def forward(self, module: fx.GraphModule) -> Program:
        self._draws = any(is_random(node) for node in module.graph.nodes)
        return self._counted(compile_program(module, "olla_forward"))

    def backward(self, module: fx.GraphModule) -> Program:
        return compile_program(module, "olla_backward")

    def inference(self, module: fx.GraphModule) -> Program:
        self._backend.note_inference(module)
        return self._counted(compile_program(module, "olla_inference"))

    def _counted(self, program: Program) -> Program:
        def run(values: list[Any]) -> list[Any]:
            self._backend.num_runs += 1
            return program(values)

        return run
