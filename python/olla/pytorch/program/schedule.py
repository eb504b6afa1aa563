"""Schedule of a program: the captured ops or those of a rewriting, and the tensors each one reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import fx

from olla.graph import Graph, Rerun
from olla.plan import Plan, Recomputed, Swapped
from olla.pytorch.capture import Captured
from olla.pytorch.program.swapped import Transfers, transfers


class ScheduledOp(NamedTuple):
    """One op of the graph that runs.

    Attributes:
        nodes: of the captured op it stands for: the node with the kernel, then those without one that are made of it;
            none of a swap-out or a swap-in.
        place: tensor of the captured graph that it uses or makes -> tensor of the graph that runs; None: the same.
        again: it is recomputed for its first result alone.
        over: tensor of the captured graph whose memory its result takes over; -1: none.
        draw: the captured op whose random numbers are drawn by several calls, this one among them; -1: none.
        replay: it draws them again.
    """

    nodes: Sequence[fx.Node]
    place: Mapping[int, int] | None = None
    again: bool = False
    over: int = -1
    draw: int = -1
    replay: bool = False


class OpSchedule(NamedTuple):
    """The graph that runs, and what its ops are.

    Attributes:
        graph: its ops are in an order they can run in.
        calls: call i is op i.
        outputs: tensor of the captured graph that outlives the step -> tensor of the graph; None: the same.
        transfers: the copies beside the ops, where the plan swaps.
    """

    graph: Graph
    calls: Sequence[ScheduledOp]
    outputs: Mapping[int, int] | None = None
    transfers: Transfers | None = None


def op_schedule(captured: Captured, plan: Plan) -> OpSchedule:
    """Return what a plan of a captured step runs.

    Where the plan's losses are in chunks, the captured step has them too.

    Complexity: O(ops + uses).
    """
    found = OpSchedule(captured.graph, [ScheduledOp(nodes) for nodes in captured.nodes])
    if plan.recomputed is not None:
        found = _recomputing(captured, plan.recomputed)
    return found if plan.swapped is None else _swapping(found, plan.swapped)


def _recomputing(captured: Captured, plan: Recomputed) -> OpSchedule:
    """Return the schedule of a step with recomputed or in-place ops, mapping values to the tensors that hold them."""
    original, graph = captured.graph, plan.graph
    held = plan.tensor_origin.tolist()  # tensor of the captured graph that each tensor stands for so far
    calls = []
    replays = (plan.rerun == Rerun.REPLAY) & ~graph.communicates  # of random numbers: what is gathered is there
    drawn = set(plan.origin[replays].tolist())
    for i, v in enumerate(plan.origin.tolist()):
        changed = list(dict.fromkeys(graph.mutates.of(i).tolist()))
        place = {held[t]: t for t in (*graph.reads.of(i).tolist(), *changed)}
        again = bool(plan.rerun[i] == Rerun.FIRST_RESULT)
        written, mutated = original.writes.of(v).tolist(), list(dict.fromkeys(original.mutates.of(v).tolist()))
        over = held[changed[0]] if not again and len(changed) > len(mutated) else -1
        made = written[:1] if again else [*written, *mutated]
        for old, new in zip(made, [*graph.writes.of(i).tolist(), *changed], strict=True):
            place[old], held[new] = new, old
        nodes = captured.nodes[v]
        if again:
            # What else the operator gives, as cuDNN's batch norm its reserve, is dropped with the call's result.
            place = dict.fromkeys(written, place[written[0]]) | place
            nodes = (nodes[0], *(n for n in nodes[1:] if set(captured.tensors[n]) == {written[0]}))
        replay = bool(replays[i])
        draw = v if v in drawn and (replay or plan.rerun[i] == Rerun.NEVER) else -1
        calls.append(ScheduledOp(nodes, place, again, over, draw, replay))
    outputs = dict(zip(original.outputs.tolist(), graph.outputs.tolist(), strict=True))
    return OpSchedule(graph, calls, outputs)


def _swapping(below: OpSchedule, plan: Swapped) -> OpSchedule:
    """Return the schedule below the swaps, mapping values to the tensors that hold them by then."""
    original, graph = below.graph, plan.graph
    calls = []
    for i, v in enumerate(plan.origin.tolist()):
        if v < 0:
            calls.append(ScheduledOp(()))
            continue
        place = {t: t for t in original.writes.of(v).tolist()}
        for before, now in ((original.reads, graph.reads), (original.mutates, graph.mutates)):
            place |= zip(before.of(v).tolist(), now.of(i).tolist(), strict=True)
        call = below.calls[v]
        held = place if call.place is None else {old: place[t] for old, t in call.place.items()}
        calls.append(call._replace(place=held))
    kept = dict(zip(original.outputs.tolist(), graph.outputs.tolist(), strict=True))
    outputs = kept if below.outputs is None else {old: kept[t] for old, t in below.outputs.items()}
    return OpSchedule(graph, calls, outputs, transfers(plan))
