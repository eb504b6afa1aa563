"""Tensors computed from constants alone, such as positions: their values are known while a step is traced."""

from __future__ import annotations

import contextlib
import math
import operator
import sys
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from olla.pytorch.capture import costs
from olla.pytorch.capture.exclusive import ExclusiveCapture

READS = frozenset({torch.Tensor.__bool__, torch.Tensor.item, torch.Tensor.__int__, torch.Tensor.__float__})
_MOST_OPS = 100
_MOST_ELEMENTS = 1 << 16


def value(tensor: Any) -> torch.Tensor | None:
    """Return the value of a traced tensor that is computed from constants alone; None: it is not known.

    Complexity: O(nodes so far).
    """
    last = _node(tensor)
    nodes = [] if last is None else _makers(last, _MOST_OPS)
    if last is None or len(nodes) > _MOST_OPS or not all(map(_is_quick, nodes)):
        return None
    values: dict[fx.Node, Any] = {}
    with _disable_current_modes(), torch.no_grad():
        for node in nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    result: torch.Tensor = values[last]
    return result


def is_constant(value: Any) -> bool:
    """Whether a value that the traced step made holds tensors, all of them the same in every step.

    Complexity: O(nodes so far).
    """
    leaves = pytree.tree_leaves(value)
    if not leaves or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return False
    nodes = [_node(leaf) for leaf in leaves]
    if any(node is None and isinstance(leaf, FakeTensor) for node, leaf in zip(nodes, leaves, strict=True)):
        return False
    makers = (n for node in nodes if node is not None for n in _makers(node))
    return not any(n.op == "placeholder" or costs.is_random(n) for n in makers)


def _node(tensor: Any) -> fx.Node | None:
    mode = get_proxy_mode()
    slot: Any = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def _makers(last: fx.Node, most: float = math.inf) -> list[fx.Node]:
    """Return the nodes that the present value of a node depends on, in order; stop at more than ``most``.

    Nodes that write into its memory in place are among them.
    """
    writers: dict[Any, list[fx.Node]] = {}  # by the memory they write into
    for node in last.graph.nodes:
        for written in costs.mutated(node):
            writers.setdefault(_storage(written), []).append(node)
    found, left = {last}, [last]
    while left and len(found) <= most:
        node = left.pop()
        new = {*node.all_input_nodes, *writers.get(_storage(node), ())} - found
        found |= new
        left += new
    return sorted(found)


def _storage(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return costs.storage_of(value) if isinstance(value, torch.Tensor) else node


def _is_quick(node: fx.Node) -> bool:
    """Whether a node has a small value that is always the same."""
    result = node.meta.get("val")
    is_sure = isinstance(node.target, torch._ops.OpOverload) and not costs.is_random(node)
    is_small = not isinstance(result, torch.Tensor) or result.numel() <= _MOST_ELEMENTS
    return is_small and (is_sure or node.target is operator.getitem)


def for_transformers(capture: ExclusiveCapture) -> contextlib.AbstractContextManager[None]:
    """Let transformers look at masks and positions whose values are known; it looks at no fake tensor otherwise."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    original = getattr(masks, "is_tracing", None)
    if original is None:
        return contextlib.nullcontext()

    def is_tracing(tensor: Any = None) -> bool:
        return bool(original() if isinstance(tensor, torch.Tensor) and value(tensor) is not None else original(tensor))

    return capture.replaced(masks, "is_tracing", is_tracing)


def fix_types(module: fx.GraphModule) -> None:
    """Write the type into operators that would take torch's default one, which may be another when they run."""
    for node in module.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        names = [a.name for a in node.target._schema.arguments]
        reads_tensors = any(isinstance(n.meta.get("val"), torch.Tensor) for n in node.all_input_nodes)
        if "dtype" in names[len(node.args) :] and node.kwargs.get("dtype") is None and not reads_tensors:
            node.kwargs = {**node.kwargs, "dtype": node.meta["val"].dtype}
