"""The partitioner: a joint graph of forward and backward in, two graphs out."""

from __future__ import annotations

import logging
import time
import warnings
from typing import Any

from olla.budgets import Goal
from olla.devices import PROFILES
from olla.inductor import compat, joint, rebuild, saving

_log = logging.getLogger(__name__)
_warned: set[str] = set()


class Partitioner(compat.CustomPartitionerFn):  # type: ignore[misc]
    """Splits joint graphs so that the peak of forward and backward, as they will be fused, meets a goal.

    Args:
        goal: what is asked for.
        device_given: whether the goal's device was asked for; else it follows the graph's device.
        max_recomputed: most flops to run again, as a share of them all.
    """

    def __init__(self, goal: Goal, *, device_given: bool, max_recomputed: float | None = None) -> None:
        self.goal = goal
        self.max_recomputed = max_recomputed
        self.device_given = device_given
        self.choices: list[saving.Choice] | None = None  # one per graph that is divided, where someone wants them
        self.planning_seconds = 0.0  # processor time of what torch's partitioner would not have done

    def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Return the forward and the backward graph module of a joint one."""
        reason = compat.obstacle(gm)
        if reason:
            _warn(reason)
            return compat.min_cut_partition(gm, joint_inputs, **kwargs)  # type: ignore[no-any-return]
        num_forward = kwargs["num_fwd_outputs"]
        info = compat.prepare(gm, kwargs.get("static_lifetime_input_indices"), num_forward)
        if info is None:
            return compat.min_cut_partition(gm, joint_inputs, **kwargs)  # type: ignore[no-any-return]
        start = time.process_time()
        model = joint.build(gm.graph, info, num_forward, self._device(gm))
        choice = saving.choose(model, self.goal, self.max_recomputed)
        if self.choices is not None:
            self.choices.append(choice)
        _log.info(
            "saved for backward: peak %d bytes (at least %d, all saved: %d), %.2f %% more time, %.2f %% flops again",
            choice.peak_bytes,
            choice.lower_bound_bytes,
            choice.saved_peak_bytes,
            100 * choice.added_seconds / max(model.step_seconds, 1e-30),
            100 * choice.recomputed_flops / max(int(model.flops.sum()), 1),
        )
        new = rebuild.rebuild(
            gm.graph, model, choice.values, choice.runs, num_forward, info.static_lifetime_input_nodes
        )
        gm.graph = new.graph
        self.planning_seconds += time.process_time() - start
        return compat.split(gm, list(new.saved), list(new.saved_sizes), new.static, num_forward)

    def _device(self, gm: Any) -> Any:
        if self.device_given:
            return self.goal.device
        on_cpu = all(device.type in ("cpu", "meta") for device in compat.devices(gm))
        return PROFILES["cpu" if on_cpu else "a100"]

    def uuid(self) -> tuple[str, ...]:
        """Return what identifies the decisions, for Inductor's caches: olla's version and code, and the goal."""
        return (
            compat.code_digest(),
            repr(sorted(self.goal.record().items())),
            f"{self.device_given} {self.max_recomputed}",
        )


def forget_warnings() -> None:
    """Warn again of what was warned of already."""
    _warned.clear()


def _warn(reason: str) -> None:
    """Say once why a graph is left to torch's own partitioner."""
    if reason in _warned:
        return
    _warned.add(reason)
    warnings.warn(
        f"olla leaves a compiled graph to torch's own partitioner: {reason}. It runs, "
        "with torch's choice of what is saved",
        stacklevel=2,
    )
