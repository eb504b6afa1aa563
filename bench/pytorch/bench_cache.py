"""Time a training script's first step in a process that finds nothing on disk, and in one that finds the step there.

    python bench/pytorch/bench_cache.py gpt2 resnet50 --markdown bench/results/pytorch/cache.md

Both processes must compute the same losses and parameters, to the bit. Exit status 1 if they do not, or if the second
one plans anything.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

from bench.support.harness import REPOSITORY, Report

PROGRAM = """
import hashlib, json, sys, time
begin = time.perf_counter()
import torch
import olla
from tests.support.pytorch import models
torch.manual_seed(0)
name, batch_size, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) or None
example = models.build(name, batch_size, device="cpu", length=length)
optimizer = models.optimizer("adamw", example.model)
step = olla.compile(example.model, optimizer=optimizer, loss=example.loss)
torch.manual_seed(1)
built = time.perf_counter()
losses = [step(example.batch).item()]
first = time.perf_counter()
losses += [step(example.batch).item() for _ in range(2)]
content = hashlib.sha256()
for tensor in example.model.state_dict().values():
    content.update(tensor.numpy().tobytes())
report = step.report()
print(json.dumps([built - begin, first - built, report.seconds_per_step, report.capture_seconds, report.plan_seconds,
                  report.record_seconds, report.cached, report.num_misses, losses, content.hexdigest()]))
"""


def run(name: str, batch_size: int, length: int, cache: str) -> list[object]:
    """Run the program in a fresh process, and return what it printed."""
    command = [sys.executable, "-c", PROGRAM, name, str(batch_size), str(length)]
    environment = os.environ | {"OLLA_CACHE_DIR": cache, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    answer: list[object] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", default=["gpt2", "resnet50"], help="models of tests/support/pytorch/models.py"
    )
    parser.add_argument("--batch", type=int, default=1, metavar="N")
    parser.add_argument("--length", type=int, default=128, metavar="N", help="tokens per sequence")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    options = parser.parse_args()

    columns = ["model", "process", "first step", "capture", "plan", "record", "a later step", "from disk", "misses"]
    page = Report("Start of a training step, seconds", columns)
    wrong = False
    for name in options.names:
        from olla.base.folders import cache_folder

        (cache_folder() / "replay").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as cache:
            (Path(cache) / "replay").symlink_to(cache_folder() / "replay")  # the compiled allocator is another matter
            runs = [run(name, options.batch, options.length, cache) for _ in range(3)]
        for process, (_, first, later, capture, plan, record, cached, misses, *_numbers) in enumerate(runs, 1):
            page.rows.append([name, process, first, capture, plan, record, later, cached, misses])
        wrong |= any(answer[-2:] != runs[0][-2:] for answer in runs) or [r[6] for r in runs] != [False, True, True]
    page.summary["losses and parameters"] = "differ" if wrong else "equal to the bit in all processes"
    page.print()
    for out in (options.json, options.markdown):
        if out:
            page.save(out)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
