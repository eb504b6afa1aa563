"""The captures of one step, and the search for one whose batch key and guard match a call."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from olla._core import same_objects
from olla.pytorch.binding import Settings
from olla.pytorch.capture import Captured
from olla.pytorch.capture.exclusive import between
from olla.pytorch.capture.inputs import InputBinding
from olla.pytorch.capture.results import Gradients
from olla.pytorch.checks import failures
from olla.pytorch.guards.containers import Holds, WatchedContainer
from olla.pytorch.guards.facts import StepCall, own_attributes
from olla.pytorch.guards.guard import Guard, TensorFacts, Wholes
from olla.pytorch.guards.values import equal

if TYPE_CHECKING:
    from olla.pytorch.ranks.group import Ranks
    from olla.pytorch.runner import Runner

_UNREADABLE = (KeyError, IndexError, StopIteration, AttributeError, TypeError)


class Capture:
    """One capture of a step, and the guards that decide whether a call may use it.

    Args:
        captured: the step.
        call: that it was captured for.
        inputs: finds its tensors.

    Attributes:
        runner: runs it; set by the step.
        number: the same on all ranks that run it together; 0: it runs on one.
        left: its side effects beside its operators; None: none.
    """

    runner: Runner
    number: int = 0

    def __init__(self, captured: Captured, call: StepCall, inputs: InputBinding) -> None:
        assert captured.reads is not None
        self.key, leaves = call.key, call.leaves
        self.left = captured.left
        self.inputs = inputs
        self.gather = inputs.gatherer(captured.inputs)
        self._setting_change: Callable[[], str] = lambda: ""
        if inputs.optimizer is not None:
            self._setting_change = Settings(inputs.optimizer).change
        values = self.gather(leaves)
        position = {id(t): i for i, t in enumerate(values)}
        self._own = [position[id(t)] for t in call.own]
        self._num_tensors = sum(entry.kind in ("parameter", "buffer") for entry in captured.inputs)  # they come first
        self._guard = Guard(captured.reads, values[: self._num_tensors])
        self._gradients = captured.gradients or Gradients()
        self._states = [i for i, entry in enumerate(captured.inputs) if entry.kind == "optimizer_state"]
        self._added_to = [i for i, entry in enumerate(captured.inputs) if entry.kind == "gradient"]
        others = ("input", "rate", "gradient")
        self._kept = [i for i, entry in enumerate(captured.inputs) if entry.kind not in others]
        self._shared = self._guard.shared_with(leaves)
        self._state_facts = TensorFacts([values[i] for i in self._states])
        self._gradient_facts = TensorFacts([values[i] for i in self._added_to])
        self._updated = inputs.updated()
        self._first = values[: self._num_tensors]
        self._replaced = Wholes([])  # the attributes of tensors that came later
        self._keep(values)
        failures.check_memory(_changed(captured, values))

    def values(self, call: StepCall) -> tuple[list[torch.Tensor], str]:
        """Return the input tensors of the step for a call with this key; or, in words, why the capture does not apply.

        Complexity: O(values that the step read + its inputs).
        """
        leaves = call.leaves
        try:
            if what := self._gradients.change(self.inputs.parameter):
                return [], what
            values = self.gather(leaves)
        except _UNREADABLE as error:
            lost = f"a parameter, a buffer or optimizer state is not where it was ({type(error).__name__}: {error})"
            return [], self._guard.change() or self._setting_change() or lost
        if not all(map(operator.is_, map(values.__getitem__, self._own), call.own)):
            return [], "a parameter or buffer stands in another place of the model"
        what = self._guard.change() or self._guard.tensor_change(values[: self._num_tensors]) or self._setting_change()
        if not what and not same_objects(values, self._ids):
            what = self._other_tensors(values)
        if not what and self._added_to and (of := self._gradient_facts.change([values[i] for i in self._added_to])):
            what = f"of the gradients that are there, {of}"
        if not what and self._replaced.first_changed(0) >= 0:
            what = "a parameter or buffer has other attributes"
        if not what and self._shared != self._guard.shared_with(leaves):
            what = "the batch shares memory with parameters or buffers in another way"
        return ([], what) if what else (values, "")

    def run(self, values: list[torch.Tensor], model: torch.nn.Module, ranks: Ranks | None) -> Any:
        """Run the step and its side effects; return what the loss function returned."""
        runner, left = self.runner, self.left
        if left is not None:
            names = [name for name, _ in runner.gradients if name not in self._gradients.leaves]
            left.begin(self.inputs.parameter(name).grad for name in names if name not in self._gradients.dropped)
        self._gradients.drop(self.inputs.parameter)
        with ranks.in_step() if ranks is not None else contextlib.nullcontext():
            results = runner.run(values)
        if left is not None:
            left.end(model)
        if self.inputs.optimizer is not None:
            # A learning-rate scheduler warns unless it sees that the optimizer stepped.
            self.inputs.optimizer._opt_called = True  # type: ignore[attr-defined]
        num_values = runner.structure.num_tensors
        if runner.gradients or self._gradients.cleared:
            with between():
                found = zip(runner.gradients, results[num_values:], strict=True)
                held = self._gradients.leave(self.inputs.parameter, ((*name, gradient) for name, gradient in found))
            runner.figures.held_gradient_bytes = held
        return runner.structure.fill(results[:num_values])

    def _other_tensors(self, values: Sequence[torch.Tensor]) -> str:
        """Return why the step cannot take other tensors than it took before; empty where it can."""
        if self.inputs.updated() != self._updated:
            return "the optimizer updates other parameters of the model"
        replaced = [(old, t) for old, t in zip(self._first, values, strict=False) if old is not t]
        if any(not equal(own_attributes(old), own_attributes(new)) for old, new in replaced):
            return "a parameter or buffer was replaced by one with other attributes"
        self._replaced = Wholes([WatchedContainer.of(vars(new), Holds.ATTRIBUTES, "") for _, new in replaced])
        state = [values[i] for i in self._states]
        if not all(isinstance(t, torch.Tensor) for t in state):
            return "the optimizer's state holds something else than tensors"
        if what := self._state_facts.change(state):
            return f"of the optimizer's state, {what}"
        self._keep(values)
        return ""

    def _keep(self, values: Sequence[torch.Tensor]) -> None:
        """Note the parameters, buffers and optimizer state that the step takes."""
        self._ids = np.zeros(len(values), dtype=np.uint64)
        self._ids[self._kept] = [id(values[i]) for i in self._kept]
        self._seen = [values[i] for i in self._kept]  # holding references keeps the ids unique


class Captures:
    """The captures of a step, the latest used last; at most ``size`` are kept."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._captures: list[Capture] = []

    def __len__(self) -> int:
        return len(self._captures)

    @property
    def latest(self) -> Capture | None:
        """The one that was used last."""
        return self._captures[-1] if self._captures else None

    def find(self, call: StepCall) -> tuple[Capture | None, list[torch.Tensor], str]:
        """Return the capture that matches a call, with its input tensors, or why none matches."""
        reason = ""
        for capture in reversed(self._captures):
            if capture.key != call.key:
                continue
            try:
                values, what = capture.values(call)
            except Exception as error:  # whatever the user's objects do where they are compared
                values, what = [], f"what it read cannot be compared ({type(error).__name__}: {error})"
            if not what:
                return capture, values, ""
            reason = reason or what
        return None, [], reason or ("another batch, mode or setting of torch" if self._captures else "")

    def use(self, capture: Capture) -> bool:
        """Mark a capture as the latest used; return whether another one was evicted for it."""
        self._captures = [c for c in self._captures if c is not capture] + [capture]
        if len(self._captures) <= self._size:
            return False
        self._captures.pop(0)
        return True


def _changed(captured: Captured, values: Sequence[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield what a step takes: name, tensor, whether the step changes it."""
    nodes = captured.module.graph.find_nodes(op="placeholder")
    changed = set(captured.graph.mutates.item.tolist())
    for entry, node, value in zip(captured.inputs, nodes, values, strict=True):
        yield entry.name, value, any(t in changed for t in captured.tensors[node])
