"""Order trees, series-parallel graphs, and steps of very many parallel branches: peak, bound and processor time.

    python bench/order/bench_trees.py --markdown bench/results/order/trees.md

Sizes of tensors are random; in half of the graphs one tensor serves all readers of an op. With torch, a step of a model
of 400 embedding tables is captured as well. Every plan is checked by ``olla.check``.

Exit status: 1 if a plan broke a rule.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla
from bench.support.harness import Cell, Report
from tests.support.generate import stack
from tests.support.order.trees import SHAPES, tables, tensors_along

COLUMNS = ["graph", "one tensor for all readers", "what is unread lasts", "ops", "best of Inductor's four orders"]
COLUMNS += ["peak", "bound", "gap %", "proved", "processor seconds"]
FEW_OPS = 2_000  # of graphs that are not series-parallel: these are searched up to the limit of time


def graphs(sizes: list[int], num_tables: list[int]) -> Iterator[tuple[str, bool, bool, olla.Graph]]:
    """Yield name, whether readers share tensors, whether unread tensors last, and the graph."""
    for shape in SHAPES:
        for num_ops in sizes:
            for shared in (False, True):
                if shape == "wired" and num_ops > FEW_OPS:
                    continue
                for outputs in (False, True):
                    graph = tensors_along(
                        shape, num_ops, seed=num_ops, shared=shared, workspaces=True, outputs=outputs, max_bytes=1 << 20
                    )
                    yield shape.replace("_", " "), shared, outputs, graph
    for num in num_tables:
        yield f"{num} tables", True, True, tables(num)
    if importlib.util.find_spec("torch"):
        from tests.support.order.many_tables import captured_step

        for optimizer in ("sgd", "adam"):
            yield f"captured, 400 tables, {optimizer}", True, True, captured_step(400, optimizer)


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=[1_000, 5_000, 20_000], metavar="OPS")
    parser.add_argument("--tables", nargs="+", type=int, default=[400, 1_000, 4_000], metavar="NUM")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds per graph; default 10")
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    options = parser.parse_args()

    olla.plan(stack(300))  # compiles or loads the warm starts' kernels
    page = Report("Trees, series-parallel graphs and wide steps, bytes", COLUMNS, [], {})
    num_proved = num_broken = 0
    for name, shared, outputs, graph in graphs(options.sizes, options.tables):
        rival = olla.plan(graph, method="inductor", layout=False, time_limit=options.time_limit)
        start = time.process_time()
        plan = olla.plan(graph, layout=False, time_limit=options.time_limit)
        seconds = time.process_time() - start
        try:
            olla.check(graph, plan)
        except olla.PlanError as error:
            num_broken += 1
            print(f"{name}: {error}", file=sys.stderr)
        proved = plan.peak_bytes == plan.lower_bound_bytes
        num_proved += proved
        row: list[Cell] = [name, shared, outputs, graph.num_ops, rival.peak_bytes, plan.peak_bytes]
        page.rows.append([*row, plan.lower_bound_bytes, 100 * plan.gap, proved, seconds])
        print(f"{name} {graph.num_ops}: {seconds:.2f} s, gap {100 * plan.gap:.3f} %", file=sys.stderr, flush=True)
    page.summary.update(
        {"graphs": len(page.rows), "proved optimal": num_proved, "plans the checker refused": num_broken}
    )
    page.print()
    if options.markdown:
        page.save(options.markdown)
    return 1 if num_broken else 0


if __name__ == "__main__":
    sys.exit(main())
