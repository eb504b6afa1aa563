"""The partitioner: a joint graph of forward and backward in, two graphs out."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

from torch import fx

from olla.graph import PROFILES, DeviceProfile
from olla.inductor.compat import codegen, compat, fallback
from olla.inductor.compat.inlined import with_calls_inlined
from olla.inductor.saving import chunked, joint, offload, rebuild, saving, verify
from olla.plan import Goal, Swapping

_log = logging.getLogger(__name__)
_MOST_PLANS = 4  # for one budget: a compilation each, without its kernels
_OTHER_SHARES = (1 / 16, 1 / 4, 1 / 2)  # of the code's excess over the least plan: further plans, higher by so much
_CLOSE = 1.02  # times the planned peak: code within that is accepted if there is no budget
_USUAL_SLOWDOWN = 0.05  # on a CPU
_UNMEASURABLE = 0.01  # of a step's flops, and of its seconds: limit on recomputed products on a GPU without a goal
_LEFT = "olla leaves a compiled graph to torch's own partitioner"


class _Planned(NamedTuple):
    """A joint graph before it is rewritten, torch's classification of its nodes, its model, and what may be chosen.

    `judged` holds the partitions whose code was measured, by their runs.
    """

    module: fx.GraphModule
    graph: fx.Graph
    num_forward: int  # results that are forward's
    info: Any
    model: joint.Joint
    goal: Goal
    front: saving.Front
    choice: saving.SavedChoice
    judged: dict[bytes, _Partition]

    def within(self, budget: int) -> saving.SavedChoice:
        """Choose once more, for a budget."""
        return self.front.choose(dataclasses.replace(self.goal, budget_bytes=budget, minimise=None))


@dataclass(frozen=True)
class _Partition:
    """A joint graph as it was rewritten, its two halves, and the choice that made them."""

    joint: fx.Graph
    forward: fx.GraphModule
    backward: fx.GraphModule
    choice: saving.SavedChoice


@dataclass(eq=False, repr=False)
class Partitioner(compat.CustomPartitionerFn):  # type: ignore[misc]
    """Splits joint graphs so that the peak of forward and backward, as they will be fused, meets a goal.

    Args:
        goal: what is asked for; None: the default of each graph's device, see `usual_goal`.
        device: what seconds are estimated for; None: it follows the graph's device.
        max_recomputed: most flops to recompute, as a share of them all.
        foresee: returns the peak of the code for forward and backward, given how many results of forward are not saved;
            None: budgets are checked against the planned peak.
        chunked_loss: chunks of rows for linear layers with their losses, or "auto"; None: they stay whole.
        segment: let the code for a GPU have torch's allocator take the memory of the step in one piece.
        swapping: how a GPU's tensors may be offloaded to host memory between forward and backward; None: they are not.

    Attributes:
        choices: one per graph that is divided, where someone puts a list here.
        cacheable: whether results may go into torch's caches; not after a warning, which a cache hit would not repeat.
        planning_seconds: processor time of olla's own decisions, which torch's partitioner would not spend.
    """

    goal: Goal | None
    _: KW_ONLY
    device: DeviceProfile | None = None
    max_recomputed: float | None = None
    foresee: Callable[[fx.GraphModule, fx.GraphModule, int], int | None] | None = None
    chunked_loss: int | str | None = None
    segment: bool = True
    swapping: Swapping | None = None
    choices: list[saving.SavedChoice] | None = field(default=None, init=False)
    cacheable: bool = field(default=True, init=False)
    planning_seconds: float = field(default=0.0, init=False)

    def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Return the forward and the backward graph module of a joint one; torch's own where olla's fail."""
        divided = None
        try:
            if joint_inputs:  # else a nested region, which is inlined into its caller
                divided = self._divide(gm, kwargs.get("static_lifetime_input_indices"), kwargs["num_fwd_outputs"])
        except Exception as error:  # whatever it is: the graph as it came is still whole, and torch can divide it
            self.cacheable = False
            fallback.failed(f"{_LEFT}, with torch's choice of what is saved", error)
        if divided is None:
            return compat.min_cut_partition(gm, joint_inputs, **kwargs)  # type: ignore[no-any-return]
        gm.graph = divided.joint
        if self.choices is not None:
            self.choices.append(divided.choice)
        if self.segment:
            above = divided.choice.known_peak_bytes - divided.choice.peak_bytes
            codegen.note_segment(divided.forward, divided.backward, divided.choice.segment_bytes + max(above, 0))
        self._tell_budget(divided.choice, on_cpu=compat.on_cpu(gm))
        return divided.forward, divided.backward

    def _divide(self, given: Any, static_indices: Any, num_forward: int) -> _Partition | None:
        """Divide a copy of a joint graph; None if it is left to torch's partitioner."""
        given = with_calls_inlined(given)
        reason = compat.obstacle(given)
        if reason:
            self.cacheable = False  # a later process is to be told as well
            fallback.warn(f"{_LEFT}: {reason}. It runs, with torch's choice of what is saved")
            return None
        planned = None if self.chunked_loss is None else self._in_chunks(given, static_indices, num_forward)
        if planned is None or self.chunked_loss == "auto":
            planned = self._better(self._planned(compat.copied(given), static_indices, num_forward), planned)
        if planned is None:
            return None
        start = time.process_time()
        if planned.goal.budget_bytes is not None:
            found = self._within(planned, planned.goal.budget_bytes)
        elif self.goal is not None and self.goal.minimise:
            found = self._least(planned, 0)
        else:
            found = _divided(planned, planned.choice)
        self.planning_seconds += time.process_time() - start
        choice, model = found.choice, planned.model
        _log.info(
            "saved for backward: peak %d bytes (at least %d, all saved: %d), %.2f %% more time, "
            "%.2f %% of flops recomputed",
            choice.known_peak_bytes,
            choice.lower_bound_bytes,
            choice.saved_peak_bytes,
            100 * choice.slowdown,
            100 * choice.recomputed_flops / max(int(model.flops.sum()), 1),
        )
        return found

    def _planned(self, gm: Any, static_indices: Any, num_forward: int, *, in_chunks: bool = False) -> _Planned | None:
        """Choose what a joint graph saves; None if it has no backward. The graph is simplified in place."""
        info = compat.prepare(gm, static_indices, num_forward)
        if info is None:
            return None
        if in_chunks:
            chunked.in_forward(gm.graph, info)
        start = time.process_time()
        model, goal, again = asked_of(gm, info, num_forward, self.goal, self.device, self.max_recomputed)
        front = saving.Front(model, again, self._host(gm, model))
        choice = front.choose(goal)
        self.planning_seconds += time.process_time() - start
        return _Planned(gm, gm.graph, num_forward, info, model, goal, front, choice, {})

    def _host(self, gm: Any, model: joint.Joint) -> Swapping | None:
        """Return how a graph may offload tensors, or None; if that was asked for, one warning says why not."""
        if self.swapping is None:
            return None
        if compat.on_cpu(gm):
            why = "on a CPU, whose tensors are in host memory as it is"
        elif compat.config.triton.cudagraphs:
            why = "behind CUDA graphs: leave out mode='reduce-overhead', or host_budget"
        elif model.communicates:
            why = "that communicates with other ranks"
        else:
            return self.swapping
        fallback.warn(f"host_budget changes nothing in a compiled graph {why}", about="host_budget")
        return None

    def _within(self, planned: _Planned, budget: int) -> _Partition:
        """Return a division whose code fits the budget, else the one of least peak that was found.

        Inductor's fusions differ from the model's here and there. If the code exceeds the budget, the next plan aims
        lower by that excess.
        """
        target, choice = budget, planned.choice
        for _ in range(_MOST_PLANS):
            found = self._measured(planned, choice)
            excess = found.choice.known_peak_bytes - budget
            if excess <= 0:
                return found
            if choice.peak_bytes > target:  # no plan is left
                break
            target = choice.peak_bytes - excess
            choice = planned.within(target)
        return self._least(planned, budget)

    def _least(self, planned: _Planned, budget: int) -> _Partition:
        """Return the division of least peak as code, or the first within the budget (0: within 2 % of the least plan).

        A plan with a higher planned peak may have a lower one as code. The plans tried do not depend on the budget, so
        a budget set to the peak that a warning named is met.
        """
        lowest = planned.choice if planned.goal.minimise else planned.within(0)
        enough = max(budget, lowest.peak_bytes) if budget else int(_CLOSE * lowest.peak_bytes)
        found = [self._measured(planned, lowest)]
        excess = found[0].choice.known_peak_bytes - lowest.peak_bytes
        for share in _OTHER_SHARES:
            if min(d.choice.known_peak_bytes for d in found) <= enough:
                break
            choice = planned.within(lowest.peak_bytes + int(share * excess))
            if choice.peak_bytes != found[-1].choice.peak_bytes:
                found.append(self._measured(planned, choice))
        if lowest.offload is not None:
            alone = planned.front.choose(planned.goal, copies=False)
            if alone.peak_bytes < min(d.choice.known_peak_bytes for d in found):
                found.append(self._measured(planned, alone))
        return min(found, key=lambda d: (max(d.choice.known_peak_bytes, budget), d.choice.added_seconds))

    def _measured(self, planned: _Planned, choice: saving.SavedChoice) -> _Partition:
        """Divide a joint graph by a choice, and note what its code needs."""
        copies = choice.offload[:5] if choice.offload else ()
        key = b"".join(a.tobytes() for a in (choice.runs.op, choice.runs.value, *choice.runs.reads, *copies))
        if key in planned.judged:
            return planned.judged[key]
        found = _divided(planned, choice)
        if self.foresee is None or planned.model.communicates:  # its peak depends on a time limit: ranks could differ
            return found
        with fallback.tried("whether a plan fits the budget is told from the plan, not from the code"):
            peak_bytes = self.foresee(found.forward, found.backward, planned.num_forward)
            found = dataclasses.replace(found, choice=dataclasses.replace(choice, code_peak_bytes=peak_bytes))
        planned.judged[key] = found
        return found

    def _in_chunks(self, given: Any, static_indices: Any, num_forward: int) -> _Planned | None:
        """Choose what a joint graph saves with its losses in chunks; None if no loss can be chunked."""
        assert self.chunked_loss is not None
        start = time.process_time()
        gm = compat.copied(given)
        try:
            num_losses, why = chunked.in_chunks(gm, self.chunked_loss)
        except Exception as error:  # the graph with whole losses is there
            fallback.failed("losses run whole, not in chunks", error)
            return None
        self.planning_seconds += time.process_time() - start
        if num_losses:
            return self._planned(gm, static_indices, num_forward, in_chunks=True)
        if self.chunked_loss not in ("auto", 1):
            self.cacheable = False  # a later process is to be told as well
            fallback.warn(
                f"chunked_loss={self.chunked_loss} changes nothing in a compiled graph: {why}. What runs in chunks is "
                "a linear layer with the loss of its rows, compiled together, its logits not returned",
                about="chunked_loss",
            )
        return None

    def _better(self, whole: _Planned | None, in_chunks: _Planned | None) -> _Planned | None:
        """Return the plan with chunked losses if the whole one does not fit the budget and has a higher peak."""
        if in_chunks is None or whole is None:
            return whole
        budget = self.goal.budget_bytes if self.goal else None
        enough = budget is not None and whole.choice.peak_bytes <= budget
        return whole if enough or whole.choice.peak_bytes <= in_chunks.choice.peak_bytes else in_chunks

    def _tell_budget(self, choice: saving.SavedChoice, *, on_cpu: bool) -> None:
        """Warn where no plan fits the budget: what was found instead."""
        budget, needed = self.goal.budget_bytes if self.goal else None, choice.known_peak_bytes
        if budget is None or needed <= budget:
            return
        self.cacheable = False  # a later process is to be told as well
        more = "" if on_cpu or self.swapping is not None else ", let tensors wait in host memory (host_budget)"
        within = "" if self.max_recomputed is None else f" that recomputes at most {self.max_recomputed:g} of the flops"
        fallback.warn(
            f"olla found no way to fit a compiled forward and backward into budget={budget} bytes: the least found"
            f"{within} is {needed} bytes, with parameters, inputs and gradients, and is used (all saved: "
            f"{choice.saved_peak_bytes}; nothing that takes as long can be below {choice.lower_bound_bytes}). Ask for "
            f"budget={needed}{more}, or take a smaller batch"
        )

    def uuid(self) -> tuple[str, ...]:
        """Return what identifies the decisions, for Inductor's caches: olla's version and code, and the goal.

        Raises:
            BypassFxGraphCache: a warning was given, which a cache hit would not repeat.
        """
        if not self.cacheable:
            raise compat.uncacheable("olla has warned of what it compiled")
        goal = repr(sorted(self.goal.record().items())) if self.goal else "usual"
        others = (self.device, self.max_recomputed, self.chunked_loss, self.segment, self.swapping)
        return compat.code_digest(), goal, " ".join(map(str, others))

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings without the results: the pickle is a part of Inductor's cache key."""
        names = ("goal", "device", "max_recomputed", "chunked_loss", "segment", "swapping")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin with nothing divided."""
        Partitioner.__init__(self, **state)


def _divided(planned: _Planned, choice: saving.SavedChoice) -> _Partition:
    """Divide a joint graph by a choice; it can be divided by another one afterwards."""
    gm, num_forward = planned.module, planned.num_forward
    new = rebuild.rebuild(planned.graph, planned.model, choice.values, choice.runs, num_forward)
    if choice.offload is not None:
        written = offload.insert(choice.offload, new.made, new.starts, new.forward)
        verify.waiting(written, new.forward)
        for node, copies in written.items():
            del new.saved[node]
            new.saved[copies.host] = None
    lasting = planned.info.static_lifetime_input_nodes
    static = [node for node in new.graph.find_nodes(op="placeholder") if new.origin[node] in lasting]
    gm.graph = new.graph
    sizes = list(new.saved_sizes)
    forward, backward = compat.split(gm, list(new.saved), sizes, static, num_forward)
    verify.halves(forward, backward, new.graph, num_forward)
    if new.drawn_again:
        names = {second.name: first.name for second, first in new.drawn_again.items()}
        forward, backward = compat.drawn_alike(gm, forward, backward, names, len(sizes))
    return _Partition(new.graph, forward, backward, choice)


def asked_of(
    gm: Any, info: Any, num_forward: int, goal: Goal | None, device: DeviceProfile | None, max_recomputed: float | None
) -> tuple[joint.Joint, Goal, saving.Again]:
    """Return the model of a joint graph, its goal, and its limits on recomputation; defaults follow its device."""
    on_cpu = compat.on_cpu(gm)
    device = device or PROFILES["cpu" if on_cpu else "a100"]
    model = joint.build(gm.graph, info, num_forward, device)
    if goal is None:
        return model, *usual_goal(device, on_cpu)
    return model, goal, saving.EVERYTHING if max_recomputed is None else saving.Again(max_recomputed)


def usual_goal(device: DeviceProfile, on_cpu: bool) -> tuple[Goal, saving.Again]:
    """Return the goal where none is given, and the most products to recompute.

    Triton's fused kernels are memory-bound, so recomputing the ops fused into them costs next to nothing: on a GPU they
    are recomputed freely, and matrix products, convolutions and attention within 1 % of flops and time. A CPU's kernels
    are as often compute-bound.
    """
    if on_cpu:
        return Goal(max_slowdown=_USUAL_SLOWDOWN, device=device), saving.EVERYTHING
    return Goal(minimise="peak", device=device), saving.Again(_UNMEASURABLE, _UNMEASURABLE)
