"""The ways in which a trainer's callback plans memory, and which goals go with each."""

from __future__ import annotations

from typing import Any, Literal

How = Literal["checkpoint", "aten", "inductor", "pool"]
WAYS = ("checkpoint", "aten", "inductor", "pool")


def require_goal(how: str, goal: dict[str, Any]) -> None:
    """Refuse goals that a way takes no notice of, and a way that needs one.

    Raises:
        ValueError: the message names the argument, and what to give or leave out.
    """
    if how not in WAYS:
        raise ValueError(f"how is {how!r}, expected one of {', '.join(WAYS)}")
    if how == "pool" and goal:
        raise ValueError(f"how='pool' leaves {', '.join(goal)} without effect: a pool takes no goal; leave one out")
    for name in {"chunked_loss", "host_budget"} & goal.keys() if how != "inductor" else ():
        raise ValueError(f"{name} is for how='inductor', not {how!r}: leave one out")
    if "host_budget" in goal and not {"budget", "max_slowdown", "minimise"} & goal.keys():
        raise ValueError("host_budget is for a goal: give budget, max_slowdown or minimise too")
    if how == "checkpoint" and not goal:
        raise ValueError("how='checkpoint' needs a goal: give budget, max_slowdown or minimise")
