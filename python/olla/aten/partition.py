"""The partitioner for torch's own kernels: a joint graph in, forward and backward in planned order out."""

from __future__ import annotations

import dataclasses
import logging
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx

from olla import planner
from olla.aten.halves import FUNCTIONAL_NORM, Halves, divided
from olla.aten.joint import JointStep, obstacle, stand_for_sparse
from olla.aten.record import GraphRecord
from olla.errors import BudgetError
from olla.graph import DeviceProfile, Rerun, Rules, profile_of
from olla.inductor.compat import compat, fallback
from olla.plan import Goal, Options, Plan, Request
from olla.pytorch.memory import arrange
from olla.pytorch.program.schedule import op_schedule
from olla.pytorch.program.variants import restrict_rules

_log = logging.getLogger(__name__)
_ORDER = Goal(max_slowdown=0.0, device=profile_of("cpu"))  # no time is added
_LEFT = "olla leaves a graph to torch's own partitioner, and its operators run in the order of the program"


@dataclass(eq=False)
class AtenPartitioner:
    """Divides joint graphs so that forward and backward, operator by operator, meet a goal.

    A budget is for a model as a whole: for one graph it is reduced by the parameters and gradients of the rest of the
    model, and by what graphs before it have saved.

    Args:
        goal: what is asked for; None: nothing is recomputed.
        device: what seconds are estimated for; None: it follows the graph's device.
        time_limit: seconds for the plan of one graph.
        model_bytes: of parameters, their gradients and buffers of the whole model; 0: those of the graph alone.
        graphs: receives a record of every graph.

    Attributes:
        saved_before: bytes saved by the graphs that were compiled earlier in this call of the model.
    """

    goal: Goal | None
    device: DeviceProfile | str | None = None
    time_limit: float = 15.0
    model_bytes: int = 0
    saved_before: int = field(default=0, init=False)
    graphs: list[GraphRecord] = field(default_factory=list)

    def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Return the forward and the backward graph module of a joint one; torch's own where olla's fail."""
        reason = obstacle(gm)
        if not reason:
            try:
                halves, found = self._planned(
                    gm, kwargs["num_fwd_outputs"], kwargs.get("static_lifetime_input_indices")
                )
                self.graphs.append(found)
                self.saved_before += found.saved_bytes
                return halves.forward, halves.backward
            except Exception as error:  # the graph as it came is whole, and torch can divide it
                fallback.failed(_LEFT, error)
                reason = f"{type(error).__name__}: {error}"
        self.graphs.append(GraphRecord(reason=reason, num_ops=_num_ops(gm)))
        return compat.min_cut_partition(gm, joint_inputs, **kwargs)  # type: ignore[no-any-return]

    def _planned(self, gm: fx.GraphModule, num_forward: int, static: list[int] | None) -> tuple[Halves, GraphRecord]:
        start = time.perf_counter()
        module = compat.copied(gm)
        stand_for_sparse(module.graph)
        joint = JointStep(module, num_forward, static or [], "forward and backward")
        plan = self._plan(joint)
        graph = joint.captured.graph
        schedule = op_schedule(joint.captured, plan)
        halves = divided(joint, schedule, plan.order.tolist(), static or [])
        below = plan.recomputed
        found = GraphRecord(
            num_ops=graph.num_ops - 1,
            peak_bytes=plan.peak_bytes,
            eager_peak_bytes=arrange.program_peak(graph, 1),
            lower_bound_bytes=plan.peak_lower_bound_bytes,
            resident_bytes=plan.resident_bytes,
            saved_bytes=sum(halves.saved_bytes),
            num_again=joint.num_again + (below.num_recomputed if below else 0),
            num_in_place=below.num_in_place if below else 0,
            added_seconds=plan.added_seconds,
            base_seconds=plan.base_seconds,
            plan_seconds=time.perf_counter() - start,
        )
        _log.info("planned: %s", found)
        return halves, found

    def _plan(self, joint: JointStep) -> Plan:
        device = joint.captured.device_type
        profile = profile_of(self.device or ("cpu" if device == "cpu" else "a100"))
        asked = self.goal or _ORDER
        goal = dataclasses.replace(asked, device=profile)
        if goal.budget_bytes is not None:
            goal = dataclasses.replace(goal, budget_bytes=max(goal.budget_bytes - self._elsewhere(joint), 1))
        request = Request(
            graph=joint.captured.graph,
            options=Options(layout=False, time_limit=self.time_limit),
            goal=goal,
            restrict=lambda rules, chunked: _restricted(joint, device, rules),
        )
        try:
            return planner.run(request)
        except BudgetError as error:
            goal = dataclasses.replace(goal, budget_bytes=None, minimise="peak")
            found = planner.run(dataclasses.replace(request, goal=goal))
            least = found.peak_bytes + self._elsewhere(joint)
            fallback.warn(
                f"olla found no way to fit forward and backward into budget={asked.budget_bytes} bytes: the least "
                f"found is {least} bytes, with parameters, inputs and gradients, and is "
                f"used ({error}). Ask for a budget of that, or take a smaller batch"
            )
            return found

    def _elsewhere(self, joint: JointStep) -> int:
        """Return the bytes in memory beside a graph: parameters that it does not take, and what is saved before it."""
        inputs = zip(joint.captured.inputs, joint.captured.module.graph.find_nodes(op="placeholder"), strict=True)
        own = {"parameter": 2, "buffer": 1, "input": 0}  # of a parameter its gradient too
        known: int = sum(own[entry.kind] * node.meta["val"].untyped_storage().nbytes() for entry, node in inputs)
        return max(self.model_bytes - known, 0) + self.saved_before


def model_bytes(model: Any) -> int:
    """Return the bytes of parameters, twice for those that get gradients, and of buffers."""
    held = {id(p): p.nbytes * (2 if p.requires_grad else 1) for p in model.parameters()}
    return sum((held | {id(b): b.nbytes for b in model.buffers()}).values())


def _num_ops(module: fx.GraphModule) -> int:
    return sum(isinstance(node.target, torch._ops.OpOverload) for node in module.graph.nodes)


def _restricted(joint: JointStep, device: str, rules: Rules) -> Rules:
    """Return the rules, restricted to what the two graphs can express.

    Tangents belong to autograd, which may hand them to others: they are not overwritten. Readers of an input that
    forward mutates are not recomputed.
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
