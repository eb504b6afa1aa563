"""Train models behind `olla.wrap`, in an ordinary loop: numbers, peaks, the arena of a pool around it, and time.

    python bench/aten/bench_wrap.py --markdown bench/results/aten/wrap.md
    python bench/aten/bench_wrap.py --cases gpt2:1:256 --goals 0.05 --only check

A case is model:batch[:tokens]; a goal is the added time that `max_slowdown` allows. The loop has AdamW, clipping, and
two batches for each update. Each part in a process of its own:

check   10 updates give the losses, parameters, buffers and optimizer state of the model as it was, to the bit; the same
        once more inside `olla.pool`: its arena beside the load, and how many requests missed their place.
peak    of forward and backward by plan, beside what `olla.compile` plans for them: within 1.02.
memory  the most a process had resident (VmHWM) in three updates behind the first six: as it was, wrapped, in a pool.
time    processor time of a forward and backward pass where nothing is recomputed, in turns with the model as it was.

Exit status: 0; 1 if the numbers differ, a request was missed, or a peak is not within 1.02.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla
from bench.pytorch.bench_run import CASES, World, resident_bytes
from bench.support.harness import Cell, Report, answer, ask

OTHERS = [
    *("roberta_base:2:128", "t5_small:2:128", "deberta_v2:1:64", "mixtral_100m:1:128", "resnet18:8", "swin_t:2"),
    *("convnext_t:2", "mobilenet_v2:8", "efficientnet_b0:4", "vgg16:2"),
]
PARTS = ("check", "peak", "memory", "time")
NUM_UPDATES = 10
NUM_BATCHES = 2  # for one update
MOST_PEAK = 1.02  # times that of the same graph inside olla.compile


def wrapped(world: World, goal: float) -> Callable[[], torch.Tensor]:
    """Return a wrapped function that computes the loss of a world's model."""
    model, loss, batch = world.model, world.loss, world.batch

    def compute() -> torch.Tensor:
        return loss(model, batch)

    return olla.wrap(compute, max_slowdown=goal)


def update(world: World, compute: Callable[[], torch.Tensor]) -> list[float]:
    """Take one step of the optimizer, as an ordinary loop does."""
    losses = []
    for _ in range(NUM_BATCHES):
        loss = compute() / NUM_BATCHES
        loss.backward()
        losses.append(loss.item())
    torch.nn.utils.clip_grad_norm_(world.model.parameters(), 1.0)
    world.optimizer.step()
    world.optimizer.zero_grad()
    return losses


def check(case: str, goal: float) -> dict[str, Any]:
    """Return whether updates are equal, wrapped and in a pool, and what the reports say."""
    first = World(case, "adamw", "cpu")
    runs: dict[str, tuple[list[list[float]], list[torch.Tensor]]] = {}
    found: dict[str, Any] = {}
    for way in ("eager", "wrap", "pool"):
        world = copy.deepcopy(first)
        compute = (lambda w=world: w.loss(w.model, w.batch)) if way == "eager" else wrapped(world, goal)
        pool = olla.pool() if way == "pool" else None
        torch.manual_seed(7)
        with pool or contextlib.nullcontext():
            losses = []
            for _ in range(NUM_UPDATES):
                losses.append(update(world, compute))
                if pool is not None:
                    pool.step()
        runs[way] = losses, [value.detach().clone() for value in world.values()]
        if pool is not None:
            report = pool.report()
            found |= {"arena": report.arena_bytes, "load": report.load_bytes, "misses": report.num_misses}
            found |= {"served": report.served, "num_planned": report.num_planned}
        elif way == "wrap":
            told = olla.report_of(compute)
            found |= {"graphs": len(told.planned), "breaks": len(told.breaks), "left": told.num_unplanned_calls}

    def equal(way: str) -> bool:
        (losses, values), (others, wanted) = runs[way], runs["eager"]
        return losses == others and all(torch.equal(a, b) for a, b in zip(values, wanted, strict=True))

    return found | {"equal": equal("wrap"), "equal in a pool": equal("pool")}


def peak(case: str, goal: float) -> dict[str, Any]:
    """Return the planned peak of forward and backward, wrapped and captured, in bytes."""
    world = World(case, "adamw", "cpu")
    compute = wrapped(world, goal)
    compute().backward()
    graphs = olla.report_of(compute).planned
    world.optimizer.zero_grad()
    captured = olla.capture(world.model, world.batch, loss=world.loss)
    inside = olla.plan(captured.graph, max_slowdown=goal, layout=False, device="cpu")
    return {
        "peaks": [graph.peak_bytes for graph in graphs],
        "eager": [graph.eager_peak_bytes for graph in graphs],
        "compile": inside.peak_bytes,
    }


def memory(case: str, goal: float, way: str) -> dict[str, Any]:
    """Return the most that a process had resident."""
    world = World(case, "adamw", "cpu")
    compute = (lambda: world.loss(world.model, world.batch)) if way == "eager" else wrapped(world, goal)
    with olla.pool() if way == "pool" else contextlib.nullcontext() as pool:
        for i in range(9):
            if i == 6:
                Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
            update(world, compute)
            if pool is not None:
                pool.step()
        return {"bytes": resident_bytes("VmHWM")}


def measure_time(case: str, num_rounds: int) -> dict[str, Any]:
    """Return processor seconds of a forward and backward pass in turns."""
    first = World(case, "adamw", "cpu")
    computes: dict[str, Callable[[], torch.Tensor]] = {}
    worlds = {way: copy.deepcopy(first) for way in ("eager", "wrap")}
    computes["eager"] = lambda: worlds["eager"].loss(worlds["eager"].model, worlds["eager"].batch)
    computes["wrap"] = wrapped(worlds["wrap"], 0.0)
    seconds: dict[str, list[float]] = {way: [] for way in computes}
    for turn in range(3 + num_rounds):
        for way, compute in computes.items():
            torch.manual_seed(turn)
            begin = time.process_time()
            compute().backward()
            seconds[way].append(time.process_time() - begin)
            worlds[way].model.zero_grad()
    return {way: s[3:] for way, s in seconds.items()}


def run_part(part: str, case: str, *rest: str) -> dict[str, Any]:
    """Do what a process of its own does."""
    if part == "time":
        return measure_time(case, int(rest[0]))
    if part == "memory":
        return memory(case, float(rest[0]), rest[1])
    return {"check": check, "peak": peak}[part](case, float(rest[0]))


def row(case: str, goal: float, args: argparse.Namespace) -> tuple[dict[str, Cell], list[str]]:
    """Return the cells of one model under one goal, and what failed."""
    cells: dict[str, Cell] = {"model": case, "goal": f"{goal:.0%}"}
    failed = []
    if "check" in args.only:
        c = ask(__file__, "--part", "check", case, str(goal))
        cells |= {"graphs": c["graphs"], "breaks": c["breaks"], "equal": c["equal"]}
        cells |= {"equal in a pool": c["equal in a pool"], "pool: arena / load": c["arena"] / max(c["load"], 1)}
        cells |= {"served": f"{c['served']:.2%}", "misses": c["misses"]}
        failed += [name for name in ("equal", "equal in a pool") if not c[name]]
        failed += ["misses"] if c["misses"] or not c["num_planned"] else []
    if "peak" in args.only:
        p = ask(__file__, "--part", "peak", case, str(goal))
        one = len(p["peaks"]) == 1
        cells |= {"peak MiB": round(max(p["peaks"], default=0) / 2**20, 1)}
        cells |= {"of eager's": f"{max(p['peaks'], default=0) / max(p['eager'], default=1):.1%}"}
        cells["of compile's"] = p["peaks"][0] / p["compile"] if one else None
        failed += ["peak"] if one and p["peaks"][0] > MOST_PEAK * p["compile"] else []
    if "memory" in args.only:
        for way in ("eager", "wrap", "pool"):
            used = ask(__file__, "--part", "memory", case, str(goal), way)["bytes"]
            cells[f"{way}: process MiB"] = round(used / 2**20)
    if "time" in args.only and goal == 0.0:
        t = ask(__file__, "--part", "time", case, str(args.num_rounds))
        cells["time"] = statistics.median(a / b for a, b in zip(t["wrap"], t["eager"], strict=True))
    return cells, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=[*CASES, *OTHERS])
    parser.add_argument("--goals", nargs="+", type=float, default=[0.0, 0.05, 0.1])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--num-rounds", type=int, default=15)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        answer(run_part(*args.part))
    rows: list[dict[str, Cell]] = []
    bad = []
    for case in args.cases:
        for goal in args.goals:
            cells, failed = row(case, goal, args)
            rows.append(cells)
            bad += [f"{case} {goal:.0%}: {', '.join(failed)}"] if failed else []
            print(json.dumps(cells), *failed, file=sys.stderr, flush=True)
    columns = list(dict.fromkeys(name for cells in rows for name in cells))
    report = Report("Ordinary loops behind olla.wrap", columns, [[cells.get(c) for c in columns] for cells in rows])
    times = [cells["time"] for cells in rows if isinstance(cells.get("time"), float)]
    if times:
        report.summary["time, median and most"] = f"{statistics.median(times):.3f}, {max(times):.3f}"
    report.summary["failed"] = "; ".join(bad) or "none"
    report.print()
    for path in (args.markdown, args.json):
        if path is not None:
            report.save(path)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
