"""Every name of torch that is private or a prototype and that olla uses inside torch.compile.

Supported: torch 2.11 to 2.13. Where a name is gone, the error says which, and in which torch.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import operator
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from olla.errors import CaptureError

OLDEST = (2, 11)
NEWEST_TESTED = (2, 13)


def private(module: str, name: str) -> Any:
    """Return a name of a torch module.

    Raises:
        CaptureError: rule "torch_version"; this torch has it no more, or not yet.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST_TESTED))
        raise CaptureError(
            f"olla.inductor needs {module}.{name}, which torch {torch.__version__} does not have; it works with torch "
            f"{oldest} to {newest}: install one of those, or compile with backend='inductor'",
            rule="torch_version",
        ) from error


CustomPartitionerFn: Any = private("torch._inductor.custom_graph_pass", "CustomPartitionerFn")
CustomSchedulerPass: Any = (  # 2.13; a plain callable does before, but bypasses the cache of compiled graphs
    private("torch._inductor.custom_graph_pass", "CustomSchedulerPass")
    if hasattr(importlib.import_module("torch._inductor.custom_graph_pass"), "CustomSchedulerPass")
    else object
)
_partitioners = "torch._functorch.partitioners"
min_cut_partition: Any = private(_partitioners, "min_cut_rematerialization_partition")
must_recompute: Any = private(_partitioners, "must_recompute")
size_of: Any = private(_partitioners, "_size_of")
is_tangent: Any = private("torch._functorch._aot_autograd.utils", "_is_tangent")
is_symbolic: Any = private("torch.fx.experimental.proxy_tensor", "is_sym_node")


def is_tensor(value: object) -> bool:
    """Whether a node's value is a tensor."""
    return isinstance(value, torch.Tensor)


def is_getitem(node: torch.fx.Node) -> bool:
    """Whether a node takes an element of a tuple."""
    return node.target is operator.getitem


def is_operator(target: object) -> bool:
    """Whether a node's target runs kernels."""
    return isinstance(target, torch._ops.OpOverload | torch._ops.HigherOrderOperator)


def must_save(node: torch.fx.Node) -> bool:
    """Whether the user, or torch on behalf of what has effects, wants a node's result saved."""
    return bool(node.meta.get("recompute") == torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE)


def hint(value: Any) -> Any:
    """Return a size as a plain number, without making a guard of it."""
    if not isinstance(value, torch.SymInt):
        return value
    module = "torch.fx.experimental.symbolic_shapes"
    new = hasattr(importlib.import_module(module), "optimization_hint")  # its name since torch 2.13
    return private(module, "optimization_hint" if new else "size_hint")(value, fallback=4096)


def hinted(value: Any) -> Any:
    """Return what a flop formula takes for a value: plain numbers, the sizes of a tensor for the tensor."""
    if isinstance(value, torch.Tensor):
        return torch.Size(hint(size) for size in value.shape)
    if isinstance(value, tuple | list):
        return type(value)(hinted(item) for item in value)
    return hint(value)


def set_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Set names of Inductor's configuration; returns what they were before."""
    config = private("torch._inductor", "config")
    before = {name: getattr(config, name) for name in values}
    for name, value in values.items():
        setattr(config, name, value)
    return before


def compile_graph(
    module: Any, inputs: Any, *, mode: str | None, options: Mapping[str, Any], patches: Mapping[str, Any]
) -> Any:
    """Compile with Inductor under a mode, options by name, and patches of its configuration."""
    inductor = private("torch", "_TorchCompileInductorWrapper")(mode, dict(options), None)
    return inductor(module, inputs, config_patches=dict(patches))


@functools.cache
def code_digest() -> str:
    """Return a digest of the package's Python code and compiled core: decisions may change with either."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted((*root.rglob("*.py"), *root.glob("_core*"))):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


_PATCHABLE = {  # what is replaced while a wrapper is replayed: module, path in it
    "AsyncCompile": ("torch._inductor.async_compile", "AsyncCompile"),
    "load_wrapper": ("torch._inductor.codecache", "PyCodeCache.load_by_key_path"),
    "partition_fn": ("torch._inductor.compile_fx", "partition_fn"),
}


@contextlib.contextmanager
def patched(name: str, value: Any) -> Iterator[Any]:
    """Replace one of the names of _PATCHABLE in a block; yields what it was."""
    module, path = _PATCHABLE[name]
    owner, _, attribute = path.rpartition(".")
    holder = private(module, owner) if owner else importlib.import_module(module)
    private(module, path.partition(".")[0])
    before = vars(holder)[attribute]
    setattr(holder, attribute, value)
    try:
        yield before
    finally:
        setattr(holder, attribute, before)


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Compile everything anew in a block, in this process: nothing is read from or written to caches."""
    config = private("torch._inductor", "config")
    with config.patch(force_disable_caches=True, compile_threads=1, benchmark_harness=False):
        yield


def flop_formula(target: Any) -> Callable[..., int] | None:
    """Return what counts the flops of an operator, or None where it is no product of matrices and no convolution."""
    registry = private("torch.utils.flop_counter", "flop_registry")
    packet = getattr(target, "overloadpacket", target)
    name = str(packet).removesuffix("_for_cpu").removesuffix("_for_cpu_backward")
    if name != str(packet):  # attention on the CPU: same arguments first, but without an entry of its own
        backward = "_backward" if str(packet).endswith("_backward") else ""
        packet = getattr(torch.ops.aten, name.removeprefix("aten.") + backward)
    formula: Callable[..., int] | None = registry.get(packet)
    return formula
