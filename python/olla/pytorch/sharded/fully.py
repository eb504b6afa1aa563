"""Models in FSDP2's fully_shard as a step finds them: what of them can be captured, and what each rank holds."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from olla.errors import CaptureError

if TYPE_CHECKING:
    from olla.pytorch.sharded.ranks import Precision, ShardedRanks


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether fully_shard was called on a model or on parts of it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where it was not imported nobody called it
    return fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in model.modules())


def local(tensor: Any) -> Any:
    """Return what this rank holds of a tensor in shards; any other one as it is."""
    return getattr(tensor, "_local_tensor", tensor)


class Shards:
    """What this rank holds of tensors in shards, as many rows as the first rank, so that all ranks run the same step.

    FSDP2 keeps its shards of parameters padded; those of an optimizer's state are padded when they are first seen.
    """

    def __init__(self) -> None:
        self._padded: Any = WeakIdKeyDictionary()  # tensor -> its shard, and that with its padding

    def __call__(self, tensor: Any) -> Any:
        """Return the shard of a tensor, with its padding; a tensor in no shards as it is.

        Raises:
            CaptureError: the shard of a parameter is not kept padded.
        """
        shard = getattr(tensor, "_local_tensor", None)
        if shard is None:
            return tensor
        rows = -(-tensor.shape[0] // tensor.device_mesh.size())
        if shard.shape[0] == rows:
            return shard
        known = self._padded.get(tensor)
        if known is None or known[0] is not shard:
            padded = _with_padding(tensor, shard, rows)
            known = self._padded[tensor] = (tensor._local_tensor, padded)
        return known[1]


def _with_padding(tensor: Any, shard: torch.Tensor, rows: int) -> torch.Tensor:
    shape = (rows, *shard.shape[1:])
    num_bytes = (shard.storage_offset() + math.prod(shape)) * shard.element_size()
    with torch.no_grad():
        if shard.is_contiguous() and shard.untyped_storage().nbytes() >= num_bytes:
            return shard.as_strided(shape, torch.empty(shape, device="meta").stride())
        if isinstance(tensor, torch.nn.Parameter):
            raise CaptureError(
                f"a shard of {shard.shape[0]} rows is not kept with its padding: call fully_shard on the model last"
            )
        whole = torch.zeros(shape, dtype=shard.dtype, device=shard.device)
        whole[: shard.shape[0]] = shard
        tensor._local_tensor = whole[: shard.shape[0]]
    return whole


def ranks_of_model(model: torch.nn.Module, is_ordinary: bool, is_elementwise: bool) -> ShardedRanks | None:
    """Return the ranks that hold the shards of a model; None where it is in none.

    Args:
        model: of `olla.capture`.
        is_ordinary: whether a loss function and an optimizer make the step.
        is_elementwise: whether the optimizer updates element by element.

    Raises:
        CaptureError: it is sharded in a way that no captured step computes; the message says what to do.
    """
    if not is_sharded(model):
        return None
    from torch.distributed.tensor import DTensor, Shard

    from olla.pytorch.sharded.ranks import ShardedRanks

    states = _states(model)
    for state in states:
        _require_supported(state)
    sharded = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
    meshes = {p.device_mesh for p in sharded.values()}
    if not meshes:
        raise CaptureError("the parameters of the model are whole for the moment: call model.reshard() before the step")
    if not is_ordinary:
        raise CaptureError(
            "of a model in shards the ordinary training step is captured, since gradients of shards live inside it: "
            "pass loss=... and optimizer=..., and no step function"
        )
    if len(meshes) > 1 or (mesh := meshes.pop()).ndim > 1:
        raise CaptureError(
            "the model is sharded over several dimensions of ranks (hybrid or tensor parallel), of which no step can "
            "be captured: call fully_shard with one mesh of one dimension, or use torch.compile with backend='olla'"
        )
    if not is_elementwise:
        raise CaptureError(
            "the optimizer looks at whole parameters, of which each rank holds a shard: use SGD, Adam, AdamW or "
            "another one that updates element by element"
        )
    for name, parameter in sharded.items():
        if tuple(parameter.placements) != (Shard(0),):
            raise CaptureError(f"{name} is sharded as {parameter.placements}, expected shards of dim 0: leave "
                               "shard_placement_fn out")  # fmt: skip
    return ShardedRanks("fsdp", mesh.size(), str(mesh.get_group().group_name), _precisions(states, sharded))


def _precisions(states: list[Any], sharded: dict[str, Any]) -> dict[str, Precision]:
    """Return the types that FSDP2 gathers parameters and averages their gradients in."""
    from olla.pytorch.sharded.ranks import Precision

    found = {
        id(parameter.sharded_param): Precision(parameter.mp_policy.param_dtype, _averaged_in(parameter))
        for state in states
        for group in _groups(state)
        for parameter in group.fsdp_params
    }
    return {name: found[id(parameter)] for name, parameter in sharded.items()}


def _averaged_in(parameter: Any) -> torch.dtype | None:
    """Return the type that FSDP2 averages the gradient of a parameter in; None: in that of the gradient."""
    reduced: torch.dtype | None = parameter.mp_policy.reduce_dtype
    if reduced is None and hasattr(type(parameter), "unsharded_grad_dtype"):  # since torch 2.15
        reduced = parameter.sharded_param.grad_dtype
    return reduced


def _states(model: torch.nn.Module) -> list[Any]:
    """Return what FSDP2 keeps of the modules that fully_shard was called on."""
    from torch.distributed.fsdp import FSDPModule

    states = (module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule))
    return list({id(state): state for state in states}.values())


def _groups(state: Any) -> list[Any]:
    """Return the groups of parameters of one call of fully_shard; torch 2.11 has at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _require_supported(state: Any) -> None:
    """Refuse what of FSDP2 no captured step does."""
    groups = _groups(state)
    parameters = [parameter for group in groups for parameter in group.fsdp_params]
    found = {
        "averages gradients in float16": (
            any((_averaged_in(p) or p.mp_policy.param_dtype) is torch.float16 for p in parameters),
            "give its mp_policy reduce_dtype=torch.float32",
        ),
        "keeps its shards in the host's memory": (
            any(type(group.offload_policy).__name__ != "OffloadPolicy" for group in groups),
            "leave offload_policy out, and let olla swap (swap=True)",
        ),
        "divides gradients by a factor of its own": (
            any(group.gradient_divide_factor is not None for group in groups),
            "leave set_gradient_divide_factor() out",
        ),
        "does not reduce its gradients": (
            not all(group.reduce_grads for group in groups),
            "call set_requires_gradient_sync(True), and accumulate in larger batches",
        ),
        "shares one call of fully_shard among modules": (len(state._modules) > 1, "call it for each of them"),
    }  # fmt: skip
    for what, (is_so, remedy) in found.items():
        if is_so:
            raise CaptureError(f"fully_shard {what}, which a captured step does not do: {remedy}")


@contextlib.contextmanager
def idle_hooks(model: torch.nn.Module) -> Iterator[None]:
    """Let what FSDP2 does before and after modules run do nothing in a block: the step gathers and averages itself."""
    states = _states(model) if is_sharded(model) else []
    saved = [dict(vars(state)) for state in states]
    try:
        for state in states:
            state._states_to_forward_prefetch = []
            if hasattr(state, "_fsdp_param_groups"):
                state._fsdp_param_groups = []
            else:
                state._fsdp_param_group = None
            state._root_pre_forward = lambda module, args, kwargs: (args, kwargs)
            state._register_pre_backward_hook = lambda output: output
        yield
    finally:
        for state, before in zip(states, saved, strict=True):
            vars(state).clear()
            vars(state).update(before)
