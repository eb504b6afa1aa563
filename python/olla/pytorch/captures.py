"""The captures of one step: which of them is still right for a call, by its batch and by its guard."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from olla._core import same_objects
from olla.errors import BudgetError, CaptureError, ReplayError
from olla.pytorch.binding import Settings
from olla.pytorch.capture import Captured
from olla.pytorch.capture.exclusive import between
from olla.pytorch.capture.inputs import InputBinding
from olla.pytorch.capture.results import Gradients
from olla.pytorch.checks import failures
from olla.pytorch.guards.followed import Followed, Kept
from olla.pytorch.guards.guard import Guard, TensorFacts, Wholes
from olla.pytorch.guards.places import Holds, Watched, contents
from olla.pytorch.guards.values import equal
from olla.pytorch.ordinary.loop import inference
from olla.pytorch.ranks.wrapped import is_wrapped
from olla.pytorch.sharded.fully import is_sharded

if TYPE_CHECKING:
    from olla.pytorch.ranks.group import Ranks
    from olla.pytorch.runner import Runner

_UNREADABLE = (KeyError, IndexError, StopIteration, AttributeError, TypeError)


class Capture:
    """One capture, and what it is right for.

    Args:
        captured: the step.
        key: of the batch it was captured with.
        inputs: finds its tensors.
        leaves: of the batch.
        kept: the attributes that its loss function sets; None: it sets none.

    Attributes:
        runner: runs it; set by the step.
        number: the same on all ranks that run it together; 0: it runs on one.
        left: what it does beside its operators; None: nothing.
    """

    runner: Runner
    number: int = 0

    def __init__(
        self,
        captured: Captured,
        key: tuple[Any, ...],
        inputs: InputBinding,
        leaves: Sequence[Any],
        kept: Kept | None = None,
    ) -> None:
        assert captured.reads is not None
        self.key = key
        self.left = captured.left
        self.inputs = inputs
        self.gather = inputs.gatherer(captured.inputs)
        self._setting_change: Callable[[], str] = lambda: ""
        if inputs.optimizer is not None:
            self._setting_change = Settings(inputs.optimizer).change
        values = self.gather(leaves)
        self._num_tensors = sum(entry.kind in ("parameter", "buffer") for entry in captured.inputs)  # they come first
        self.kept = kept
        names = frozenset[str]() if kept is None else kept.names
        self._guard = Guard(captured.reads, values[: self._num_tensors], names)
        self._gradients = captured.gradients or Gradients()
        left = captured.outputs[captured.structure.num_tensors :]
        self._unkept = [n for n in self._gradients.dropped if f"gradient of {n}" not in left]
        self._has_told = False
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

    def values(self, leaves: Sequence[Any]) -> tuple[list[torch.Tensor], str]:
        """Return the tensors the step takes for a batch with this key; or, in words, why it is not right any more.

        Complexity: O(what the step read and takes).
        """
        try:
            if what := self._gradients.change(self.inputs.parameter):
                return [], what
            values = self.gather(leaves)
        except _UNREADABLE as error:
            lost = f"a parameter, a buffer or optimizer state is not where it was ({type(error).__name__}: {error})"
            return [], self._guard.change() or self._setting_change() or lost
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

    def run(self, values: list[torch.Tensor], model: torch.nn.Module, ranks: Ranks | None, *, tells: bool) -> Any:
        """Run the step, with what it does beside its operators; return what the loss function returned.

        Args:
            values: what it takes.
            model: of the step.
            ranks: that run it together.
            tells: whether gradients in ``.grad`` may be the user's own, who is told once that they are dropped.
        """
        runner, left = self.runner, self.left
        if left is not None:
            names = [name for name, _ in runner.gradients if name not in self._gradients.leaves]
            left.begin(self.inputs.parameter(name).grad for name in names if name not in self._gradients.dropped)
        if tells:
            self._tell_of_dropped()
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

    def _tell_of_dropped(self) -> None:
        """Warn once where an ordinary loop has left gradients, and would leave others in their place."""
        if self._has_told or not any(self.inputs.parameter(name).grad is not None for name in self._unkept):
            return
        self._has_told = True
        warnings.warn(
            "gradients that were in .grad before the step are dropped, as by zero_grad(), and planned steps leave none "
            "of those that the optimizer has used: .grad is None behind them. To log or read gradients, pass "
            "keep_gradients=True to olla.compile; otherwise call optimizer.zero_grad() before the first planned step.",
            stacklevel=6,
        )

    def _other_tensors(self, values: Sequence[torch.Tensor]) -> str:
        """Return why the step cannot take other tensors than it took before; empty where it can."""
        if self.inputs.updated() != self._updated:
            return "the optimizer updates other parameters of the model"
        replaced = [(old, t) for old, t in zip(self._first, values, strict=False) if old is not t]
        if any(not equal(contents(vars(old)), contents(vars(new))) for old, new in replaced):
            return "a parameter or buffer was replaced by one with other attributes"
        self._replaced = Wholes([Watched.of(vars(new), Holds.ATTRIBUTES, "") for _, new in replaced])
        state = [values[i] for i in self._states]
        if not all(isinstance(t, torch.Tensor) for t in state):
            return "the optimizer's state holds something else than tensors"
        if what := self._state_facts.change(state):
            return f"of the optimizer's state, {what}"
        self._keep(values)
        return ""

    def _keep(self, values: Sequence[torch.Tensor]) -> None:
        """Note which tensors the step takes at every call."""
        self._ids = np.zeros(len(values), dtype=np.uint64)
        self._ids[self._kept] = [id(values[i]) for i in self._kept]
        self._seen = [values[i] for i in self._kept]  # what is kept keeps its id


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

    def find(self, key: tuple[Any, ...], leaves: Sequence[Any]) -> tuple[Capture | None, list[torch.Tensor], str]:
        """Return the capture that is right for a call, with its values, or why none is."""
        reason = ""
        for capture in reversed(self._captures):
            if capture.key != key:
                continue
            values, what = _values(capture, leaves)
            if not what:
                return capture, values, ""
            reason = reason or what
        return None, [], reason or self._why(key, leaves)

    def _why(self, key: tuple[Any, ...], leaves: Sequence[Any]) -> str:
        """Return in words what is new about a call of which no capture has the key."""
        if not self._captures:
            return ""
        batch = next((c for c in reversed(self._captures) if c.key[:-1] == key[:-1]), None)
        if batch is None or len(key) != len(batch.key):
            return "another batch, mode or setting of torch"
        return _values(batch, leaves)[1] or "what its Python code reads, or how it goes on, as Dynamo sees it"

    def use(self, capture: Capture) -> bool:
        """Note that a capture was used; whether another one was dropped for it."""
        self._captures = [c for c in self._captures if c is not capture] + [capture]
        if len(self._captures) <= self._size:
            return False
        self._captures.pop(0)
        return True


def _values(capture: Capture, leaves: Sequence[Any]) -> tuple[list[torch.Tensor], str]:
    """Return the values of a capture for a call, or why it is not right."""
    try:
        return capture.values(leaves)
    except Exception as error:  # whatever the user's objects do where they are compared
        return [], f"what it read cannot be compared ({type(error).__name__}: {error})"


def must_be_planned(ranks: Ranks | None, model: torch.nn.Module, error: Exception) -> bool:
    """Whether the ordinary step is no answer: to what the user asked for, or where other ranks run the planned one."""
    if isinstance(error, BudgetError | ReplayError | MemoryError | torch.OutOfMemoryError):
        return True
    is_alone = ranks is None and not is_wrapped(model) and not is_sharded(model)
    return isinstance(error, CaptureError) and not is_alone


def followed(model: torch.nn.Module, loss: Callable[[Any, Any], Any] | None, body: Any) -> Followed | None:
    """Return what follows a step's Python code at every call; None: its own body, or ranks that have to agree."""
    if body is not None or is_wrapped(model) or is_sharded(model):
        return None
    return Followed(loss if loss is not None else inference)


def _changed(captured: Captured, values: Sequence[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield what a step takes: name, tensor, whether the step changes it."""
    nodes = captured.module.graph.find_nodes(op="placeholder")
    changed = set(captured.graph.mutates.item.tolist())
    for entry, node, value in zip(captured.inputs, nodes, values, strict=True):
        yield entry.name, value, any(t in changed for t in captured.tensors[node])
