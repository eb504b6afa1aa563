"""Ours against the rivals of a budget, at the added time that each of their points costs; see bench_budget.py."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import numpy as np

import olla
from bench.recompute import recompute_rivals
from bench.recompute.recompute_rivals import Point
from bench.support.harness import Cell, Report, graph_name
from olla import _core
from olla.graph import profile_of

_SHARES = (0.02, 0.05, 0.1, 0.2, 0.33, math.inf)  # of added time, for which a rival's best point is shown
_FLOOR = 1.1  # a least peak is to come this close to resident memory and the largest op


class Ours:
    """Our least peaks by added time: the curve of one greedy run, and a plan of its own where that is above a rival."""

    def __init__(self, graph: olla.Graph, device: str, time_limit: float) -> None:
        self.graph, self.device, self.time_limit = graph, device, time_limit
        start = time.perf_counter()
        self.curve = olla.pareto(graph, device=device, time_limit=time_limit)
        self.seconds = time.perf_counter() - start

    def peak_bytes(self, added_seconds: float, rival_bytes: int) -> int:
        """Return our peak within an added time."""
        within = self.curve.added_seconds <= added_seconds
        peak = int(self.curve.peak_bytes[within].min(initial=2**62))
        if peak <= rival_bytes:
            return peak
        start = time.perf_counter()
        share = added_seconds / self.curve.base_seconds
        plan = olla.plan(self.graph, max_slowdown=share, device=self.device, time_limit=self.time_limit, layout=False)
        self.seconds = max(self.seconds, time.perf_counter() - start)
        return min(peak, int(plan.peak_bytes))


def frontier(points: list[Point]) -> list[Point]:
    """Return the points that no other beats in both peak and added time, by added time."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.added_seconds, p.peak_bytes)):
        if not best or point.peak_bytes < best[-1].peak_bytes:
            best.append(point)
    return best


def shown(points: list[Point], base_seconds: float) -> list[Point]:
    """Return a rival's best point within each share of added time, without repetition."""
    chosen = [
        min(within, key=lambda p: (p.peak_bytes, p.added_seconds))
        for share in _SHARES
        if (within := [p for p in points if p.added_seconds <= share * base_seconds])
    ]
    return list(dict.fromkeys(chosen))


def floor_bytes(graph: olla.Graph) -> int:
    """Return resident memory and the largest working set of one op: no plan of the op list can go below."""
    resident = np.array([kind != "temporary" for kind in graph.tensor_kinds], dtype=np.bool_) & ~graph.donated
    size = np.where(resident, 0, graph.tensor_bytes)
    largest = 0
    for v in range(graph.num_ops):
        used = np.unique(np.concatenate((graph.reads.of(v), graph.writes.of(v), graph.mutates.of(v))))
        largest = max(largest, int(size[used].sum() + graph.workspace_bytes[v]))
    return int(graph.resident_bytes) + largest


def run(paths: list[Path], device: str, time_limit: float, outs: list[Path]) -> int:
    """Compare on graph files, save the report after every graph, and return the exit status."""
    columns = ["graph", "rival", "setting", "reduction, %", "added time, %", "sweep, s"]
    columns += ["our reduction, %", "our seconds", "our peak is lower by, %"]
    rows: list[list[Cell]] = []
    beaten: list[str] = []
    floors: list[float] = []
    num_points = 0
    for path in paths:
        graph, name = olla.Graph.load(path), graph_name(path)
        order = recompute_rivals.base_order(graph)
        base_bytes = _core.profile(graph.core, order).peak_bytes
        base_seconds = float(profile_of(device).op_seconds(graph).sum())
        ours = Ours(graph, device, time_limit)
        for points in (
            recompute_rivals.checkpoint(graph, order, device),
            recompute_rivals.min_cut(graph, order, device),
        ):
            table = shown(points, base_seconds) if points[0].rival == "checkpoint" else points
            for p in dict.fromkeys([*frontier(points), *table]):
                num_points += 1
                peak = ours.peak_bytes(p.added_seconds, p.peak_bytes)
                share = 100 * p.added_seconds / base_seconds
                if peak > p.peak_bytes:
                    beaten.append(
                        f"{name}: {p.rival} {p.setting} has {p.peak_bytes} bytes, ours {peak}, at {share:.2f} %"
                    )
                if p in table:
                    reduction, our = 100 * (1 - p.peak_bytes / base_bytes), 100 * (1 - peak / base_bytes)
                    row: list[Cell] = [
                        name,
                        p.rival,
                        p.setting,
                        round(reduction, 2),
                        round(share, 2),
                        round(p.seconds, 2),
                    ]
                    rows.append(
                        [*row, round(our, 2), round(ours.seconds, 2), round(100 * (1 - peak / p.peak_bytes), 2)]
                    )
        least = olla.plan(graph, minimise="peak", device=device, time_limit=time_limit, layout=False)
        floors.append(least.peak_bytes / floor_bytes(graph))
        row = [name, "none: our least peak", f"{floors[-1]:.3f} x (resident + largest op)", None, None, None]
        rows.append([*row, round(100 * (1 - least.peak_bytes / base_bytes), 2), round(least.seconds["total"], 2), None])
        print(f"{name}: {len(beaten)} of {num_points} points beat ours so far", *beaten, sep="\n  ", file=sys.stderr)
        summary: dict[str, Cell] = {
            "device": device,
            "graphs": len(floors),
            "points of rivals, on their frontiers or shown": num_points,
            "points below ours": len(beaten),
            "least peaks within 10 % of resident + largest op": sum(f <= _FLOOR for f in floors),
        }
        page = Report("Budget: our peak at the added time of every rival", columns, rows, summary)
        for out in outs:
            page.save(out)
    page.print()
    print("\n".join(beaten), file=sys.stderr)
    return 1 if beaten else 0
