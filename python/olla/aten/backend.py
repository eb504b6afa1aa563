"""``kernels="aten"`` of the backend "olla": Dynamo's graphs, AOTAutograd's forward and backward, olla's plan."""

from __future__ import annotations

from typing import Any

from olla.aten.partition import Partitioner
from olla.aten.program import compile_program
from olla.inductor.compat import compat
from olla.plan import Goal


def partitioner(
    budget: int | str | None = None,
    max_slowdown: float | None = None,
    minimise: str | None = None,
    device: Any = None,
    time_limit: float = 15.0,
) -> Partitioner:
    """Return the partitioner for a goal; without one, nothing runs again.

    Raises:
        BudgetError: the budget is no number of bytes.
        ValueError: two goals are given, or one is out of its range.
    """
    if budget is None and max_slowdown is None and minimise is None:
        max_slowdown = 0.0
    goal = Goal.of(budget, max_slowdown, minimise, "a100" if device is None else device, True, True)
    assert goal is not None
    return Partitioner(goal, device=device, time_limit=time_limit)


def compile_graph(module: Any, inputs: Any, partition: Partitioner) -> Any:
    """Compile a graph that Dynamo captured: torch's own kernels, forward and backward in planned order.

    Nothing is decomposed but what eager training decomposes as well, so that results are the same to the bit.
    """
    return compat.compile_aten(module, inputs, partition, compile_program)


_OPTIONS = ("budget", "max_slowdown", "minimise", "device", "time_limit")


def partitioner_of(options: dict[str, Any]) -> Partitioner:
    """Return the partitioner for the options of ``torch.compile``.

    Raises:
        ValueError: an option is unknown.
    """
    others = {name: value for name, value in options.items() if name not in (*_OPTIONS, "kernels")}
    if options["kernels"] != "aten":
        raise ValueError(f"kernels is {options['kernels']!r}, expected 'inductor' or 'aten'")
    if others:
        raise ValueError(f"{next(iter(others))} is no option of kernels='aten', which takes {', '.join(_OPTIONS)}")
    return partitioner(**{name: value for name, value in options.items() if name in _OPTIONS})
