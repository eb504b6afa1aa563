"""Generated code around collectives on a CPU: it waits until a thread of gloo has let go of their tensors.

Without that, memory that the plan gives to others may still be in use for a moment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import fx

from olla.pytorch.capture.costs import results_of
from olla.pytorch.ranks import collectives

Alive = Callable[[fx.Node], str]  # the name of a tensor of the step that is there, or ""


class _Begun(NamedTuple):
    op: int
    given: list[str]  # names of its tensors
    counts: str  # name of their use counts


class CollectiveLines:
    """Writes the lines before a collective begins, and after the wait for it."""

    def __init__(self) -> None:
        self._begun: dict[fx.Node, _Begun] = {}
        self._left: dict[fx.Node, int] = {}  # collective -> waits to come

    def before(self, op: int, kernel: fx.Node, alive: Alive) -> list[str]:
        """Return the lines before an operator."""
        if not _on_cpu(kernel) or not collectives.issues(kernel):
            return []
        found = [alive(node) for node in kernel.all_input_nodes]
        begun = self._begun[kernel] = _Begun(op, list(dict.fromkeys(filter(None, found))), f"h_{kernel.name}")
        return [f"{begun.counts} = use_counts({', '.join(begun.given)})"]

    def behind(self, kernel: fx.Node, alive: Alive) -> list[str]:
        """Return the lines after an operator: none but after the last wait for a collective, and after an all-gather.

        All-gathers are waited for at once: with several in flight, gloo's threads (torch 2.13) crash now and then.
        """
        if kernel in self._begun and collectives.gathers(kernel) and (result := alive(kernel)):
            made = f"[*{result}]" if isinstance(kernel.meta["val"], list | tuple) else f"[{result}]"
            return [f"wait_now({made})", _release(self._begun.pop(kernel), made)]
        issue = collectives.issue_of(kernel) if collectives.is_wait(kernel) else None
        if issue is None or issue not in self._begun:
            return []
        waits = _waits_for(issue)
        left = self._left[issue] = self._left.get(issue, len(waits)) - 1
        if left > 0:
            return []
        begun = self._begun.pop(issue)
        names = dict.fromkeys(alive(wait.all_input_nodes[0]) for wait in waits)
        return [_release(begun, f"[{', '.join(name for name in names if name and name not in begun.given)}]")]


def _release(begun: _Begun, made: str) -> str:
    return f"wait_until_released({begun.counts}, [{', '.join(begun.given)}], {made}, live, {begun.op})"


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
    return any(result.device.type == "cpu" for result in results_of(node)[:1])
