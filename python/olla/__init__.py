"""olla: the memory planner for PyTorch training."""

from olla.check import check
from olla.errors import BudgetError, CaptureError, GraphError, OllaError, PlanError, ReplayError, SolverError
from olla.graph import Graph
from olla.plan import Plan, Status, plan

__all__ = [
    "BudgetError",
    "CaptureError",
    "Graph",
    "GraphError",
    "OllaError",
    "Plan",
    "PlanError",
    "ReplayError",
    "SolverError",
    "Status",
    "__version__",
    "check",
    "plan",
]


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version  # slow to import, seldom needed

        return version("olla-planner")
    raise AttributeError(f"module 'olla' has no attribute {name!r}")
