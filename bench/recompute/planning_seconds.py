"""Planning times under a budget over every captured graph; see bench_budget.py."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import olla
from bench.support.harness import Cell, Report, graph_files, graph_name

_SLOWDOWN = 0.1
_MOST_MEDIAN_SECONDS = 2.0
_MOST_SECONDS = {"gpt2xl_b4": 15.0}


def run(device: str, time_limit: float, strict: bool, outs: list[Path]) -> int:
    """Plan every graph within 10 % added time; return the exit status."""
    columns = ["graph", "ops", "wall seconds", "CPU seconds", "reduction, %", "at most, %"]
    rows: list[list[Cell]] = []
    seconds: dict[str, float] = {}
    for path in graph_files():
        graph, name = olla.Graph.load(path), graph_name(path)
        wall, cpu = time.perf_counter(), time.process_time()
        plan = olla.plan(graph, max_slowdown=_SLOWDOWN, device=device, time_limit=time_limit)
        cpu, seconds[name] = time.process_time() - cpu, time.perf_counter() - wall
        reduction, most = (
            100 * (1 - peak / plan.base_peak_bytes) for peak in (plan.peak_bytes, plan.peak_lower_bound_bytes)
        )
        rows.append([name, graph.num_ops, seconds[name], cpu, round(reduction, 2), round(most, 2)])
        print(f"{name}: {seconds[name]:.2f} s, CPU {cpu:.2f} s", file=sys.stderr)
    median = statistics.median(seconds.values())
    cpus = [float(str(row[3])) for row in rows]
    summary: dict[str, Cell] = {
        "device": device,
        "graphs": len(rows),
        "median wall seconds": median,
        "median CPU seconds": statistics.median(cpus),
        "most wall seconds": max(seconds.values()),
    }
    page = Report(f"Budget: planning times within {_SLOWDOWN:.0%} added time", columns, rows, summary)
    page.print()
    for out in outs:
        page.save(out)
    late = [f"{name}: {seconds[name]:.1f} s" for name, most in _MOST_SECONDS.items() if seconds.get(name, 0) > most]
    if median > _MOST_MEDIAN_SECONDS:
        late.append(f"median {median:.2f} s, at most {_MOST_MEDIAN_SECONDS} s expected")
    print("\n".join(late), file=sys.stderr)
    return 1 if strict and late else 0
