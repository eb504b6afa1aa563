"""Partition of a whole step: the tensors saved for backward, and each update behind the last reader of its tensors."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from olla.errors import CaptureError
from olla.inductor.compat import compat, fallback
from olla.inductor.compat.whole import KEEP, SEED, UPDATE
from olla.inductor.saving import joint, rebuild, saving
from olla.inductor.saving.kinds import is_seed, is_view
from olla.inductor.saving.partition import asked_of
from olla.inductor.saving.verify import root
from olla.plan import Goal

_OF_UPDATES = ("optimizer_state", "rate", "number")  # inputs from which updates alone are computed
_MOST_PLANNED = 0.95  # of what separate graphs need: the code of one graph needs up to 5 % more than planned


@dataclass
class UpdateGroup:
    """The operators that update some parameters, and their state, from the same gradients.

    Attributes:
        taken: what it reads of backward.
        nodes: its operators, in order; changes of inputs are among them.
        targets: the inputs it changes.
    """

    taken: list[fx.Node]
    nodes: list[fx.Node] = field(default_factory=list)
    targets: list[fx.Node] = field(default_factory=list)

    def add(self, taken: Iterable[fx.Node], nodes: Iterable[fx.Node], targets: Iterable[fx.Node]) -> None:
        """Let it take, run and change more."""
        self.taken = sorted({*self.taken, *taken})
        self.nodes = sorted({*self.nodes, *nodes})  # changes are the last nodes of the graph
        self.targets += targets


@dataclass(frozen=True)
class Asked:
    """What a whole step is to reach.

    Attributes:
        goal: see `olla.inductor.enable`; a budget here is for the whole step. None: the backend's default.
        max_recomputed: most flops to recompute, as a share of them all.
        compares: whether to stop, before any code is generated, if separate graphs would need hardly more memory.
    """

    goal: Goal | None = None
    max_recomputed: float | None = None
    compares: bool = False


class NothingGainedError(Exception):
    """A whole step would need hardly less than separate graphs of forward and backward, and the optimizer after."""


class Whole(compat.CustomGraphPass):  # type: ignore[misc]
    """Decides what a whole step saves, as Inductor is about to lower it.

    Args:
        kinds: of the inputs of the graph; see `olla.inductor.whole.flat`.
        asked: what is asked for.

    Attributes:
        planned_peak_bytes: what the step is foreseen to need, with what lives throughout.
        separate_peak_bytes: the same of forward and backward as two graphs, whose gradients live until all are there.
            None where nobody asked.
    """

    def __init__(self, kinds: Sequence[str], asked: Asked) -> None:
        self.kinds = kinds
        self.asked = asked
        self.planned_peak_bytes = 0
        self.separate_peak_bytes: int | None = None

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite a functional graph whose last nodes change inputs.

        Raises:
            CaptureError: rule "inductor_graph"; it has not the form of one forward, one backward and updates.
            NothingGainedError: separate graphs were compared, and need hardly more.
        """
        given = graph.find_nodes(op="placeholder")
        if len(given) != len(self.kinds):
            raise CaptureError(
                f"the step takes {len(self.kinds)} tensors, and {len(given)} are left of them: some share memory",
                rule="inductor_graph",
            )
        step = compat.fx_graph_cse(graph)  # which merges nothing across a change
        inputs = step.find_nodes(op="placeholder")
        updates, rest, behind = _updates(step, dict(zip(inputs, self.kinds, strict=True)))
        part, names, order = _without_updates(step, updates, rest, behind, self.kinds)
        apart = sum(compat.size_of(n) for n, k in zip(given, self.kinds, strict=True) if k in _OF_UPDATES)
        model, choice = self._chosen(part, apart)
        self.planned_peak_bytes = choice.known_peak_bytes + apart
        if self.asked.compares:
            _, separate = self._chosen(_without_sinks(part), apart)
            self.separate_peak_bytes = separate.known_peak_bytes + apart
            if not self._gains(self.planned_peak_bytes, self.separate_peak_bytes):
                raise NothingGainedError
        needed = self.planned_peak_bytes
        budget = self.asked.goal.budget_bytes if self.asked.goal is not None else None
        if budget is not None and needed > budget:
            fallback.warn(
                f"olla found no way to fit a compiled step into budget={budget} bytes: the least found is {needed} "
                f"bytes, with parameters and the optimizer's state, and is used. Ask for budget={needed}, or take a "
                "smaller batch"
            )
        rebuilt = rebuild.rebuild(part.graph, model, choice.values, choice.runs, part.meta["num_forward"])
        _replace(graph, _assembled(step, rebuilt, updates, names, order))

    def _chosen(self, part: fx.GraphModule, apart: int) -> tuple[joint.Joint, saving.SavedChoice]:
        """Return a model of forward and backward, and what they save and recompute.

        Args:
            part: forward and backward.
            apart: bytes that live throughout beside what these take.
        """
        num_forward = part.meta["num_forward"]
        info = compat.prepare(part, None, num_forward)
        if info is None:
            raise CaptureError("nothing of the step is backward", rule="inductor_graph")
        goal, device = self.asked.goal, self.asked.goal.device if self.asked.goal else None
        if goal is not None and goal.budget_bytes is not None:
            goal = dataclasses.replace(goal, budget_bytes=max(goal.budget_bytes - apart, 1))
        model, goal, again = asked_of(part, info, num_forward, goal, device, self.asked.max_recomputed)
        return model, saving.choose(model, goal, again)

    def _gains(self, planned: int, separate: int) -> bool:
        """Return whether one graph is worth it: it needs less, or it alone fits the budget."""
        budget = self.asked.goal.budget_bytes if self.asked.goal is not None else None
        return planned <= _MOST_PLANNED * separate or (budget is not None and planned <= budget < separate)

    def uuid(self) -> None:
        """Return None: the result is not to be cached."""
        return


def _without_sinks(part: fx.GraphModule) -> fx.GraphModule:
    """Return forward and backward as separate graphs have them: gradients for updates are results, alive to the end."""
    gm = compat.copied(part)
    sinks: Any = gm.graph.find_nodes(op="call_function", target=UPDATE)
    results = [*_results(gm.graph), *dict.fromkeys(n for sink in sinks for n in sink.args[1])]
    gm.graph.output_node().args = (tuple(results),)
    gm.graph.output_node().meta["desc"] = [None] * len(results)
    for sink in sinks:
        gm.graph.erase_node(sink)
    gm.meta["num_forward"] = part.meta["num_forward"]
    return gm


def _updates(graph: fx.Graph, kinds: dict[fx.Node, str]) -> tuple[list[UpdateGroup], list[fx.Node], set[fx.Node]]:
    """Return the updates of a graph, its other operators, and all that depends on the tangent."""
    behind = {node for node, kind in kinds.items() if kind == "tangent"}
    inside = {node for node, kind in kinds.items() if kind in _OF_UPDATES}
    parameters = {node for node, kind in kinds.items() if kind == "parameter"}
    for node in graph.nodes:
        if not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
        changes_parameter = compat.changes_inputs(node) and node.args[0] in parameters
        if node.op == "call_function" and (not inside.isdisjoint(node.all_input_nodes) or changes_parameter):
            inside.add(node)
    output = graph.output_node()
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    by_taken: dict[tuple[fx.Node, ...], UpdateGroup] = {}
    for node in nodes:
        if node not in inside or not compat.changes_inputs(node):
            continue
        own, taken = _makers(node, inside)
        target: Any = node.args[0]
        update = by_taken.setdefault(tuple(n for n in taken if n in behind), UpdateGroup([]))
        update.add(taken, own, [target])
    rest = [node for node in nodes if node not in inside]
    if any(n in inside and n.op == "call_function" for n in output.all_input_nodes):
        raise CaptureError(
            'kernels="inductor" cannot return what an update computes: return the loss and what forward makes, or '
            'compile with kernels="torch"',
            rule="inductor_graph",
        )
    late = by_taken.pop((), None)  # updates without gradients: they run behind all readers of the old values
    return [*_merged(list(by_taken.values())), *([late] if late else [])], rest, behind


def _merged(updates: list[UpdateGroup]) -> list[UpdateGroup]:
    """Merge updates of which one reads what another changes, so that all reads come before all changes."""
    changed_by = {target: i for i, update in enumerate(updates) for target in update.targets}
    group = list(range(len(updates)))  # the first update of those it is put together with, by way of others

    def first(i: int) -> int:
        while group[i] != i:
            group[i] = i = group[group[i]]
        return i

    for i, update in enumerate(updates):
        for source in {root(n) for node in update.nodes for n in node.all_input_nodes} & changed_by.keys():
            one, other = sorted((first(i), first(changed_by[source])))
            group[other] = one
    for i, update in enumerate(updates):
        if first(i) != i:
            updates[first(i)].add(update.taken, update.nodes, update.targets)
    return [update for i, update in enumerate(updates) if first(i) == i]


def _makers(last: fx.Node, inside: set[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the operators of updates that a node needs, in order with itself, and what they read from outside."""
    found, left = {last}, [last]
    taken: dict[fx.Node, None] = {}
    while left:
        for source in left.pop().all_input_nodes:
            if source.op == "placeholder":
                continue
            if source not in inside:
                taken[source] = None
            elif source not in found:
                found.add(source)
                left.append(source)
    return sorted(found), sorted(taken)


def _without_updates(
    graph: fx.Graph, updates: Sequence[UpdateGroup], rest: Sequence[fx.Node], behind: set[fx.Node], kinds: Sequence[str]
) -> tuple[fx.GraphModule, dict[str, fx.Node], list[int]]:
    """Return forward and backward with one operator per update, which consumes its inputs as soon as they exist.

    Returns:
        The graph as a partitioner takes it; the input of the whole graph by the name it has there; which of its
        results are those of the whole graph, in order.
    """
    part = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    names: dict[str, fx.Node] = {}
    for i, (node, kind) in enumerate(zip(graph.find_nodes(op="placeholder"), kinds, strict=True)):
        name = f"{'tangents' if kind == 'tangent' else 'primals'}_{i + 1}"
        names[name] = node
        if kind not in _OF_UPDATES:
            new[node] = part.placeholder(name)
            new[node].meta.update(node.meta)
    waiting = [{n for n in update.taken if n.op != "placeholder"} for update in updates]
    late: list[fx.Node] = []  # changes of buffers: forward's last operators
    begun = False  # whether backward has
    for node in rest:
        if node in behind and not begun:
            begun = True
            for change in late:
                new[change] = part.node_copy(change, new.__getitem__)
        if compat.changes_inputs(node) and not begun:
            late.append(node)
            continue
        new[node] = part.node_copy(node, new.__getitem__)
        for number, left in enumerate(waiting):
            if node in left:
                left.remove(node)
                if not left:
                    _sink(part, number, [new[n] for n in updates[number].taken])
    for number, update in enumerate(updates):
        if not any(n.op != "placeholder" for n in update.taken):
            _sink(part, number, [new[n] for n in update.taken])
    results = _results(graph)
    sides = sorted(range(len(results)), key=lambda i: results[i] in behind)
    part.output(tuple(new[results[i]] for i in sides))
    part.output_node().meta["desc"] = [None] * len(results)
    module = fx.GraphModule(torch.nn.Module(), part)
    module.meta["num_forward"] = sum(n not in behind for n in results)
    return module, names, [sides.index(i) for i in range(len(results))]


def _sink(part: fx.Graph, number: int, taken: list[fx.Node]) -> None:
    node = part.call_function(UPDATE, (number, taken))
    node.meta["val"] = None


def _assembled(
    step: fx.Graph,
    rebuilt: rebuild.Rebuilt,
    updates: Sequence[UpdateGroup],
    names: dict[str, fx.Node],
    order: Sequence[int],
) -> fx.Graph:
    """Return the graph of a step: forward, backward, and each update behind the last reader of what it changes.

    Args:
        step: as it was, with the same inputs.
        rebuilt: forward and backward.
        updates: of the step.
        names: the step's input by its name in ``rebuilt``.
        order: which of the results of ``rebuilt`` is result i.
    """
    final = fx.Graph()
    new = {node: final.placeholder(node.name) for node in step.find_nodes(op="placeholder")}
    env: dict[fx.Node, fx.Node] = {}
    kept: dict[fx.Node, fx.Node] = {}
    left = collections.Counter(names[str(r.target)] for n in rebuilt.graph.nodes for r in _read_inputs(n))
    waiting: list[tuple[UpdateGroup, dict[fx.Node, fx.Node]]] = []
    for node in rebuilt.graph.nodes:
        if node.op == "placeholder":
            env[node] = new[names[str(node.target)]]
        elif node.target is UPDATE:
            update = updates[node.args[0]]
            waiting.append((update, dict(zip(update.taken, (env[n] for n in node.args[1]), strict=True))))
        elif node.op == "call_function":
            seen = env if node in rebuilt.forward else collections.ChainMap(kept, env)
            env[node] = final.node_copy(node, seen.__getitem__)
            if is_seed(node) and node.meta["val"].device.type == "cpu":
                env[node].target = SEED
            if node in rebuilt.saved:
                kept[node] = final.call_function(KEEP, (env[node],))
                kept[node].meta["val"] = node.meta["val"]
        left.subtract(names[str(r.target)] for r in _read_inputs(node))
        ready = [item for item in waiting if not any(left[target] for target in item[0].targets)]
        waiting = [item for item in waiting if item not in ready]
        for update, here in ready:
            seen = new | here
            for changing in update.nodes:
                seen[changing] = final.node_copy(changing, seen.__getitem__)
    found = [env[n] for n in _results(rebuilt.graph)]
    final.output([found[i] for i in order]).meta.update(step.output_node().meta)
    return final


def _read_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the inputs whose memory an operator that computes may read, through views too."""
    if node.op != "call_function" or is_view(node):
        return []
    return [source for n in node.all_input_nodes if (source := root(n)).op == "placeholder"]


def _replace(graph: fx.Graph, final: fx.Graph) -> None:
    """Give a graph the nodes of another one with the same inputs."""
    for node in reversed(list(graph.nodes)):
        if node.op != "placeholder":
            graph.erase_node(node)
    inputs = zip(final.find_nodes(op="placeholder"), graph.find_nodes(op="placeholder"), strict=True)
    env = dict(inputs)
    copied: Any = graph.graph_copy(final, env, return_output_node=True)
    results, output = copied
    graph.output(results).meta.update(output.meta)


def _results(graph: fx.Graph) -> list[fx.Node]:
    output: Any = graph.output_node()
    return list(output.args[0])
