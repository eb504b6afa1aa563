"""Classes of operators in Inductor: a kernel of its own or fused with others, and whether it may be recomputed."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import torch
from torch import fx

from olla.graph import DeviceProfile, draws_numbers
from olla.inductor.compat import compat


class Fusion(IntEnum):
    """How an op shares a kernel with others; the same numbers as in cpp/olla/graph/values.hpp."""

    KERNEL = 0  # its inputs and results are in memory
    POINTWISE = 1  # inlined into its readers
    REDUCTION = 2  # inlines its inputs; its result is in memory


# Inductor writes these as loops over their result, though torch does not call them pointwise.
_ATEN_LOOPS = """
    _adaptive_avg_pool2d_backward _to_copy arange avg_pool2d_backward cat clone constant_pad_nd embedding empty
    empty_like empty_strided flip full full_like gather index index_select lift_fresh_copy masked_fill
    native_dropout_backward new_empty new_full new_ones new_zeros nll_loss_backward ones ones_like repeat roll
    scalar_tensor select_scatter slice_scatter tril triu where zeros zeros_like
"""
_ATEN_REDUCTIONS = """
    _grad_sum_to_size all amax amin any argmax argmin linalg_vector_norm logsumexp max mean min norm prod std std_mean
    sum sum_to_size var var_mean
"""
_PRIMS_LOOPS = """
    convert_element_type iota inductor_lookup_seed inductor_random inductor_randint fma
    _low_memory_max_pool_offsets_to_indices
"""
_PRIMS_REDUCTIONS = "sum var prepare_softmax_online xor_sum"
_LOOPS = {f"aten::{name}" for name in _ATEN_LOOPS.split()} | {f"prims::{name}" for name in _PRIMS_LOOPS.split()}
_REDUCTIONS = {f"aten::{name}" for name in _ATEN_REDUCTIONS.split()} | {
    f"prims::{name}" for name in _PRIMS_REDUCTIONS.split()
}
# Views in Inductor, though their schema does not say so.
_VIEWS = frozenset({"aten::_unsafe_view", "aten::reshape", "prims::view_of", "prims::broadcast_in_dim"})


def name_of(node: fx.Node) -> str:
    """Return ``"aten::add"`` for ``aten.add.Tensor``; empty for what is no torch operator."""
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""


def is_view(node: fx.Node) -> bool:
    """Whether a node's results look at the memory of its first input."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    if schema.name in _VIEWS:
        return True
    aliases = [returned.alias_info for returned in schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def fusion_of(node: fx.Node) -> Fusion:
    """Return how Inductor fuses a node."""
    name = name_of(node)
    if not name or compat.changes_inputs(node):
        return Fusion.KERNEL
    if name in _REDUCTIONS:
        return Fusion.REDUCTION
    pointwise = torch.Tag.pointwise in node.target.tags and not is_random(node)  # type: ignore[union-attr]
    return Fusion.POINTWISE if pointwise or name in _LOOPS else Fusion.KERNEL


def writes_over(node: fx.Node) -> bool:
    """Whether a node, an unfused kernel, writes over its first input if nothing else reads that."""
    return name_of(node) in ("aten::_unsafe_masked_index_put_accumulate", "aten::index_put", "aten::_unsafe_index_put")


def is_random(node: fx.Node) -> bool:
    """Whether a node draws from a generator; what Inductor computes from a stored seed does not."""
    seeds = ("prims::inductor_seed", "prims::inductor_seeds")
    return draws_numbers(node.target, node.args, node.kwargs) or name_of(node) in seeds


def is_seed(node: fx.Node) -> bool:
    """Whether a node takes one seed out of those a step has drawn."""
    return name_of(node) == "prims::inductor_lookup_seed"


def is_drawn(node: fx.Node) -> bool:
    """Whether a node computes random numbers from a stored seed, element by element."""
    return name_of(node) in ("prims::inductor_random", "prims::inductor_randint")


def is_truth(node: fx.Node) -> bool:
    """Whether a node makes one tensor of truth values."""
    return compat.is_tensor_node(node) and node.meta["val"].dtype == torch.bool


def num_elements(node: fx.Node | None, kind: Callable[[fx.Node], bool]) -> int:
    """Return how many elements a node's one tensor has, if the node is of a kind; 0 otherwise."""
    return int(compat.hinted(node.meta["val"]).numel()) if node is not None and kind(node) else 0


def may_run_again(node: fx.Node) -> bool:
    """Whether backward may recompute a node of forward.

    Not if it is random, mutates memory, communicates or must be saved; and only torch's own operators (aten, prims,
    flex attention), since others may have effects. Anything that a checkpoint must recompute may be; if it is random,
    it draws the same numbers.
    """
    if compat.must_recompute(node):
        return True
    known = name_of(node).split("::")[0] in ("aten", "prims") or compat.is_flex_attention(node)
    return known and not (is_random(node) or compat.changes_inputs(node) or compat.must_save(node))


def arithmetic(node: fx.Node, device: DeviceProfile) -> float:
    """Return a node's flops, scaled by its precision so that the device's default speed gives its time."""
    flops = compat.node_flops(node)
    value = node.meta.get("val")
    value = value[0] if isinstance(value, tuple | list) and value else value
    if not flops or not isinstance(value, torch.Tensor) or value.device.type != "cuda":
        return flops
    rate = 0.0
    if value.dtype.itemsize <= 2:
        rate = device.half_flops_per_second
    elif not compat.multiplies_in_short(is_convolution="convolution" in name_of(node)):
        rate = device.single_flops_per_second
    return flops * device.flops_per_second / (rate or device.flops_per_second)
