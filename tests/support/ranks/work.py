"""What ranks do in tests; each function runs in a process of its own."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

from tests.support.ranks.processes import Raised


def summed(
    rank: int,
    *,
    steps: int = 4,
    width: int = 64,
    rows: int = 32,
    pause: float = 0.0,
    ends: int = -1,
    sends: int = 0,
    **options: Any,
) -> Any:
    """Train with gradients averaged by hand; return losses and what the report says.

    Args:
        rank: of this process.
        steps: to take.
        width: of the hidden layer.
        rows: of the batch.
        pause: seconds before the first step.
        ends: the step before which this process gets a signal; -1: none.
        sends: that signal.
        options: of olla.compile.
    """
    import torch

    import olla
    from tests.support.ranks.steps import summed

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.GELU(), torch.nn.Linear(width, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rank))

    step = olla.compile(model, optimizer=optimizer, step=summed, **options)
    time.sleep(pause)
    losses = []
    for i in range(steps):
        if i == ends:
            os.kill(os.getpid(), sends)
        losses.append(float(step(batch)))
    report = step.report()
    return {
        "losses": losses,
        "cached": report.cached,
        "misses": report.misses,
        "planned": report.planned_peak_bytes,
        "measured": report.measured_peak_bytes,
        "order": step.plan.order.tolist(),
    }


def one_after_another(rank: int, world_size: int, *, cases: dict[str, Any], cache: Path) -> dict[str, Any]:
    """Run cases one after another; return for each what `summed` returned, or what it raised.

    Args:
        rank: of this process.
        world_size: how many there are.
        cases: name -> options by rank, of `summed`; "empty" first empties the cache.
        cache: of this rank.
    """
    found: dict[str, Any] = {}
    for name, per_rank in cases.items():
        options = dict(per_rank.get(rank, per_rank.get("all", {})))
        if options.pop("empty", False):
            shutil.rmtree(cache / "steps")
        try:
            found[name] = summed(rank, **options)
        except Exception as error:
            found[name] = Raised(type(error).__name__, str(error))
    return found


def interrupted(rank: int, world_size: int, *, ends: int = -1, sends: int = int(signal.SIGKILL)) -> Any:
    """Take steps until this process, or another one, gets a signal."""
    start = time.monotonic()
    try:
        return summed(rank, steps=6, ends=ends, sends=sends)
    except BaseException as error:
        return Raised(type(error).__name__, f"{time.monotonic() - start:.1f}: {error}")


def parallel(rank: int, world_size: int, *, cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Train models in DistributedDataParallel; return for each case what was found in both ways, or what was raised.

    Args:
        rank: of this process.
        world_size: how many there are.
        cases: name -> options of `tests.support.ranks.parallel.trained`; "eager" and "olla" hold those of one way.
    """
    from tests.support.ranks.parallel import trained

    found: dict[str, dict[str, Any]] = {}
    for name, options in cases.items():
        own = {way: options.get(way, {}) for way in ("eager", "olla")}
        both = {key: value for key, value in options.items() if key not in own}
        found[name] = {}
        for way, further in own.items():
            try:
                found[name][way] = trained(rank, way, **both, **further)
            except Exception as error:
                found[name][way] = Raised(type(error).__name__, str(error))
    return found


def killed(rank: int, world_size: int, *, after: float = -1.0, sends: int = 0) -> Any:
    """Train a model in DistributedDataParallel until this process, or another one, gets a signal in a step.

    Args:
        rank: of this process.
        world_size: how many there are.
        after: seconds from the third step on until it gets the signal; negative: it gets none.
        sends: that signal.
    """
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import olla
    from tests.support.ranks.parallel import batches, loss, made

    model = DistributedDataParallel(made("resnet"))
    optimizer = torch.optim.AdamW(model.parameters())
    step = olla.compile(model, optimizer=optimizer, loss=loss, time_limit=1.0)
    batch = batches("resnet", rank, 1)[0]
    for i in range(1_000_000):
        if i == 3 and after >= 0:
            threading.Timer(after, os.kill, (os.getpid(), sends)).start()
        step(batch)
    return "went on"


def recomputed_together(rank: int, world_size: int, *, goal: dict[str, Any]) -> dict[str, Any]:
    """Return what is recomputed of a step over sharded parameters, for a goal of this rank's own."""
    import torch.distributed as dist

    from olla.integrations.torchtitan import choose
    from olla.plan import asked
    from tests.support.ranks.sharded_step import ShardedStep

    world = dist.group.WORLD
    assert world is not None
    found, _ = asked(in_place=False, device="a100", **goal)
    assert found is not None
    choice = choose(ShardedStep(world.group_name, world_size).module, found)
    return {"recomputed": choice.recomputed, "peak_bytes": choice.peak_bytes}


def titan_trained(rank: int, world_size: int, *, goal: dict[str, Any]) -> dict[str, Any]:
    """Return losses and gradients of a step of torchtitan's over two ranks: eager, and with olla's memory policy."""
    import olla.integrations.torchtitan as ours
    from tests.support.ranks.titan import trained

    found: dict[str, Any] = {}
    choose = ours.choose

    def noted(*given: Any, **options: Any) -> Any:
        choice = choose(*given, **options)
        found["recomputed"] = choice.recomputed
        return choice

    ours.choose = noted
    ours.register(**goal)
    for way, policy in (("eager", None), ("olla", "olla")):
        loss, gradients, _ = trained(policy, is_sharded=True)
        found[way] = [loss.numpy(), *(gradient.to_local().numpy() for gradient in gradients)]
    return found
