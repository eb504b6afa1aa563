"""Which searches of the layout carry weight: heights by all of them, by the greedy rules alone, and with each left out.

    python bench/layout/ablate_layout.py --markdown bench/results/layout/layout_ablation.md
    python bench/layout/ablate_layout.py --quick

Sets: captured training steps in planned and in program order, some rewritten for the least peak at 10 % more time, the
requests that steps under `olla.compile` make, public sets, and generated ones. Every run has one thread and an equal
share of processor time, so that other work on the machine makes it longer, not worse. A new search has to win its row
here before it moves in. Every layout is checked; exit status 1: one was wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla
from bench.layout.bench_layout import public_files
from bench.support.harness import Cell, Report, graph_files, graph_name
from olla.layout import ArenaBuffers, LayoutOptions, place
from tests.support.buffers import Problem, generate, load
from tests.support.generate import stack
from tests.support.overlap import highest_end, overlapping

GREEDY = ("keys", "births", "squeaky_wheel", "foresight")  # with enumeration, which always takes part
OTHERS = ("exact", "neighbourhood", "beam")
ALIGNMENT = 512
MAX_SLOWDOWN = 0.1  # of rewritten steps
REWRITTEN = ("alexnet_b32", "resnet18_b32", "mobilenetv2_b32", "gpt2_b1", "bert_base_b1", "transformer_b32")
RECORDED = ("gpt2-tiny:2", "bert_base-tiny:2", "resnet18:2", "mobilenet_v2:2", "vit_b16-tiny:2", "unet-tiny:1")
GENERATED = ("pipeline:1000:120", "pipeline:10000:120", "uneven:10000:4", "random:10000:4", "tight:1000:4")
_NO_LIMIT = 2**60


def step_sets(graphs: Iterable[tuple[str, olla.Graph]], rewritten: Sequence[str]) -> Iterator[Problem]:
    """Yield the buffers of training steps, in planned and in program order, and of those that are to be rewritten."""
    for name, graph in graphs:
        yield _of_order("planned order", name, graph, olla.plan(graph, layout=False).order)
        yield _of_order("program order", name, graph, np.arange(graph.num_ops, dtype=np.int32))
        if name in rewritten:
            plan = olla.plan(graph, max_slowdown=MAX_SLOWDOWN, layout=False)
            yield _of_order("rewritten", name, plan.graph, plan.order)


def _of_order(family: str, name: str, graph: olla.Graph, order: np.ndarray) -> Problem:
    buffers = ArenaBuffers(graph, graph.core, order, ALIGNMENT)
    return Problem(f"{name}, {family}", family, buffers.lower, buffers.upper, buffers.size)


def recorded_sets(cases: Iterable[str]) -> Iterator[Problem]:
    """Yield the requests that a step of a model makes, as `olla.compile` lays them out; a case is MODEL:BATCH."""
    for case in cases:
        from olla.pytorch.memory import arrange
        from tests.support.pytorch import models

        name, batch = case.split(":")
        example = models.build(name.removesuffix("-tiny"), int(batch), tiny="-tiny" in name, device="cpu")
        optimizer = models.optimizer("adam", example.model)
        step = olla.compile(example.model, optimizer=optimizer, loss=example.loss, arena=True, disk_cache=False)
        with mock.patch.object(arrange, "place", side_effect=place) as placed:
            for _ in range(3):
                step(example.batch)
        step.release()
        lower, upper, size = placed.call_args.args[:3]
        yield Problem(f"{case}, recorded", "recorded requests", lower, upper, size)


def generated_sets(kinds: Iterable[str]) -> Iterator[Problem]:
    """Yield generated sets: for every FAMILY:SIZE:COUNT so many of the seeds from 0 on."""
    for kind in kinds:
        family, size, count = kind.split(":")
        for seed in range(int(count)):
            made = generate(family, int(size), seed)
            yield dataclasses.replace(made, family=made.name.rpartition("_s")[0])


def gap(problem: Problem, seconds: float, left_out: Sequence[str]) -> float:
    """Lay out without some searches; return how far the height is above the load, in percent of it.

    Raises:
        SystemExit: two buffers that are alive together overlap.
    """
    switches = {f"use_{name}": False for name in left_out}
    options = LayoutOptions(max_placements=_NO_LIMIT, max_nodes=_NO_LIMIT, **switches)
    end = time.process_time() + seconds
    columns = problem.lower, problem.upper, problem.size
    found = place(*columns, options, float("inf"), lambda *_: time.process_time() < end)
    if (clash := overlapping(*columns, found.offsets)) >= 0 or found.offsets.min(initial=0) < 0:
        raise SystemExit(f"{problem.name}, without {left_out}: buffer {clash} overlaps one below it")
    return 100 * (highest_end(*columns, found.offsets) / max(1, problem.load_bytes) - 1)


def weigh(problems: Iterable[Problem], seconds: float) -> tuple[Report, Report]:
    """Return two tables: all searches beside the greedy rules on every kind of set; each left out on hard sets."""
    gaps: dict[str, list[tuple[float, float]]] = {}
    hard: list[tuple[Problem, float]] = []
    for problem in problems:
        pair = gap(problem, seconds, ()), gap(problem, seconds, OTHERS)
        gaps.setdefault(problem.family, []).append(pair)
        if max(pair) > 0:
            hard.append((problem, pair[0]))
        print(f"{problem.name}: {pair[0]:.4f} %, greedy rules {pair[1]:.4f} %", file=sys.stderr, flush=True)
    kinds: list[list[Cell]] = []
    for family, pairs in gaps.items():
        row: list[Cell] = [family, len(pairs)]
        for side in zip(*pairs, strict=True):
            row += [sum(value == 0 for value in side), statistics.mean(side), max(side)]
        kinds.append(row)
    columns = ["sets", "number"]
    for name in ("all", "greedy"):
        columns += [f"{name}: at load", "mean gap %", "worst gap %"]
    notes: dict[str, Cell] = {"greedy": f"without {', '.join(OTHERS)}"}
    first = Report(
        f"Layout by all searches and by the greedy rules, {seconds:g} s of processor time", columns, kinds, notes
    )
    return first, leave_one_out(hard, seconds)


def leave_one_out(hard: list[tuple[Problem, float]], seconds: float) -> Report:
    """Leave each search out on the sets that not all, or not the greedy rules alone, bring to their load."""
    families = list(dict.fromkeys(problem.family for problem, _ in hard))
    rows: list[list[Cell]] = []
    for left_out in (None, *OTHERS, *GREEDY) if hard else ():
        gaps: dict[str, list[float]] = {family: [] for family in families}
        worse = better = 0
        for problem, with_all in hard:
            without = gap(problem, seconds, (left_out,)) if left_out else with_all
            gaps[problem.family].append(without)
            worse, better = worse + (without > with_all), better + (without < with_all)
        rows.append([left_out or "nothing", *map(statistics.mean, gaps.values()), worse, better])
        print(*rows[-1], file=sys.stderr, flush=True)
    columns = ["left out", *(f"{family}, mean gap %" for family in families), "worse on", "better on"]
    title = "Each search left out, on the sets above that end above their load by all searches or by the greedy rules"
    return Report(title, columns, rows, {"sets": ", ".join(problem.name for problem, _ in hard)})


def problems_of(options: argparse.Namespace) -> Iterator[Problem]:
    """Yield all sets that are asked for."""
    if options.quick:
        yield from step_sets([("step", stack(300))], ())
        yield from generated_sets(["pipeline:300:2", "tight:300:1"])
        return
    graphs = ((graph_name(path), olla.Graph.load(path)) for path in graph_files(options.graphs))
    yield from step_sets(graphs, options.rewritten)
    yield from recorded_sets(options.recorded)
    yield from map(load, public_files())
    yield from generated_sets(options.generated)


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--graphs", nargs="+", default=[], metavar="GRAPH", help="names or files; default: all captured"
    )
    parser.add_argument("--rewritten", nargs="*", default=REWRITTEN, metavar="GRAPH", help="names among them")
    parser.add_argument("--recorded", nargs="*", default=RECORDED, metavar="MODEL:BATCH")
    parser.add_argument("--generated", nargs="*", default=GENERATED, metavar="FAMILY:SIZE:COUNT")
    parser.add_argument("--seconds", type=float, default=2.0, help="of processor time for a layout; default 2")
    parser.add_argument("--quick", action="store_true", help="a generated step and a few small sets alone")
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    options = parser.parse_args()
    pages = weigh(problems_of(options), options.seconds)
    for page in pages:
        page.print()
    if options.markdown:
        options.markdown.write_text("\n".join(page.markdown() for page in pages))
    return 0


if __name__ == "__main__":
    sys.exit(main())
