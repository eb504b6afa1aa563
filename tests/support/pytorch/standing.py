"""Kernels of Triton under the stand-in for CUDA, where they do nothing: not tuned by times, and compiled or not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.runtime.triton_heuristics import CachingAutotuner


class _Idle:
    """What Inductor launches in place of a kernel that was not compiled."""

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, as a kernel of Triton does there."""


@contextlib.contextmanager
def without_times() -> Iterator[None]:
    """Let kernels be compiled in this process, and taken as they are: times mean nothing."""
    settings = {"compile_threads": 1, "triton.autotune_pointwise": False}
    with torch._inductor.config.patch(settings), mock.patch.object(CachingAutotuner, "bench", return_value=1.0):
        yield


@contextlib.contextmanager
def without_triton() -> Iterator[None]:
    """Let kernels of Triton be written, but not compiled, which takes half a second for each."""
    with mock.patch.object(AsyncCompile, "triton", return_value=_Idle()):
        yield
