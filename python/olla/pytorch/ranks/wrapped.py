"""DistributedDataParallel as a step finds it: what of it can be captured, its parameters, buffers and buckets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from olla.errors import CaptureError

# What a captured step of a wrapped model depends on.
ATTRIBUTES = (
    "require_backward_grad_sync", "require_forward_param_sync", "forward_sync_buffers", "broadcast_buffers",
    "find_unused_parameters", "static_graph", "gradient_as_bucket_view", "batched_grad_copy", "mixed_precision",
    "skip_all_reduce_unused_params", "bucket_bytes_cap", "bucket_bytes_cap_default", "bucket_bytes_cap_list",
    "parameters_to_ignore", "process_group", "buffer_hook", "module", "_comm_hooks", "_delay_all_reduce_params",
    "_has_rebuilt_buckets", "_join_config", "_use_python_reducer",
)  # fmt: skip
_FORWARD = DistributedDataParallel.forward


def is_wrapped(model: torch.nn.Module) -> bool:
    """Whether a model is a DistributedDataParallel."""
    return isinstance(model, DistributedDataParallel)


def require_supported(model: Any) -> None:
    """Refuse what of DistributedDataParallel no captured step does.

    Raises:
        CaptureError: names it, and says what to do.
    """
    hook = model._get_ddp_logging_data().get("comm_hook") if model.logger is not None else None
    found = {
        "trains in mixed precision of its own": (model.mixed_precision, "use torch.autocast in the loss function"),
        "steps an optimizer in backward": (
            any(hasattr(p, "_in_backward_optimizers") for p in model.parameters()),
            "pass the optimizer to olla.compile, which updates as early as its plan allows",
        ),
        "has a communication hook": (model._comm_hooks or hook, "leave register_comm_hook() out"),
        "has a hook for buffers": (hasattr(model, "buffer_hook"), "leave _register_buffer_comm_hook() out"),
        "delays the reduction of some gradients": (
            getattr(model, "_delay_all_reduce_params", None), "leave delay_all_reduce_named_params out",
        ),
        "skips unused parameters by a list of its own": (
            getattr(model, "skip_all_reduce_unused_params", False), "leave skip_all_reduce_unused_params out",
        ),
        "is within join(), for ranks with fewer batches": (
            model._join_config.enable, "give every rank as many batches (drop_last=True), and leave join() out",
        ),
        "reduces in Python (optimize_ddp='python_reducer')": (
            model._use_python_reducer, 'set torch._dynamo.config.optimize_ddp = "ddp_optimizer"',
        ),
        "has another forward, of a class that inherits": (
            type(model).forward is not _FORWARD and "olla" not in type(model).forward.__module__,
            "put what it does into the module",
        ),
    }  # fmt: skip
    for what, (is_so, remedy) in found.items():
        if is_so:
            raise CaptureError(
                f"the DistributedDataParallel {what}, which a captured step does not do: {remedy}, or pass the module "
                "inside (model.module) and reduce its gradients in a step function"
            )


def reduced_parameters(model: Any) -> list[torch.nn.Parameter]:
    """Return the parameters whose gradients are reduced, in the order in which the reducer numbers them."""
    parameters, _ = model._build_params_for_reducer()
    return list(parameters)


def synced_buffers(model: Any) -> list[list[torch.Tensor]]:
    """Return the buffers that are broadcast before a forward pass, those of one message together."""
    model._assign_modules_buffers()
    buffers: list[torch.Tensor] = model.modules_buffers
    if not model.broadcast_buffers or not buffers:
        return []
    groups = _assigned(buffers, [model.broadcast_bucket_size])
    return [[buffers[i] for i in group] for group in groups]


def final_buckets(model: Any) -> list[list[torch.nn.Parameter]] | None:
    """Return the buckets that the reducer has for good; None where it rebuilds them after its first backward pass."""
    rebuilds = model.static_graph or not model.find_unused_parameters
    if rebuilds and not model._has_rebuilt_buckets:
        return None
    return [list(bucket.parameters()) for bucket in model.reducer._get_zeros_like_grad_buckets()]


def rebuilt_buckets(model: Any, arrived: Sequence[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Return the buckets that the reducer makes of all its parameters, whose gradients arrived in this order."""
    cap = model.bucket_bytes_cap
    first = vars(dist)["_DEFAULT_FIRST_BUCKET_BYTES"] if model.bucket_bytes_cap_default else cap
    limits = list(getattr(model, "bucket_bytes_cap_list", ())) or [first, cap]
    last_is_small = os.environ.get("DDP_SET_LAST_BUCKET_CAP") == "1"
    ordered = list(reversed(arrived)) if last_is_small else list(arrived)
    # Given numbers, buckets keep the order of arrival.
    buckets = _assigned(ordered, limits, [False] * len(ordered), list(range(len(ordered))))
    found = [[ordered[i] for i in bucket] for bucket in buckets]
    return list(reversed(found)) if last_is_small else found


def _assigned(tensors: Sequence[torch.Tensor], limits: Sequence[int], *rest: Any) -> list[list[int]]:
    """Return which tensors make a message, by torch's own rule."""
    groups: list[list[int]] = vars(dist)["_compute_bucket_assignment_by_size"](list(tensors), list(limits), *rest)[0]
    return groups
