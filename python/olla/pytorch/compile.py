"""olla.compile: a training step that runs in its planned order, in one arena. Importing this does not import torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from olla.graph import DeviceProfile, profile_of
from olla.plan import Goal, Link, Swapping, asked
from olla.pytorch.lengths.padding import Padding
from olla.pytorch.step import Step

if TYPE_CHECKING:
    import torch

_OF_PLANS: dict[str, Any] = {  # options that kernels="inductor" does not take, with their defaults
    **dict.fromkeys(("arena", "swap", "link", "host_budget", "chunked_loss")),
    **{
        "cuda_graph": False,
        "in_place": True,
        "recompute": True,
        "method": "auto",
        "updates_may_move": True,
        "keep_gradients": False,
    },
}

_OF_GOALS = ["budget", "max_slowdown", "minimise", "in_place", "recompute", "chunked_loss", "method"]
_OF_SWAPS = ["swap", "host_budget", "link"]


def compile(
    model: torch.nn.Module,
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    step: Callable[[Any, Any, Any], Any] | None = None,
    device: torch.device | str | None = None,
    time_limit: float = 15.0,
    seed: int = 0,
    updates_may_move: bool = True,
    arena: bool | None = None,
    cache_size: int = 8,
    buckets: Sequence[int] | None = None,
    fill: Mapping[str, float] | None = None,
    cuda_graph: bool = False,
    disk_cache: bool = True,
    budget: int | str | None = None,
    max_slowdown: float | None = None,
    minimise: str | None = None,
    plan_for: str | DeviceProfile | None = None,
    in_place: bool = True,
    recompute: bool = True,
    method: str = "auto",
    swap: bool | None = None,
    link: Link | float | None = None,
    host_budget: int | str | None = None,
    chunked_loss: int | None = None,
    checks: str = "run",
    kernels: str = "torch",
    max_recomputed: float | None = None,
    keep_gradients: bool = False,
    on_unsupported: str = "warn",
) -> Step:
    """Turn a training step into one that runs in planned order, in one arena; the first call captures and plans it.

    Parameters, buffers and optimizer state stay the user's own tensors: state_dict, checkpoints, param_groups, learning
    rate schedules and ``model.eval()`` work as before.

    Args:
        model: the model to train; in a DistributedDataParallel, or in FSDP2's ``fully_shard``, the ranks share what
            those have them share: see docs/distributed.md.
        optimizer: see olla.capture. None: the gradients are left in ``.grad``, added to those already there. Several:
            all of them step, and a ``step`` function is given the sequence; their updates run as they are.
        loss: ``loss(model, batch)`` returns the loss, or a tuple that starts with it. None: inference.
        step: ``step(model, optimizer, batch)``, the body of a training loop, in place of ``loss``: see olla.capture.
        device: where the model must be; not checked if not given.
        time_limit: seconds to search for an order; a fifth of it more for the layout.
        seed: for every random choice of the searches.
        updates_may_move: whether weight updates may run early, in the backward pass.
        arena: whether to run at planned addresses, or in planned order on torch's own allocator. None: at planned
            addresses; where each of the first steps takes more memory than planned, a warning says what differs, and
            the step continues on torch's own allocator.
        cache_size: captures to keep, the most recently used. Other shapes or types of the batch, or another value of
            what the step reads from Python (a mode, a number in a closure, a hook, a setting of the optimizer, but not
            its learning rate), need a capture of their own.
        buckets: lengths along dimension 1. A batch is padded to the next one, so that one capture per bucket serves all
            lengths; longer batches stay as they are. See docs/lengths.md for what that changes.
        fill: with buckets: entry of the batch (a dict) -> the value that it is padded with, as ``{"input_ids": 0,
            "attention_mask": 0, "labels": -100}``. Other entries stay as they are.
        cuda_graph: whether to capture the planned step in a CUDA graph and to replay that: from the third call on, and
            anew when a learning rate changes, unless that is a tensor on the GPU. Built, not measured.
        disk_cache: whether plans and recorded requests are kept on disk and found there again by later processes that
            capture the same step; see docs/step.md.
        budget: memory limit, "16GB", "16GiB" or bytes, for resident tensors, outputs and the arena: ops are
            recomputed, and results overwrite inputs that die, until the step fits, in the least added time. Results
            stay the same to the bit.
        max_slowdown: instead of a budget: the lowest peak within this share of added time; 0.05 is 5 %.
        minimise: "peak", instead of a budget: the lowest peak, however much time that adds.
        plan_for: device for estimates of added time, see olla.plan; by default "cpu" or "a100", by where the model is.
        in_place: whether a budget may let results overwrite inputs in place.
        recompute: whether a budget may recompute ops.
        method: "auto", or "autoswap": the program order, tensors swapped by AutoSwap, with or without a budget.
        swap: whether a budget may copy tensors to host memory and back; default: where ``host_budget`` says how much of
            it there is. On CUDA that is built, not measured.
        link: to host memory: an olla.Link, or bytes per second both ways; by default that of ``plan_for``.
        host_budget: the host memory there is for swapping, in bytes or as text.
        chunked_loss: with a goal: compute large linear layers with their cross-entropy in so many chunks of rows. This
            changes rounding, and is off unless asked for.
        checks: "run" or "skip" checks of tensor values that only raise an error, as asserts; see olla.capture. On a GPU
            each check waits for the kernels before it.
        kernels: "torch", torch's own operators in planned order, or "inductor": forward, backward and update as one
            graph that Inductor compiles, whose gradients die at their updates; see docs/inductor.md. It takes an
            optimizer, and of the goals ``budget``, ``max_slowdown``, ``minimise`` and ``max_recomputed``; without one,
            the backend's default: recompute only what costs under 1 % (GPU) or 5 % (CPU).
        max_recomputed: with ``kernels="inductor"``: most flops of matrix products, convolutions and attention to
            recompute, as a share of the step's; without another goal, the peak is minimised within it.
        keep_gradients: whether gradients that the optimizer has used stay in ``.grad`` until the next step, to be
            logged, for example; they need their memory as in an ordinary loop. Without, ``.grad`` is None behind a
            step, and each gradient's memory is free right after its update.
        on_unsupported: for a step that cannot be captured or planned: "warn" runs the ordinary step with its forward
            and backward passes planned, in pieces where they are no single graph; one warning says why, and the report
            counts such steps. "raise" raises a CaptureError.

    Returns:
        The step: ``step(batch)`` runs it and returns what ``loss`` or ``step`` returned.

    Raises:
        ReplayError: the model is elsewhere than ``device``, or not on a GPU with ``cuda_graph=True``.
        BudgetError: the budget is no number of bytes. A call of the step raises it where nothing fits the budget.
        ValueError: cache_size is below 1, buckets are no lengths or lack ``fill``, an option of the budget is out of
            its range, or the method, checks or on_unsupported unknown.

    Example:
        >>> import torch, olla
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loss = lambda model, x: model(x).square().mean()
        >>> step = olla.compile(model, optimizer=optimizer, loss=loss, arena=False)
        >>> losses = [float(step(torch.ones(2, 8))) for _ in range(3)]
        >>> losses[2] < losses[1] < losses[0]
        True
    """
    given = dict(locals())
    if method not in ("auto", "autoswap"):
        raise ValueError(f"method is {method!r}, expected 'auto' or 'autoswap': the others plan, see olla.plan")
    given["minimise"] = _minimised(given)
    goal, swapping = _asked(model, given)
    arguments = (
        *(given[name] for name in ("model", "optimizer", "loss", "step", "device")),
        {name: given[name] for name in ("time_limit", "seed", "updates_may_move")},
        *(given[name] for name in ("arena", "cache_size", "cuda_graph", "disk_cache")),
        goal,
        swapping,
        checks,
        keep_gradients,
        on_unsupported,
        None if buckets is None and fill is None else Padding(buckets or (), fill or {}),
    )
    if kernels == "torch":
        return Step(*arguments)
    from olla.pytorch.inductor_step import InductorStep

    return InductorStep(*arguments, max_recomputed=max_recomputed)


def _minimised(given: dict[str, Any]) -> str | None:
    """Check the options of Inductor's kernels; return ``minimise``, "peak" if max_recomputed is the only goal.

    Args:
        given: the arguments of `compile`.

    Raises:
        ValueError: the kernels are unknown, there is no optimizer, or an option is for the other kernels.
    """
    kernels, share, minimise = given["kernels"], given["max_recomputed"], given["minimise"]
    if kernels == "torch":
        if share is not None:
            raise ValueError(f'max_recomputed={share!r} is for kernels="inductor": give a budget or max_slowdown')
        return minimise  # type: ignore[no-any-return]
    if kernels != "inductor":
        raise ValueError(f"kernels is {kernels!r}, expected 'torch' or 'inductor'")
    if given["optimizer"] is None:
        raise ValueError(
            'kernels="inductor" compiles updates with the gradients they take: pass optimizer=..., or use '
            'torch.compile(model, backend="olla")'
        )
    for name, usual in _OF_PLANS.items():
        if given[name] != usual:
            raise ValueError(
                f'{name}={given[name]!r} is for kernels="torch": leave it out. kernels="inductor" takes budget, '
                "max_slowdown, minimise and max_recomputed"
            )
    if share is not None and not (isinstance(share, int | float) and share >= 0):
        raise ValueError(f"max_recomputed is {share!r}, expected a share of the step's flops: 0.05 for 5 %")
    alone = share is not None and all(given[goal] is None for goal in ("budget", "max_slowdown", "minimise"))
    return "peak" if alone else minimise


def _asked(model: torch.nn.Module, given: dict[str, Any]) -> tuple[Goal | None, Swapping | None]:
    """Return the goal of a step and its swapping options; ``given`` are the arguments of `compile`."""
    profile = _profile(model, given["plan_for"])
    goal, swapping = asked(device=profile, **{name: given[name] for name in (*_OF_GOALS, *_OF_SWAPS)})
    if swapping is not None and given["link"] is None:
        swapping = dataclasses.replace(swapping, link=Link.of(profile))
    return goal, swapping


def _profile(model: torch.nn.Module, plan_for: str | DeviceProfile | None) -> DeviceProfile:
    if plan_for is None:
        tensors = [*model.parameters(), *model.buffers()]
        plan_for = "a100" if any(t.device.type == "cuda" for t in tensors) else "cpu"
    return profile_of(plan_for)
