"""What `olla fit` does."""

from __future__ import annotations

import argparse
import importlib.util

from olla.cli.commands import NOTHING_FITS, OK, call, fail, function_of, interrupted, print_json, require_place, show
from olla.errors import BudgetError
from olla.report.interrupt import Interrupt
from olla.report.progress import ProgressLine


def fit_sizes(args: argparse.Namespace) -> int:
    """Run `olla fit`; return the exit status."""
    for path in (args.output, args.plot):
        require_place(path)
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        return fail("--plot needs matplotlib: pip install 'olla-planner[plot]'")
    from olla.fit import table
    from olla.fit.fit import fit

    given = {name: value for name in ("sizes", "slowdowns") if (value := getattr(args, name)) is not None}
    make_step = function_of(args.source)
    with Interrupt() as interrupt, ProgressLine(f"fitting {args.source}") as progress:
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
        try:
            found.plot(args.plot)
        except ValueError as error:  # of the ending
            return fail(f"{args.plot}: cannot be drawn: {error}")
    if interrupt.seen:
        return interrupted("sizes and ways are missing")
    return OK if found.fastest else NOTHING_FITS
