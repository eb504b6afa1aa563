"""Every name of torch that is private or a prototype and that olla uses inside torch.compile.

Supported: torch 2.11 to 2.13. Where a name is gone, the error says which, and in which torch.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Mapping
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

# --- Inductor's scheduler: order.py, fused.py, scheduler.py -----------------------------------------------------------
inductor_ir: Any = importlib.import_module("torch._inductor.ir")
virtualized: Any = private("torch._inductor.virtualized", "V")
prepare_planning_info: Any = private("torch._inductor.memory", "prepare_planning_info")
can_match_buffer_size: Any = private("torch._inductor.codegen.wrapper", "can_match_buffer_size")
is_nonfreeable_buffers: Any = private("torch._inductor.utils", "is_nonfreeable_buffers")
is_collective: Any = private("torch._inductor.utils", "contains_collective")
is_wait: Any = private("torch._inductor.utils", "contains_wait")
graph_being_compiled: Any = private("torch._functorch._aot_autograd.logging_utils", "get_aot_graph_name")
OrderedSet: Any = private("torch.utils._ordered_set", "OrderedSet")
_SCHEDULER_MEMBERS = {
    "BaseSchedulerNode": ("get_outputs", "get_nodes", "get_name", "get_device", "used_or_aliased_buffer_names"),
    "SchedulerBuffer": ("get_name", "get_aliases", "can_free"),
    "Scheduler": ("can_buffer_be_removed_through_fusion", "get_fused_node", "get_donated_buffers"),
    "SchedulerNode": (),
    "ExternKernelSchedulerNode": (),
    "NopKernelSchedulerNode": (),
    "OutputNode": (),
}


@functools.cache
def scheduler_classes() -> Any:
    """Return the module of Inductor's scheduler, its classes checked for the members that olla uses."""
    for owner, members in _SCHEDULER_MEMBERS.items():
        found = private("torch._inductor.scheduler", owner)
        for member in members:
            if not hasattr(found, member):
                private("torch._inductor.scheduler", f"{owner}.{member}")
    return importlib.import_module("torch._inductor.scheduler")


def size_hint(graph: Any, size: Any) -> int:
    """Return a size as a number; what stands for a symbol is the value it was traced with."""
    sizes = graph.sizevars
    hint = sizes.optimization_hint if hasattr(sizes, "optimization_hint") else sizes.size_hint  # 2.12 renamed it
    return int(hint(size, fallback=0))


def overwrites(graph: Any, device: Any) -> bool:
    """Return whether kernels on a device may write their results over their inputs."""
    features = private("torch._inductor.codegen.common", "BackendFeature")
    config = private("torch._inductor", "config")
    return bool(config.inplace_buffers and graph.has_feature(device, features.INPLACE_BUFFERS))


# ----------------------------------------------------------------------------------------------------------------------


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
