"""Swap to host memory, simulated: AutoSwap by its four scores beside ours, and ours on top of recomputation.

    python bench/bench_swap.py --graphs 'vgg11_b32' 'resnet*_b32' --device gtx1080ti --links 12

Figures are the fall of the peak in %, resident memory included, without stalls (0) and within 5 % of the step's
estimated time (5). Every graph that swaps passes the check of `olla.contract` and has the peak that the simulation
says. Exit status: 0; 1 a graph broke a rule, or, with --strict, ours was behind AutoSwap.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import olla
from bench_budget import GRAPHS
from harness import Cell, Report, graph_files, graph_name
from olla import _core
from olla.autoswap import SCORES, AutoSwap
from olla.contract import check_swaps
from olla.devices import DeviceProfile, profile_of
from olla.operators import rules
from olla.swap import PCIE3, Link, Swaps, plan_swaps, swapped_graph

SLOWDOWNS = (0.0, 0.05)
RECOMPUTED = (0.05, 0.10)


class Case:
    """One graph in one order on one device."""

    def __init__(self, path: Path, device: DeviceProfile, program_order: bool, time_limit: float) -> None:
        self.graph = olla.Graph.load(path)
        self.name, self.device, self.time_limit = graph_name(path), device, time_limit
        self.seconds = device.op_seconds(self.graph)
        method = "program" if program_order else "auto"
        plan = olla.plan(self.graph, method=method, time_limit=time_limit, layout=False)
        self.order, self.peak_bytes = plan.order, plan.peak_bytes

    def fall(self, peak_bytes: int) -> float:
        return 100 * (1 - peak_bytes / self.peak_bytes)

    def swaps_alone(self, link: Link) -> tuple[list[Cell], float]:
        """Return the falls by every score and by ours at each slowdown; how far ours is behind the best of them."""
        method = AutoSwap(self.graph, self.order, self.seconds, link)
        cells: list[Cell] = []
        behind = 0.0
        for slowdown in SLOWDOWNS:
            theirs = [self.fall(method.least_peak(score, slowdown).peak_bytes) for score in SCORES]
            ours = plan_swaps(
                self.graph, self.order, self.seconds, link, max_slowdown=slowdown, time_limit=self.time_limit
            )
            check(self.graph, self.order, ours)
            cells += [*theirs, self.fall(ours.peak_bytes)]
            behind = max(behind, max(theirs) - self.fall(ours.peak_bytes))
        return cells, behind

    def swaps_and_recomputation(self, link: Link) -> list[Cell]:
        """Return the falls by recomputation alone and with swaps on top, at each added time."""
        cells: list[Cell] = []
        may = rules(self.graph, self.device)
        for slowdown in RECOMPUTED:
            plan = olla.plan(
                self.graph, max_slowdown=slowdown, device=self.device, time_limit=2 * self.time_limit, layout=False
            )
            assert isinstance(plan, olla.BudgetPlan)
            seconds = np.where(plan.rerun != 0, may.rerun_seconds[plan.origin], self.seconds[plan.origin])
            left = max(0.0, slowdown - plan.slowdown) * plan.base_seconds / seconds.sum()
            limit = self.time_limit
            swaps = plan_swaps(plan.graph, plan.order, seconds, link, max_slowdown=left, time_limit=limit)
            check(plan.graph, plan.order, swaps)
            cells += [self.fall(plan.peak_bytes), self.fall(swaps.peak_bytes)]
        return cells


def check(graph: olla.Graph, order: NDArray[np.int32], swaps: Swaps) -> None:
    """Raise PlanError unless the graph that swaps computes the same and has the simulated peak."""
    swapped, origin = swapped_graph(graph, order, swaps)
    check_swaps(graph, swapped, origin)
    peak = _core.profile(swapped.core, np.arange(swapped.num_ops, dtype=np.int32))[3]
    if peak != swaps.peak_bytes:
        raise olla.PlanError(
            f"the simulation says {swaps.peak_bytes} bytes, the graph needs {peak}", rule="peak", ids=()
        )


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=GRAPHS, help="names, patterns or files; default: the twelve")
    parser.add_argument(
        "--links", nargs="+", type=float, default=[12.0, 25.0, 55.0], help="GB/s; 12: as AutoSwap saw it"
    )
    parser.add_argument("--device", default="a100", help="whose times are estimated")
    parser.add_argument("--program-order", action="store_true", help="swap in the program order, not in the best one")
    parser.add_argument("--recompute", action="store_true", help="swap on top of recomputation instead of alone")
    parser.add_argument("--time-limit", type=float, default=2.0, help="seconds per search")
    parser.add_argument("--strict", action="store_true", help="ours behind AutoSwap is a failure")
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    options = parser.parse_args()

    if options.recompute:
        figures = [f"{what} {100 * s:g}" for s in RECOMPUTED for what in ("recompute", "+ swap")]
    else:
        figures = [f"{name} {100 * s:g}" for s in SLOWDOWNS for name in (*SCORES, "ours")]
    report = Report(f"Swapping on {options.device}: fall of the peak, %", ["graph", "GB/s", "base MiB", *figures])
    wrong = []
    for path in graph_files(options.graphs):
        case = Case(path, profile_of(options.device), options.program_order, options.time_limit)
        for speed in options.links:
            link, start = PCIE3 if speed == 12.0 else Link.of(speed * 1e9), time.perf_counter()
            try:
                if options.recompute:
                    cells = case.swaps_and_recomputation(link)
                else:
                    cells, behind = case.swaps_alone(link)
                    wrong += [f"{case.name} at {speed:g} GB/s: {behind:.2f} points behind"] if behind > 0.005 else []
            except olla.PlanError as error:
                print(f"{case.name}: {error}", file=sys.stderr)
                return 1
            report.rows.append([case.name, speed, case.peak_bytes >> 20, *cells])
            shown = " ".join(f"{cell:.1f}" for cell in cells if isinstance(cell, float))
            print(f"{case.name} {speed:g}: {shown}; {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    for speed in options.links:
        for i, name in enumerate(figures, start=3):
            values = [row[i] for row in report.rows if row[1] == speed]
            report.summary[f"mean at {speed:g} GB/s, {name}"] = statistics.mean(
                v for v in values if isinstance(v, float)
            )
    report.print()
    if options.markdown:
        report.save(options.markdown)
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong and options.strict else 0


if __name__ == "__main__":
    sys.exit(main())
