"""Goal of a plan: the least peak, a budget or a slowdown, and whether swaps are allowed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from olla.base import parse_bytes
from olla.graph import DeviceProfile, profile_of
from olla.plan.swaps import PCIE3, Link

MOST_CHUNKS = 4096


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What `olla.plan` is asked for besides an order; exactly one of budget, max_slowdown and minimise is set.

    Attributes:
        budget_bytes: the least added time with which everything fits these bytes.
        max_slowdown: the least peak within this share of the step's time, 0.05 for 5 %.
        minimise: "peak": the least peak at whatever time.
        device: what seconds are estimated for.
        in_place, recompute: which levers may be used.
        chunked_loss: chunks of rows for linear layers with their cross-entropy; None: they stay whole.
    """

    budget_bytes: int | None = None
    max_slowdown: float | None = None
    minimise: str | None = None
    device: DeviceProfile
    in_place: bool = True
    recompute: bool = True
    chunked_loss: int | None = None

    @classmethod
    def of(
        cls,
        budget: int | str | None,
        max_slowdown: float | None,
        minimise: str | None,
        device: str | DeviceProfile,
        in_place: bool,
        recompute: bool,
        chunked_loss: int | None = None,
    ) -> Goal | None:
        """Check the options of `olla.plan`; None where no goal is given.

        Raises:
            BudgetError: the budget is no number of bytes.
            ValueError: an option is out of its range, or two goals are given.
        """
        goals = {"budget": budget, "max_slowdown": max_slowdown, "minimise": minimise}
        given = [name for name, value in goals.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given, expected one of them: each is a goal of its own")
        profile = profile_of(device)
        if chunked_loss is not None and (
            isinstance(chunked_loss, bool) or not isinstance(chunked_loss, int) or not 1 <= chunked_loss <= MOST_CHUNKS
        ):
            raise ValueError(f"chunked_loss is {chunked_loss!r}, expected 1 to {MOST_CHUNKS} chunks, or None")
        if not given:
            if chunked_loss is not None:
                raise ValueError("chunked_loss is for a goal: give budget, max_slowdown or minimise with it")
            return None
        if max_slowdown is not None and (
            isinstance(max_slowdown, bool)
            or not isinstance(max_slowdown, int | float)
            or not 0 <= max_slowdown < math.inf
        ):
            raise ValueError(f"max_slowdown is {max_slowdown!r}, expected a share of the step's time: 0.05 for 5 %")
        if minimise not in (None, "peak"):
            raise ValueError(f"minimise is {minimise!r}, expected 'peak'")
        return cls(
            budget_bytes=None if budget is None else parse_bytes(budget),
            max_slowdown=None if max_slowdown is None else float(max_slowdown),
            minimise=minimise,
            device=profile,
            in_place=bool(in_place),
            recompute=bool(recompute),
            chunked_loss=chunked_loss,
        )

    def record(self) -> dict[str, Any]:
        """Return the goal as a plan keeps it: what is set, as numbers, text, true or false."""
        values = {**vars(self), "device": self.device.name}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Swapping:
    """Whether and how tensors may be swapped to host memory.

    Attributes:
        link: to host memory.
        host_bytes: host memory there is; None: as much as it takes.
        state: whether optimizer state may wait in host memory from step to step.
        by_autoswap: by AutoSwap, which keeps the order, in place of our search.
    """

    link: Link
    host_bytes: int | None = None
    state: bool = False
    by_autoswap: bool = False

    def record(self) -> dict[str, Any]:
        """Return it as a plan keeps it, with its goal: numbers, true or false."""
        speeds = {f"link_{name}": value for name, value in vars(self.link).items()}
        host = {} if self.host_bytes is None else {"host_budget_bytes": self.host_bytes}
        return {**speeds, **host, "swap_state": self.state}


def asked(
    *,
    budget: int | str | None = None,
    max_slowdown: float | None = None,
    minimise: str | None = None,
    device: str | DeviceProfile = "a100",
    in_place: bool = True,
    recompute: bool = True,
    chunked_loss: int | None = None,
    swap: bool | None = None,
    host_budget: int | str | None = None,
    link: Link | float | None = None,
    method: str = "auto",
    swap_state: bool = False,
) -> tuple[Goal | None, Swapping | None]:
    """Check what is asked for besides an order; the arguments are those of `olla.plan`.

    Swapping is on where it is asked for (`swap=True`, method "autoswap") or host memory is granted (`host_budget`),
    unless `swap=False` forbids it. The link is by default the device's, and for AutoSwap what its authors saw. AutoSwap
    without a goal looks for the least peak at no overhead.

    Raises:
        BudgetError: a budget is no number of bytes.
        ValueError: an option is out of its range, or two contradict each other.
    """
    profile = profile_of(device)
    goal = Goal.of(budget, max_slowdown, minimise, profile, in_place, recompute, chunked_loss)
    host_bytes = None if host_budget is None else parse_bytes(host_budget, "host_budget")
    autoswap = method == "autoswap"
    if swap is False and autoswap:
        raise ValueError("swap is False, but method 'autoswap' does nothing else: choose another method")
    if not (autoswap or (host_budget is not None if swap is None else swap)):
        if (link is not None or swap_state) and swap is None:
            name = "swap_state" if swap_state else "link"
            raise ValueError(f"{name} is given, but nothing may be swapped: give host_budget, or swap=True")
        return goal, None
    if goal is None and not autoswap:
        name = "swap" if swap else "host_budget"
        raise ValueError(f"{name} is for a goal: give budget, max_slowdown or minimise too, or method 'autoswap'")
    if swap_state and autoswap:
        raise ValueError("swap_state is not for method 'autoswap', which swaps activations: choose another method")
    default = PCIE3 if autoswap else profile
    speed = Link.of(default if link is None else link)
    swapping = Swapping(link=speed, host_bytes=host_bytes, state=bool(swap_state), by_autoswap=autoswap)
    return goal or Goal(max_slowdown=0.0, device=profile, in_place=False, recompute=False), swapping
