"""What torch's caching allocator needs for a compiled training step: the measure of bench_compile.py on CUDA.

Two steps, optimizer and first step included, kernels of Triton written but not compiled under the stand-in for CUDA
(docs/cuda.md), where they would do nothing: sizes, order and allocator are real.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from olla.inductor.compat import compat
from olla.inductor.simulate.split import Split, Splits, recorded
from tests.support.pytorch import compile_cases, models, standing

NUM_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Peaks(Splits):
    """Bytes of torch's allocator over the life of a training run: workspaces of cuBLAS and rounding included.

    Attributes:
        peak_bytes, reserved_bytes: the most allocated, and the most taken from the device.
        requested_bytes: the most asked for: without rounding, and without what is too small to be split off a block.
        compile_seconds: processor time of the compilation, without that of the kernels.
    """

    peak_bytes: int
    reserved_bytes: int
    requested_bytes: int
    compile_seconds: float


def _only(case: str, size: str) -> models.Example:
    """Return a model and its batch, with nothing else on the device and torch's statistics begun anew.

    Raises:
        RuntimeError: something of an earlier measurement is still there, and would be counted.
    """
    torch.compiler.reset()
    give_back()
    if torch.cuda.memory_reserved():
        raise RuntimeError(f"{torch.cuda.memory_allocated()} bytes are left of an earlier measurement")
    example, _ = compile_cases.build(case, size, "cuda")
    with torch.no_grad():  # what a first step settles in its model would make it compile twice
        example.loss(example.model, example.batch)
    give_back()
    torch.cuda.reset_peak_memory_stats()
    return example


def give_back() -> None:
    """Let nothing that is in no use be left on the device, workspaces of cuBLAS included."""
    while gc.collect():
        pass
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def measure(case: str, size: str, watch: Callable[[Split], None] | None = None, *, eager: bool = False) -> Peaks:
    """Train a model of compile_cases.py under whatever settings are in force.

    Args:
        watch: is told of every joint graph as soon as it is divided, and may end the measurement by an exception.
        eager: without torch.compile.
    """
    example = _only(case, size)
    optimizer = compile_cases.optimizer(case, example.model, fused=True)  # it takes no memory beside its state
    splits: list[Split] = []
    with contextlib.ExitStack() as stack:
        for block in (compat.uncached(), standing.without_times(), standing.without_triton()):
            stack.enter_context(block)
        stack.enter_context(recorded(splits, watch))
        loss = example.loss if eager else torch.compile(lambda model, batch: example.loss(model, batch))
        start = time.process_time()
        for _ in range(NUM_STEPS):
            loss(example.model, example.batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        seconds = time.process_time() - start
    return Peaks(
        peak_bytes=torch.cuda.max_memory_allocated(),
        reserved_bytes=torch.cuda.max_memory_reserved(),
        requested_bytes=torch.cuda.memory_stats()["requested_bytes.all.peak"],
        splits=splits,
        compile_seconds=seconds,
    )
