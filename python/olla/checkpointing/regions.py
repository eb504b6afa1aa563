"""Runs modules under torch's own checkpoint: their activations are recomputed in backward, but for saved operators.

A module keeps its class, its parameters and the keys of its state: its ``forward`` is replaced on the instance alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from olla.checkpointing.python_state import PythonState
from olla.checkpointing.reached import hooks_of

SaveKey = tuple[str, int]  # an operator such as "aten.mm.default", and how many operators the module ran before it
Forward = Callable[..., Any]
_BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)


@dataclass(frozen=True)
class ModuleRegion:
    """How one module is checkpointed.

    Attributes:
        saved: operators whose results are saved for backward instead of being recomputed.
        buffers: names of buffers of the module and its parts that its forward changes, such as running statistics.
        noting: names of those of its parts, "" for itself, whose Python attributes its forward changes.
    """

    saved: frozenset[SaveKey] = frozenset()
    buffers: tuple[str, ...] = ()
    noting: tuple[str, ...] = ()


def checkpointed(module: torch.nn.Module) -> ModuleRegion | None:
    """Return how a module is checkpointed; None: it is not."""
    forward = vars(module).get("forward")
    if isinstance(forward, functools.partial) and forward.func is _run:
        region: ModuleRegion = forward.args[1]
        return region
    return None


def apply(module: torch.nn.Module, region: ModuleRegion) -> None:
    """Checkpoint a module from now on."""
    remove(module)
    replaced: Forward | None = vars(module).get("forward")
    module.forward = functools.partial(_run, module, region, replaced)


def remove(module: torch.nn.Module) -> bool:
    """Undo `apply`; return whether the module was checkpointed."""
    if checkpointed(module) is None:
        return False
    replaced = vars(module).pop("forward").args[2]
    if replaced is not None:
        module.forward = replaced
    return True


def _run(module: torch.nn.Module, region: ModuleRegion, replaced: Forward | None, /, *args: Any, **kwargs: Any) -> Any:
    """Call the forward of a module, checkpointed where gradients are recorded.

    Args:
        module: is called.
        region: how it is checkpointed.
        replaced: a forward of the instance that stood there before; None: that of the class is called.
    """
    forward = functools.partial(type(module).forward, module) if replaced is None else replaced
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    args, kwargs = without_caches(args, kwargs)
    # torch.compile supports the contexts of selective checkpoints alone, and updates buffers once by itself.
    is_compiling = torch.compiler.is_compiling()
    buffers = () if is_compiling else region.buffers
    hooked = [] if is_compiling else hooks_of(part for part in module.modules() if part is not module)
    noting = () if is_compiling else region.noting
    options: dict[str, Any] = {"use_reentrant": False}
    if region.saved or buffers or hooked or noting:
        options["context_fn"] = functools.partial(_contexts, module, region.saved, buffers, noting, hooked)
    # Keywords go in one piece: names of the module's arguments may be those of checkpoint's.
    return checkpoint(lambda named, *given: forward(*given, **named), kwargs, *args, **options)


def without_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of a module without caches of keys and values, as transformers makes them for generation.

    A recomputed call would append to them twice; transformers' own checkpointed layers drop them in training, too.
    """
    kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return tuple(None if _is_cache(value) else value for value in args), kwargs


def _is_cache(value: object) -> bool:
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def _contexts(
    module: torch.nn.Module,
    saved: frozenset[SaveKey],
    buffers: tuple[str, ...],
    noting: tuple[str, ...],
    hooked: list[Forward],
) -> tuple[Any, Any]:
    """Return the contexts of one call and of its recomputation.

    Args:
        module: is called.
        saved, buffers, noting: see `ModuleRegion`.
        hooked: hooks of its parts.
    """
    call: Any = contextlib.nullcontext()
    again: Any = contextlib.nullcontext()
    if saved:
        call, again = create_selective_checkpoint_contexts(_Policy(saved))  # type: ignore[no-untyped-call]
    if buffers:
        again = _WithBuffers(module, buffers, again)
    if noting or hooked:
        again = _WithState([module.get_submodule(name) for name in noting], hooked, again)
    return call, again


class _Policy:
    """Tells torch's checkpoint which operators of one call are saved.

    Where a batch leads to other operators than the one that was traced, nothing more is saved: all is recomputed.
    """

    def __init__(self, saved: frozenset[SaveKey]) -> None:
        self._saved = saved
        self._position = -1

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        self._position += 1
        is_saved = (str(operator), self._position) in self._saved
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


class _WithBuffers:
    """A recomputation that sees buffers as they were before the first call, and mutates copies of them alone.

    So running statistics are updated once, as without a checkpoint.

    Args:
        module: is recomputed.
        names: of its buffers.
        inner: the context of the recomputation otherwise.
    """

    def __init__(self, module: torch.nn.Module, names: Sequence[str], inner: Any) -> None:
        split = [(module.get_submodule(owner), own) for owner, _, own in (name.rpartition(".") for name in names)]
        self._owners = [(owner._buffers, own) for owner, own in split]
        self._copies = [_unset if _ignores(owner) else torch.Tensor.clone for owner, _ in split]
        with torch.no_grad():
            self._before = [copy(owner.get_buffer(own)) for copy, (owner, own) in zip(self._copies, split, strict=True)]
        self._now: list[Any] = []
        self._inner = inner

    def __enter__(self) -> None:
        self._now = [buffers[own] for buffers, own in self._owners]
        with torch.no_grad():
            for (buffers, own), copy, before in zip(self._owners, self._copies, self._before, strict=True):
                buffers[own] = copy(before)
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> Any:
        for (buffers, own), now in zip(self._owners, self._now, strict=True):
            buffers[own] = now
        self._now = []
        return self._inner.__exit__(*error)


class _WithState:
    """A recomputation that sees Python state as it was before the first call, and leaves that state unchanged.

    So counters, histories and records of hooks are as without a checkpoint.

    Args:
        modules: whose attributes the recomputation changes.
        hooks: that it calls.
        inner: the context of the recomputation otherwise.
    """

    def __init__(self, modules: list[torch.nn.Module], hooks: list[Forward], inner: Any) -> None:
        self._modules, self._hooks, self._inner = modules, hooks, inner
        self._before = PythonState(modules, hooks)
        self._now: PythonState | None = None

    def __enter__(self) -> None:
        self._now = PythonState(self._modules, self._hooks)
        self._before.put_back()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> Any:
        assert self._now is not None
        self._now.put_back()
        self._now = None
        return self._inner.__exit__(*error)


def _ignores(module: torch.nn.Module) -> bool:
    """Whether what a module computes does not depend on its buffers: batch norm in training takes the batch's own."""
    return type(module) in _BATCH_NORMS and module.training


def _unset(buffer: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(buffer)
