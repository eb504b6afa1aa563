"""A captured step with the plan that is in force: the graph that runs, copies beside its ops, programs of it."""

from __future__ import annotations

import numpy as np
import torch

from olla.graph import Graph
from olla.plan import Costs, Plan
from olla.pytorch.capture import Captured
from olla.pytorch.memory.arrange import Arranged
from olla.pytorch.memory.copies import Copies, HostMemory
from olla.pytorch.memory.replay import Replay
from olla.pytorch.memory.requests import Recorder
from olla.pytorch.planner import captured_costs
from olla.pytorch.program.program import Program, compile_program
from olla.pytorch.program.schedule import OpSchedule, op_schedule

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


def device_type(captured: Captured) -> str:
    """Return where the step runs: a learning rate is on the CPU everywhere."""
    nodes = (n for n in captured.module.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor))
    return next((n.meta["val"].device.type for n in nodes if n.meta["val"].device.type != "cpu"), "cpu")
