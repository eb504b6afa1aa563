"""What a capture depends on, as a digest that is known before anything is captured; see docs/step.md.

A capture may be used again only where nothing that could change it has changed. Three things are compared: the digest
made here, of the model, its optimizer, the loss function, the shapes of the batch and the settings of torch; the
versions of Python, torch and olla, and the processor; and the source files of all modules that were loaded when the
step was captured. What the walk over the objects does not understand makes a step that is not kept on disk.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim import optimizer as torch_optimizer
from torch.utils import _pytree as pytree

import olla
from olla.pytorch import STARTED_NS
from olla.pytorch.origins import patches, source_files
from olla.pytorch.walk import NotUnderstood, Walk, describe

_RATES = ("lr", "initial_lr", "params", "foreach", "fused")  # of a parameter group: no constants of a capture
_MATMUL = ("allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
_SDP = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")
_BACKENDS = {
    "": ("fp32_precision",),
    "mkldnn": ("enabled", "deterministic", "allow_tf32"),
    "cudnn": ("enabled", "benchmark", "deterministic", "allow_tf32"),
    "cuda": (*_SDP, "fp16_bf16_reduction_math_sdp_allowed"),
    "cuda.matmul": _MATMUL,
    "mha": ("get_fastpath_enabled",),
    "opt_einsum": ("enabled", "strategy"),
}


class Fingerprint(NamedTuple):
    """A digest, and the tensors that were met on the way, whose values are part of it."""

    digest: str
    constants: list[torch.Tensor]


def fingerprint(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    loss: Callable[[Any, Any], Any] | None,
    step: Callable[[Any, Any, Any], Any] | None,
    leaves: Sequence[Any],
    spec: pytree.TreeSpec,
) -> Fingerprint:
    """Return the digest of everything that decides what one step of a model captures.

    Args:
        model: the user's, in the mode it shall run in.
        optimizer: the user's, or None.
        loss: see olla.capture.
        step: see olla.capture.
        leaves: of the batch.
        spec: of the batch.

    Raises:
        NotUnderstood: something that may decide is of an unknown kind; the message names it.

    Complexity: O(objects reachable), about 0.5 s for a transformers model.
    """
    tables = (model.named_parameters, model.named_buffers)
    registered = {id(t): name for table in tables for name, t in table()}
    walk = Walk(registered)
    walk.add("versions", _versions(_device(model, leaves)))
    walk.add("settings", _settings())
    walk.add("patches", [*patches()])
    walk.add("batch", _batch(leaves, spec))
    walk.add("model", model)
    walk.add("aliases", _aliases(model))
    walk.add("optimizer", () if optimizer is None else _optimizer(optimizer, registered))
    walk.add("loss", loss)
    walk.add("step", step)
    return Fingerprint(walk.digest, walk.tensors)


def sources() -> list[tuple[str, int, int]]:
    """Return path, size and time of the files that all loaded modules outside torch and Python were read from.

    Raises:
        NotUnderstood: a file has changed since this process may have read it.
    """
    found = []
    for path in source_files():
        try:
            facts = path.stat()
        except OSError:
            raise NotUnderstood(f"{path}, the source of a loaded module, is not there") from None
        if facts.st_mtime_ns > STARTED_NS:
            raise NotUnderstood(f"{path} has changed since this process started")
        found.append((str(path), facts.st_size, facts.st_mtime_ns))
    return found


def are_unchanged(files: Sequence[Sequence[Any]]) -> bool:
    """Whether all files are what they were when sources() listed them."""
    for path, size, mtime_ns in files:
        try:
            facts = os.stat(path)
        except OSError:
            return False
        if (facts.st_size, facts.st_mtime_ns) != (size, mtime_ns):
            return False
    return True


def _device(model: torch.nn.Module, leaves: Sequence[Any]) -> torch.device:
    tensors = [*model.parameters(), *model.buffers(), *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]
    return next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))


@functools.cache
def _versions(device: torch.device) -> tuple[str, ...]:
    """Return what ran: Python, torch, olla and the machine."""
    package = Path(olla.__file__).parent
    own = hashlib.sha256()
    for path in sorted([*package.rglob("*.py"), *package.glob("_core*.so")]):
        own.update(path.read_bytes())
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    cpu = torch.backends.cpu.get_cpu_capability()
    python = (sys.version, str(sys.flags.optimize), platform.machine())
    return (own.hexdigest(), *python, str(torch.__version__), str(torch.version.git_version), str(device), where, cpu)


def _settings() -> list[Any]:
    """Return the state of torch that decides which operators a step consists of.

    Raises:
        NotUnderstood: a mode is active that may do anything to the operators.
    """
    modes = {
        "a torch function mode (torch.device or torch.set_default_device, for example)": "_len_torch_function_stack",
        "a torch dispatch mode": "_len_torch_dispatch_stack",
    }
    for what, count in modes.items():
        if getattr(torch._C, count)() > 0:
            raise NotUnderstood(f"{what} is active")
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        raise NotUnderstood("a hook for saved tensors is active")
    kinds = {"cpu", "cuda"}
    flags: list[Any] = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in sorted(kinds)]
    flags += [torch.is_autocast_cache_enabled(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    flags += [torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.is_anomaly_enabled()]
    flags += [torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()]
    flags += [getattr(torch.utils.deterministic, "fill_uninitialized_memory")]  # noqa: B009 - its module is untyped
    flags += _backends()
    hooks = [table for name, table in vars(torch.nn.modules.module).items() if name.startswith("_global_")]
    return [*flags, *hooks, torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks]


def _backends() -> list[str]:
    """Return the settings of torch's backends, as text; those that this torch does not have are left out."""
    found = []
    for place, names in _BACKENDS.items():
        space = operator.attrgetter(place)(torch.backends) if place else torch.backends
        for name in names:
            try:
                value = getattr(space, name)
                found.append(f"{place}.{name}={value() if callable(value) else value}")
            except (AttributeError, RuntimeError) as error:  # the latter: older and newer names of a setting were mixed
                found.append(f"{place}.{name}: {type(error).__name__}")
    return found


def _batch(leaves: Sequence[Any], spec: pytree.TreeSpec) -> tuple[Any, ...]:
    first: dict[int, int] = {}  # a tensor that stands twice in the batch is one input
    facts = [
        (describe(leaf), first.setdefault(id(leaf), i)) if isinstance(leaf, torch.Tensor) else leaf
        for i, leaf in enumerate(leaves)
    ]
    return (str(spec), *facts)


def _aliases(model: torch.nn.Module) -> tuple[Any, ...]:
    """Return which parameters and buffers stand in several places, and which share memory."""
    tables = (model.named_parameters, model.named_buffers)
    named = [(name, t) for table in tables for name, t in table(remove_duplicate=False)]
    objects: dict[int, int] = {}
    storages: dict[int, int] = {}
    return tuple(
        (n, objects.setdefault(id(t), i), storages.setdefault(t.untyped_storage()._cdata, i), t.storage_offset())
        for i, (n, t) in enumerate(named)
    )


def _optimizer(optimizer: torch.optim.Optimizer, registered: dict[int, str]) -> list[Any]:
    """Return the class, the settings and the layout of the state of an optimizer.

    Raises:
        NotUnderstood: it has a parameter that the model does not have.
    """
    state_dict = {k: v for k, v in vars(optimizer).items() if k not in ("param_groups", "state", "defaults", "step")}
    ignored = ("_opt_called", "_step_count", "_zero_grad_profile_name")  # of schedulers and profilers
    facts: list[Any] = [type(optimizer), {k: v for k, v in state_dict.items() if k not in ignored}]
    for group in optimizer.param_groups:
        facts.append({k: v for k, v in group.items() if k not in _RATES})
        facts.append(describe(group["lr"]) if isinstance(group["lr"], torch.Tensor) else "number")
        for parameter in group["params"]:
            if id(parameter) not in registered:
                raise NotUnderstood("a parameter of the optimizer that the model does not have")
            state = optimizer.state.get(parameter, {})
            entries = [(k, describe(v) if isinstance(v, torch.Tensor) else v) for k, v in state.items()]
            facts.append((registered[id(parameter)], *entries))
    return facts
