"""Implementation of `olla fit`."""

from __future__ import annotations

import argparse

from olla.base.files import JSON, naming, read
from olla.base.packages import require
from olla.cli.commands import NOTHING_FITS, OK, call, fail, function_of, interrupted, print_json, require_place, show
from olla.errors import BudgetError, OllaError
from olla.report.interrupt import Interrupt
from olla.report.progress import ProgressLine

PICTURES = (".png", ".svg", ".pdf")


def lengths_in(path: str) -> list[int]:
    """Return the whole numbers in a text file.

    Raises:
        OllaError: the file cannot be read, or holds something else.
    """
    with naming(path):
        words = bytes(read(path, OllaError)).split()
        if wrong := next((word for word in words if not word.isdigit()), None):
            raise OllaError(f"{wrong.decode(errors='replace')!r} is no length, expected whole numbers between blanks")
        return [int(word) for word in words]


def fit_sizes(args: argparse.Namespace) -> int:
    """Run `olla fit`; return the exit status."""
    require_place(args.output, JSON)
    require_place(args.plot, PICTURES)
    if args.plot:
        require("matplotlib", "plot")
    from olla.fit import table
    from olla.fit.fit import fit

    given = {name: value for name in ("sizes", "slowdowns") if (value := getattr(args, name)) is not None}
    if args.lengths is not None:
        given["lengths"] = lengths_in(args.lengths)
    make_step = function_of(args.source)
    with Interrupt() as interrupt, ProgressLine(f"fitting {args.source}", lines=True) as progress:
        try:
            found = fit(
                lambda n: call(lambda: make_step(n), f"{args.source} with n = {n}"),
                memory=args.memory,
                device=args.device,
                exact=args.exact,
                weights=args.weights,
                world_size=args.world_size,
                parallel=args.parallel or (None if args.world_size is None else "fsdp"),
                time_limit=args.time_limit,
                seed=args.seed,
                progress=interrupt.ends(progress),
                **given,
            )
        except (ValueError, BudgetError) as error:
            return fail(str(error))
    if args.output:
        found.save(args.output)
    if args.json:
        print_json(found.to_dict())
    else:
        show(table.render(found), table.WIDTH)
    if args.plot:
        found.plot(args.plot)
    if interrupt.seen:
        return interrupted("sizes and ways are missing")
    return OK if found.fastest else NOTHING_FITS
