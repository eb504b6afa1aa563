"""olla: the memory planner for PyTorch training."""

from olla.errors import BudgetError, CaptureError, GraphError, OllaError, PlanError, ReplayError, SolverError
from olla.graph import Graph

__all__ = [
    "BudgetError",
    "CaptureError",
    "Graph",
    "GraphError",
    "OllaError",
    "PlanError",
    "ReplayError",
    "SolverError",
    "__version__",
]


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version  # slow to import, seldom needed

        return version("olla-planner")
    raise AttributeError(f"module 'olla' has no attribute {name!r}")
