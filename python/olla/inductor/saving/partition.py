"""The partitioner: a joint graph of forward and backward in, two graphs out."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from torch import fx

from olla.graph import PROFILES
from olla.inductor.compat import compat, fallback
from olla.inductor.saving import joint, rebuild, saving, verify
from olla.plan import Goal

_log = logging.getLogger(__name__)
_LEFT = "olla leaves a compiled graph to torch's own partitioner"


@dataclass(frozen=True)
class _Divided:
    """A joint graph as it was rewritten, its two halves, and the choice that made them."""

    joint: fx.Graph
    forward: fx.GraphModule
    backward: fx.GraphModule
    choice: saving.Choice


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
        self.cacheable = True  # whether what this divides may come out of torch's caches, where nobody is warned
        self.planning_seconds = 0.0  # processor time of what torch's partitioner would not have done

    def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Return the forward and the backward graph module of a joint one; torch's own where olla's fail."""
        try:
            divided = self._divide(gm, kwargs.get("static_lifetime_input_indices"), kwargs["num_fwd_outputs"])
        except Exception as error:  # whatever it is: the graph as it came is still whole, and torch can divide it
            self.cacheable = False
            fallback.failed(f"{_LEFT}, with torch's choice of what is saved", error)
            divided = None
        if divided is None:
            return compat.min_cut_partition(gm, joint_inputs, **kwargs)  # type: ignore[no-any-return]
        gm.graph = divided.joint
        if self.choices is not None:
            self.choices.append(divided.choice)
        self._tell_budget(divided.choice)
        return divided.forward, divided.backward

    def _divide(self, given: Any, static_indices: Any, num_forward: int) -> _Divided | None:
        """Divide a copy of a joint graph; None where it is one for torch."""
        reason = compat.obstacle(given)
        if reason:
            fallback.warn(f"{_LEFT}: {reason}. It runs, with torch's choice of what is saved")
            return None
        gm = compat.copied(given)
        info = compat.prepare(gm, static_indices, num_forward)
        if info is None:
            return None
        start = time.process_time()
        model = joint.build(gm.graph, info, num_forward, self._device(gm))
        choice = saving.choose(model, self.goal, self.max_recomputed)
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
        forward, backward = compat.split(gm, list(new.saved), list(new.saved_sizes), new.static, num_forward)
        verify.halves(forward, backward, new.graph, num_forward)
        return _Divided(new.graph, forward, backward, choice)

    def _tell_budget(self, choice: saving.Choice) -> None:
        """Warn where no plan fits the budget: what was found instead."""
        budget = self.goal.budget_bytes
        if budget is None or choice.peak_bytes <= budget:
            return
        self.cacheable = False  # a later process is to be told as well
        within = "" if self.max_recomputed is None else f" that runs at most {self.max_recomputed:g} of the flops again"
        fallback.warn(
            f"olla found no way to fit a compiled forward and backward into budget={budget} bytes: the least found"
            f"{within} is {choice.peak_bytes} bytes, with parameters, inputs and gradients, and is used (all saved: "
            f"{choice.saved_peak_bytes}; nothing that takes as long can be below {choice.lower_bound_bytes}). Ask for "
            f"budget={choice.peak_bytes}, or take a smaller batch"
        )

    def _device(self, gm: Any) -> Any:
        if self.device_given:
            return self.goal.device
        on_cpu = all(device.type in ("cpu", "meta") for device in compat.devices(gm))
        return PROFILES["cpu" if on_cpu else "a100"]

    def uuid(self) -> tuple[str, ...]:
        """Return what identifies the decisions, for Inductor's caches: olla's version and code, and the goal.

        Raises:
            BypassFxGraphCache: something was warned of, of which code out of a cache would say nothing.
        """
        if not self.cacheable:
            raise compat.uncacheable("olla has warned of what it compiled")
        return self._identity()

    def __getstate__(self) -> object:
        """Return what pickles, a part of Inductor's hashed configuration: what is decided by, not what became of it."""
        return self.goal, self.device_given, self.max_recomputed

    def __setstate__(self, state: tuple[Goal, bool, float | None]) -> None:
        """Begin with nothing divided."""
        goal, device_given, max_recomputed = state
        Partitioner.__init__(self, goal, device_given=device_given, max_recomputed=max_recomputed)

    def _identity(self) -> tuple[str, ...]:
        goal = repr(sorted(self.goal.record().items()))
        return compat.code_digest(), goal, f"{self.device_given} {self.max_recomputed}"
