"""The partitioner: a joint graph of forward and backward in, two graphs out."""

from __future__ import annotations

from typing import Any

from olla.budgets import Goal
from olla.inductor import compat


class Partitioner(compat.CustomPartitionerFn):
    """Splits joint graphs so that the peak of forward and backward, as they will be fused, meets a goal.

    Args:
        goal: what is asked for.
        device_given: whether the goal's device was asked for; else it follows the graph's device.
    """

    def __init__(self, goal: Goal, *, device_given: bool) -> None:
        self.goal = goal
        self.device_given = device_given

    def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Return the forward and the backward graph module of a joint one."""
        return compat.min_cut_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> tuple[str, ...]:
        """Return what identifies the decisions, for Inductor's caches: olla's version and code, and the goal."""
        return (compat.code_digest(), repr(sorted(self.goal.record().items())), str(self.device_given))
