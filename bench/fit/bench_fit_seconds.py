"""How long `olla.fit` takes for five batch sizes: a process of its own for each model, nothing cached.

    python bench/fit/bench_fit_seconds.py --markdown bench/results/fit/seconds.md

Models have 1,024 tokens per sequence, fused AdamW, no weights. Times begin before torch is imported. On a machine that
others use, processor seconds say what the answer costs; the wall clock waits for them too.

Exit status: 1 if an answer costs more than 180 processor seconds, its own threads and processes together.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

from bench.support.harness import Cell, Report, answer, ask

CASES = ["gpt2:4,8,16,32,64", "llama_1b:2,4,8,16,32"]
MOST_SECONDS = 180.0


def timed(case: str, memory: str) -> dict[str, Any]:
    """Answer for the sizes of a case and say what that took."""
    start = time.perf_counter()
    import olla
    from tests.support.pytorch import models

    name, _, sizes = case.partition(":")

    def make_step(n: int) -> tuple[Any, ...]:
        example = models.build(name, n, length=1024, device="meta")
        return example.model, example.batch, models.optimizer("adamw", example.model, fused=True), example.loss

    found = olla.fit(make_step, memory=memory, device="h100", sizes=[int(size) for size in sizes.split(",")])
    return {
        "num_ops": max(row.num_ops for row in found.rows),
        "capture": sum(row.seconds["capture"] for row in found.rows),
        "plan": sum(row.seconds["plan"] for row in found.rows),
        "wall": time.perf_counter() - start,
        "processor": time.process_time(),
        "most_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        "largest": {name: found.largest(name) for name in ("eager", "planned", "5%", "least", "budget")},
    }


def apart(case: str, memory: str) -> dict[str, Any]:
    """Do it in a process of its own, with empty caches."""
    with tempfile.TemporaryDirectory() as empty:
        caches = {"NUMBA_CACHE_DIR": f"{empty}/numba", "OLLA_CACHE_DIR": f"{empty}/olla"}
        found: dict[str, Any] = ask(__file__, "--one", case, "--memory", memory, environment=caches)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="MODEL:N,N,...")
    parser.add_argument("--memory", default="80GB")
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        answer(timed(arguments.one, arguments.memory))
    rows: list[list[Cell]] = []
    most = 0.0
    for case in arguments.cases:
        found = apart(case, arguments.memory)
        name, _, sizes = case.partition(":")
        most = max(most, found["processor"])
        largest = [found["largest"][way] for way in ("eager", "planned", "5%", "least", "budget")]
        seconds = [round(found[key], 1) for key in ("processor", "wall", "capture", "plan")]
        rows.append(
            [name, sizes.replace(",", ", "), found["num_ops"], *seconds, found["most_bytes"] // 2**20, *largest]
        )
        print(*rows[-1], file=sys.stderr, flush=True)
    columns = ["model", "batches", "ops", "processor s", "wall s", "of it capture", "of it plans", "process MiB"]
    columns += [f"largest {way}" for way in ("eager", "planned", "5 %", "least peak", "in memory")]
    summary: dict[str, Cell] = {"memory": arguments.memory, "most processor s": most, "allowed": MOST_SECONDS}
    summary["load of the machine, by others too"] = f"{os.getloadavg()[1]:.1f}" if hasattr(os, "getloadavg") else None
    report = Report("Seconds until olla.fit answers for five batch sizes", columns, rows, summary)
    report.print()
    if arguments.markdown is not None:
        report.save(arguments.markdown)
    return 0 if most <= MOST_SECONDS else 1


if __name__ == "__main__":
    raise SystemExit(main())
