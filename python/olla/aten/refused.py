"""Refuse to plan graphs of Dynamo's that would then behave differently from the user's Python code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from olla.pytorch.dynamo.graph import unlike_python

_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)


def refused(module: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Return why a graph of Dynamo's has to run as it is; empty where it may be planned.

    Args:
        module: the graph.
        inputs: of the call for which it was made.

    Complexity: O(nodes).
    """
    for value in inputs:
        kind = type(value)
        if isinstance(value, torch.Tensor) and kind not in _PLAIN and not is_traceable_wrapper_subclass(value):
            return f"an input is a {kind.__name__}, whose operators are its own"
    if reason := unlike_python(module):
        return reason
    for node in module.graph.nodes:
        if str(node.target) == "prims._tensor_version.default":
            return f"it reads how often {node.args[0]} was changed"
        name = getattr(node.target, "__name__", "")
        if node.op == "call_function" and name.startswith("set_") and getattr(torch, name, None) is node.target:
            return f"it changes a setting of torch ({name})"
    for name, inner in module.named_modules():
        if name and isinstance(inner, fx.GraphModule):
            for node in inner.graph.nodes:
                if "batch_norm" in getattr(node.target, "__name__", ""):
                    # Eager training does so, planned it would not.
                    return "a batch norm in a checkpointed region updates its statistics twice"
    return ""
