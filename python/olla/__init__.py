"""olla: the memory planner for PyTorch training."""

from importlib import import_module
from typing import TYPE_CHECKING

from olla.base.packages import require
from olla.check.check import check
from olla.errors import BudgetError, CaptureError, GraphError, OllaError, PlanError, ReplayError, SolverError
from olla.fit import Fit
from olla.fit.fit import fit
from olla.graph import DeviceProfile, Graph, Timeline, timeline
from olla.layout import Layout
from olla.layout.layout import layout
from olla.picture.memory_viz import memory_viz
from olla.picture.plot import plot
from olla.plan import Link, Plan, Status
from olla.planner import plan

if TYPE_CHECKING:
    from olla import inductor as inductor
    from olla.aten.wrap import explain as explain
    from olla.aten.wrap import report_of as report_of
    from olla.aten.wrap import wrap as wrap
    from olla.checkpointing.checkpoint import checkpoint as checkpoint
    from olla.graph.measure import device_profile as device_profile
    from olla.integrations.onnx import from_onnx as from_onnx
    from olla.pytorch.capture.capture import capture as capture
    from olla.pytorch.compile import compile as compile
    from olla.pytorch.imported import from_export as from_export
    from olla.pytorch.imported import from_fx as from_fx
    from olla.pytorch.pool import pool as pool
    from olla.pytorch.step import Step as Step
    from olla.recompute.curve import Curve as Curve
    from olla.recompute.curve import pareto as pareto

__all__ = [
    "BudgetError",
    "CaptureError",
    "Curve",
    "DeviceProfile",
    "Fit",
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
    "Timeline",
    "__version__",
    "capture",
    "check",
    "checkpoint",
    "compile",
    "device_profile",
    "explain",
    "fit",
    "from_export",
    "from_fx",
    "from_onnx",
    "inductor",
    "layout",
    "memory_viz",
    "pareto",
    "plan",
    "plot",
    "pool",
    "report_of",
    "timeline",
    "wrap",
]

_MODULES = {  # of names that are loaded when they are asked for; all but the curve and from_onnx import torch
    "Curve": "olla.recompute.curve",
    "Step": "olla.pytorch.step",
    "capture": "olla.pytorch.capture.capture",
    "checkpoint": "olla.checkpointing.checkpoint",
    "compile": "olla.pytorch.compile",
    "device_profile": "olla.graph.measure",
    "explain": "olla.aten.wrap",
    "from_export": "olla.pytorch.imported",
    "from_fx": "olla.pytorch.imported",
    "from_onnx": "olla.integrations.onnx",
    "pareto": "olla.recompute.curve",
    "pool": "olla.pytorch.pool",
    "report_of": "olla.aten.wrap",
    "wrap": "olla.aten.wrap",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    if name == "inductor":
        require("torch", "torch")
        return import_module("olla.inductor")
    if name == "__version__":
        from importlib.metadata import version  # slow to import, seldom needed

        return version("olla-planner")
    raise AttributeError(f"module 'olla' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
