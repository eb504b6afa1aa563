"""olla: the memory planner for PyTorch training."""

from typing import TYPE_CHECKING

from olla.check import check
from olla.errors import BudgetError, CaptureError, GraphError, OllaError, PlanError, ReplayError, SolverError
from olla.graph import Graph
from olla.layout import Layout, layout
from olla.plan import Plan, Status, plan

if TYPE_CHECKING:
    from olla.pytorch.capture import capture as capture

__all__ = [
    "BudgetError",
    "CaptureError",
    "Graph",
    "GraphError",
    "Layout",
    "OllaError",
    "Plan",
    "PlanError",
    "ReplayError",
    "SolverError",
    "Status",
    "__version__",
    "capture",
    "check",
    "layout",
    "plan",
]


def __getattr__(name: str) -> object:
    if name == "capture":
        from olla.pytorch.capture import capture  # imports torch

        return capture
    if name == "__version__":
        from importlib.metadata import version  # slow to import, seldom needed

        return version("olla-planner")
    raise AttributeError(f"module 'olla' has no attribute {name!r}")
