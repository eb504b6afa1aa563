"""The `olla` command.

Exit status: 0 done; 1 valid input, but nothing fits, or `olla doctor` found something missing; 2 bad usage or input,
said in one line; 130 interrupted, what is printed and written is the best found so far.
"""

from __future__ import annotations

import argparse
import errno
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from typing import Any, NoReturn

from olla.base import files, human_bytes, parse_bytes, visible
from olla.cli import commands, fit, many
from olla.cli.commands import INTERRUPTED, OK, fail
from olla.cli.doctor import doctor as run_doctor
from olla.errors import BudgetError, OllaError
from olla.plan import METHODS

READER_GONE = 141  # as a shell reports the signal
_FILES = ("GRAPH", "PLAN", "FILE", "FIT", "BUFFERS.csv", "OUT.csv")  # what files are called in the help


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: the arguments after the program's name; those of the process by default.

    Returns:
        The exit status.

    Raises:
        SystemExit: the arguments ask for help or the version (0), or are wrong (2).
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller: what is printed goes nowhere, the status is the answer
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    for stream in (sys.stdout, sys.stderr):  # names may hold what the terminal's encoding does not
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    args = make_parser().parse_args(argv)
    if files.stream_of(getattr(args, "output", None) or "") == 1:  # standard output is the file: words go elsewhere
        with redirect_stdout(sys.stderr):
            return _run(args)
    return _run(args)


def _run(args: argparse.Namespace) -> int:
    """Run a command; return its exit status, whatever it raises."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            status: int = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        _silence_stdout()
        return READER_GONE
    except OllaError as error:
        return fail(str(error))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "olla":
            raise
        return fail(str(error))
    except OSError as error:
        where = error.filename or "standard output"
        if error.errno == errno.ENOSPC:
            _silence_stdout()  # which it is, unless the error names a file
            return fail(f"{where}: cannot be written: the disk is full; free some space, or write elsewhere")
        return fail(f"{where}: {error.strerror or error}")
    except MemoryError:
        return fail("not enough memory for this input")
    except KeyboardInterrupt:
        fail("interrupted")
        return INTERRUPTED


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning in one line, without the place in the code that it was given at."""
    with suppress(OSError):
        print("olla: warning:", visible(" ".join(str(message).split())), file=sys.stderr)


def _silence_stdout() -> None:
    """Drop what could not be written: Python's own flush at exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line, without the usage."""
        self.exit(fail(f"{message} (see {self.prog} --help)"))


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


def _list(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [parse(item) for item in text.split(",")]


def _part(text: str) -> tuple[int, int]:
    first, _, step = text.partition("/")
    if not (first.isdecimal() and step.isdecimal() and int(first) < int(step)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not I/N, such as 0/8 for the first of 8 parts, or 7/8 for the last"
        )
    return int(first), int(step)


def _named(read: Callable[[str], Any], expected: str) -> Callable[[str], tuple[str, tuple[Any, ...]]]:
    def parse(text: str) -> tuple[str, tuple[Any, ...]]:
        name, _, numbers = text.rpartition("=")
        try:
            if name:
                return name, tuple(map(read, numbers.split(",")))
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")

    return parse


def _int_or_float(text: str) -> int | float:
    return float(text) if {".", "e", "E"} & set(text) else int(text)


def _bytes(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = 0 if text == "0" else parse_bytes(text)
        except BudgetError:
            value = -1
        if not least <= value <= most:
            expected = f"a size from {least} to {human_bytes(most)}, such as 512, 4KiB or 16MB"
            raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
        return value

    return parse


def _input(text: str) -> str:
    return "/dev/stdin" if text == "-" else text


def _output(text: str) -> str:
    return "/dev/stdout" if text == "-" else text


_seconds = _number(float, 0, 1e9, "a number of seconds from 0 to 1e9")
_alignment = _bytes(1, 2**30)
_seed = _number(int, 0, 2**31 - 1, "a whole number from 0 to 2^31 - 1")
_threads = _number(int, 1, 1024, "a number of threads from 1 to 1024")
_slowdown = _number(float, 0, 1e6, "a share of the step's time from 0 on, such as 0.1 for 10 %")
_chunks = _number(int, 1, 4096, "a number of chunks from 1 to 4096")
_size = _number(int, 1, 2**40, "a whole number from 1 on")
_capacity = _bytes(0, 2**62)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; `run` of what it parsed is the function to call."""
    parser = _Parser(
        prog="olla",
        description="Plan the memory of PyTorch training steps.",
        epilog="Where a file is read or written, - is standard input or output; what is printed then goes to standard "
        "error. Sizes are bytes, or have a unit: 16GB (1000^3), 16GiB (1024^3). Exit status: 0 done, 1 nothing fits, "
        "2 bad usage or input, 130 interrupted.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    _add_plan(subparsers)

    about = "check a plan against its graph"
    check = subparsers.add_parser("check", help=about, description=f"{about.capitalize()}.")
    check.add_argument("graph", type=_input, metavar="GRAPH", help="graph file, or an ONNX model")
    _add_shapes(check)
    check.add_argument("plan", type=_input, metavar="PLAN", help="plan file")
    _add_json(check)
    check.set_defaults(run=commands.check_plan)

    about = "Find offsets for buffers with given lifetimes."
    layout = subparsers.add_parser("layout", help="lay out buffers", description=about)
    add = layout.add_argument
    add("buffers", type=_input, metavar="BUFFERS.csv", help="columns id,lower,upper,size; optional: fixed,preferred")
    add("-o", "--output", type=_output, metavar="OUT.csv", help="write the buffers there, with a column offset")
    about = "stop at a layout that fits; exit status 1 where none was found"
    add("--capacity", type=_capacity, metavar="BYTES", help=about)
    add("--threads", type=_threads, metavar="N", help="of the search (default: one per core, up to 8)")
    _add_search_options(layout, time_limit=15.0, alignment=1)
    layout.set_defaults(run=commands.lay_out_buffers)

    _add_show(subparsers)
    about = "Try everything that planning and running steps needs, and say what is missing and how to get it."
    subparsers.add_parser("doctor", help="try what olla needs", description=about).set_defaults(run=run_doctor)
    _add_capture(subparsers)
    _add_fit(subparsers)
    _add_completion(subparsers, parser)
    return parser


def _add_capture(subparsers: argparse._SubParsersAction[_Parser]) -> None:
    capture = subparsers.add_parser(
        "capture",
        help="write the graph of a PyTorch training step",
        description="Write the graph of a PyTorch training step. FUNCTION() returns (model, batch, optimizer, loss), "
        "the arguments of olla.capture, or a captured step.",
    )
    add = capture.add_argument
    add("source", metavar="MODULE:FUNCTION", help="for example train:step, for step() in train.py")
    about = "write the graph there (.json or .json.gz)"
    add("-o", "--output", type=_output, metavar="GRAPH", required=True, help=about)
    capture.set_defaults(run=commands.capture_step)


def _add_plan(subparsers: argparse._SubParsersAction[_Parser]) -> None:
    plan = subparsers.add_parser(
        "plan",
        help="order and lay out a graph, or many",
        description="Order and lay out a graph; with --output-folder many graphs, in processes. Exit status 1 if "
        "nothing fits a budget, 2 if a graph failed.",
    )
    about = "graph file (.json, .json.gz), or ONNX model (.onnx)"
    plan.add_argument("graphs", type=_input, metavar="GRAPH", nargs="+", help=about)
    _add_shapes(plan)
    about = "write the plan there (.json or .json.gz)"
    plan.add_argument("-o", "--output", type=_output, metavar="PLAN", help=about)
    _add_search_options(plan, time_limit=15.0, alignment=512)
    plan.add_argument("--order-only", action="store_false", dest="layout", help="lay out nothing")
    plan.add_argument("--method", choices=(*METHODS, "autoswap"), default="auto", help="how to plan (default: auto)")
    about = "keep weight updates at the end of the step"
    plan.add_argument("--updates-stay", action="store_false", dest="updates_may_move", help=about)
    _add_verbose(plan)
    _add_budget_options(plan)
    group = plan.add_argument_group(
        "many graphs",
        "GRAPH may be a pattern or a URL for fsspec, --budget and --max-slowdown may be lists: 40GB,80GB. What the "
        "folder has already is not planned again; --json prints one object a line",
    )
    group.add_argument("--output-folder", metavar="FOLDER", help="keep plans and results there: a folder, or a URL")
    group.add_argument("--jobs", type=_threads, default=1, metavar="N", help="processes that plan (default: 1)")
    group.add_argument("--part", type=_part, default=(0, 1), metavar="I/N", help="of N equal parts the I-th, from 0 on")
    plan.set_defaults(run=many.plan_graphs)


def _add_show(subparsers: argparse._SubParsersAction[_Parser]) -> None:
    show = subparsers.add_parser("show", help="print a plan", description="Print a plan.")
    show.add_argument("plan", type=_input, metavar="PLAN", help="plan file")
    about = "draw it: bytes over steps, and the arena, on one page (.html)"
    show.add_argument("--html", type=_output, metavar="FILE", help=about)
    about = "write it for PyTorch's memory viewer (.pickle)"
    show.add_argument("--memory-viz", type=_output, metavar="FILE", help=about)
    show.add_argument("--graph", type=_input, metavar="GRAPH", help="graph file the plan was made for; both need it")
    _add_shapes(show)
    _add_json(show)
    _add_verbose(show)
    show.set_defaults(run=commands.show_plan)


def _add_completion(subparsers: argparse._SubParsersAction[_Parser], whole: _Parser) -> None:
    parser = subparsers.add_parser(
        "completion",
        help="print what a shell needs to complete this command",
        description="Print a script with which a shell completes commands, options and files of olla. For bash: "
        'eval "$(olla completion bash)" in ~/.bashrc; zsh: olla completion zsh > a folder of $fpath/_olla.',
    )
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="the shell to complete in")
    parser.set_defaults(run=lambda args: _print_completion(whole, args.shell))


def _print_completion(parser: argparse.ArgumentParser, shell: str) -> int:
    """Print the script with which a shell completes what a parser takes; return the exit status."""
    try:
        import shtab
    except ImportError:
        return fail('completion is made by shtab, which is not here: pip install "olla-planner[completion]"')
    for action in _actions(parser):
        if action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, shell))
    return OK


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Return the arguments of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)


def _add_fit(subparsers: argparse._SubParsersAction[_Parser]) -> None:
    parser = subparsers.add_parser(
        "fit",
        help="which batch fits a memory, and how",
        description="Say which sizes of a training step fit a memory, as it is and planned; nothing is run. "
        "FUNCTION(n) returns (model, batch, optimizer, loss) for size n, the arguments of olla.capture, or a captured "
        "step; models are made without weights. Exit status 1 if nothing fits.",
        epilog="Columns of the table: eager is the ordinary loop, planned its operators in the best order, 5% and 10% "
        "the least peak within so much added time, least peak at whatever time, in memory the least added time that "
        "fits. Times are estimates for --device.",
    )
    add = parser.add_argument
    add("source", metavar="MODULE:FUNCTION", help="for example train:step, for step(n) in train.py")
    add("--memory", required=True, metavar="BYTES", help="memory there is (80GB, 80GiB, bytes)")
    add("--device", default="a100", metavar="NAME", help="what time is estimated for (default: a100)")
    add("--sizes", type=_list(_size), metavar="N,N,...", help="values of n (default: 1,2,4,8,16,32)")
    add("--lengths", type=_input, metavar="FILE", help="lengths of a run's batches, as numbers: which of them fit")
    add("--slowdowns", type=_list(_slowdown), metavar="X,X", help="added time (default: 0.05,0.1)")
    ways = "eager, planned, 5%%, 10%%, least, budget"
    add("--exact", metavar="WAY", help=f"try further sizes until the largest n of this way is known: {ways}")
    add("--weights", action="store_true", help="let FUNCTION allocate weights: it does not run on the meta device")
    about = "how many ranks run the step; memory and n are of one of them"
    add("--world-size", type=_size, metavar="RANKS", help=about)
    add("--parallel", choices=("fsdp", "ddp"), help="what they share (default: fsdp, parameters in shards)")
    _add_search_options(parser, time_limit=10.0, of="for each plan")
    add("-o", "--output", type=_output, metavar="FIT", help="write all rows there (.json or .json.gz)")
    add("--plot", metavar="FILE", help="draw peaks over n with matplotlib (.png, .svg, .pdf)")
    parser.set_defaults(run=fit.fit_sizes)


def _add_budget_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "budget",
        "rewrite the graph as well: recompute ops, let results take over inputs; exit status 1 if nothing fits",
    )
    goal = group.add_mutually_exclusive_group()
    goal.add_argument("--budget", metavar="BYTES", help="memory there is (16GB, 16GiB, bytes): least added time")
    about = "share of added time (0.1): least peak"
    goal.add_argument("--max-slowdown", type=_list(_slowdown), metavar="X", help=about)
    goal.add_argument("--minimise", choices=("peak",), help="least peak at whatever time")
    add = group.add_argument
    add("--device", default="a100", metavar="NAME", help="what time is estimated for (default: a100)")
    about = "let no result take over an input's storage"
    add("--no-in-place", action="store_false", dest="in_place", help=about)
    add("--no-recompute", action="store_false", dest="recompute", help="recompute no op")
    add("--host-budget", metavar="BYTES", help="swap tensors to this much host memory (64GB, 64GiB, bytes)")
    add("--swap-state", action="store_true", help="swap optimizer state too: it waits in host memory between steps")
    about = "swap nothing, whatever --host-budget says"
    add("--no-swap", action="store_const", const=False, dest="swap", help=about)
    about = "linear layers and their loss in K chunks of rows: other rounding"
    add("--chunked-loss", type=_chunks, metavar="K", help=about)


def _add_search_options(
    parser: argparse.ArgumentParser, *, time_limit: float, alignment: int | None = None, of: str = "in all"
) -> None:
    add, about = parser.add_argument, f"seconds {of} (default: {time_limit:g})"
    add("--time-limit", type=_seconds, default=time_limit, metavar="SECONDS", help=about)
    if alignment is not None:
        about = f"of every offset (default: {alignment})"
        add("--alignment", type=_alignment, default=alignment, metavar="BYTES", help=about)
    add("--seed", type=_seed, default=0, metavar="N", help="for random choices (default: 0)")
    _add_json(parser)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_shapes(parser: argparse.ArgumentParser) -> None:
    """Let a command say what an ONNX model leaves open."""
    about = "of an input of an ONNX model that leaves dimensions open; one for each such input"
    shape = _named(int, "NAME=N,N,..., such as pixels=1,3,224,224")
    parser.add_argument("--shape", action="append", default=[], type=shape, metavar="NAME=N,N,...", help=about)
    about = "of an input of an ONNX model that its branches or shapes depend on; one for each such input"
    value = _named(_int_or_float, "NAME=NUMBER or NAME=NUMBER,NUMBER,..., such as rate=16000")
    parser.add_argument("--value", action="append", default=[], type=value, metavar="NAME=N,...", help=about)


def _add_verbose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-v", "--verbose", action="store_true", help="print what the method says about its parts")
