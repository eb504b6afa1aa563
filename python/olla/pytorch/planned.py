"""A captured step with the plan that is in force: the graph that runs, copies beside its ops, programs of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from olla.base import Progress
from olla.errors import PlanError
from olla.graph import Graph
from olla.plan import Costs, Plan
from olla.planner import plan
from olla.pytorch.cache import Place
from olla.pytorch.capture import Captured
from olla.pytorch.memory.arrange import Arranged, planned_again
from olla.pytorch.memory.copies import Copies, HostMemory
from olla.pytorch.memory.replay import Replay
from olla.pytorch.memory.requests import Recorder
from olla.pytorch.planner import Planner, captured_costs
from olla.pytorch.program.program import Program, compile_program
from olla.pytorch.program.schedule import OpSchedule, op_schedule
from olla.pytorch.ranks.agreement import agreed_costs, digest_of, plan_together
from olla.pytorch.ranks.group import Ranks

_ALIGNMENT = {"cpu": 64}  # bytes; torch's allocators for accelerators align to 512


class PlannedStep:
    """A captured step with the plan that is in force, ready to be compiled.

    Args:
        captured: the step.
        plan: of the captured graph, or of a rewriting of it.
        host: memory for what is swapped; None: new memory.

    Attributes:
        device: type of the device that it runs on.
        alignment: of the device's memory, in bytes.
        plan: the plan in force.
        estimated: the graph that runs, without what was recorded.
        graph: the same; with workspaces and seconds once it was recorded.
        copies: beside its ops, where the plan swaps.
    """

    def __init__(self, captured: Captured, plan: Plan, host: HostMemory | None) -> None:
        self.device = device_type(captured)
        self.alignment = _ALIGNMENT.get(self.device, 512)
        self.copies: Copies | None = None
        self._captured = captured
        self._host = HostMemory(self.device) if host is None else host
        self.use(plan)

    def use(self, plan: Plan) -> None:
        """Put a plan in force whose graph is not recorded yet."""
        self.plan: Plan = plan
        self._schedule: OpSchedule = op_schedule(self._captured, plan)
        self.estimated: Graph = self._schedule.graph
        self.graph = self.estimated
        if self.copies is not None:
            self._host.release()  # the plan before may have needed more
        self.copies = None
        if (t := self._schedule.transfers) is not None:
            self.copies = Copies(t.num_bytes, t.places, t.after, self._host, t.host_bytes, torch.device(self.device))

    def costs(self) -> Costs:
        """Return what was recorded, of the ops of the captured graph."""
        return captured_costs(self._captured.graph, self.graph, self.plan)

    def compile(self) -> Program:
        """Return the step as a function, on torch's own allocator."""
        order = self.plan.order.tolist()
        return compile_program(self._captured, order, schedule=self._schedule, copies=self.copies)

    def compile_recorded(self, recorder: Recorder, addresses: bool = True) -> Program:
        """Return the step with a window around every op, to be recorded.

        Args:
            recorder: opens and closes the windows.
            addresses: whether it also notes where tensors are.
        """
        return compile_program(
            self._captured,
            self.plan.order.tolist(),
            schedule=self._schedule,
            begin=recorder.begin,
            end=recorder.end,
            windows=range(self.graph.num_ops),
            note=recorder.note if addresses else None,
            copies=self.copies,
        )

    def compile_arranged(self, replay: Replay, arranged: Arranged) -> Program:
        """Return the step with a window around every op that has a place in the arena."""
        return compile_program(
            self._captured,
            self.plan.order.tolist(),
            schedule=self._schedule,
            begin=replay.begin,
            end=replay.end,
            windows=frozenset(np.flatnonzero(np.diff(arranged.table.op_offset)).tolist()),
            copies=self.copies,
        )


class Agreement:
    """What is decided by what was measured: by this process alone, or by the most that any rank measured.

    The ranks of a step record it at the same call, and decide together until its requests are laid out. From then on
    its order stands; a rank whose requests differ records again for itself.

    Args:
        ranks: that run the step together; None: this process alone.

    Attributes:
        is_open: whether the ranks have still to decide.
    """

    def __init__(self, ranks: Ranks | None) -> None:
        self.is_open = True
        self._ranks = ranks

    def all_have(self, recorded: Plan | None) -> bool:
        """Whether every rank finds on its disk what was recorded, for one order."""
        if self._ranks is None:
            return recorded is not None
        known = self._ranks.gather("" if recorded is None else digest_of(recorded))
        self.is_open = len(set(known)) > 1 or known[0] == ""
        return not self.is_open

    def any(self, value: bool) -> bool:
        """Whether something holds on any rank."""
        return any(self._ranks.numbers(value)) if self._ranks is not None and self.is_open else value

    def costs(self, graph: Graph) -> Graph:
        """Return a graph with the most that any rank measured."""
        return agreed_costs(self._ranks, graph) if self._ranks is not None and self.is_open else graph

    def planned_again(self, graph: Graph, before: Plan, progress: Progress | None) -> Plan:
        """Return the plan of a step whose workspaces have become known."""
        if self._ranks is None:
            return planned_again(graph, before, progress)
        if not self.is_open:
            return planned_again(graph, before, progress, search=False)
        return plan_together(
            self._ranks, None, graph, lambda: planned_again(graph, before, progress), lambda found: None
        )

    def replan(
        self,
        planner: Planner,
        captured: Captured,
        costs: Costs,
        device: str,
        needed_bytes: int,
        peak_bytes: int,
        progress: Progress | None,
    ) -> Plan | None:
        """Return a tighter plan, or None; see `Planner.replan`."""
        if self._ranks is None:
            return planner.replan(captured, costs, device, needed_bytes, peak_bytes, progress)
        if not self.is_open:
            return None
        most = max(self._ranks.numbers(needed_bytes))

        def make() -> list[Any]:
            found = planner.replan(captured, costs, device, most, peak_bytes, progress)
            return [None if found is None else found.to_object(), planner.is_measured]

        content, planner.is_measured = self._ranks.first(make)
        return None if content is None else Plan.from_object(content)


def device_type(captured: Captured) -> str:
    """Return where the step runs: a learning rate is on the CPU everywhere."""
    nodes = (n for n in captured.module.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor))
    return next((n.meta["val"].device.type for n in nodes if n.meta["val"].device.type != "cpu"), "cpu")


def prepared(
    captured: Captured,
    place: Place | None,
    planner: Planner | None,
    options: dict[str, Any],
    progress: Progress | None,
    ranks: Ranks | None,
) -> tuple[Captured, Plan]:
    """Return the step to run, with its losses in chunks where its goal says so, and its plan: found or made.

    Args:
        captured: the step.
        place: where its plan is kept; None: nowhere.
        planner: plans it towards its goal; None: there is none.
        options: of a plan without a goal.
        progress: see olla.plan.
        ranks: that run the step; None: this process alone.

    Raises:
        BudgetError: nothing fits the budget.
    """

    def accept(found: Plan) -> None:
        if planner is not None:
            planner.accept(captured, device_type(captured), found)
        elif found.rewrites:
            raise PlanError("the plan is for another goal", rule="plan")

    def make() -> tuple[Captured, Plan]:
        if planner is None:
            return captured, plan(captured, layout=False, progress=progress, **options)
        return planner.plan(captured, device_type(captured), progress)

    own = place.load(captured.graph, accept) if place is not None else None
    if ranks is not None:
        found = plan_together(ranks, own, captured.graph, lambda: make()[1], accept)
    elif own is not None:
        found = own
    else:
        captured, found = make()
    if place is not None and found is not own:
        place.save(found)
    if planner is not None and (own is not None or ranks is not None):
        captured = planner.restore(captured, found)
    return captured, found
