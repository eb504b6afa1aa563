"""The memory of an ordinary step, operator by operator, on fake tensors: nothing is computed or allocated."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from olla.graph import DeviceProfile
from olla.pytorch.capture.costs import ALLOCATIONS, UNDECLARED, storage_of, tensor_bytes


class Memory(TorchDispatchMode):
    """Counts the bytes of storages that are alive while operators run, and estimates what the operators take.

    A storage is alive from the operator that makes it until Python and autograd have let go of it, as on torch's
    allocators. What kernels use while they run (workspaces) is not seen.

    Args:
        device: for the estimate.

    Attributes:
        live_bytes: now.
        peak_bytes: the most so far.
        num_ops: that ran so far.
        seconds: that they take, as estimated.
    """

    def __init__(self, device: DeviceProfile) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.live_bytes = self.peak_bytes = self.num_ops = 0
        self.seconds = 0.0

    def add(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        """Count storages that are not known yet; return their keys."""
        added = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage_of(tensor)
            if key in self._alive:
                continue
            self._alive[key] = (weakref.ref(storage, self._on_end(key)), int(storage.nbytes()))
            self.live_bytes += self._alive[key][1]
            added.append(key)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return added

    def given(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Count what is there before the step, each with its name; empty where it has none."""
        self.add(tensor for _, tensor in tensors)

    def ended(self, key: int) -> None:
        """Take note that a storage was freed."""

    def ran(self, function: Any, used: list[int], made: list[int], changed: list[int], seconds: float) -> None:
        """Take note of an operator that ran.

        Args:
            function: the operator.
            used: keys of the storages of its arguments.
            made: keys of the storages that it made.
            changed: keys of those of its arguments that it changed.
            seconds: that it takes, as estimated.
        """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        arguments, results = dense_parts((args, kwargs)), dense_parts(result)
        used = [storage_of(t) for t in arguments]
        known = set(used)
        made = self.add(t for t in results if storage_of(t) not in known)
        seconds = self._estimate(func, args, kwargs, result, arguments, [t for t in results if storage_of(t) in made])
        self.seconds += seconds
        self.ran(func, used, made, changed_by(func, args, kwargs), seconds)
        self.num_ops += 1
        return result

    def _on_end(self, key: int) -> Callable[[Any], None]:
        def end(_: Any) -> None:
            self.live_bytes -= self._alive.pop(key)[1]
            self.ended(key)

        return end

    def _estimate(self, func: Any, args: Any, kwargs: Any, result: Any, used: Any, made: Any) -> float:
        """Return the seconds of an operator: of its arithmetic or its memory traffic, and of its launch."""
        name = func._schema.name if isinstance(func, torch._ops.OpOverload) else ""
        changes = isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable
        if name in ALLOCATIONS or not (made or changes):  # the rest are views
            return 0.0
        formula = flop_registry.get(getattr(func, "_overloadpacket", None))
        num_flops = 0 if formula is None else formula(*args, **kwargs, out_val=result)
        sizes = {storage_of(t): tensor_bytes(t) for t in (*used, *made)}
        return _seconds(self._device, num_flops, sum(sizes.values()), used)


def _seconds(device: DeviceProfile, num_flops: int, num_bytes: int, used: list[torch.Tensor]) -> float:
    speed = device.flops_per_second
    if used and used[0].element_size() <= 2 and device.half_flops_per_second:
        speed = device.half_flops_per_second
    return max(num_flops / speed, num_bytes / device.bytes_per_second) + device.launch_seconds


def changed_by(func: Any, args: Any, kwargs: Any) -> list[int]:
    """Return the keys of the storages that an operator changes, by its schema or by what is known of it."""
    if not isinstance(func, torch._ops.OpOverload):
        return []
    schema = func._schema
    changed: list[Any] = []
    for position, argument in enumerate(schema.arguments if schema.is_mutable else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed.append(args[position] if position < len(args) else kwargs.get(argument.name))
    if schema.name in UNDECLARED:
        changed += [args[position] for position in UNDECLARED[schema.name] if position < len(args)]
    return [storage_of(part) for part in dense_parts(changed)]


def dense_parts(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in a tree; of a sparse one its indices and values, which are what takes memory."""
    found: list[torch.Tensor] = []
    for leaf in pytree.tree_leaves(tree):
        if not isinstance(leaf, torch.Tensor):
            continue
        found += [leaf._indices(), leaf._values()] if leaf.layout == torch.sparse_coo else [leaf]
    return found
