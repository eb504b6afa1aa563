"""A device profile measured here: how fast this machine multiplies, moves, starts and copies."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from olla.base.packages import require
from olla.graph.devices import DeviceProfile

if TYPE_CHECKING:
    import torch

_SECONDS = 0.4  # of each measurement
_LEAST_RUNS = 3
_SIDE = {"cpu": 1024, "cuda": 8192}  # of the multiplied matrices
_COPY_BYTES = {"cpu": 2**26, "cuda": 2**28}  # far beyond the caches
_NUM_SMALL_OPS = 200


def device_profile(device: str | torch.device | None = None) -> DeviceProfile:
    """Measure a device and return its profile, to be given to `olla.plan` as ``device=``.

    Takes a few seconds: a float32 matrix product, a copy within the device, many tiny ops, and copies from and to
    pinned host memory (on the CPU, from one buffer to another: the link of a simulated swap).

    Args:
        device: a torch device; default: the first CUDA device, or the CPU where there is none.

    Returns:
        The best rates of several runs: what the device does undisturbed.

    Raises:
        ImportError: torch is not installed.
        ValueError: the device is neither a CPU nor a CUDA device.

    Example:
        >>> profile = device_profile("cpu")  # doctest: +SKIP
        >>> plan = olla.plan(graph, max_slowdown=0.05, device=profile)  # doctest: +SKIP
    """
    require("torch", "torch")
    import torch

    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type not in _SIDE:
        raise ValueError(f"device is {str(where)!r}, expected 'cpu' or a CUDA device")

    def wait() -> None:
        if where.type == "cuda":
            torch.cuda.synchronize(where)

    with torch.no_grad():
        side, num_bytes = _SIDE[where.type], _COPY_BYTES[where.type]
        a, b = (torch.ones(side, side, device=where) for _ in range(2))
        product = torch.empty_like(a)
        flops = 2 * side**3 / _least_seconds(lambda: torch.mm(a, b, out=product), wait)

        source, target = (torch.ones(num_bytes // 4, device=where) for _ in range(2))
        moved = 2 * num_bytes / _least_seconds(lambda: target.copy_(source), wait)  # read once, written once

        small = torch.ones(1, device=where)

        def many_small_ops() -> None:
            for _ in range(_NUM_SMALL_OPS):
                small.add_(1.0)

        launch_seconds = _least_seconds(many_small_ops, wait) / _NUM_SMALL_OPS
        host = torch.ones(num_bytes // 4, pin_memory=where.type == "cuda")
        to_host = num_bytes / _least_seconds(lambda: host.copy_(source, non_blocking=True), wait)
        from_host = num_bytes / _least_seconds(lambda: source.copy_(host, non_blocking=True), wait)
    return DeviceProfile(
        name=f"measured {torch.cuda.get_device_name(where) if where.type == 'cuda' else 'cpu'}",
        flops_per_second=flops,
        bytes_per_second=moved,
        launch_seconds=launch_seconds,
        to_host_bytes_per_second=to_host,
        from_host_bytes_per_second=from_host,
    )


def _least_seconds(run: Callable[[], object], wait: Callable[[], None]) -> float:
    """Return the shortest of several runs, the first of them not counted."""
    run()
    wait()
    least, runs, end = float("inf"), 0, time.perf_counter() + _SECONDS
    while runs < _LEAST_RUNS or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        wait()
        least = min(least, time.perf_counter() - start)
        runs += 1
    return least
