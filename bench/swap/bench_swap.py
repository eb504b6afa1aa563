"""Swap to host memory, simulated: AutoSwap by its four scores beside ours, and swaps chosen with recomputation.

    python bench/swap/bench_swap.py --graphs vgg11_b32 vgg16@64 resnet18@100 --devices gtx1080 --links 12
    python bench/swap/bench_swap.py --recompute --links 25

Figures are the fall of the peak in %, resident memory included. NAME@BATCH captures a model of
tests/support/pytorch/models.py with momentum. AutoSwap and ours swap in the program order, at shares of the step's time
that ops may wait for copies: 0 is no overhead. With --recompute, time is spent on recomputation as well, on top of the
best order, with losses whole and in chunks of rows; "at most" is what the bound allows. No plan with swaps may be worse
than the one without. Every graph that swaps passes the check against its original and has the peak that the simulation
says. Exit status: 0; 1 a plan broke a rule, or, with --strict, ours was behind AutoSwap or a target was missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla
from bench.recompute.bench_budget import GRAPHS
from bench.support.harness import Cell, Report, graph_files, graph_name
from olla import _core
from olla.check.swapped import check_swaps
from olla.chunk import chunked
from olla.graph import profile_of
from olla.plan import Link, Swaps
from olla.plan.swaps import PCIE3
from olla.swap import plan_swaps, swapped_graph
from olla.swap.autoswap import SCORES, AutoSwap

SLOWDOWNS = (0.0, 0.02, 0.05, 0.1, 0.2)
TARGETS = {0.05: 33.0, 0.10: 46.0}  # mean fall of the twelve graphs, chunked, on an a100 with a link of 25 GB/s
RECOMPUTED = ("recompute", "+ swap", "at most", "swapped MiB", "CPU seconds")


def graphs(names: list[str]) -> list[tuple[str, olla.Graph]]:
    """Return graphs by name: of a file, or captured where the name is MODEL@BATCH."""
    found = []
    for name in names:
        model, at, batch = name.partition("@")
        if at:
            from tests.support.pytorch import models

            example = models.build(model, int(batch))
            optimizer = models.optimizer("momentum", example.model)
            graph = olla.capture(example.model, example.batch, optimizer=optimizer, loss=example.loss).graph
            found.append((f"{model}_b{batch}", graph))
        else:
            found += [(graph_name(path), olla.Graph.load(path)) for path in graph_files([name])]
    return found


def check(graph: olla.Graph, order: NDArray[np.int32], swaps: Swaps) -> None:
    """Raise PlanError unless the graph that swaps computes the same and has the simulated peak."""
    swapped = swapped_graph(graph, order, swaps)
    check_swaps(graph, swapped.graph, swapped.origin)
    peak = _core.profile(swapped.graph.core, np.arange(swapped.graph.num_ops, dtype=np.int32)).peak_bytes
    if peak != swaps.peak_bytes:
        raise olla.PlanError(
            f"the simulation says {swaps.peak_bytes} bytes, the graph needs {peak}", rule="peak", ids=()
        )


def beside_autoswap(graph: olla.Graph, device: str, link: Link, time_limit: float) -> tuple[list[Cell], float]:
    """Return the falls by every score and by ours at each slowdown; how far ours is behind the best of them."""
    order = np.arange(graph.num_ops, dtype=np.int32)
    seconds = profile_of(device).op_seconds(graph)
    method = AutoSwap(graph, order, seconds, link)
    cells: list[Cell] = [1e3 * float(seconds.sum()), method.peak_bytes >> 20]
    behind = 0.0
    for slowdown in SLOWDOWNS:
        theirs = [method.least_peak(score, slowdown).peak_bytes for score in SCORES]
        swaps = plan_swaps(graph, order, seconds, link, max_slowdown=slowdown, time_limit=time_limit)
        check(graph, order, swaps)
        falls = [100 * (1 - peak / method.peak_bytes) for peak in (*theirs, swaps.peak_bytes)]
        cells += falls if slowdown == 0.0 else [max(falls[:-1]), falls[-1]]
        behind = max(behind, max(falls[:-1]) - falls[-1])
    return cells, behind


def with_recomputation(
    graph: olla.Graph, device: str, link: Link, time_limit: float, state: bool, num_chunks: int
) -> list[Cell]:
    """Return the falls by recomputation, with swaps, at most, what is swapped, seconds of planning: per added time
    with losses whole, then in chunks.
    """
    cells: list[Cell] = [None, None]
    has_chunks = chunked(graph, num_chunks).num_losses > 0
    for slowdown in TARGETS:
        goal = {"max_slowdown": slowdown, "device": device, "time_limit": time_limit}
        for chunks in (None, num_chunks):
            if chunks and not has_chunks:
                cells += cells[-len(RECOMPUTED) :]
                continue
            alone = olla.plan(graph, chunked_loss=chunks, **goal)  # type: ignore[arg-type]
            start = time.process_time()
            plan = olla.plan(graph, chunked_loss=chunks, link=link, swap=True, swap_state=state, **goal)  # type: ignore[arg-type]
            seconds = time.process_time() - start
            olla.check(graph, plan)
            if plan.peak_bytes > alone.peak_bytes or plan.slowdown > slowdown * (1 + 1e-9):
                raise olla.PlanError(
                    f"with swaps {plan.peak_bytes} bytes and {plan.slowdown:.2%}, without {alone.peak_bytes} bytes",
                    rule="worse",
                    ids=(),
                )
            base = plan.base_peak_bytes
            cells[:2] = [1e3 * plan.base_seconds, base >> 20]
            peaks = (alone.peak_bytes, plan.peak_bytes, plan.peak_lower_bound_bytes)
            cells += [*(100 * (1 - peak / base) for peak in peaks), plan.swapped_bytes >> 20, seconds]
    return cells


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=GRAPHS, help="names, patterns, files or MODEL@BATCH")
    parser.add_argument("--links", nargs="+", type=float, default=[12.0], help="GB/s; 12: as AutoSwap saw it")
    parser.add_argument("--devices", nargs="+", default=["a100"], help="whose times are estimated")
    parser.add_argument("--recompute", action="store_true", help="swap and recompute")
    parser.add_argument(
        "--chunked-loss", type=int, default=8, metavar="K", help="with --recompute: large losses in K chunks, too"
    )
    parser.add_argument("--state", action="store_true", help="with --recompute: optimizer state is swapped too")
    parser.add_argument("--time-limit", type=float, help="seconds per search (default: 2), or per plan (15)")
    parser.add_argument("--strict", action="store_true", help="ours behind AutoSwap, or behind a target, is a failure")
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    options = parser.parse_args()

    if options.recompute:
        chunks = f", {options.chunked_loss} chunks"
        figures = [f"{name} {100 * s:g}{how}" for s in TARGETS for how in ("", chunks) for name in RECOMPUTED]
        what = "Swapping of activations and optimizer state" if options.state else "Swapping"
        title = f"{what} and recomputation: fall of the peak on top of the best order, %"
    else:
        figures = [f"{name} 0" for name in (*SCORES, "ours")]
        figures += [f"{name} {100 * s:g}" for s in SLOWDOWNS[1:] for name in ("AutoSwap", "ours")]
        title = "AutoSwap and ours in program order: fall of the peak, %"
    report = Report(title, ["graph", "device", "GB/s", "step ms", "base MiB", *figures])
    wrong = []
    for name, graph in graphs(options.graphs):
        for device in options.devices:
            for speed in options.links:
                link, start = PCIE3 if speed == 12.0 else Link.of(speed * 1e9), time.perf_counter()
                try:
                    if options.recompute:
                        limit = options.time_limit or 15.0
                        cells = with_recomputation(graph, device, link, limit, options.state, options.chunked_loss)
                    else:
                        cells, behind = beside_autoswap(graph, device, link, options.time_limit or 2.0)
                        wrong += [f"{name}, {device}, {speed:g} GB/s: {behind:.2f} points behind"] * (behind > 0.005)
                except olla.PlanError as error:
                    print(f"{name}: {error}", file=sys.stderr)
                    return 1
                report.rows.append([name, device, speed, *cells])
                shown = " ".join(f"{cell:.1f}" for cell in cells if isinstance(cell, float))
                print(f"{name} {device} {speed:g}: {shown}; {time.perf_counter() - start:.1f} s", file=sys.stderr)
    for device in options.devices:
        for speed in options.links:
            rows = [row[5:] for row in report.rows if row[1:3] == [device, speed]]
            means = [
                statistics.mean(v for v in column if isinstance(v, int | float)) for column in zip(*rows, strict=True)
            ]
            of = f"mean, {device}, {speed:g} GB/s"
            report.summary |= {f"{of}, {name}": mean for name, mean in zip(figures, means, strict=True)}
            for share, least in TARGETS.items() if options.recompute else ():
                if report.summary[f"{of}, + swap {100 * share:g}{chunks}"] < least:  # type: ignore[operator]
                    wrong.append(f"{of}: {least} % wanted within {share:.0%}")
    report.print()
    if options.markdown:
        report.save(options.markdown)
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong and options.strict else 0


if __name__ == "__main__":
    sys.exit(main())
