"""What an ordinary loop requests at once: the captured ops in program order, and what it frees later than a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from olla import _core
from olla.errors import CaptureError
from olla.graph import Graph

if TYPE_CHECKING:
    import torch


def eager_peak(graph: Graph, update_bytes: int | None = None) -> int:
    """Return the most bytes an ordinary loop requests at once, the resident ones included.

    Tensors die after their last use, as autograd frees them; gradients live on until the next `zero_grad`. What kernels
    take while they run is counted where the graph knows it (`workspace_bytes`).

    Args:
        graph: the captured step, in program order.
        update_bytes: what the optimizer's step takes at once beside gradients and state, see update_bytes(); None: as
            captured, one parameter after the other.

    Example:
        >>> import olla
        >>> builder = olla.Graph.builder("two gradients, two updates")
        >>> weights = [builder.tensor(10, kind="parameter") for _ in range(2)]
        >>> gradients = [builder.tensor(10) for _ in range(2)]
        >>> _ = builder.op("first", writes=[gradients[0]]), builder.op("second", writes=[gradients[1]])
        >>> for w, g in zip(weights, gradients):
        ...     half = builder.tensor(10)
        ...     _ = builder.op("scale", reads=[g], writes=[half], kind="update")
        ...     _ = builder.op("update", reads=[half], mutates=[w], kind="update")
        >>> graph = builder.build()
        >>> olla.plan(graph).program_peak_bytes, eager_peak(graph), eager_peak(graph, update_bytes=20)
        (50, 50, 60)
    """
    held = np.unique(np.concatenate([graph.outputs, _gradients(graph)])).astype(np.int32)
    loop = dataclasses.replace(graph, outputs=held)
    order = np.arange(graph.num_ops, dtype=np.int32)
    live: NDArray[np.int64] = _core.profile(loop.core, order).live_bytes
    if update_bytes is not None:
        live = live[~_is_update(graph)]
        kept = int(graph.tensor_bytes[np.intersect1d(held, graph.writes.item)].sum())
        live = np.append(live, graph.resident_bytes + kept + update_bytes)
    return int(live.max(initial=graph.resident_bytes))


def _is_update(graph: Graph) -> NDArray[np.bool_]:
    return np.array([kind == "update" for kind in graph.op_kinds], dtype=bool)


def _gradients(graph: Graph) -> NDArray[np.int32]:
    """Return the tensors that updates use and other ops made."""
    update = _is_update(graph)
    made = graph.writes.item[~update[graph.writes.owner]]
    used = [lists.item[update[lists.owner]] for lists in (graph.reads, graph.mutates)]
    return np.intersect1d(made, np.concatenate(used))


def update_bytes(optimizer: torch.optim.Optimizer, *, on_gpu: bool) -> int | None:
    """Return what the step of an optimizer takes at once beside gradients and state.

    On a GPU torch updates all parameters of a group together, unless `foreach=False` or `fused=True` says otherwise:
    AdamW then has a temporary of the size of every parameter at once. On a CPU it does so where `foreach=True`; else
    some temporaries of one parameter live on until the next one is updated. A fused step has none. The step runs on the
    meta device: no memory is needed.

    Args:
        optimizer: nothing of it is changed.
        on_gpu: where it is to run.

    Returns:
        Bytes; None where nothing is known of the optimizer's first step.

    Example:
        >>> import torch
        >>> weights = [torch.nn.Parameter(torch.ones(10)) for _ in range(3)]
        >>> adamw, fused = torch.optim.AdamW(weights), torch.optim.AdamW(weights, fused=True)
        >>> [update_bytes(adamw, on_gpu=True), update_bytes(adamw, on_gpu=False), update_bytes(fused, on_gpu=True)]
        [120, 120, 0]
    """
    from olla.pytorch.capture import optimizers

    if not optimizers.is_known(optimizer):
        return None
    groups: list[dict[str, Any]] = []
    state: dict[torch.Tensor, dict[str, Any]] = {}
    try:
        for group in optimizer.param_groups:
            if group.get("fused"):
                continue
            parameters = [_on_meta(p) for p in group["params"] if p.requires_grad]
            # Neither changes what is taken, and both may want tensors of a GPU.
            settings = {**group, "lr": 0.1, **({"capturable": False} if "capturable" in group else {})}
            groups.append({**settings, "params": parameters})
            state |= {p: optimizers.first_state(optimizer, settings, p) for p in parameters}
    except CaptureError:
        return None
    if not groups:
        return 0
    copy = optimizers.stand_in(optimizer, groups, state)
    for group, given in zip(copy.param_groups, groups, strict=True):
        if "foreach" in given:
            by_default = on_gpu and not given.get("differentiable")
            group["foreach"] = by_default if given["foreach"] is None else given["foreach"]
    return _most_bytes(copy.step)


def _on_meta(parameter: torch.Tensor) -> torch.Tensor:
    import torch

    found = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    found.grad = torch.empty_like(found)
    return found


def _most_bytes(run: Callable[[], object]) -> int:
    """Return the most bytes of new storages of the meta device that are alive at once while a function runs."""
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode

    from olla.pytorch.capture.costs import storage_of

    most = 0
    given: set[int] = set()  # storages that were there before
    alive: dict[int, tuple[Any, int]] = {}

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal most, alive
            alive = {key: found for key, found in alive.items() if not found[0].expired()}
            given.update({storage_of(t) for t in pytree.tree_leaves((args, kwargs)) if _is_meta(t)} - alive.keys())
            result = func(*args, **(kwargs or {}))
            for tensor in pytree.tree_leaves(result):
                if _is_meta(tensor) and (key := storage_of(tensor)) not in given and key not in alive:
                    storage = tensor.untyped_storage()
                    alive[key] = (StorageWeakRef(storage), storage.nbytes())  # type: ignore[no-untyped-call]
            most = max(most, sum(num_bytes for _, num_bytes in alive.values()))
            return result

    with Watch():  # type: ignore[no-untyped-call]
        run()
    return most


def _is_meta(value: Any) -> bool:
    return getattr(getattr(value, "device", None), "type", "") == "meta"
