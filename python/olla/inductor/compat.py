"""Every name of torch that is private or a prototype and that olla uses inside torch.compile.

Supported: torch 2.11 to 2.13. Where a name is gone, the error says which, and in which torch.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
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
min_cut_partition: Any = private("torch._functorch.partitioners", "min_cut_rematerialization_partition")


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
