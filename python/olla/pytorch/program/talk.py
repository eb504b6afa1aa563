"""The lines around operators that communicate: their memory is free where the plan says so, not a moment later."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from olla.pytorch.ranks import collectives

Alive = Callable[[fx.Node], str]  # the name of a tensor of the step that is there, or ""


class Talk:
    """What is written before a collective is begun, and behind the wait for it, for tensors on a CPU."""

    def __init__(self) -> None:
        self._given: dict[fx.Node, list[str]] = {}  # collective -> names of its tensors
        self._left: dict[fx.Node, int] = {}  # collective -> waits to come
        self._counts: dict[fx.Node, str] = {}
        self._ops: dict[fx.Node, int] = {}

    def before(self, op: int, kernel: fx.Node, alive: Alive) -> list[str]:
        """Return the lines before an operator."""
        if not _on_cpu(kernel) or not collectives.issues(kernel):
            return []
        found = [alive(node) for node in kernel.all_input_nodes]
        self._given[kernel] = list(dict.fromkeys(name for name in found if name))
        self._counts[kernel] = f"h_{kernel.name}"
        self._ops[kernel] = op
        return [f"{self._counts[kernel]} = uses({', '.join(self._given[kernel])})"]

    def behind(self, kernel: fx.Node, alive: Alive) -> list[str]:
        """Return the lines behind an operator: nothing but for the last wait for a collective."""
        issue = collectives.issue_of(kernel) if collectives.is_wait(kernel) else None
        if issue is None or issue not in self._given:
            return []
        waits = _waits_for(issue)
        left = self._left[issue] = self._left.get(issue, len(waits)) - 1
        if left > 0:
            return []
        made = [alive(wait.all_input_nodes[0]) for wait in waits]
        given = self._given[issue]
        results = ", ".join(name for name in dict.fromkeys(made) if name and name not in given)
        return [f"settled({self._counts[issue]}, [{', '.join(given)}], [{results}], live, {self._ops[issue]})"]


def _waits_for(issue: fx.Node) -> list[fx.Node]:
    """Return the operators that wait for a collective, or for items of its result."""
    found, pending = [], [issue]
    while pending:
        for user in pending.pop().users:
            if collectives.is_wait(user):
                found.append(user)
            elif user.op == "call_function" and not isinstance(user.target, torch._ops.OpOverload):
                pending.append(user)  # an item of the result
    return found


def _on_cpu(node: fx.Node) -> bool:
    value = node.meta.get("val")
    first = value[0] if isinstance(value, list | tuple) and value else value
    return isinstance(first, torch.Tensor) and first.device.type == "cpu"
