"""One-element results in storages of their own: torch's losses keep the loss of every element in theirs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def may_be_loose(node: fx.Node) -> bool:
    """Return whether an operator reduces a tensor to one element, whose storage may hold more than that.

    On a CPU, `mse_loss`, `binary_cross_entropy` and others sum up in place what they computed for every element: the
    result keeps all of it alive, and neither its shape nor a fake tensor tells.
    """
    value, target = node.meta.get("val"), node.target
    if not isinstance(value, torch.Tensor) or value.dim() or value.layout is not torch.strided:
        return False
    if not isinstance(target, torch._ops.OpOverload) or any(r.alias_info is not None for r in target._schema.returns):
        return False
    inputs = (i.meta.get("val") for i in node.all_input_nodes)
    return any(isinstance(given, torch.Tensor) and given.dim() > 0 for given in inputs)


def compact(value: Any) -> Any:
    """Return a tensor in a storage that holds nothing else.

    Example:
        >>> loss = torch.empty(1000).resize_(())
        >>> loss.untyped_storage().nbytes(), compact(loss).untyped_storage().nbytes()
        (4000, 4)
    """
    return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
