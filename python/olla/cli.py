"""The `olla` command. Exit status: 0 done; 1 valid input, but nothing fits; 2 bad usage or input, said in one line."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from olla.errors import BudgetError, CaptureError, OllaError
from olla.methods import METHODS
from olla.report.progress import ProgressLine

if TYPE_CHECKING:
    from olla.layout import Layout
    from olla.plan import Plan

OK, NOTHING_FITS, BAD_INPUT, INTERRUPTED, READER_GONE = (
    0,
    1,
    2,
    130,
    141,
)  # the last two as a shell reports these signals


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: the arguments after the program's name; those of the process by default.

    Returns:
        The exit status.

    Raises:
        SystemExit: the arguments ask for help or the version (0), or are wrong (2).
    """
    for stream in (sys.stdout, sys.stderr):  # names may hold what the terminal's encoding does not
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's own flush at exit fails again
        return READER_GONE
    except OllaError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except MemoryError:
        return _fail("not enough memory for this input")
    except KeyboardInterrupt:
        _fail("interrupted")
        return INTERRUPTED


def _fail(message: str) -> int:
    print("olla: error:", " ".join(message.split()), file=sys.stderr)
    return BAD_INPUT


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line, without the usage."""
        self.exit(BAD_INPUT, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Look the version up only when it is asked for."""
        import olla

        print("olla", olla.__version__)
        parser.exit()


def _number(convert: Callable[[str], Any], least: float, most: float, expected: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = convert(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
        return value

    return parse


_seconds = _number(float, 0, 1e9, "a number of seconds from 0 to 1e9")
_alignment = _number(int, 1, 2**30, "a number of bytes from 1 to 2^30")
_seed = _number(int, 0, 2**31 - 1, "a whole number from 0 to 2^31 - 1")
_threads = _number(int, 1, 1024, "a number of threads from 1 to 1024")
_slowdown = _number(float, 0, 1e6, "a share of the step's time from 0 on, such as 0.1 for 10 %")
_chunks = _number(int, 1, 4096, "a number of chunks from 1 to 4096")
_capacity = _number(int, 0, 2**62, "a number of bytes from 0 to 2^62")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="olla", description="Plan the memory of PyTorch training steps.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    plan = commands.add_parser("plan", help="order and lay out a graph", description="Order and lay out a graph.")
    plan.add_argument("graph", metavar="GRAPH", help="graph file (.json or .json.gz)")
    plan.add_argument("-o", "--output", metavar="PLAN", help="write the plan there (.json or .json.gz)")
    _add_search_options(plan, time_limit=15.0, alignment=512)
    plan.add_argument("--order-only", action="store_true", help="lay out nothing")
    plan.add_argument("--method", choices=(*METHODS, "autoswap"), default="auto", help="how to plan (default: auto)")
    plan.add_argument("--updates-stay", action="store_true", help="keep weight updates at the end of the step")
    _add_verbose(plan)
    _add_budget_options(plan)
    plan.set_defaults(run=_plan)

    check = commands.add_parser(
        "check", help="check a plan against its graph", description="Check a plan against its graph."
    )
    check.add_argument("graph", metavar="GRAPH", help="graph file")
    check.add_argument("plan", metavar="PLAN", help="plan file")
    check.set_defaults(run=_check)

    layout = commands.add_parser(
        "layout", help="lay out buffers", description="Find offsets for buffers with given lifetimes."
    )
    layout.add_argument(
        "buffers", metavar="BUFFERS.csv", help="columns id,lower,upper,size, and if wanted fixed,preferred"
    )
    layout.add_argument("-o", "--output", metavar="OUT.csv", help="write the buffers there, with a column offset")
    layout.add_argument(
        "--capacity", type=_capacity, metavar="N", help="stop at a layout that fits; exit status 1 where none was found"
    )
    layout.add_argument("--threads", type=_threads, metavar="N", help="of the search (default: one per core, up to 8)")
    _add_search_options(layout, time_limit=15.0, alignment=1)
    layout.set_defaults(run=_layout)

    show = commands.add_parser("show", help="print a plan", description="Print a plan.")
    show.add_argument("plan", metavar="PLAN", help="plan file")
    _add_verbose(show)
    show.set_defaults(run=_show)

    capture = commands.add_parser(
        "capture",
        help="write the graph of a PyTorch training step",
        description="Write the graph of a PyTorch training step. FUNCTION() returns (model, batch, optimizer, loss), "
        "the arguments of olla.capture, or a captured step.",
    )
    capture.add_argument("source", metavar="MODULE:FUNCTION", help="for example train:step, for step() in train.py")
    capture.add_argument(
        "-o", "--output", metavar="GRAPH", required=True, help="write the graph there (.json or .json.gz)"
    )
    capture.set_defaults(run=_capture)
    return parser


def _add_budget_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "budget",
        "rewrite the graph as well: run ops again, let results take over inputs; exit status 1 if nothing fits",
    )
    goal = group.add_mutually_exclusive_group()
    goal.add_argument("--budget", metavar="BYTES", help="memory there is (16GB, 16GiB, bytes): least added time")
    goal.add_argument("--max-slowdown", type=_slowdown, metavar="X", help="share of added time (0.1): least peak")
    goal.add_argument("--minimise", choices=("peak",), help="least peak at whatever time")
    group.add_argument("--device", default="a100", metavar="NAME", help="what time is estimated for (default: a100)")
    group.add_argument("--no-in-place", action="store_true", help="let no result take over an input's storage")
    group.add_argument("--no-recompute", action="store_true", help="run no op again")
    group.add_argument(
        "--host-budget", metavar="BYTES", help="swap tensors to this much host memory (64GB, 64GiB, bytes)"
    )
    group.add_argument("--no-swap", action="store_true", help="swap nothing, whatever --host-budget says")
    group.add_argument(
        "--chunked-loss",
        type=_chunks,
        metavar="K",
        help="linear layers and their loss in K chunks of rows: other rounding",
    )


def _add_search_options(parser: argparse.ArgumentParser, *, time_limit: float, alignment: int) -> None:
    add = parser.add_argument
    add(
        "--time-limit", type=_seconds, default=time_limit, metavar="S", help=f"seconds in all (default: {time_limit:g})"
    )
    add("--align", type=_alignment, default=alignment, metavar="N", help=f"alignment in bytes (default: {alignment})")
    add("--seed", type=_seed, default=0, metavar="N", help="for random choices (default: 0)")
    add("--json", action="store_true", help="print one JSON object")


def _add_verbose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-v", "--verbose", action="store_true", help="print what the method says about its parts")


def _plan(args: argparse.Namespace) -> int:
    _require_place(args.output)
    from olla.budgets import Goal, Swapping, parse_bytes
    from olla.devices import profile_of
    from olla.plan import plan

    swap = False if args.no_swap else None
    try:
        device, budget = profile_of(args.device), None if args.budget is None else parse_bytes(args.budget, "--budget")
        host_budget = None if args.host_budget is None else parse_bytes(args.host_budget, "--host-budget")
        goal = Goal.of(budget, args.max_slowdown, args.minimise, device, True, True)
        Swapping.of(swap, host_budget, None, args.method, goal)
    except (ValueError, BudgetError) as error:
        return _fail(str(error))
    if args.chunked_loss and budget is args.max_slowdown is args.minimise is None:
        return _fail("--chunked-loss is for a goal: give --budget, --max-slowdown or --minimise with it")
    with ProgressLine(f"planning {args.graph}") as progress, _nothing_fits() as refused:
        result = plan(
            args.graph,
            method=args.method,
            time_limit=args.time_limit,
            seed=args.seed,
            alignment=args.align,
            layout=not args.order_only,
            updates_may_move=not args.updates_stay,
            budget=budget,
            max_slowdown=args.max_slowdown,
            minimise=args.minimise,
            device=device,
            in_place=not args.no_in_place,
            recompute=not args.no_recompute,
            swap=swap,
            host_budget=host_budget,
            chunked_loss=args.chunked_loss,
            progress=progress,
        )
    if refused:
        print("olla:", " ".join(str(refused[0]).split()), file=sys.stderr)
        return NOTHING_FITS
    if args.output:
        result.save(args.output)
    if args.json:
        _print_json(_plan_summary(result))
    else:
        _print_plan(result, args.verbose)
    return OK


@contextmanager
def _nothing_fits() -> Iterator[list[BudgetError]]:
    """Collect the error of a budget that nothing fits: it is an answer, once the progress line is gone."""
    refused: list[BudgetError] = []
    try:
        yield refused
    except BudgetError as error:
        refused.append(error)


def _budget_summary(plan: Plan) -> dict[str, Any]:
    goal = getattr(plan, "goal", None)  # of a BudgetPlan or a SwapPlan
    if goal is None:
        return {}
    names = "base_peak_bytes base_seconds added_seconds added_seconds_lower_bound peak_lower_bound_bytes num_recomputed"
    figures = {name: getattr(plan, name) for name in (*names.split(), "num_in_place")}
    swapped = {name: getattr(plan, name, 0) for name in ("swapped_bytes", "host_bytes")}
    chunked = getattr(plan, "chunked", None)
    figures["num_chunked_losses"] = 0 if chunked is None else chunked.num_losses
    return {**figures, **swapped, "goal": dict(goal)}


def _plan_summary(plan: Plan) -> dict[str, Any]:
    return {
        "graph": plan.graph_name,
        "num_ops": plan.num_ops,
        "num_tensors": plan.num_tensors,
        "method": plan.method,
        "status": plan.status.value,
        "message": plan.message,
        "peak_bytes": plan.peak_bytes,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "gap": plan.gap,
        "program_peak_bytes": plan.program_peak_bytes,
        "saved_bytes": plan.saved_bytes,
        "resident_bytes": plan.resident_bytes,
        "arena_bytes": plan.arena_bytes,
        "load_bytes": plan.load_bytes,
        "arena_lower_bound_bytes": plan.arena_lower_bound_bytes,
        "fragmentation": plan.fragmentation,
        "alignment": plan.alignment,
        "seconds": {"capture": 0.0, "order": 0.0, "layout": 0.0, **plan.seconds},
        **_budget_summary(plan),
    }


def _check(args: argparse.Namespace) -> int:
    from olla.check import check
    from olla.graph import Graph
    from olla.plan import Plan
    from olla.report.text import human_bytes

    with ProgressLine(f"checking {args.plan}"):
        graph, plan = Graph.load(args.graph), Plan.load(args.plan)
        try:
            check(graph, plan)
        except OllaError as error:
            raise type(error)(
                f"{args.plan} breaks rule {error.rule!r}: {error}", rule=error.rule, ids=error.ids
            ) from error
    peak, arena = human_bytes(plan.peak_bytes), human_bytes(plan.arena_bytes)
    print(f"ok: valid for {graph.name or args.graph}, peak {peak}, arena {arena}")
    return OK


def _layout(args: argparse.Namespace) -> int:
    _require_place(args.output)
    from olla.layout import layout, read_buffers, write_offsets

    start = time.perf_counter()
    with ProgressLine(f"laying out {args.buffers}") as progress:
        buffers = read_buffers(args.buffers)
        result = layout(
            buffers.lower,
            buffers.upper,
            buffers.size,
            alignment=args.align,
            fixed=buffers.fixed,
            preferred=buffers.preferred,
            capacity=args.capacity or None,
            num_threads=args.threads,
            time_limit=args.time_limit,
            seed=args.seed,
            progress=progress,
        )
    seconds = time.perf_counter() - start
    fits = _fits(result, args.capacity)
    if args.output and (fits or args.capacity is None):
        write_offsets(args.output, buffers, result.offsets)
    if args.json:
        status = {None: "unknown", False: "infeasible", True: result.status}[fits]
        summary = {
            "status": status if args.capacity is not None else result.status,
            "height": result.height_bytes,
            "load": result.load_bytes,
            "bound": result.bound_bytes,
            "num_buffers": len(result.offsets),
            "seconds": seconds,
            "capacity": args.capacity,
            "fits": fits,
        }
        _print_json(summary)
    else:
        _print_layout(result, args.capacity, seconds)
    return OK if fits or args.capacity is None else NOTHING_FITS


def _fits(layout: Layout, capacity: int | None) -> bool | None:
    """Whether a layout fits the capacity; None where that is not known, or not asked."""
    if capacity is None:
        return None
    if layout.height_bytes <= capacity:
        return True
    return False if layout.bound_bytes > capacity else None


def _print_layout(layout: Layout, capacity: int | None, seconds: float) -> None:
    from olla.report.text import human_bytes, percent

    height, load, fits = layout.height_bytes, layout.load_bytes, _fits(layout, capacity)
    print(f"{len(layout.offsets)} buffers: height {height} ({human_bytes(height)}), load {load} ({human_bytes(load)})")
    words = f"fragmentation {percent(layout.fragmentation)}, "
    if fits:
        words += f"a layout that fits {capacity} bytes"
    elif fits is False:
        words = f"no layout fits {capacity} bytes: proved, none is below {layout.bound_bytes}"
    elif capacity is not None:
        advice = "a longer --time-limit or another --seed may find one"
        words = f"none found within {seconds:.1f} s that fits {capacity} bytes; not proved: {advice}"
    else:
        words += _LAYOUT_MESSAGES[layout.status]
    print(words)


_LAYOUT_MESSAGES = {
    "optimal": "optimal: no layout is lower",
    "feasible": "feasible: a lower layout may exist; a longer --time-limit or another --seed may find it",
}


def _show(args: argparse.Namespace) -> int:
    from olla.plan import Plan

    _print_plan(Plan.load(args.plan), args.verbose)
    return OK


def _capture(args: argparse.Namespace) -> int:
    _require_place(args.output)
    from olla.graph import Graph
    from olla.report.text import human_bytes

    with ProgressLine(f"capturing {args.source}"):
        made = _call(args.source)
        if isinstance(made, tuple):
            if len(made) != 4:
                raise CaptureError(
                    f"{args.source} returned {len(made)} values, expected (model, batch, optimizer, loss)"
                )
            from olla.pytorch.capture import capture

            model, batch, optimizer, loss = made
            made = capture(model, batch, optimizer=optimizer, loss=loss)
        graph = getattr(made, "graph", None)
        if not isinstance(graph, Graph):
            expected = "(model, batch, optimizer, loss) or a captured step"
            raise CaptureError(f"{args.source} returned a {type(made).__name__}, expected {expected}")
    graph.save(args.output)
    resident = human_bytes(graph.resident_bytes)
    print(f"{args.output}: {graph.name}, {graph.num_ops:,} ops, {graph.num_tensors:,} tensors, {resident} resident")
    return OK


def _call(source: str) -> Any:
    """Import MODULE, also from the working directory, and call FUNCTION."""
    module_name, colon, function_name = source.partition(":")
    if not colon or not module_name or not function_name:
        raise CaptureError(f"{source!r} names no function: write MODULE:FUNCTION, for example train:step")
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name, None)
        if not callable(function):
            raise CaptureError(f"module {module_name} has no function {function_name}")
        return function()
    except (OllaError, BrokenPipeError, MemoryError):
        raise
    except ModuleNotFoundError as error:
        raise CaptureError(f"{source}: {error}; install it, or run olla where {module_name} can be imported") from error
    except Exception as error:  # whatever the user's own code raises
        raise CaptureError(f"{source} failed with {type(error).__name__}: {error}") from error


def _require_place(path: str | None) -> None:
    """Refuse an output path that cannot work before the long work, not after it."""
    if path is None:
        return
    folder = Path(path).parent
    if not folder.is_dir():
        raise OllaError(f"{path}: cannot be written: there is no folder {folder}")
    if Path(path).is_dir() or not os.access(folder, os.W_OK):
        raise OllaError(f"{path}: cannot be written: it is a folder, or lies in one that cannot be written")


def _print_json(summary: dict[str, Any]) -> None:
    finite = {key: None if isinstance(value, float) and math.isinf(value) else value for key, value in summary.items()}
    print(json.dumps(finite, allow_nan=False))


def _print_plan(plan: Plan, verbose: bool) -> None:
    from olla.report.text import render, text

    if not sys.stdout.isatty():
        print(text(plan, verbose))
        return
    from rich.console import Console

    Console().print(render(plan, verbose))
