"""A process group of any size that sends nothing: for the time of a capture."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from olla.errors import CaptureError

if TYPE_CHECKING:
    from olla.pytorch.sharded.ranks import ShardedRanks

PARALLEL = ("fsdp", "ddp")


def require_parallel(world_size: Any, parallel: Any, step: Any) -> None:
    """Raise unless it is clear how many ranks run the step, and what they share.

    Raises:
        CaptureError: the step is the body of a loop.
        ValueError: a value is out of its range.
    """
    if world_size is None and parallel is None:
        return
    if parallel not in PARALLEL:
        raise ValueError(
            f"parallel is {parallel!r}, expected 'fsdp' (every parameter in shards) or 'ddp' (every parameter whole on "
            "each rank)" + ("" if parallel is None else "; leave world_size out too for a step of one rank")
        )
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(
            f"world_size is {world_size!r}, expected how many ranks run the step: a whole number from 1 on"
        )
    if step is not None:
        raise CaptureError(
            "a step function says itself what its ranks send each other, so that it takes no world_size: pass "
            "loss=... for the ordinary loop"
        )


@contextlib.contextmanager
def ranks_of(world_size: int | None, parallel: str | None) -> Iterator[ShardedRanks | None]:
    """Yield the ranks of a step, this process as the first; None where it has none of its own.

    While the context lasts they are the default process group.

    Raises:
        CaptureError: this process has a process group already, or its torch cannot make any.
    """
    if world_size is None or parallel is None:
        yield None
        return
    import torch.distributed as dist

    from olla.pytorch.sharded.ranks import ShardedRanks

    if not dist.is_available():
        raise CaptureError(
            "world_size needs torch.distributed, which this build of PyTorch does not have: leave it out"
        )
    if dist.is_initialized():
        raise CaptureError(
            f"world_size={world_size} makes a process group for the capture, and this process has one already "
            f"({dist.get_backend()}, {dist.get_world_size()} ranks). Capture in a process of its own, or before "
            "init_process_group(); in a launched process leave world_size out"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group(backend="fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        world: Any = dist.group.WORLD
        yield ShardedRanks(parallel, world_size, str(world.group_name))
    finally:
        dist.destroy_process_group()
