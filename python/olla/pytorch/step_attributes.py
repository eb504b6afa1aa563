"""Public attributes and reports of a compiled step. Importing this does not import torch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from olla.errors import ReplayError
from olla.graph import Graph
from olla.picture.memory_viz import memory_viz
from olla.plan import Goal, Plan, Swapping

if TYPE_CHECKING:
    import torch

    from olla.pytorch.captures import Captures
    from olla.pytorch.dynamo.follower import Follower
    from olla.pytorch.lengths.padding import Padding
    from olla.pytorch.ordinary.unplanned import Unplanned
    from olla.pytorch.runner import Runner
    from olla.report.step import StepReport


@dataclass(eq=False)
class StepAttributes:
    """Settings of a step, its public properties and its reports."""

    _model: torch.nn.Module
    _optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
    _loss: Callable[[Any, Any], Any] | None
    _body: Callable[[Any, Any, Any], Any] | None
    _required_device: torch.device | str | None
    _options: dict[str, Any]
    _arena: bool | None
    _cache_size: int
    _cuda_graph: bool
    _disk_cache: bool
    _goal: Goal | None
    _swapping: Swapping | None
    _checks: str
    _keep_gradients: bool
    _on_unsupported: str
    _padding: Padding | None

    _captures: Captures = field(init=False)
    _follower: Follower | None = field(init=False, default=None)
    _unplanned: Unplanned = field(init=False)

    @property
    def model(self) -> torch.nn.Module:
        """The model that is trained; to train another one, compile another step."""
        return self._model

    @property
    def optimizer(self) -> torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None:
        """Its optimizer, or its optimizers, as they were given."""
        return self._optimizer

    @property
    def loss(self) -> Callable[[Any, Any], Any] | None:
        """The loss function."""
        return self._loss

    @property
    def graph(self) -> Graph:
        """The step that runs, for the shapes it ran with last; with workspaces and seconds if it was recorded.

        With a budget it is the rewritten graph: op i stands for op ``plan.origin[i]`` of the captured one.
        """
        return self._latest.graph

    @property
    def plan(self) -> Plan:
        """The plan of this graph. It leaves out the layout of the arena, which covers every request for memory."""
        return self._latest.plan

    def report(self) -> StepReport:
        """Return memory and time of the step, for the shapes it ran with last; ReplayError before the first call."""
        unplanned = self._unplanned
        if self._captures.latest is None and unplanned.inner is None and unplanned.num_steps:
            return unplanned.report()
        captures = (
            self._captures
            if self._captures.latest is not None or unplanned.inner is None
            else unplanned.inner._captures
        )
        found = self._latest.report(len(captures))
        note = " ".join(filter(None, (found.note, unplanned.note, self._unfollowed)))
        return dataclasses.replace(found, note=note, num_ordinary_steps=unplanned.num_steps)

    def memory_viz(self, path: str | os.PathLike[str]) -> None:
        """Write the plan for PyTorch's memory viewer, see `olla.memory_viz`; ReplayError where there is no plan yet."""
        memory_viz(self.graph, self.plan, path)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw what was captured beside what runs, and the arena, as a page; ReplayError where there is no plan yet."""
        self._latest.plot(path, len(self._captures))

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be copied or pickled: a step is bound to the tensors of its model."""
        raise ReplayError(
            "a compiled step cannot be copied or pickled: copy or save the model and the optimizer, and compile those"
        )

    def __repr__(self) -> str:
        return f"<Step of {type(self._model).__name__}, {len(self._captures)} captures>"

    @property
    def _unfollowed(self) -> str:
        """The note of a report on a step that Dynamo did not follow; empty otherwise."""
        reason = self._follower.reason if self._follower is not None else ""
        what = "the inference" if self._loss is None else "the loss"
        return (
            f"Torch's Dynamo makes no single graph of {what} ({reason}): it was traced by running it." if reason else ""
        )

    @property
    def _latest(self) -> Runner:
        if (latest := self._captures.latest) is None:
            if self._unplanned.inner is not None:
                inner: StepAttributes = self._unplanned.inner
                return inner._latest
            raise ReplayError("the step has not run yet: call step(batch) once, then ask for its report")
        return latest.runner
