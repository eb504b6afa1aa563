"""A training step that is no single graph: the user's own step runs, with its forward and backward passes planned."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from olla.aten.calls import Calls
from olla.aten.partition import AtenPartitioner, model_bytes
from olla.aten.record import WrapReport
from olla.base import human_bytes
from olla.plan import Goal


class Pieces:
    """Plans the graphs that Dynamo makes of a loss function, or of the models that a loop's body calls.

    Args:
        model: of the step.
        loss: its loss function; None: the step is the body of a loop.
        goal: for forward and backward; None: nothing is recomputed.
        time_limit: seconds for the plan of one graph.

    Attributes:
        loss: what runs in place of the loss function; None: there is none.
        report: graphs and graph breaks so far.
    """

    def __init__(
        self, model: torch.nn.Module, loss: Callable[[Any, Any], Any] | None, goal: Goal | None, time_limit: float
    ) -> None:
        self.report = WrapReport(name=type(model).__name__)
        device = None if goal is None else goal.device  # without a goal, the one that the model is on
        self._partition = AtenPartitioner(goal, device, time_limit, model_bytes(model), self.report.graphs)
        self._model, self._given = model, loss
        self._calls: dict[torch.nn.Module, Calls] = {}
        self.loss = loss
        if loss is None:
            self.plan_models()
        else:
            self.loss = self._planned(loss)

    def plan_models(self) -> None:
        """Plan the models that the loss function calls, and not the function itself, which Dynamo cannot follow."""
        self.loss = self._given
        self._calls = {module: self._planned(module) for module in _called_modules(self._model)}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Plan the calls of the models within this context, in which the body of a loop runs; undo that at its end."""
        own = [module for module in self._calls if module._compiled_call_impl is None]  # else compiled by the user
        for module in own:
            module._compiled_call_impl = self._calls[module]
        try:
            yield
        finally:
            for module in own:
                module._compiled_call_impl = None

    @property
    def note(self) -> str:
        """What a report says of the graphs; empty where none is planned."""
        planned = self.report.planned
        if not planned:
            return ""
        largest = max(planned, key=lambda graph: graph.eager_peak_bytes)
        sizes = f"{human_bytes(largest.peak_bytes)} in place of {human_bytes(largest.eager_peak_bytes)}"
        left = f", {len(self.report.graphs) - len(planned)} are not" if len(self.report.graphs) > len(planned) else ""
        breaks = "".join(f" Graph break: {line}." for line in self.report.breaks[:3])
        return f"{len(planned)} graphs of forward and backward are planned{left}; the largest takes {sizes}.{breaks}"

    def _planned(self, given: Callable[..., Any]) -> Calls:
        return Calls(given, self._partition, self.report, dynamic=False)


def _called_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the outermost modules that can be called: a container of several models has no forward of its own."""
    found: list[torch.nn.Module] = []
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if type(module).forward is torch.nn.Module.forward:
            waiting += module.children()
        else:
            found.append(module)
    return found
