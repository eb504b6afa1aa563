"""The partitioner for torch's own kernels: a joint graph in, forward and backward in planned order out."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx

from olla import planner
from olla.aten.halves import FUNCTIONAL_NORM, Halves, divided
from olla.aten.joint import Joint, obstacle
from olla.errors import CaptureError
from olla.graph import PROFILES, DeviceProfile, Rerun, Rules
from olla.inductor.compat import compat, fallback
from olla.plan import Chunked, Goal, Options, Plan, Request
from olla.pytorch.memory import arrange
from olla.pytorch.memory.replay import alignment_of
from olla.pytorch.planner import device_type
from olla.pytorch.program.schedule import op_schedule
from olla.pytorch.program.variants import restrict_rules

_log = logging.getLogger(__name__)
_LEFT = "olla leaves a graph to torch's own partitioner, and its operators run in the order of the program"


@dataclass(frozen=True)
class Divided:
    """What became of one joint graph.

    Attributes:
        reason: why it is not planned; empty where it is.
        num_ops: of forward and backward as the program has them; of the graph that is not planned, its nodes.
        peak_bytes: most memory live at once in forward and backward, with inputs and gradients, as planned.
        eager_peak_bytes: the same of the program order, which keeps everything.
        lower_bound_bytes: no plan that takes as long has a lower peak.
        resident_bytes: of that, parameters, buffers and inputs.
        saved_bytes: what forward makes and keeps for backward.
        num_again: operators that run again.
        num_in_place: results that take over the memory of an input.
        added_seconds, base_seconds: estimated, of what runs again, and of the whole.
        plan_seconds: wall-clock time of planning.
    """

    reason: str = ""
    num_ops: int = 0
    peak_bytes: int = 0
    eager_peak_bytes: int = 0
    lower_bound_bytes: int = 0
    resident_bytes: int = 0
    saved_bytes: int = 0
    num_again: int = 0
    num_in_place: int = 0
    added_seconds: float = 0.0
    base_seconds: float = 0.0
    plan_seconds: float = 0.0


@dataclass(eq=False)
class Partitioner:
    """Divides joint graphs so that forward and backward, operator by operator, meet a goal.

    Args:
        goal: what is asked for.
        device: what seconds are estimated for; None: it follows the graph's device.
        time_limit: seconds for the plan of one graph.
        divided: takes what became of every graph.
    """

    goal: Goal
    device: DeviceProfile | str | None = None
    time_limit: float = 15.0
    divided: list[Divided] = field(default_factory=list)

    def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Return the forward and the backward graph module of a joint one; torch's own where olla's fail."""
        reason = obstacle(gm)
        if not reason:
            try:
                halves, found = self._planned(gm, kwargs["num_fwd_outputs"], kwargs.get("static_lifetime_input_indices"))
                self.divided.append(found)
                return halves.forward, halves.backward
            except Exception as error:  # the graph as it came is whole, and torch can divide it
                fallback.failed(_LEFT, error)
                reason = f"{type(error).__name__}: {error}"
        self.divided.append(Divided(reason, len(gm.graph.nodes)))
        return compat.min_cut_partition(gm, joint_inputs, **kwargs)  # type: ignore[no-any-return]

    def _planned(self, gm: fx.GraphModule, num_forward: int, static: list[int] | None) -> tuple[Halves, Divided]:
        start = time.perf_counter()
        joint = Joint(compat.copied(gm), num_forward, static or [], "forward and backward")
        plan = self._plan(joint)
        graph = joint.captured.graph
        schedule = op_schedule(joint.captured, plan)
        halves = divided(joint, schedule, plan.order.tolist(), static or [])
        below = plan.recomputed
        found = Divided(
            num_ops=graph.num_ops - 1,
            peak_bytes=plan.peak_bytes,
            eager_peak_bytes=arrange.program_peak(graph, 1),
            lower_bound_bytes=plan.peak_lower_bound_bytes,
            resident_bytes=plan.resident_bytes,
            saved_bytes=sum(halves.saved_bytes),
            num_again=below.num_recomputed if below else 0,
            num_in_place=below.num_in_place if below else 0,
            added_seconds=plan.added_seconds,
            base_seconds=plan.base_seconds,
            plan_seconds=time.perf_counter() - start,
        )
        _log.info("planned: %s", found)
        return halves, found

    def _plan(self, joint: Joint) -> Plan:
        device = device_type(joint.captured)
        goal = self.goal if self.device else dataclasses.replace(self.goal, device=PROFILES["cpu" if device == "cpu" else "a100"])
        options = Options(layout=False, time_limit=self.time_limit)
        request = Request(
            graph=joint.captured.graph,
            options=options,
            goal=goal,
            restrict=lambda rules, chunked: _restricted(joint, device, rules),
        )
        return planner.run(request)


def _restricted(joint: Joint, device: str, rules: Rules) -> Rules:
    """Return the rules without what the two graphs have no operators for.

    Gradients of results belong to autograd, which may hand them to others: nothing is written over them. What reads an
    input that forward changes reads it before that alone.
    """
    captured, graph = joint.captured, joint.captured.graph
    training = [v for v, nodes in enumerate(captured.nodes) if nodes[0].target is FUNCTIONAL_NORM and nodes[0].args[5]]
    norms = [v for v in training if rules.rerun[v] == Rerun.FIRST_RESULT]
    rules = restrict_rules(captured, device, rules)
    rerun, in_place = rules.rerun.copy(), rules.in_place.copy()
    rerun[joint.between] = Rerun.NEVER
    for v in np.flatnonzero(rerun == Rerun.REPLAY).tolist():
        if not joint.replays(v):
            rerun[v] = Rerun.NEVER
    changed = np.isin(graph.reads.item, joint.changed)
    rerun[graph.reads.owner[changed]] = Rerun.NEVER
    rerun[norms] = Rerun.FIRST_RESULT
    tangents = graph.writes.of(joint.between)
    in_place[graph.reads.owner[np.isin(graph.reads.item, tangents)]] = 0
    return rules._replace(rerun=rerun, in_place=in_place)
