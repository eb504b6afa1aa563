"""What becomes of a step that cannot be captured: whether another one may run in its place, and which."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from olla.errors import BudgetError, CaptureError, ReplayError

if TYPE_CHECKING:
    from olla.pytorch.step import Step


def must_be_planned(step: Step, error: Exception) -> bool:
    """Whether the ordinary step is no answer: to what the user asked for, or where other ranks run the planned one."""
    import torch

    if isinstance(error, BudgetError | ReplayError | MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, CaptureError) and not (step._ranks is None and runs_alone(step))


def runs_alone(step: Step) -> bool:
    """Whether the model is neither in a DistributedDataParallel nor in FSDP2."""
    from olla.pytorch.ranks.wrapped import is_wrapped
    from olla.pytorch.sharded.fully import is_sharded

    return not is_wrapped(step.model) and not is_sharded(step.model)


def without_update(step: Step) -> Step:
    """Return a step that leaves gradients in ``.grad``; what the optimizers hold is no part of its budget."""
    from olla.pytorch.step import Step

    goal = step._goal
    if goal is not None and goal.budget_bytes is not None:
        states = (t for o in step.optimizers for state in o.state.values() for t in state.values())
        held = sum(t.nbytes for t in states if hasattr(t, "nbytes"))
        goal = dataclasses.replace(goal, budget_bytes=max(goal.budget_bytes - held, 1))
    given = {f.name: getattr(step, f.name) for f in dataclasses.fields(step) if f.init}
    return Step(**given | {"_optimizer": None, "_goal": goal, "_on_unsupported": "raise", "_padding": None})
