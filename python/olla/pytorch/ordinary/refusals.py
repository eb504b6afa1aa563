"""Steps that cannot be captured: whether another way of running may take their place, and which."""

from __future__ import annotations

import dataclasses
from typing import Any

from olla.errors import BudgetError, CaptureError, ReplayError
from olla.plan import Goal


def must_be_planned(error: Exception, is_alone: bool) -> bool:
    """Whether the ordinary step is no answer: to what the user asked for, or where other ranks run the planned one."""
    import torch

    if isinstance(error, BudgetError | ReplayError | MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, CaptureError) and not is_alone


def without_update(step: Any) -> Any:
    """Return a step that leaves gradients in ``.grad``; what the optimizers hold is no part of its budget."""
    given = {f.name: getattr(step, f.name) for f in dataclasses.fields(step) if f.init}
    own = {"_optimizer": None, "_goal": goal_of_gradients(step), "_on_unsupported": "raise", "_padding": None}
    return type(step)(**given | own)


def goal_of_gradients(step: Any) -> Goal | None:
    """Return the goal of a step for its forward and backward passes: a budget without what the optimizers hold."""
    goal: Goal | None = step._goal
    if goal is None or goal.budget_bytes is None:
        return goal
    states = (t for o in step.optimizers for state in o.state.values() for t in state.values())
    held = sum(t.nbytes for t in states if hasattr(t, "nbytes"))
    return dataclasses.replace(goal, budget_bytes=max(goal.budget_bytes - held, 1))
