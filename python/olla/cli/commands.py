"""Implementation of the commands of `olla`."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from olla.base import files, human_bytes, parse_bytes, percent, plain, visible
from olla.base.files import CSV, JSON, naming, require_ending
from olla.base.packages import missing
from olla.errors import BudgetError, CaptureError, OllaError
from olla.report.interrupt import Interrupt
from olla.report.progress import ProgressLine

if TYPE_CHECKING:
    from rich.console import RenderableType

    from olla.graph import Graph
    from olla.layout import Layout
    from olla.plan import Plan

OK, NOTHING_FITS, BAD_INPUT = 0, 1, 2  # exit statuses
GRAPHS = (*JSON, ".onnx")
INTERRUPTED = 130  # as a shell reports the signal
_OPTIONS = (  # of `olla plan`, which are called as the arguments of `olla.plan`
    *("method", "time_limit", "seed", "alignment", "layout", "updates_may_move", "budget", "max_slowdown", "minimise"),
    *("device", "in_place", "recompute", "chunked_loss", "swap", "host_budget", "swap_state"),
)
_ASKED = ("budget", "max_slowdown", "minimise", "device", "swap", "host_budget", "method", "swap_state")


def fail(message: str) -> int:
    """Say what is wrong with the input, in one line."""
    with suppress(OSError):  # the status says it too
        print("olla: error:", visible(" ".join(message.split())), file=sys.stderr)
    return BAD_INPUT


def plan_graph(args: argparse.Namespace) -> int:
    """Run `olla plan`; return the exit status."""
    require_place(args.output, JSON)
    from olla.graph import profile_of
    from olla.plan import asked, table
    from olla.planner import plan

    options = options_of(args)
    try:
        options["device"] = profile_of(args.device)
        for option in ("budget", "host_budget"):
            if options[option] is not None:
                options[option] = parse_bytes(options[option], f"--{option.replace('_', '-')}")
        asked(**{option: options[option] for option in _ASKED})
    except (ValueError, BudgetError) as error:
        return fail(str(error))
    if args.chunked_loss and options["budget"] is args.max_slowdown is args.minimise is None:
        return fail("--chunked-loss is for a goal: give --budget, --max-slowdown or --minimise with it")
    require_format(args.graph, GRAPHS)
    with Interrupt() as interrupt:  # until the plan is saved and shown: Ctrl-C loses none that was found
        try:
            with ProgressLine(f"planning {args.graph}") as progress:
                graph = graph_at(args) if args.graph.endswith(".onnx") else args.graph
                result = plan(graph, **options, progress=interrupt.ends(progress))
        except BudgetError as error:  # an answer
            print("olla:", visible(" ".join(str(error).split())), file=sys.stderr)
            return interrupted("before a plan was found") if interrupt.seen else NOTHING_FITS
        if args.output:
            result.save(args.output)
        if args.json:
            print_json(_plan_summary(result))
        else:
            show(table.render(result, args.verbose), table.WIDTH)
    return interrupted("the plan is the best found so far") if interrupt.seen else OK


def graph_at(args: argparse.Namespace) -> Graph:
    """Read the graph of a command: an ONNX model by its name's ending, a graph file otherwise."""
    require_format(args.graph, GRAPHS)
    if not args.graph.endswith(".onnx"):
        from olla.graph import Graph

        return Graph.load(args.graph)
    from olla.integrations.onnx import from_onnx

    try:
        return from_onnx(args.graph, shapes=dict(args.shape), values=dict(args.value))
    except ValueError as error:
        raise CaptureError(f"{args.graph}: {error}") from error


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return what `olla plan` is asked for, as arguments of `olla.plan`."""
    return {name: getattr(args, name) for name in _OPTIONS}


def interrupted(what: str) -> int:
    print("olla: interrupted:", what, file=sys.stderr)
    return INTERRUPTED


def _goal_summary(plan: Plan) -> dict[str, Any]:
    if not plan.goal:
        return {}
    names = "base_peak_bytes base_seconds added_seconds added_seconds_lower_bound peak_lower_bound_bytes num_recomputed"
    figures = {name: getattr(plan, name) for name in (*names.split(), "num_in_place", "swapped_bytes", "host_bytes")}
    return {**figures, "num_chunked_losses": plan.chunked.num_losses if plan.chunked else 0, "goal": dict(plan.goal)}


def _plan_summary(plan: Plan) -> dict[str, Any]:
    names = (
        *("num_ops", "num_tensors", "method", "status", "message", "peak_bytes", "lower_bound_bytes", "gap"),
        *("program_peak_bytes", "saved_bytes", "resident_bytes", "arena_bytes", "load_bytes"),
        *("arena_lower_bound_bytes", "fragmentation", "alignment"),
    )
    return {
        "graph": plan.graph_name,
        **{name: getattr(plan, name) for name in names},
        "status": plan.status.value,
        "seconds": {"capture": 0.0, "order": 0.0, "layout": 0.0, **plan.seconds},
        **_goal_summary(plan),
    }


def check_plan(args: argparse.Namespace) -> int:
    """Run `olla check`; return the exit status."""
    from olla.check.check import check
    from olla.plan import Plan

    require_format(args.plan, JSON)
    with ProgressLine(f"checking {args.plan}"):
        graph, plan = graph_at(args), Plan.load(args.plan)
        try:
            check(graph, plan)
        except OllaError as error:
            if args.json:
                wrong = {"rule": error.rule, "ids": list(error.ids), "message": str(error)}
                print_json({"valid": False, "graph": graph.name, **wrong})
            raise type(error)(
                f"{args.plan} breaks rule {error.rule!r}: {error}", rule=error.rule, ids=error.ids
            ) from error
    if args.json:
        figures = {"peak_bytes": plan.peak_bytes, "arena_bytes": plan.arena_bytes}
        print_json({"valid": True, "graph": graph.name, **figures})
    else:
        peak, arena = human_bytes(plan.peak_bytes), human_bytes(plan.arena_bytes)
        print(f"ok: valid for {visible(graph.name or args.graph)}, peak {peak}, arena {arena}")
    return OK


def lay_out_buffers(args: argparse.Namespace) -> int:
    """Run `olla layout`; return the exit status."""
    require_place(args.output, CSV)
    require_format(args.buffers, CSV)
    from olla.layout import read_buffers, write_offsets
    from olla.layout.layout import layout

    start = time.perf_counter()
    with Interrupt() as interrupt, ProgressLine(f"laying out {args.buffers}") as progress:
        buffers = read_buffers(args.buffers)
        with naming(args.buffers):
            result = layout(
                buffers.lower,
                buffers.upper,
                buffers.size,
                alignment=args.alignment,
                fixed=buffers.fixed,
                preferred=buffers.preferred,
                capacity=args.capacity or None,
                num_threads=args.threads,
                time_limit=args.time_limit,
                seed=args.seed,
                progress=interrupt.ends(progress),
            )
    seconds = time.perf_counter() - start
    fits = _fits(result, args.capacity)
    if args.output and (fits or args.capacity is None):
        write_offsets(args.output, buffers, result.offsets)
    if args.json:
        status = {None: "unknown", False: "infeasible", True: result.status}[fits]
        summary = {
            "status": status if args.capacity is not None else result.status,
            "height_bytes": result.height_bytes,
            "load_bytes": result.load_bytes,
            "bound_bytes": result.bound_bytes,
            "num_buffers": len(result.offsets),
            "seconds": seconds,
            "capacity_bytes": args.capacity,
            "fits": fits,
        }
        print_json(summary)
    else:
        _print_layout(result, args.capacity, seconds)
    if interrupt.seen:
        return interrupted("the layout is the best found so far")
    return OK if fits or args.capacity is None else NOTHING_FITS


def _fits(layout: Layout, capacity: int | None) -> bool | None:
    """Whether a layout fits the capacity; None where that is not known, or not asked."""
    if capacity is None:
        return None
    if layout.height_bytes <= capacity:
        return True
    return False if layout.bound_bytes > capacity else None


def _print_layout(layout: Layout, capacity: int | None, seconds: float) -> None:
    height, load, fits = layout.height_bytes, layout.load_bytes, _fits(layout, capacity)
    print(f"{len(layout.offsets)} buffers: height {height} ({human_bytes(height)}), load {load} ({human_bytes(load)})")
    fragmentation = f"fragmentation {percent(layout.fragmentation)}"
    advice = "a longer --time-limit or another --seed may find"
    if fits:
        print(f"{fragmentation}, a layout that fits {capacity} bytes")
    elif fits is False:
        print(f"no layout fits {capacity} bytes: proved, none is below {layout.bound_bytes}")
    elif capacity is not None:
        print(f"none found within {seconds:.1f} s that fits {capacity} bytes; not proved: {advice} one")
    elif layout.status == "optimal":
        print(f"{fragmentation}, optimal: no layout is lower")
    else:
        print(f"{fragmentation}, feasible: a lower layout may exist; {advice} it")


def show_plan(args: argparse.Namespace) -> int:
    """Run `olla show`; return the exit status."""
    from olla.plan import Plan, table

    wanted = {"--html": (args.html, (".html", ".htm")), "--memory-viz": (args.memory_viz, (".pickle", ".pkl"))}
    for option, (path, endings) in wanted.items():
        if path is not None and args.graph is None:
            return fail(f"{option} needs the graph the plan was made for: add --graph GRAPH")
        require_place(path, endings)
    require_format(args.plan, JSON)
    plan = Plan.load(args.plan)
    if args.html is not None or args.memory_viz is not None:
        from olla.picture.memory_viz import memory_viz
        from olla.picture.plot import plot

        graph = graph_at(args)
        if args.html is not None:
            plot(graph, plan, args.html)
        if args.memory_viz is not None:
            memory_viz(graph, plan, args.memory_viz)
    if args.json:
        print_json(_plan_summary(plan))
    else:
        show(table.render(plan, args.verbose), table.WIDTH)
    return OK


def capture_step(args: argparse.Namespace) -> int:
    """Run `olla capture`; return the exit status."""
    require_place(args.output, JSON)
    from olla.graph import Graph

    with ProgressLine(f"capturing {args.source}"):
        made = call(function_of(args.source), args.source)
        if isinstance(made, tuple):
            if len(made) != 4:
                raise CaptureError(
                    f"{args.source} returned {len(made)} values, expected (model, batch, optimizer, loss)"
                )
            from olla.pytorch.capture.capture import capture

            model, batch, optimizer, loss = made
            made = capture(model, batch, optimizer=optimizer, loss=loss)
        graph = getattr(made, "graph", None)
        if not isinstance(graph, Graph):
            expected = "(model, batch, optimizer, loss) or a captured step"
            raise CaptureError(f"{args.source} returned a {type(made).__name__}, expected {expected}")
    graph.save(args.output)
    resident = human_bytes(graph.resident_bytes)
    figures = f"{graph.num_ops:,} ops, {graph.num_tensors:,} tensors, {resident} resident"
    print(visible(f"{args.output}: {graph.name}, {figures}"))
    return OK


def function_of(source: str) -> Callable[..., Any]:
    """Import MODULE of MODULE:FUNCTION, also from the working directory, and return FUNCTION."""
    module_name, colon, function_name = source.partition(":")
    if not colon or not module_name or not function_name:
        raise CaptureError(f"{source!r} names no function: write MODULE:FUNCTION, for example train:step")
    sys.path.insert(0, os.getcwd())
    function: Any = getattr(call(lambda: importlib.import_module(module_name), source), function_name, None)
    if not callable(function):
        raise CaptureError(f"module {module_name} has no function {function_name}")
    return cast(Callable[..., Any], function)


def call(function: Callable[[], Any], source: str) -> Any:
    """Call what belongs to MODULE:FUNCTION; whatever it raises ends as an error in one line."""
    try:
        return function()
    except (OllaError, BrokenPipeError, MemoryError):
        raise
    except ModuleNotFoundError as error:
        if error.name == "torch":
            raise CaptureError(f"{source}: {missing('torch', 'torch')}") from error
        module_name = source.partition(":")[0]
        raise CaptureError(f"{source}: {error}; install it, or run olla where {module_name} can be imported") from error
    except (Exception, SystemExit) as error:  # whatever the user's own code raises
        raise CaptureError(f"{source} failed with {type(error).__name__}: {error}") from error


def require_format(path: str, endings: Sequence[str]) -> None:
    """Refuse an input whose name says that it holds something else; one that is missing is named by who reads it."""
    if Path(path).is_file():
        with naming(path):
            require_ending(path, endings, OllaError)


def require_place(path: str | None, endings: Sequence[str]) -> None:
    """Refuse an output path that cannot work before the long work, not after it."""
    if path is None or files.stream_of(path) is not None:
        return
    with naming(path):
        require_ending(path, endings, OllaError)
    place = Path(os.path.realpath(path))  # a symbolic link stays, what it leads to is written
    if not place.parent.is_dir():
        raise OllaError(f"{path}: cannot be written: there is no folder {Path(path).parent}")
    if place.is_dir() or not files.may_write(place.parent):
        raise OllaError(f"{path}: cannot be written: it is a folder, or lies in one that cannot be written")
    if place.exists() and not files.may_write(place):
        raise OllaError(f"{path}: cannot be written: Permission denied")


def print_json(summary: dict[str, Any]) -> None:
    finite = {key: None if isinstance(value, float) and math.isinf(value) else value for key, value in summary.items()}
    print(json.dumps(finite, allow_nan=False))


def show(table: RenderableType, width: int) -> None:
    """Print a table: as rich draws it in a terminal, as plain text of a width elsewhere."""
    if not sys.stdout.isatty():
        print(plain(table, width=width))
        return
    from rich.console import Console

    Console().print(table)
