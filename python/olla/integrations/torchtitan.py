"""torchtitan's GraphTrainer: a memory policy that keeps and recomputes what olla chooses."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from olla import _core
from olla.base import human_bytes, percent
from olla.errors import BudgetError, CaptureError
from olla.graph import DeviceProfile, Graph, Rerun, draws_numbers, rules
from olla.plan import Goal, asked

if TYPE_CHECKING:
    from torch import fx

_log = logging.getLogger(__name__)
_WORK = 40_000_000  # of the greedy
_POINTS = 64  # of its curve that are tried
_TAKEN_BACK = 200  # recomputed ops that are tried without
_HEADS = ("lm_head", "loss")  # modules that GraphTrainer recomputes nothing of
_SLOWDOWN = 0.05  # where no goal is given


@dataclass(frozen=True)
class Choice:
    """What a policy chose for one graph; bytes and seconds are of the graph that GraphTrainer makes of it.

    Attributes:
        ops: names of the nodes that are ops of the graph; the others are views.
        recomputed: names of those that run again in backward.
        peak_bytes: most memory live at once, in program order, with all placeholders.
        saved_peak_bytes: the same with everything saved.
        added_seconds, base_seconds: estimated, of what runs again, and of the step without.
    """

    ops: frozenset[str]
    recomputed: tuple[str, ...]
    peak_bytes: int
    saved_peak_bytes: int
    added_seconds: float
    base_seconds: float


def register(
    name: str = "olla",
    *,
    budget: int | str | None = None,
    max_slowdown: float | None = None,
    minimise: str | None = None,
    device: str | DeviceProfile = "a100",
) -> None:
    """Register a memory policy for torchtitan's GraphTrainer: `config.compile.memory_policy = name`.

    Args:
        name: of the policy; an older one of that name is replaced.
        budget: memory for forward, loss and backward, parameters and gradients included: least added time within it.
        max_slowdown: least peak within this share of added time; 0.05 where no goal is given.
        minimise: "peak": least peak at whatever time.
        device: what time is estimated for.

    Raises:
        BudgetError, ValueError: as `olla.plan`.
        ImportError: torchtitan is not installed.
    """
    goal = _goal(budget, max_slowdown, minimise, device)
    from torchtitan.experiments.graph_trainer.registry import register_memory_policy

    def policy(module: fx.GraphModule, *, config: Any) -> fx.GraphModule:
        name_sums(module)
        tag(module, choose(module, goal))
        return module

    register_memory_policy(name)(policy)


def _goal(budget: Any, max_slowdown: Any, minimise: Any, device: Any) -> Goal:
    if budget is max_slowdown is minimise is None:
        max_slowdown = _SLOWDOWN
    goal, _ = asked(
        budget=budget, max_slowdown=max_slowdown, minimise=minimise, device=device, in_place=False, recompute=True
    )
    assert goal is not None
    return goal


def choose(module: fx.GraphModule, goal: Goal) -> Choice:
    """Choose what backward runs again in a graph of forward, loss and backward; the graph stays as it is.

    Every candidate is judged in the program GraphTrainer makes of it: each recomputed node runs once more, right before
    the first node of backward that needs it.

    Args:
        module: as `minimal_fx_tracer` traces it: nodes of backward have `meta["autograd_backward"]`.
        goal: what is asked for.

    Raises:
        BudgetError: nothing was found that fits the budget.
        CaptureError: the graph communicates between ranks, which the policy does not know yet.

    Complexity:
        Some 300 simulations, each O(ops + reads).
    """
    from olla.pytorch.imported import from_fx

    for node in module.graph.nodes:
        if getattr(node.target, "namespace", "").startswith("_c10d_functional"):
            raise CaptureError(
                f"{node.name} communicates ({node.target}): olla's memory policy is for graphs of one device. Take "
                "another memory_policy with FSDP, tensor or expert parallel"
            )
    graph = from_fx(module)
    program = _Program(graph, module, goal.device)
    points = [program.judged(ops) for ops in program.candidates()]
    saved_peak, base_seconds = points[0].peak_bytes, float(program.rules.seconds.sum())
    if goal.budget_bytes is not None:
        fits = [point for point in points if point.peak_bytes <= goal.budget_bytes]
        if not fits:
            least = min(point.peak_bytes for point in points)
            raise BudgetError(
                f"nothing was found that fits budget {goal.budget_bytes}: the least is {least} bytes, with parameters "
                "and gradients. Take a smaller batch, or at least that budget",
                rule="budget",
            )
        best = min(fits, key=lambda point: (point.added_seconds, point.peak_bytes))
        best = program.without(best, goal.budget_bytes)
    else:
        share = math.inf if goal.max_slowdown is None else goal.max_slowdown
        within = [point for point in points if point.added_seconds <= share * base_seconds * (1 + 1e-12)]
        best = min(within, key=lambda point: (point.peak_bytes, point.added_seconds))
        best = program.without(best, best.peak_bytes)
    names = tuple(graph.op_names[op] for op in sorted(best.ops))
    _log.info(
        "memory policy: peak %s, with everything saved %s; %d ops run again, %s of the time",
        *(human_bytes(best.peak_bytes), human_bytes(saved_peak), len(names)),
        percent(best.added_seconds / base_seconds if base_seconds else 0.0),
    )
    return Choice(frozenset(graph.op_names), names, best.peak_bytes, saved_peak, best.added_seconds, base_seconds)


def name_sums(module: fx.GraphModule) -> None:
    """Give sums of gradients the module of what they sum: torch 2.13 has them belong to the loss, which began backward.

    GraphTrainer runs nothing again before the last node of the loss.
    """
    for node in module.graph.nodes:
        if _is_backward(node) and _fqn(node) in _HEADS and "add" in str(node.target):
            others = [fqn for fqn in map(_fqn, node.all_input_nodes) if fqn and not fqn.startswith(_HEADS)]
            if others:
                node.meta["custom"] = {**node.meta["custom"], "module_fqn": others[0]}


def tag(module: fx.GraphModule, choice: Choice) -> None:
    """Mark the nodes of forward for GraphTrainer's passes: what is recomputed, what is saved; views run again."""
    import operator

    from torch.utils.checkpoint import CheckpointPolicy

    recomputed, ops = set(choice.recomputed), choice.ops
    nodes = list(module.graph.nodes)
    first = _first_backward(nodes)
    place = {node: i for i, node in enumerate(nodes)}
    for node in nodes:
        if node.op != "call_function" or _is_backward(node) or _fqn(node).startswith(_HEADS):
            continue
        early = any(_is_backward(user) and place[user] < first for user in node.users)
        if node.target is operator.getitem and "recompute" in getattr(node.args[0], "meta", {}):
            node.meta["recompute"] = node.args[0].meta["recompute"]
        elif node.name in recomputed:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        elif node.name in ops or early:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        else:
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    module.recompile()


def _fqn(node: fx.Node) -> str:
    return str(node.meta.get("custom", {}).get("module_fqn", ""))


def _is_backward(node: fx.Node) -> bool:
    return bool(node.meta.get("autograd_backward", False))


def _may_draw(node: fx.Node) -> bool:
    """Return whether GraphTrainer refuses to run a node again for its random numbers: torch looks at the tag alone.

    From 2.14 on it looks at the arguments of attention as well, which draws nothing without dropout.
    """
    import torch

    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14):
        return draws_numbers(node.target, node.args, node.kwargs)
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _first_backward(nodes: list[fx.Node]) -> int:
    """Return the place of the first node of backward that may have something run again: behind loss and head."""
    start = max((i for i, node in enumerate(nodes) if _fqn(node) in _HEADS), default=-1) + 1
    return next((i for i in range(start, len(nodes)) if _is_backward(nodes[i])), len(nodes))


@dataclass(frozen=True)
class _Judged:
    """Ops that run again, and what that makes of the program."""

    ops: frozenset[int]
    peak_bytes: int
    added_seconds: float


class _Program:
    """A graph, and what becomes of it when ops of forward run again in backward."""

    def __init__(self, graph: Graph, module: fx.GraphModule, device: DeviceProfile) -> None:
        self.graph = graph
        nodes = list(module.graph.nodes)
        node_of = {node.name: node for node in nodes}
        place = {node.name: i for i, node in enumerate(nodes)}
        first = _first_backward(nodes)
        self.first = sum(place[name] < first for name in graph.op_names)  # op of backward
        self.backward = [_is_backward(node_of[name]) for name in graph.op_names]
        self.reads = [graph.reads.of(v).tolist() for v in range(graph.num_ops)]
        self.writes = [graph.writes.of(v).tolist() for v in range(graph.num_ops)]
        self.mutates = [graph.mutates.of(v).tolist() for v in range(graph.num_ops)]
        self.producer = {t: v for v, written in enumerate(self.writes) for t in written}
        self.outputs = set(graph.outputs.tolist())
        self.forward_readers: dict[int, list[int]] = {}
        for v in np.flatnonzero(~np.array(self.backward, dtype=bool)).tolist():
            for t in self.reads[v] + self.mutates[v]:
                self.forward_readers.setdefault(t, []).append(v)
        free = rules(graph, device, in_place=False, recompute=True)
        self.allowed = frozenset(self._allowed(node_of, free.rerun))
        may = np.isin(np.arange(graph.num_ops), list(self.allowed))
        self.rules = free._replace(rerun=np.where(may, free.rerun, np.uint8(Rerun.NEVER)))

    def _allowed(self, node_of: dict[str, fx.Node], rerun: Any) -> list[int]:
        """Return the ops that GraphTrainer can run again."""
        mutated = {t for changed in self.mutates for t in changed}
        early = {t for v in range(self.first) if self.backward[v] for t in self.reads[v] + self.mutates[v]}
        return [
            v
            for v, name in enumerate(self.graph.op_names[: self.first])
            if not self.backward[v]
            and rerun[v] != Rerun.NEVER
            and not self.graph.random[v]
            and not _may_draw(node_of[name])
            and not _fqn(node_of[name]).startswith(_HEADS)
            and not self.mutates[v]
            and early.isdisjoint(self.writes[v])
            and mutated.isdisjoint(self.writes[v] + self.reads[v])
            and self.outputs.isdisjoint(self.writes[v])
        ]

    def candidates(self) -> list[frozenset[int]]:
        """Return sets of ops on the way of the greedy that drops values, from none to all that it drops."""
        search = self.rules.evictor(self.graph, np.arange(self.graph.num_ops, dtype=np.int32))
        search.run(0, 1e30, _core.Limits(time_limit=1e9, max_work=_WORK, progress=None))
        decisions, producer = search.decisions(), search.values.producer
        ends = np.unique(decisions.offset[search.curve().num_decisions])
        seen = {frozenset[int](): None}
        for end in ends[np.unique(np.linspace(0, len(ends) - 1, _POINTS).astype(int))].tolist():
            seen.setdefault(frozenset(producer[decisions.values[:end]].tolist()) & self.allowed)
        return [*seen, self.allowed]

    def without(self, point: _Judged, most_bytes: int) -> _Judged:
        """Take recomputed ops back, dearest first, as long as the peak stays within so many bytes."""
        for op in sorted(point.ops, key=lambda v: -self.rules.rerun_seconds[v])[:_TAKEN_BACK]:
            other = self.judged(point.ops - {op})
            if other.peak_bytes <= most_bytes and other.added_seconds <= point.added_seconds:
                point = other
        return point

    def judged(self, ops: frozenset[int]) -> _Judged:
        """Return the peak and the time of the program in which these ops run again where backward needs them."""
        graph, again, gone = self.rewritten(ops)
        peak = graph.program_peak_bytes
        added = float(self.rules.rerun_seconds[again].sum() - self.rules.seconds[gone].sum())
        return _Judged(ops, int(peak), added)

    def rewritten(self, ops: frozenset[int]) -> tuple[Graph, list[int], list[int]]:
        """Return the graph that GraphTrainer makes, the ops that run again, and those that run only then."""
        before: dict[int, list[int]] = {}  # op of backward -> what runs again before it
        again: set[int] = set()
        for v in range(self.first, self.graph.num_ops):
            waiting = self._producers(self.reads[v] + self.mutates[v]) if self.backward[v] else []
            while waiting:
                u = waiting.pop()
                if u in ops and u not in again:
                    again.add(u)
                    before.setdefault(v, []).append(u)
                    waiting += self._producers(self.reads[u])
        doubled = [t for u in sorted(again) for t in self.writes[u]]
        copies = {t: self.graph.num_tensors + i for i, t in enumerate(doubled)}
        gone: set[int] = set()
        for u in sorted(again, reverse=True):
            if all(v in gone for t in self.writes[u] for v in self.forward_readers.get(t, ())):
                gone.add(u)
        reads, writes, mutates = list[list[int]](), list[list[int]](), list[list[int]]()
        for v in range(self.graph.num_ops):
            for u in sorted(before.get(v, ())):
                reads.append([copies.get(t, t) for t in self.reads[u]])
                writes.append([copies[t] for t in self.writes[u]])
                mutates.append([])
            if v not in gone:
                table = copies if self.backward[v] else {}
                reads.append([table.get(t, t) for t in self.reads[v]])
                writes.append(self.writes[v])
                mutates.append([table.get(t, t) for t in self.mutates[v]])
        sizes = np.concatenate([self.graph.tensor_bytes, self.graph.tensor_bytes[doubled]])
        sizes[[t for u in gone for t in self.writes[u]]] = 0  # nobody makes them any more
        graph = Graph.from_arrays(
            tensor_bytes=sizes, reads=reads, writes=writes, mutates=mutates, outputs=self.graph.outputs
        )
        return graph, sorted(again), sorted(gone)

    def _producers(self, tensors: Iterable[int]) -> list[int]:
        return [self.producer[t] for t in tensors if t in self.producer]
