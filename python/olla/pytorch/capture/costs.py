"""Effects and costs of one ATen operator: inputs it changes, random numbers, arithmetic and bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from olla.graph import draws_numbers
from olla.pytorch.ranks.collectives import is_wait, name_of

# Operators that update running statistics without saying so in their schema: positions of what they change.
UNDECLARED = {
    "aten::native_batch_norm": (3, 4),
    "aten::cudnn_batch_norm": (3, 4),
    "aten::miopen_batch_norm": (3, 4),
    "aten::batch_norm_update_stats": (1, 2),
    "aten::batch_norm_gather_stats": (3, 4),
    "aten::batch_norm_gather_stats_with_counts": (3, 4),
}
# Reads of a table touch only the rows that are taken.
_LOOKUPS = {"aten::embedding", "aten::index", "aten::index_select", "aten::gather"}
# Reserve memory, move nothing, launch nothing.
ALLOCATIONS = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}


def is_operator(node: fx.Node) -> bool:
    """Whether the node runs a torch operator, not Python arithmetic or indexing of a tuple."""
    return isinstance(node.target, torch._ops.OpOverload | torch._ops.HigherOrderOperator)


def reads_number(node: fx.Node) -> bool:
    """Whether the operator turns a tensor into a Python number, as ``tensor.item()`` does."""
    return name_of(node) == "aten::_local_scalar_dense"


def target_name(node: fx.Node) -> str:
    """Return the name graph files use: ``"aten.add_.Tensor"``."""
    is_overload = isinstance(node.target, torch._ops.OpOverload)
    return str(node.target if is_overload else getattr(node.target, "__name__", node.target))


def _argument(node: fx.Node, name: str, default: Any) -> Any:
    assert isinstance(node.target, torch._ops.OpOverload)
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name == name:
            if position < len(node.args):
                return node.args[position]
            return node.kwargs.get(name, argument.default_value)
    return default


def mutated(node: fx.Node) -> list[fx.Node]:
    """Return the arguments the operator changes in place, by its schema or by what is known of it."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    schema = node.target._schema
    changed: list[fx.Node] = []
    for position, argument in enumerate(schema.arguments if schema.is_mutable else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            changed += nodes_in(value)
    if schema.name in UNDECLARED and _argument(node, "training", True):
        for position in UNDECLARED[schema.name]:
            changed += nodes_in(node.args[position])
    if is_wait(node):
        changed += nodes_in(node.args[0])  # what is sent arrives meanwhile
    return changed


def nodes_in(value: Any) -> list[fx.Node]:
    """Return the nodes in one argument of a node."""
    found: list[fx.Node] = []
    fx.node.map_arg(value, found.append)
    return found


def results_of(node: fx.Node) -> list[torch.Tensor]:
    """Return the tensors among the results of a node."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):  # as nearly all are
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def is_random(node: fx.Node) -> bool:
    """Whether the operator draws from a generator."""
    return draws_numbers(node.target, node.args, node.kwargs)


def num_launches(node: fx.Node) -> int:
    """Return how many kernels the operator starts, at least: reserving memory and reading a number start none."""
    starts_none = name_of(node) in ALLOCATIONS or not is_operator(node) or reads_number(node) or is_wait(node)
    return 0 if starts_none else 1


def flops(node: fx.Node) -> int:
    """Return the floating-point operations of a matrix product, convolution or attention, 0 for everything else."""
    formula = flop_registry.get(getattr(node.target, "_overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def storage_of(tensor: torch.Tensor) -> int:
    """Return the id of a tensor's storage, the same for tensors that share memory."""
    return int(tensor.untyped_storage()._cdata)


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes an operator touches when it goes through a tensor once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def moved_bytes(
    node: fx.Node, arguments: Iterable[torch.Tensor], results: Iterable[torch.Tensor], num_changed: int
) -> int:
    """Return the bytes read and written, each storage once (twice if it is changed in place).

    Args:
        node: the operator.
        arguments: tensors it reads; those it changes in place come first.
        results: tensors with a storage of their own that it writes.
        num_changed: how many of the arguments it changes.
    """
    if name_of(node) in ALLOCATIONS:
        return 0
    written = sum(tensor_bytes(t) for t in results)
    sizes: dict[int, int] = {}
    for position, tensor in enumerate(arguments):
        size = tensor_bytes(tensor) * (2 if position < num_changed else 1)
        if name_of(node) in _LOOKUPS and position == 0:
            size = min(size, written)
        key = storage_of(tensor)
        sizes[key] = max(size, sizes.get(key, 0))
    return written + sum(sizes.values())
