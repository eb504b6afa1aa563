"""Implementation of `olla plan`, for one graph or many."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from olla.cli.commands import BAD_INPUT, NOTHING_FITS, OK, fail, interrupted, options_of, plan_graph, show
from olla.errors import BudgetError
from olla.report.progress import ProgressLine

if TYPE_CHECKING:
    from olla.scale import Result

_GOALS = ("budget", "max_slowdown")  # of which there may be several


def plan_graphs(args: argparse.Namespace) -> int:
    """Run `olla plan`; return the exit status."""
    slowdowns = args.max_slowdown or [None]
    if args.output_folder is not None:
        return _plan_many(args, slowdowns)
    if args.part != (0, 1):
        return fail("--part is for many graphs: say with --output-folder where their plans go")
    for option, number in (("graphs", len(args.graphs)), ("values of --max-slowdown", len(slowdowns))):
        if number > 1:
            return fail(f"{number} {option} are given: say with --output-folder where their plans go")
    args.graph, args.max_slowdown = args.graphs[0], slowdowns[0]
    return plan_graph(args)


def _plan_many(args: argparse.Namespace, slowdowns: Sequence[float | None]) -> int:
    from olla.scale import graphs_of, plan_files
    from olla.scale.result import WIDTH, render
    from olla.scale.task import DEFAULTS

    if args.output:
        return fail("-o is for one plan: with --output-folder leave it out")
    if args.shape or args.value or any(graph.endswith(".onnx") for graph in args.graphs):
        return fail("an ONNX model is planned by itself: leave out --output-folder")
    goals: list[dict[str, Any]] = [{"max_slowdown": share} for share in slowdowns if share is not None]
    goals += [{"budget": budget} for budget in (args.budget or "").split(",") if budget]
    given = {name: value for name, value in options_of(args).items() if name not in _GOALS and value != DEFAULTS[name]}
    options = [{**given, **goal} for goal in goals or [{}]]
    results: list[Result] = []
    total, is_interrupted = 0, False
    try:
        graphs = graphs_of(args.graphs)
        first, step = args.part
        total = len(range(len(graphs) * len(options))[first::step])
        with ProgressLine(f"planning {total} plans") as progress:
            for result in plan_files(graphs, args.output_folder, options, jobs=args.jobs, part=args.part):
                results.append(result)
                if args.json:
                    print(json.dumps(result.to_dict(), allow_nan=False), flush=True)
                progress(f"{len(results)} done,", sum(r.seconds for r in results), 0, 0)
    except KeyboardInterrupt:
        is_interrupted = True
    except (ValueError, BudgetError) as error:
        return fail(str(error))
    if not args.json:
        show(render(sorted(results, key=lambda result: result.graph)), WIDTH)
    if is_interrupted or any(result.status == "interrupted" for result in results):
        return interrupted(f"{len(results)} of {total} done and kept; the same command goes on from there")
    failed, unfit = (any(result.status == status for result in results) for status in ("failed", "nothing fits"))
    return BAD_INPUT if failed else NOTHING_FITS if unfit else OK
