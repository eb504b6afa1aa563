"""Memory of an optimizer's step, measured by a dry run of a copy on the meta device, where tensors have no storage."""

from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from olla.fit.caching import Request, most_bytes
from olla.graph import Graph

if TYPE_CHECKING:
    import torch

    from olla.pytorch.capture import Captured


_OF_TORCH = ("defaults", "state", "param_groups", "step", "_optimizer_")  # beginnings of names; the last are hooks
_GRADIENT = "gradient of "  # in front of a parameter's name, among the outputs of a step
_ONE_BY_ONE = ("Adafactor", "Muon")  # torch does not use foreach for these unless asked to


@dataclass(frozen=True)
class UpdateMemory:
    """Memory of an optimizer's step.

    Attributes:
        state_bytes: size of each state tensor after the first step, in the order of allocation.
        requests: allocations and frees of a later step, gradients and state apart.
    """

    state_bytes: tuple[int, ...]
    requests: tuple[Request, ...]


def update_of(optimizer: torch.optim.Optimizer, *, on_gpu: bool) -> UpdateMemory | None:
    """Measure an optimizer: a copy of it takes two steps over meta tensors.

    On a GPU torch updates all parameters of a group in one call (foreach) unless `foreach=False` or `fused=True`: AdamW
    then holds a temporary of the size of every parameter at once. On a CPU it does so only with `foreach=True`; else
    temporaries of one parameter live until the next one is updated. A fused step has no temporaries.

    Args:
        optimizer: it is not changed. Of sharded parameters this rank's part counts.
        on_gpu: whether the step will run on a GPU.

    Returns:
        None if the step needs a closure or fails on meta tensors, or if the copy would share mutable objects with the
        optimizer.

    Example:
        >>> import torch
        >>> weights = [torch.nn.Parameter(torch.ones(10)) for _ in range(3)]
        >>> adamw, fused = torch.optim.AdamW(weights), torch.optim.AdamW(weights, fused=True)
        >>> [most_bytes(update_of(adamw, on_gpu=on_gpu).requests) for on_gpu in (True, False)]
        [120, 120]
        >>> update_of(fused, on_gpu=True)
        UpdateMemory(state_bytes=(40, 40, 40, 40, 40, 40), requests=())
    """
    with contextlib.suppress(Exception):  # whatever a step over such tensors raises
        other = _without_memory(optimizer, on_gpu=on_gpu)
        _requests_of(other.step, are_recorded=False)
        made = tuple(_state_bytes(other))
        for group, given in zip(other.param_groups, optimizer.param_groups, strict=True):
            for parameter in group["params"] if given.get("fused") else ():
                parameter.grad = None
        return UpdateMemory(made, tuple(_requests_of(other.step)))
    return None


def _without_memory(optimizer: torch.optim.Optimizer, *, on_gpu: bool) -> torch.optim.Optimizer:
    """Return a copy of an optimizer over meta tensors; its step leaves the optimizer as it is.

    Raises:
        TypeError: the optimizer holds objects that cannot be copied without risk.
    """
    from torch.optim import optimizer as torch_optimizer

    from olla.pytorch.capture import optimizers

    if torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks:
        raise TypeError("hooks of all optimizers would run")
    groups: list[dict[str, Any]] = []
    state: dict[torch.Tensor, dict[str, Any]] = {}  # what is there already: Adagrad makes it when it is built
    for group in optimizer.param_groups:
        given = [p for p in group["params"] if p.requires_grad]
        parameters = [_on_meta(p) for p in given]
        pairs = zip(parameters, given, strict=True)
        state |= {q: _copied(optimizer.state[p]) for q, p in pairs if p in optimizer.state}
        # Neither changes the memory taken, and both may require tensors on a GPU.
        simple = {"lr": 0.1, **({"capturable": False} if "capturable" in group else {})}
        settings = {name: _copied(value) for name, value in group.items() if name not in (*simple, "params")}
        groups.append({**settings, **simple, "params": parameters})
    attributes = {name: value for name, value in vars(optimizer).items() if not name.startswith(_OF_TORCH)}
    other = optimizers.stand_in(optimizer, groups, state)
    other.__dict__.update(_copied(attributes))
    other._optimizer_step_pre_hooks, other._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    for group, settings in zip(other.param_groups, groups, strict=True):
        if "foreach" in settings:
            by_default = on_gpu and not settings.get("differentiable") and type(optimizer).__name__ not in _ONE_BY_ONE
            group["foreach"] = by_default if settings["foreach"] is None else settings["foreach"]
    return other


def _copied(value: Any) -> Any:
    """Copy plain data deeply, with meta tensors in place of tensors; scalar tensors on the CPU keep their values.

    Raises:
        TypeError: the value is neither plain data nor a tensor.
    """
    import torch

    from olla.pytorch.capture import optimizers

    if isinstance(value, torch.Tensor):
        is_number = value.device.type == "cpu" and not value.shape
        return value.clone() if is_number else optimizers.without_memory(value)
    if isinstance(value, Mapping):
        return {name: _copied(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(map(_copied, value))
    if value is None or isinstance(value, bool | int | float | complex | str | torch.dtype | torch.device):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be copied")


def with_update(captured: Captured, update: UpdateMemory) -> Graph:
    """Append one op for the update to a step that was captured without its optimizer.

    Args:
        captured: forward and backward, with the gradients among the outputs.
        update: memory of the optimizer's step.
    """
    graph = captured.graph.to_dict()
    pairs = list(zip(captured.outputs, captured.graph.outputs.tolist(), strict=True))
    gradients = sorted({t for name, t in pairs if name.startswith(_GRADIENT)})
    trained = {name.removeprefix(_GRADIENT) for name, _ in pairs if name.startswith(_GRADIENT)}
    parameters = [t for t, name in enumerate(captured.graph.tensor_names) if name in trained]
    first = len(graph["tensors"])
    graph["tensors"] += [
        {"bytes": num_bytes, "kind": "optimizer_state", "name": f"state {i}"}
        for i, num_bytes in enumerate(update.state_bytes)
    ]
    moved = sum(captured.graph.tensor_bytes[[*gradients, *parameters]].tolist()) + sum(update.state_bytes)
    graph["ops"].append(
        {
            "name": "optimizer.step",
            "kind": "update",
            "reads": gradients,
            "writes": [],
            "mutates": [*parameters, *range(first, len(graph["tensors"]))],
            "workspace_bytes": most_bytes(update.requests),
            "moved_bytes": 2 * moved,
        }
    )
    graph["outputs"] = sorted({t for name, t in pairs} - set(gradients))
    return Graph.from_dict(graph)


def _on_meta(parameter: torch.Tensor) -> torch.Tensor:
    import torch

    from olla.pytorch.capture import optimizers

    found = optimizers.without_memory(parameter)
    found.grad = torch.empty_like(found)
    return found


def _state_bytes(optimizer: torch.optim.Optimizer) -> list[int]:
    """Return the sizes of an optimizer's state tensors; step counts that it keeps on the CPU are left out."""
    found = [t for entries in optimizer.state.values() for t in entries.values() if _is_meta(t)]
    return [t.untyped_storage().nbytes() for t in found]


def _requests_of(run: Callable[[], object], *, are_recorded: bool = True) -> list[Request]:
    """Run a function over meta tensors, and record the storages that it allocates and frees.

    Without recording it may keep many: each operator looks at all that are alive.
    """
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode

    from olla.pytorch.capture.costs import storage_of

    requests: list[Request] = []
    given: set[int] = set()  # storages that were there before
    alive: dict[int, tuple[Any, int]] = {}  # of a storage, and its number in the requests
    numbers = itertools.count()

    def free_expired() -> None:
        expired = [key for key, (reference, _) in alive.items() if reference.expired()]
        requests.extend((alive.pop(key)[1], -1) for key in expired)

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default and _is_meta(args[0]):
                return torch.ones((), dtype=args[0].dtype).item()  # Adafactor reads norms: sizes are the same for all
            if not are_recorded:
                return func(*args, **(kwargs or {}))
            free_expired()
            given.update({storage_of(t) for t in pytree.tree_leaves((args, kwargs)) if _is_meta(t)} - alive.keys())
            result = func(*args, **(kwargs or {}))
            for tensor in pytree.tree_leaves(result):
                if _is_meta(tensor) and (key := storage_of(tensor)) not in given and key not in alive:
                    storage = tensor.untyped_storage()
                    alive[key] = (StorageWeakRef(storage), next(numbers))  # type: ignore[no-untyped-call]
                    requests.append((alive[key][1], storage.nbytes()))
            return result

    with Watch():  # type: ignore[no-untyped-call]
        run()
    free_expired()
    return requests


def _is_meta(value: Any) -> bool:
    return getattr(getattr(value, "device", None), "type", "") == "meta"
