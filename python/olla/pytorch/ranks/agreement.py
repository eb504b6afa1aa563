"""A step of several ranks: the same graph, options and plan on all of them, decided before it first runs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import fx

from olla.check.check import check
from olla.errors import PlanError, ReplayError
from olla.graph import Graph
from olla.plan import Costs, Plan
from olla.pytorch.ranks import collectives
from olla.pytorch.ranks.group import Ranks

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_OF_PLAN = ("graph_digest", "source_digest", "order", "before", "after", "rewrites")  # what decides how a step runs


class GoalPlanner(Protocol):
    """What plans a step towards a goal, as far as ranks have to know."""

    is_measured: bool


def agree(ranks: Ranks, graph: Graph, nodes: Iterable[fx.Node], options: Mapping[str, Any]) -> None:
    """Raise the same error on every rank unless all have captured one graph, and plan it with the same options.

    Raises:
        ReplayError: names the first op, or the option, that differs.
    """
    lines = described(nodes)
    texts = {name: without_addresses(repr(value)) for name, value in options.items()}
    facts = ranks.gather([digest(graph.digest, *lines), texts])
    for rank, (_, others) in enumerate(facts):
        for name in sorted({*facts[0][1], *others}):
            ours, theirs = facts[0][1].get(name), others.get(name)
            if ours != theirs:
                raise ReplayError(
                    f"the ranks plan the step with different options: {name} is {ours} on rank 0 and {theirs} on rank "
                    f"{rank}. Call olla.compile with the same arguments on every rank"
                )
    if len({digest for digest, _ in facts}) == 1:
        return
    everyone = ranks.gather(lines)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            where = next((i for i, pair in enumerate(zip(everyone[0], theirs, strict=False)) if pair[0] != pair[1]), -1)
            shown = [all_lines[where] if where >= 0 else f"{len(all_lines)} ops" for all_lines in (everyone[0], theirs)]
            raise ReplayError(
                f"the ranks captured different steps: the first op that differs is {shown[0]} on rank 0, and "
                f"{shown[1]} on rank {rank}. Give every rank the same model, and batches of the same shapes and types "
                "(drop_last=True in a data loader)"
            )
    raise ReplayError("the ranks captured steps whose tensors share memory in different ways: give all the same model")


def described(nodes: Iterable[fx.Node]) -> list[str]:
    """Return what is computed, operator by operator; which groups have which names does not matter."""
    groups: dict[str, str] = {}
    lines = []
    for node in nodes:
        args = node.args
        if collectives.issues(node):
            name = collectives.group_name(node)
            known = groups.setdefault(name, f"group {len(groups)}")
            args = tuple(known if str(getattr(a, "group_name", a)) == name and isinstance(a, str) else a for a in args)
        if node.op == "placeholder":
            lines.append(f"input {node.name}{_shape(node)}")
            continue
        text = f"{node.name} = {node.target}({', '.join(map(repr, (*args, *node.kwargs.items())))})"
        lines.append(without_addresses(f"{text}{_shape(node)}"))
    return lines


def _shape(node: fx.Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ""
    return f" of {str(value.dtype).removeprefix('torch.')}{list(value.shape)} {list(value.stride())}"


def plan_together(
    ranks: Ranks, own: Plan | None, graph: Graph, make: Callable[[], Plan], accept: Callable[[Plan], None]
) -> Plan:
    """Return the plan of all ranks: what each found on its disk, where all are equal, else that of the first.

    Args:
        ranks: that run the step.
        own: the plan that this one found; None: none.
        graph: that was captured.
        make: plans it; called on the first rank only, and only where it found no plan.
        accept: raises for a plan that the step cannot run.

    Returns:
        ``own`` itself where it is the plan of all.

    Raises:
        OllaError: what planning raised, on every rank.
    """
    mine = "" if own is None else digest_of(own)
    known = ranks.gather(mine)
    if own is not None and len(set(known)) == 1:
        return own
    content = ranks.first(lambda: (make() if own is None else own).to_object())

    def accepted() -> Plan:
        found = checked_plan(content, graph, "the plan of rank 0 is for another graph")
        accept(found)
        return found

    found = ranks.together(accepted)
    return own if own is not None and digest_of(found) == mine else found


def checked_plan(content: Any, graph: Graph, other: str = "it was made for another graph") -> Plan:
    """Return a plan of a graph that somebody else may have written; an OllaError says why it is none."""
    found = Plan.from_object(content)
    if found.source_digest != graph.digest:  # what its rewritings start from is not to be proved then
        raise PlanError(other, rule="digest")
    check(graph, found)
    return found


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
        """Return a graph with the most that any rank measured of each op: workspaces and seconds."""
        if self._ranks is None or not self.is_open:
            return graph
        everyone = self._ranks.gather([graph.workspace_bytes.tolist(), graph.seconds.tolist()])
        workspaces, seconds = (np.max(np.array(lists), axis=0) for lists in zip(*everyone, strict=True))
        return Costs(workspaces.astype(np.int64), seconds.astype(np.float64)).on(graph)

    def plan(self, graph: Graph, make: Callable[..., Plan]) -> Plan:
        """Return the plan of a step whose workspaces have become known.

        Args:
            graph: the step.
            make: called as make(search=whether another order may be looked for), plans it.
        """
        if self._ranks is None or not self.is_open:
            return make(search=self._ranks is None)
        return plan_together(self._ranks, None, graph, lambda: make(search=True), lambda found: None)

    def replan(self, needed_bytes: int, planner: GoalPlanner, make: Callable[[int], Plan | None]) -> Plan | None:
        """Return a tighter plan, or None; `planner.is_measured` is afterwards what it is on the first rank.

        Args:
            needed_bytes: what the recorded step takes here.
            planner: that `make` asks.
            make: plans for the most bytes that any rank needs.
        """
        if self._ranks is None:
            return make(needed_bytes)
        if not self.is_open:
            return None
        most = max(self._ranks.numbers(needed_bytes))

        def made() -> list[Any]:
            found = make(most)
            return [None if found is None else found.to_object(), planner.is_measured]

        content, planner.is_measured = self._ranks.first(made)
        return None if content is None else Plan.from_object(content)


def digest_of(plan: Plan) -> str:
    """Return a digest of what a plan decides; the time it took is not in it."""
    content = plan.to_object()
    return digest(*(json.dumps(content[name]) for name in _OF_PLAN))


def digest(*lines: str) -> str:
    """Return a digest of some text."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def without_addresses(text: str) -> str:
    """Return how objects are shown without where they lie in this process."""
    return _ADDRESS.sub("", text)
