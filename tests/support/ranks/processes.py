"""Real ranks: processes of a gloo group, forked from one server that has imported torch; what each returned, or raised.

One module holds the work of all tests, so that ranks find it by name.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

_DEADLINE = 240.0


class Raised(NamedTuple):
    """What a rank raised."""

    kind: str
    text: str


def ranks(
    work: Callable[..., Any],
    world_size: int,
    folder: Path,
    *,
    timeout: float = 60.0,
    per_rank: Mapping[int, Mapping[str, Any]] | None = None,
    **options: Any,
) -> list[Any]:
    """Run ``work(rank, world_size, **options)`` in a process for each rank.

    Args:
        work: a function of a module that can be imported.
        world_size: how many processes.
        folder: for the store of the group; and each rank's cache of plans, where that is switched on.
        timeout: seconds of the group.
        per_rank: further options, by rank.
        options: of the work.

    Returns:
        For each rank what its work returned, or a `Raised`; None where it was killed.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "olla.pytorch.step", "tests.support.ranks.processes"])
    store = folder / f"store{time.monotonic_ns()}"
    started = []
    for rank in range(world_size):
        receive, send = context.Pipe(duplex=False)
        own = {**options, **((per_rank or {}).get(rank, {}))}
        process = context.Process(target=_rank, args=(work, rank, world_size, store, timeout, own, send), daemon=True)
        process.start()
        send.close()
        started.append((process, receive))
    end = time.monotonic() + _DEADLINE
    try:
        return [_answer(process, receive, end) for process, receive in started]
    finally:
        for process, _ in started:
            process.kill()
            process.join()


def _answer(process: Any, receive: Any, end: float) -> Any:
    try:
        if not receive.poll(max(0.0, end - time.monotonic())):
            raise TimeoutError(f"process {process.pid} gave no answer within {_DEADLINE} s")
        return receive.recv()
    except EOFError:  # killed
        return None


def _rank(
    work: Callable[..., Any], rank: int, world_size: int, store: Path, timeout: float, options: Any, send: Any
) -> None:
    import datetime

    import torch
    import torch.distributed as dist

    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["OLLA_DISK_CACHE"] = "1" if "cache" in options else "0"
    if "cache" in options:
        os.environ["OLLA_CACHE_DIR"] = str(options["cache"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout),
    )
    try:
        send.send(work(rank, world_size, **options))
    except BaseException as error:
        send.send(Raised(type(error).__name__, str(error) + "".join(getattr(error, "__notes__", ()))))
        traceback.print_exc()
    finally:
        send.close()
        os._exit(0)  # groups that lost a rank wait for it at exit
