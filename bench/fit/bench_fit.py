"""What `olla.fit` says of ordinary loops, beside what they request: peaks of the eager loop, on the CPU.

    python bench/fit/bench_fit.py --markdown bench/results/fit/fit.md
    python bench/fit/bench_fit.py --cases gpt2:1:256 --optimizers adamw

A case is model:batch[:tokens]. `olla.fit` sees the model on the meta device, without weights. The loop runs on the CPU
with random weights; the allocator records every request of one iteration, in a process of its own. The page has the
most bytes alive at once, model, optimizer state and batch included:

requested       of the ordinary loop, all requests
tensors         the same, without what operators free before they end: the workspaces of their kernels
workspaces      their difference, and the operator at the peak where one has a workspace there
estimate        of `olla.fit`, which knows no workspaces
deviation       of the estimate from the tensors; of the part that the loop itself requests, without the resident one

Exit status: 1 if a deviation is above 0.5 %, or recording op by op changes what is requested by more than that.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla
from bench.support.harness import Cell, Report, answer, ask
from bench.support.requested import requested
from tests.support.pytorch import models

CASES = ["gpt2:1:256", "bert_base:2:128", "llama_100m:1:256", "vit_b16:2", "resnet50:4", "mobilenet_v2:4", "unet:1"]
OPTIMIZERS = ["adamw", "adamw-foreach", "adamw-fused", "momentum"]
MOST_DEVIATION = 0.005
MIB = 2**20


def make(case: str, optimizer: str, device: str) -> tuple[Any, ...]:
    """Return model, batch, optimizer and loss of a case."""
    name, batch, *length = case.split(":")
    torch.manual_seed(0)
    tiny, size = name.endswith("-tiny"), int(length[0]) if length else None
    example = models.build(name.removesuffix("-tiny"), int(batch), tiny=tiny, length=size, device=device)
    kind, _, how = optimizer.partition("-")
    made = models.optimizer(kind, example.model, fused=how == "fused")
    if how == "foreach":
        made.param_groups[0]["foreach"] = True
    return example.model, example.batch, made, example.loss


def estimate(case: str, optimizer: str) -> dict[str, int]:
    """Return what `olla.fit` says, in bytes, and its seconds."""
    n = int(case.split(":")[1])
    found = olla.fit(
        lambda n: make(case, optimizer, "meta"), memory="1TB", device="cpu", sizes=[n], slowdowns=[], time_limit=1.0
    )
    (row,) = found.rows
    return {"estimate": row.ways["eager"].peak_bytes or 0, "resident": row.resident_bytes}


def record(case: str, optimizer: str) -> dict[str, Any]:
    """Return what the loop requests."""
    model, batch, made, loss = make(case, optimizer, "cpu")

    def iterate() -> None:
        made.zero_grad()
        loss(model, batch).backward()
        made.step()

    return requested(iterate, made.zero_grad)._asdict()


def apart(case: str, optimizer: str) -> dict[str, Any]:
    """Do both in a process of its own."""
    found: dict[str, Any] = ask(__file__, "--one", case, optimizer)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="MODEL:BATCH[:TOKENS]")
    parser.add_argument("--optimizers", nargs="+", default=OPTIMIZERS)
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        answer({**estimate(*arguments.one), **record(*arguments.one)})
    rows: list[list[Cell]] = []
    most = 0.0
    for case in arguments.cases:
        for optimizer in arguments.optimizers:
            found = apart(case, optimizer)
            whole, tensors = (found["resident"] + found[key] for key in ("loop_bytes", "tensor_bytes"))
            change = found["bytes"] / found["loop_bytes"] - 1
            deviation = found["estimate"] / tensors - 1
            own = (found["estimate"] - found["resident"]) / found["tensor_bytes"] - 1
            most = max(most, abs(deviation), abs(change))
            figures = [f"{num_bytes / MIB:,.2f}" for num_bytes in (whole, tensors, whole - tensors)]
            row: list[Cell] = [case, optimizer, *figures, found["workspace_op"] or None]
            rows.append([*row, f"{found['estimate'] / MIB:,.2f}", f"{deviation:+.4%}", f"{own:+.4%}"])
            print(*rows[-1], file=sys.stderr, flush=True)
    columns = ["model", "optimizer", "requested MiB", "tensors MiB", "workspaces MiB", "workspace at the peak"]
    columns += ["estimate MiB", "deviation", "of the loop's own"]
    summary: dict[str, Cell] = {"largest deviation": f"{most:.4%}", "allowed": f"{MOST_DEVIATION:.1%}"}
    report = Report("Peaks of ordinary loops: estimated without weights, and requested", columns, rows, summary)
    report.print()
    for path in (arguments.markdown, arguments.json):
        if path is not None:
            report.save(path)
    return 0 if most <= MOST_DEVIATION else 1


if __name__ == "__main__":
    raise SystemExit(main())
