"""The state of torch that decides which operators a step consists of: modes, types, switches of backends."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._device import DeviceContext

ATTENTION_KERNELS = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")
_BACKENDS = {
    "": ("fp32_precision",),
    "mkldnn": ("enabled", "deterministic", "allow_tf32"),
    "cudnn": ("enabled", "benchmark", "deterministic", "allow_tf32"),
    "cuda": (*ATTENTION_KERNELS, "fp16_bf16_reduction_math_sdp_allowed"),
    "cuda.matmul": ("allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"),
    "mha": ("get_fastpath_enabled",),
    "opt_einsum": ("enabled", "strategy"),
}
_CUDA = ("cudnn", "cuda.matmul")  # of these, those that matter on CUDA alone
_OF_AUTOCAST: tuple[Callable[[str], Any], ...] = (torch.is_autocast_enabled, torch.get_autocast_dtype)
_function_modes: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack


def modes(device_type: str) -> tuple[Any, ...]:
    """Return the state of torch that a capture on such a device depends on, as values to compare.

    Example:
        >>> modes("cpu") == modes("cpu")
        True
    """
    return tuple([read() for read in _readers(device_type)])


def kernel_modes(device_type: str) -> tuple[Any, ...]:
    """Return those of torch's settings that kernels read when they run: a step that changes them cannot be captured."""
    return tuple([read() for read in _kernel_readers(device_type)])


@functools.cache
def _kernel_readers(device_type: str) -> list[Callable[[], Any]]:
    places = ("mkldnn", *(_CUDA if device_type == "cuda" else ()))
    return [torch.get_float32_matmul_precision, torch.are_deterministic_algorithms_enabled, *_settings(places)]


@functools.cache
def _readers(device_type: str) -> list[Callable[[], Any]]:
    kinds = sorted({"cpu", device_type} & {"cpu", "cuda", "xpu", "mps"})
    return [
        torch.is_grad_enabled,
        torch.get_num_threads,
        torch.is_inference_mode_enabled,
        torch.is_autocast_cache_enabled,
        torch.get_default_dtype,
        torch.get_float32_matmul_precision,
        torch.is_anomaly_enabled,
        torch.are_deterministic_algorithms_enabled,
        torch.is_deterministic_algorithms_warn_only_enabled,
        lambda: getattr(torch.utils.deterministic, "fill_uninitialized_memory"),  # noqa: B009 - its module is untyped
        lambda: [("device", m.device) if isinstance(m, DeviceContext) else m for m in _function_modes()],
        torch._C._len_torch_dispatch_stack,
        lambda: torch._C._autograd._top_saved_tensors_default_hooks(True),
        *(functools.partial(read, kind) for kind in kinds for read in _OF_AUTOCAST),
        *_settings(place for place in _BACKENDS if device_type == "cuda" or place not in _CUDA),
    ]


def _settings(places: Iterable[str]) -> Iterator[Callable[[], Any]]:
    """Yield functions that read the settings of parts of torch.backends, as far as this torch has them."""
    for place in places:
        space = operator.attrgetter(place)(torch.backends) if place else torch.backends
        for name in _BACKENDS[place]:
            if (read := _setting(space, name)) is not None:
                yield read


def _setting(space: Any, name: str) -> Callable[[], Any] | None:
    """Return a function that reads a setting; None where this torch does not have it."""
    try:
        value = getattr(space, name)
    except (AttributeError, RuntimeError):  # the latter: older and newer names of a setting were mixed
        return None
    if callable(value):
        return value  # type: ignore[no-any-return]

    def read() -> Any:
        try:
            return getattr(space, name)
        except RuntimeError as error:
            return str(error)

    return read
