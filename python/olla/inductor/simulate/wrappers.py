"""The Python that Inductor generates around its kernels, loaded so that its allocations can be watched."""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from olla.inductor.compat import codegen, compat


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Counts the bytes of storages that are alive, and the most there were, while the mode is active.

    What an operator allocates and frees before it returns (workspaces of kernels) is not seen.

    Args:
        on_host: whether storages in host memory count: yes for a step on a CPU, no if they are offloaded tensors.

    Attributes:
        paused: while set, what is new is not counted.
    """

    supports_higher_order_operators = True

    def __init__(self, on_host: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.on_host = on_host
        self.live_bytes = 0
        self.peak_bytes = 0
        self.paused = False
        self._alive: dict[int, weakref.ref[Any]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile's code run under this mode."""
        return True

    def add(self, value: Any) -> None:
        """Count the storage of a value from now on, if it is a tensor whose storage is not known yet."""
        if not isinstance(value, torch.Tensor) or (value.device.type == "cpu" and not self.on_host):
            return
        storage = value.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def gone(_: Any) -> None:
            del self._alive[key]
            self.live_bytes -= num_bytes

        self._alive[key] = weakref.ref(storage, gone)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.paused:
            for value in pytree.tree_leaves(result):
                self.add(value)
        return result


def storage_of(node: Any) -> int | None:
    """Return a key of the storage of a node's tensor; None if this is no node of one tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


class _AnyNumber(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Returns a dummy for a number read off a fake tensor: CPU scalars passed to GPU kernels, which do nothing here."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            if args[0].dtype == torch.bool:  # which of two graphs runs
                return True
            if args[0].is_floating_point():  # and no size
                return 0.0
        return func(*args, **(kwargs or {}))


class _Idle:
    """A kernel that does nothing, however it is launched."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None

    run = __call__


class _NoCompiler:
    """Stands in for what compiles kernels: gives idle ones, for whatever language."""

    def __getattr__(self, language: str) -> Callable[..., _Idle]:
        return lambda *_, **__: _Idle()

    def wait(self, scope: Any) -> None:
        """Return at once: nothing is compiled in the background."""


def _empty(device: str) -> Callable[..., torch.Tensor]:
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


def _reinterpret(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _from_pool(pool: torch.Tensor, offset: int, dtype: torch.dtype, size: Any, stride: Any) -> torch.Tensor:
    return torch.as_strided(pool.view(dtype), size, stride, offset // dtype.itemsize)


# The wrappers' own functions bypass the dispatcher, so that fake tensors and modes would not see them.
_DISPATCHED: dict[str, Callable[..., Any]] = {
    "empty_strided_cpu": _empty("cpu"),
    "empty_strided_cpu_pinned": _empty("cpu"),
    "empty_strided_cuda": _empty("cuda"),
    "reinterpret_tensor": _reinterpret,
    "alloc_from_pool": _from_pool,
    codegen.SEGMENT: lambda: None,  # what asks a GPU's allocator for memory: nothing lives in it
}
# Functions that read addresses: a fake tensor has none, and torch aborts the process if asked for it.
_OF_ADDRESSES: dict[str, Callable[..., Any]] = {
    "assert_size_stride": lambda *_, **__: None,
    "assert_size_stride_grouped": lambda *_, **__: None,  # since torch 2.15, as the next
    "assert_tensor_metadata": lambda *_, **__: None,
    "assert_alignment": lambda *_, **__: None,
    "copy_if_misaligned": lambda tensor: tensor,
}


@contextlib.contextmanager
def watched_wrappers(loaded: list[str], *, kernels: bool = False) -> Iterator[None]:
    """Make code that is compiled in this block allocate through the dispatcher.

    Args:
        loaded: receives the source of every wrapper.
        kernels: whether they are compiled and run; else they are no-ops, and the wrappers run on fake tensors, without
            CUDA graphs.
    """

    def load(_: Any, key: str, path: str, linemap: Any = None, attrs: Any = None) -> types.ModuleType:
        module = _watched(key, path, attrs, kernels)
        loaded.append(Path(path).read_text())
        return module

    with contextlib.ExitStack() as stack:
        stack.enter_context(compat.patched("load_wrapper", classmethod(load)))
        if not kernels:
            for name in ("align_inputs", "cudagraphify"):  # the first looks at addresses of inputs that change
                stack.enter_context(compat.patched(name, lambda model, *_, **__: model))
        yield


def _watched(key: str, path: str, attrs: Any, kernels: bool) -> types.ModuleType:
    module = types.ModuleType(f"olla_watched_{key}")
    module.__dict__.update(attrs or {}, __file__=path, key=key)
    with contextlib.nullcontext() if kernels else compat.patched("AsyncCompile", _NoCompiler):
        exec(compile(Path(path).read_text(), path, "exec"), module.__dict__)
    module.__dict__.update(attrs or {}, **_DISPATCHED)
    usual = module.__dict__["call"]

    def call(args: Any) -> Any:
        with _AnyNumber():  # type: ignore[no-untyped-call, unused-ignore]
            return usual(args)

    if not kernels:
        module.__dict__.update(_OF_ADDRESSES, call=call)
    return module


@contextlib.contextmanager
def idle_twins(loaded: list[Callable[[list[torch.Tensor]], Any]]) -> Iterator[None]:
    """Keep a second function of every wrapper that is compiled in this block: without kernels, for fake tensors.

    Args:
        loaded: receives them; each takes the list of the graph's inputs.
    """

    def load(cls: Any, key: str, path: str, linemap: Any = None, attrs: Any = None) -> types.ModuleType:
        module: types.ModuleType = usual.__func__(cls, key, path, linemap, attrs)
        loaded.append(_watched(key, path, attrs, kernels=False).call)
        return module

    with compat.patched("load_wrapper", classmethod(load)) as usual:
        yield
