"""A benchmark of several ranks: it calls itself in processes that torchrun starts, of a gloo group."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.support.harness import ask

Rows = list[dict[str, Any]]


def arguments(doc: str | None, cases: Iterable[str]) -> argparse.Namespace:
    """Parse the command line: the cases (the first two if none is named), how many ranks, where the page goes."""
    names = list(cases)
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=names[:2], choices=names)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def as_rank(measure: Callable[[str], Rows], case: str) -> None:
    """Measure a case as one of the ranks; the first one prints what was found."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rows = measure(case)
    if dist.get_rank() == 0:
        print(json.dumps(rows), flush=True)
    dist.destroy_process_group()


def launched(script: str, case: str, num_ranks: int) -> Rows:
    """Return what the ranks of a case find."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    variables = {"OLLA_DISK_CACHE": "0", "OMP_NUM_THREADS": "1"}
    found: Rows = ask(*launcher, script, "--one", case, environment=variables)
    return found


def of_all_ranks(rows: Rows) -> list[tuple[dict[str, Any], ...]]:
    """Return, for each row of this rank, that row of every rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, rows)
    return list(zip(*everyone, strict=True))
