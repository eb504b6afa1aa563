"""`olla completion`: scripts for shells, made from the parser by shtab."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from olla.cli.commands import OK, fail

SHELLS = ("bash", "zsh", "tcsh")


def print_completion(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run `olla completion`: print the script for a shell; return the exit status.

    Args:
        args: with `shell`, one of `SHELLS`.
        parser: what is completed.
    """
    try:
        import shtab
    except ImportError:
        return fail('completion is made by shtab, which is not here: pip install "olla-planner[completion]"')
    for action in _actions(parser):
        if action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, args.shell))
    return OK


_FILES = ("GRAPH", "PLAN", "FILE", "FIT", "BUFFERS.csv", "OUT.csv")  # what files are called in the help


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Return the arguments of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
