"""A compiled step by the graphs that Dynamo makes of its loss function: each is captured, planned and guarded."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from olla.errors import FIRST_STEP, CaptureError, free_frames
from olla.pytorch.capture.inputs import batch_names, plain_batch
from olla.pytorch.capture.loop import GraphLoss
from olla.pytorch.dynamo.follow import Followed
from olla.pytorch.dynamo.graph import LossGraph, NotFollowed
from olla.pytorch.guards.facts import StepCall, leaf_facts

_Key = tuple[Any, ...]


class RunnableStep(Protocol):
    """A step that captures and runs what it is called for."""

    @property
    def model(self) -> torch.nn.Module:
        """Its model."""

    def find(self, call: StepCall) -> Any:
        """Return a capture, what it takes and why it was made; an exception, or None, where there is none."""

    def runs_beside(self, found: Any) -> bool:
        """Whether it runs the step on the batch, in place of the graph that it was found for."""

    def run_found(self, *found: Any) -> Any:
        """Run that."""


class _Refused(Exception):
    """A graph of Dynamo's cannot be captured or planned. Nothing was run."""


class _StepFound(Exception):
    """Raised in place of running a step that was to be captured and planned only, or that runs beside the graph."""

    def __init__(self, found: Any) -> None:
        super().__init__()
        self.found = found


class Follower:
    """Runs a step wherever Dynamo makes one graph of its loss function.

    Args:
        step: the step.
        function: its loss function, or inference, of a model and a batch.
        trains: whether it is a loss function.
        most_graphs: that are kept.

    Attributes:
        NOT_TAKEN: what ``run`` returns where it has run nothing.
        reason: why Dynamo made no single graph of it, the last time it did not; empty: it always did.
        refusal: why it cannot be captured in another way either; None: that is to be tried.
    """

    NOT_TAKEN = object()

    def __init__(self, step: RunnableStep, function: Callable[[Any, Any], Any], trains: bool, most_graphs: int) -> None:
        own = weakref.ref(self)

        def run(graph: LossGraph, inputs: Sequence[Any]) -> Sequence[Any]:
            follower = own()
            assert follower is not None
            return follower._run_graph(graph, inputs)

        self._step: RunnableStep = weakref.proxy(step)
        self._most_graphs = most_graphs
        self._followed = Followed(step.model, function, trains, run, most_graphs)
        self._call: StepCall | None = None  # that runs
        self._only_prepares = False
        self._is_lazy = True  # some parameters have no shape yet, as far as is known
        self._places: dict[int, _Places] = {}  # by the number of a graph
        self._known: list[_Key] = []  # keys of batches that were taken
        self._lost: list[_Key] = []  # keys of batches that are to be captured in another way
        self.refusal: CaptureError | None = None
        self.reason = ""

    def forget(self) -> None:
        """Let go of all that was captured, and try again what could not be."""
        self._followed.forget()
        self._places.clear()
        self._known.clear()
        self._lost.clear()
        self.reason, self.refusal = "", None

    def takes(self, call: StepCall) -> bool:
        """Whether a call may run here."""
        self._is_lazy = self._is_lazy and any(is_lazy(p) for p in self._step.model.parameters())
        if self._is_lazy or call.key in self._lost:
            return False
        return not any(isinstance(leaf, np.generic) for leaf in call.leaves)  # their kind counts

    def run(self, call: StepCall, only_prepares: bool = False) -> Any:
        """Run the step, and return what the loss function returns; NOT_TAKEN where it is to be captured in another way.

        Args:
            call: of the step.
            only_prepares: capture and plan the step for it, and run nothing; what ``find`` returned is returned.
        """
        self._call, self._only_prepares = call, only_prepares
        is_new, handled = call.key not in self._known, sys.exception()
        try:
            result = self._followed(self._step.model, plain_batch(call.batch), is_new)
            if is_new:
                self._known = [*self._known[-self._most_graphs :], call.key]
            return result
        except _StepFound as error:
            return error.found if only_prepares else self._step.run_found(*error.found, call.batch)
        except (NotFollowed, _Refused) as error:
            if getattr(error.__cause__, "rule", "") != FIRST_STEP:
                self._lost.append(call.key)
            self.reason = str(error) or self.reason
            if isinstance(error, NotFollowed) and error.reads:
                self.refusal = CaptureError(
                    f"the step calls {error.reads}, and what that says would be frozen into the captured step. Call it "
                    "before the step, and pass the result in with the batch, as a tensor."
                )
            free_frames(error, handled)
            return self.NOT_TAKEN
        finally:
            self._call = None

    def _run_graph(self, graph: LossGraph, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run the step whose forward pass a graph is, on the graph's inputs; return its outputs."""
        step, call = self._step, self._call
        assert call is not None
        places = self._places.get(graph.number)
        if places is None:
            if len(self._places) >= self._most_graphs:
                self._places.clear()
            places = self._places[graph.number] = _Places(step.model, graph, inputs, call)
        leaves = [inputs[i] for i in places.passed]
        own = [inputs[i] for i in places.own]
        _, _, modes = call.key
        key = (graph.number, leaf_facts(leaves), modes, [id(inputs[i]) for i in places.fixed])
        loss = GraphLoss(graph.run, inputs, places.names, graph.trains)
        found = step.find(StepCall(leaves, key, leaves, loss, own, graph.change))
        if not isinstance(found, tuple):
            raise _Refused from found
        if self._only_prepares or step.runs_beside(found):
            raise _StepFound(found)
        return step.run_found(*found, call.batch)  # type: ignore[no-any-return]


class _Places:
    """Which inputs of a graph a step is passed at every call.

    Args:
        model: whose parameters and buffers the step finds by itself.
        graph, inputs: of a call.
        call: of the step.

    Attributes:
        passed: positions of tensors that are passed.
        names: of these.
        own: positions of parameters and buffers of the model.
        fixed: positions of tensors beside the model that get gradients, and have to stay the same objects.
    """

    def __init__(self, model: torch.nn.Module, graph: LossGraph, inputs: Sequence[Any], call: StepCall) -> None:
        own = {id(t) for t in (*model.parameters(), *model.buffers())}
        of_batch = {id(leaf): name for leaf, name in zip(call.leaves, batch_names(call.batch), strict=True)}
        self.passed: list[int] = []
        names: list[str] = []
        self.own: list[int] = []
        self.fixed: list[int] = []
        for i, (name, value) in enumerate(zip(graph.names, inputs, strict=True)):
            if id(value) in own:
                self.own.append(i)
            elif graph.trains and _gets_gradient(value) and id(value) not in of_batch:
                self.fixed.append(i)
            else:
                self.passed.append(i)
                names.append(of_batch.get(id(value), name))
        self.names = tuple(names)


def _gets_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
