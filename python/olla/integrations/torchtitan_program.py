"""The program that torchtitan's GraphTrainer makes of a traced step when nodes of forward are recomputed in backward.

Its `selective_activation_remat_pass` runs each marked node once more, right before the first node of backward that
needs it, and drops the first run where only backward reads it. An op that changes a new tensor in place counts as one
with the op that made it, since both are recomputed or neither is; so do a collective and the wait behind it. The
parameters of a block are gathered again together, or not at all: GraphTrainer gathers them as one message, and cannot
place one that belongs to forward in part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from olla import _core
from olla.graph import DeviceProfile, Graph, Rerun, collective_seconds, draws_numbers, rules
from olla.integrations.torchtitan_messages import Messages, Run

if TYPE_CHECKING:
    from torch import fx

HEADS = ("lm_head", "loss")  # modules that GraphTrainer recomputes nothing of
_LAST = ("norm", *HEADS)  # modules whose parameters it gathers as one
_WORK = 40_000_000  # of the greedy, a bound on what it may take; graphs of 10,000 ops end far below it
# Points of each way that are tried, and more beside the best of them: without the latter `eager` needed 1 % less memory
# than the choice on one step of bench_titan_ranks.py, with them 5 % more.
_POINTS, _FINER = 48, 32
_TAKEN_BACK = 200  # recomputed ops that are tried without


@dataclass(frozen=True)
class Judged:
    """Ops that are recomputed, and what that makes of the program.

    Attributes:
        ops: that are marked.
        peak_bytes: most memory live at once, in program order.
        added_seconds: estimated, beside the program in which everything is saved.
    """

    ops: frozenset[int]
    peak_bytes: int
    added_seconds: float


class _Way(NamedTuple):
    """Ops in the order in which they are recomputed, more and more of them, and how many of them to try."""

    ops: list[int]
    ends: list[int]


class GraphTrainerProgram:
    """A traced step, and what becomes of it when ops of forward are recomputed in backward.

    Args:
        graph: of the module; program order.
        module: as `minimal_fx_tracer` traces it: nodes of backward have `meta["autograd_backward"]`.
        device: what seconds are estimated for.
        sends_ahead: whether GraphTrainer sends the messages of FSDP as one for each layer, ahead of it.

    Attributes:
        graph: with what is recomputed together as one op.
        base_seconds: estimated, of the step with everything saved.
        allowed: ops that GraphTrainer can recompute.
    """

    def __init__(
        self, graph: Graph, module: fx.GraphModule, device: DeviceProfile, *, sends_ahead: bool = True
    ) -> None:
        joined = _joined(graph)
        silent = replace(graph, message_bytes=np.zeros_like(graph.message_bytes))
        link, latency = (np.add.reduceat(collective_seconds(g, device), joined) for g in (graph, silent))
        self._names = [tuple(names) for names in np.split(np.array(graph.op_names, dtype=object), joined[1:])]
        self.graph = graph = _of_joined(graph, joined)
        nodes = list(module.graph.nodes)
        node_of = {node.name: node for node in nodes}
        place = {node.name: i for i, node in enumerate(nodes)}
        first = first_backward(nodes)
        self._first = sum(place[name] < first for name in graph.op_names)  # op of backward
        self._backward = np.array([is_backward(node_of[name]) for name in graph.op_names], dtype=bool)
        self._reads = graph.reads.to_lists()
        self._writes = graph.writes.to_lists()
        self._mutates = graph.mutates.to_lists()
        self._sizes = graph.tensor_bytes.tolist()
        self._producer = {t: v for v, written in enumerate(self._writes) for t in written}
        self._outputs = set(graph.outputs.tolist())
        self._forward_readers: dict[int, list[int]] = {}
        for v in np.flatnonzero(~self._backward).tolist():
            for t in self._reads[v] + self._mutates[v]:
                self._forward_readers.setdefault(t, []).append(v)
        free = rules(graph, device, in_place=False, recompute=True)
        self.allowed = frozenset(self._allowed(node_of, free.rerun))
        self._blocks = [_block_of(node_of[name]) for name in graph.op_names]
        self._in_layer = [block.startswith("layers.") for block in self._blocks]
        self._block = np.unique(self._blocks, return_inverse=True)[1]
        beside = np.array([link[v] > 0 and _runs_beside(node_of[name]) for v, name in enumerate(graph.op_names)])
        self._own_seconds = free.seconds + np.where(beside, 0.0, link)
        messages = np.where(beside, 1 + 2 * self._block + self._backward, 0)  # those of one number are one
        share = latency * (1 - 1 / np.bincount(messages)[messages])
        self._link_seconds = np.where(beside, link - share, 0.0)
        self.base_seconds = self._step_seconds([], [])
        together = self._gathered_together()
        self._messages = self._sent(frozenset().union(*together)) if sends_ahead and beside.any() else None
        self._gathers = [ops for ops in together if ops <= self.allowed]
        self.allowed -= frozenset().union(*together).difference(*self._gathers)
        may = np.isin(np.arange(graph.num_ops), list(self.allowed))
        self._rules = free._replace(rerun=np.where(may, free.rerun, np.uint8(Rerun.NEVER)))

    def names_of(self, ops: Iterable[int]) -> tuple[str, ...]:
        """Return the names of the nodes of ops, in program order."""
        return tuple(name for v in sorted(ops) for name in self._names[v])

    def ops_of(self, names: Iterable[str]) -> frozenset[int]:
        """Return the ops of nodes by their names."""
        wanted = set(names)
        return frozenset(v for v, own in enumerate(self._names) if wanted.intersection(own))

    def best(self, rank: Callable[[Judged], tuple[float, ...]]) -> Judged:
        """Return the choice of the lowest rank: of points along each way, and of more beside the best of them."""
        found = self.judged(frozenset())
        for way in self._ways():
            ends = np.unique(np.linspace(0, len(way.ends) - 1, _POINTS).astype(int))
            points = [self.judged(self._prefix(way, i)) for i in ends.tolist()]
            k = min(range(len(points)), key=lambda k: rank(points[k]))
            between = np.linspace(ends[max(k - 1, 0)], ends[min(k + 1, len(ends) - 1)], _FINER + 2).astype(int)
            finer = sorted(set(between.tolist()).difference(ends.tolist()))
            points += [self.judged(self._prefix(way, i)) for i in finer]
            found = min([found, *points], key=rank)
        return found

    def _ways(self) -> list[_Way]:
        """Return ways from everything saved to nothing: layer by layer, and as greedies drop values.

        A layer keeps what the next one reads, as in a checkpoint. One greedy counts the link for a gather; the other
        takes it for free, as it is where backward computes longer than it gathers.
        """
        order = np.arange(self.graph.num_ops, dtype=np.int32)
        first_op = np.unique(self._block, return_index=True)[1]
        inside = [v for v in self.allowed if not self._leaves_block(v)]
        inside.sort(key=lambda v: (first_op[self._block[v]], v))
        every = sorted(self.allowed)
        ways = [_Way(inside, list(range(len(inside) + 1))), _Way(every, [len(every)])]
        costs = [self._own_seconds + self._link_seconds] + [self._own_seconds] * bool(self._link_seconds.any())
        for seconds in costs:
            search = self._rules._replace(rerun_seconds=seconds).evictor(self.graph, order)
            search.run(0, 1e30, _core.Limits(time_limit=1e9, max_work=_WORK, progress=None))
            decisions, producer = search.decisions(), search.values.producer
            ends = np.unique(decisions.offset[search.curve().num_decisions])
            ways.append(_Way(producer[decisions.values].tolist(), ends.tolist()))
        return ways

    def _prefix(self, way: _Way, i: int) -> frozenset[int]:
        """Return the ops of a way up to its i-th end; parameters of a layer are gathered together or not at all."""
        found = self.allowed.intersection(way.ops[: way.ends[i]])
        for ops in self._gathers:
            found = found | ops if 2 * len(found & ops) > len(ops) else found - ops
        return found

    def without(self, point: Judged, most_bytes: int) -> Judged:
        """Take recomputed ops back, dearest first, as long as the peak stays within so many bytes."""
        together = frozenset().union(*self._gathers)
        units = [ops for ops in self._gathers if ops <= point.ops] + [frozenset((op,)) for op in point.ops - together]
        cost = self._own_seconds + self._link_seconds
        units.sort(key=lambda ops: (-cost[list(ops)].sum(), min(ops)))
        for ops in units[:_TAKEN_BACK]:
            other = self.judged(point.ops - ops)
            if other.peak_bytes <= most_bytes and other.added_seconds <= point.added_seconds:
                point = other
        return point

    def judged(self, ops: frozenset[int]) -> Judged:
        """Return the peak and the time of the program in which these ops are recomputed where backward needs them."""
        graph, again, gone = self._rewritten(ops)
        return Judged(ops, int(graph.program_peak_bytes), self._step_seconds(again, gone) - self.base_seconds)

    def _allowed(self, node_of: dict[str, fx.Node], rerun: Any) -> list[int]:
        """Return the ops that GraphTrainer can recompute."""
        mutated = {t for changed in self._mutates for t in changed}
        early = {t for v in range(self._first) if self._backward[v] for t in self._reads[v] + self._mutates[v]}
        return [
            v
            for v, name in enumerate(self.graph.op_names[: self._first])
            if not self._backward[v]
            and rerun[v] != Rerun.NEVER
            and not self.graph.random[v]
            and not any(_may_draw(node_of[own]) for own in self._names[v])
            and not module_name(node_of[name]).startswith(HEADS)
            and not self._mutates[v]
            and early.isdisjoint(self._writes[v])
            and mutated.isdisjoint(self._writes[v] + self._reads[v])
            and self._outputs.isdisjoint(self._writes[v])
        ]

    def _sent(self, together: frozenset[int]) -> Messages:
        """Return what is sent as one: the last layer's messages are those of the norm and the head behind it."""
        beside = self._link_seconds > 0
        gathers = set(np.flatnonzero(beside & ~self._backward).tolist())
        layer = [-1 if name in _LAST else block for name, block in zip(self._blocks, self._block.tolist(), strict=True)]
        return Messages(layer, gathers, set(together) - gathers, set(np.flatnonzero(beside & self._backward).tolist()))

    def _leaves_block(self, op: int) -> bool:
        """Return whether a layer reads in forward what an op of another block writes."""
        readers = (v for t in self._writes[op] for v in self._forward_readers.get(t, ()) if self._in_layer[v])
        return any(self._block[v] != self._block[op] for v in readers)

    def _gathered_together(self) -> list[frozenset[int]]:
        """Return, block by block, the ops that gather its parameters, casts of the shards included."""
        found: dict[int, set[int]] = {}
        for v in np.flatnonzero((self._link_seconds > 0) & ~self._backward).tolist():
            ops, waiting = found.setdefault(self._block[v], set()), [v]
            while waiting:
                op = waiting.pop()
                ops.add(op)
                waiting += self._producers(self._reads[op])
        return [frozenset(ops) for ops in found.values()]

    def _step_seconds(self, again: list[int], gone: list[int]) -> float:
        """Return the seconds of a step: forward and backward each take what is longer, computing or communicating.

        GraphTrainer gathers the parameters of the next block, and reduces the gradients of the last one, beside the
        block that computes. What else communicates is waited for, and counts as computing.
        """
        lanes = []
        for seconds in (self._own_seconds, self._link_seconds):
            forward = seconds[~self._backward].sum() - seconds[gone].sum()
            lanes.append((forward, seconds[self._backward].sum() + seconds[again].sum()))
        return float(np.maximum(*np.array(lanes)).sum())

    def _rewritten(self, ops: frozenset[int]) -> tuple[Graph, list[int], list[int]]:
        """Return the graph that GraphTrainer makes, the ops that are recomputed, and those that run only then."""
        before: dict[int, list[int]] = {}  # op of backward -> what is recomputed before it
        again: set[int] = set()
        for v in range(self._first, self.graph.num_ops):
            waiting = self._producers(self._reads[v] + self._mutates[v]) if self._backward[v] else []
            while waiting:
                u = waiting.pop()
                if u in ops and u not in again:
                    again.add(u)
                    before.setdefault(v, []).append(u)
                    waiting += self._producers(self._reads[u])
        doubled = [t for u in sorted(again) for t in self._writes[u]]
        copies = {t: self.graph.num_tensors + i for i, t in enumerate(doubled)}
        gone: set[int] = set()
        for u in sorted(again, reverse=True):
            if all(v in gone for t in self._writes[u] for v in self._forward_readers.get(t, ())):
                gone.add(u)
        runs: list[Run] = []
        for v in range(self.graph.num_ops):
            for u in sorted(before.get(v, ())):
                read, written = [copies.get(t, t) for t in self._reads[u]], [copies[t] for t in self._writes[u]]
                runs.append(Run(u, True, read, written, []))
            if v not in gone:
                is_backward = bool(self._backward[v])
                read, changed = self._reads[v], self._mutates[v]
                if is_backward:
                    read, changed = [copies.get(t, t) for t in read], [copies.get(t, t) for t in changed]
                runs.append(Run(v, is_backward, read, self._writes[v], changed))
        sizes = [*self._sizes, *(self._sizes[t] for t in doubled)]
        for t in (t for u in gone for t in self._writes[u]):
            sizes[t] = 0  # nobody makes it any more
        if self._messages is not None:
            runs = self._messages.sent(runs, sizes)
        graph = Graph.from_arrays(
            tensor_bytes=sizes,
            reads=[run.reads for run in runs],
            writes=[run.writes for run in runs],
            mutates=[run.mutates for run in runs],
            outputs=self.graph.outputs,
        )
        return graph, sorted(again), sorted(gone)

    def _producers(self, tensors: Iterable[int]) -> list[int]:
        return [self._producer[t] for t in tensors if t in self._producer]


def first_backward(nodes: list[fx.Node]) -> int:
    """Return the place of the first node of backward that may have something recomputed: behind loss and head."""
    start = max((i for i, node in enumerate(nodes) if module_name(node) in HEADS), default=-1) + 1
    return next((i for i in range(start, len(nodes)) if is_backward(nodes[i])), len(nodes))


def module_name(node: fx.Node) -> str:
    """Return the name of the module that a node belongs to; empty where it has none."""
    return str(node.meta.get("custom", {}).get("module_fqn", ""))


def _block_of(node: fx.Node) -> str:
    """Return what GraphTrainer gathers the parameters of at once: a layer, or another module of the model."""
    path = module_name(node).split(".")
    return ".".join(path[: 2 if path[0] == "layers" else 1])


def is_backward(node: fx.Node) -> bool:
    """Return whether a node was traced in backward."""
    return bool(node.meta.get("autograd_backward", False))


def _may_draw(node: fx.Node) -> bool:
    """Return whether GraphTrainer refuses to recompute a node for its random numbers: torch looks at the tag alone.

    From 2.14 on it looks at the arguments of attention as well, which draws nothing without dropout.
    """
    import torch

    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14):
        return draws_numbers(node.target, node.args, node.kwargs)
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _runs_beside(node: fx.Node) -> bool:
    """Return whether a collective runs beside other ops: it gathers a parameter, or its result is a gradient."""
    if is_backward(node):
        while len(node.users) == 1:
            (node,) = node.users
        return node.op == "output"
    while len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return node.op == "placeholder"


def _joined(graph: Graph) -> NDArray[np.int64]:
    """Return where each op begins that is recomputed as one: what was made, with the changes right behind it."""
    starts, made = list[int](), set[int]()
    for v in range(graph.num_ops):
        changed = graph.mutates.of(v).tolist()
        if not changed or not made.issuperset(changed) or len(graph.writes.of(v)):
            starts.append(v)
            made = set(graph.writes.of(v).tolist())
    return np.array(starts, dtype=np.int64)


def _of_joined(graph: Graph, starts: NDArray[np.int64]) -> Graph:
    """Return a graph in which the ops from each start to the next one are one op, and nothing communicates."""
    ends = np.append(starts[1:], graph.num_ops)
    reads, writes, mutates = list[list[int]](), list[list[int]](), list[list[int]]()
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        writes.append(graph.writes.of(start).tolist())
        read = dict.fromkeys(t for v in range(start, end) for t in graph.reads.of(v).tolist())
        reads.append([t for t in read if t not in writes[-1]])
        mutates.append(graph.mutates.of(start).tolist())
    kinds = np.array([*graph.collectives, ""])
    is_waited = (kinds[starts + 1] == "wait") & (ends - starts > 1)
    alone = np.where(kinds[starts] == "", True, (kinds[starts] != "wait") & is_waited)
    return Graph.from_arrays(
        tensor_bytes=graph.tensor_bytes,
        tensor_kinds=graph.tensor_kinds,
        outputs=graph.outputs,
        op_names=[graph.op_names[v] for v in starts],
        targets=[graph.targets[v] for v in starts],
        reads=reads,
        writes=writes,
        mutates=mutates,
        random=np.logical_or.reduceat(graph.random, starts),
        recomputable=np.logical_and.reduceat(graph.recomputable | graph.communicates, starts) & alone,
        flops=np.add.reduceat(graph.flops, starts),
        moved_bytes=np.add.reduceat(graph.moved_bytes, starts),
        launches=np.add.reduceat(graph.launches, starts),
    )
