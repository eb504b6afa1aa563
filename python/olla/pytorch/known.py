"""Values that depend on nothing, such as positions: a step decides by them what the ordinary loop decides."""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes

from olla.pytorch.exclusive import Capture

READS = frozenset({torch.Tensor.__bool__, torch.Tensor.item, torch.Tensor.__int__, torch.Tensor.__float__})
_MOST_OPS = 100
_MOST_ELEMENTS = 1 << 16


def value(tensor: Any) -> torch.Tensor | None:
    """Return the value of a tensor of the trace that is computed from no input; None: it is not known.

    Complexity: O(nodes so far) where it is known.
    """
    mode = get_proxy_mode()
    slot: Any = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    nodes = None if slot is None else _made_by(slot.proxy.node)
    if nodes is None:
        return None
    values: dict[fx.Node, Any] = {}
    with _disable_current_modes(), torch.no_grad():
        for node in nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    result: torch.Tensor = values[nodes[-1]]
    return result


def _made_by(last: fx.Node) -> list[fx.Node] | None:
    """Return what has to run for a node, in order; None if that is more than a few operators on nothing."""
    found, left = {last}, [last]
    while left:
        node = left.pop()
        if len(found) > _MOST_OPS or not _is_plain(node):
            return None
        left += [n for n in node.all_input_nodes if n not in found]
        found.update(node.all_input_nodes)
    storages = {_storage(node) for node in found}
    for node in last.graph.nodes:
        if _changes_something(node) and any(_storage(n) in storages for n in node.all_input_nodes):
            return None
    return sorted(found)


def _storage(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else node


def _is_plain(node: fx.Node) -> bool:
    """Whether a node has a value that is always the same, and small."""
    if node.target is not operator.getitem:
        random = torch.Tag.nondeterministic_seeded
        if not isinstance(node.target, torch._ops.OpOverload) or random in node.target.tags or _changes_something(node):
            return False
    result = node.meta.get("val")
    return not isinstance(result, torch.Tensor) or result.numel() <= _MOST_ELEMENTS


def _changes_something(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


@contextlib.contextmanager
def told_to_transformers(capture: Capture) -> Iterator[None]:
    """Let transformers look at masks and positions whose values are known; it looks at no fake tensor otherwise."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    original = getattr(masks, "is_tracing", None)
    if original is None:
        yield
        return

    def is_tracing(tensor: Any = None) -> bool:
        return bool(original() if isinstance(tensor, torch.Tensor) and value(tensor) is not None else original(tensor))

    with capture.replaced(masks, "is_tracing", is_tracing):
        yield
