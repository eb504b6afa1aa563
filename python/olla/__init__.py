"""olla: the memory planner for PyTorch training."""

from typing import TYPE_CHECKING

from olla.check import check
from olla.devices import DeviceProfile
from olla.errors import BudgetError, CaptureError, GraphError, OllaError, PlanError, ReplayError, SolverError
from olla.graph import Graph
from olla.layout import Layout, layout
from olla.plan import Plan, Status, plan

if TYPE_CHECKING:
    from olla import inductor as inductor
    from olla.budgetplan import BudgetPlan as BudgetPlan
    from olla.curve import Curve as Curve
    from olla.curve import pareto as pareto
    from olla.measure import device_profile as device_profile
    from olla.pytorch.capture import capture as capture
    from olla.pytorch.pool import pool as pool
    from olla.pytorch.step import Step as Step
    from olla.pytorch.step import compile as compile
    from olla.swap import Link as Link
    from olla.swapplan import SwapPlan as SwapPlan

__all__ = [
    "BudgetError",
    "BudgetPlan",
    "CaptureError",
    "Curve",
    "DeviceProfile",
    "Graph",
    "GraphError",
    "Layout",
    "Link",
    "OllaError",
    "Plan",
    "PlanError",
    "ReplayError",
    "SolverError",
    "Status",
    "Step",
    "SwapPlan",
    "__version__",
    "capture",
    "check",
    "compile",
    "device_profile",
    "inductor",
    "layout",
    "pareto",
    "plan",
    "pool",
]


def __getattr__(name: str) -> object:
    if name == "capture":
        from olla.pytorch.capture import capture  # imports torch

        return capture
    if name == "inductor":
        from importlib import import_module

        return import_module("olla.inductor")  # imports torch
    if name == "pool":
        from olla.pytorch.pool import pool

        return pool
    if name in ("Curve", "pareto"):
        from olla import curve

        return getattr(curve, name)
    if name == "device_profile":
        from olla.measure import device_profile

        return device_profile
    if name == "BudgetPlan":
        from olla.budgetplan import BudgetPlan

        return BudgetPlan
    if name == "Link":
        from olla.swap import Link

        return Link
    if name == "SwapPlan":
        from olla.swapplan import SwapPlan

        return SwapPlan
    if name in ("Step", "compile"):
        from olla.pytorch import step

        return getattr(step, name)
    if name == "__version__":
        from importlib.metadata import version  # slow to import, seldom needed

        return version("olla-planner")
    raise AttributeError(f"module 'olla' has no attribute {name!r}")
