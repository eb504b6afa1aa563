"""Capture steps of whole models at five batch sizes each, as olla.fit does, and say what a capture costs.

    python bench/pytorch/bench_capture.py --markdown bench/results/pytorch/capture.md

Each model has a process of its own, with fake weights and AdamW; nothing runs. Seconds are those of the processor:
"first" for the first capture in the process, "later" for the median of the other four. Exit status: 0; 1 the captures
of a model differ in more than sizes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla
from bench.support.harness import Report, answer, ask

MODELS = ("gpt2", "bert_base", "resnet50")
BATCHES = (2, 4, 6, 8, 10)
COLUMNS = ["model", "ops", "of forward and backward", "parameters", "first", "later", "all five", "ms per op"]


def measure(name: str) -> dict[str, Any]:
    """Capture a model's step in this process and return what it took."""
    from tests.support.pytorch import models

    seconds, targets = [], []
    for size in BATCHES:
        example = models.build(name, size)
        optimizer = models.optimizer("adamw", example.model)
        start = time.process_time()
        captured = olla.capture(example.model, example.batch, optimizer=optimizer, loss=example.loss)
        seconds.append(time.process_time() - start)
        targets.append((captured.graph.targets, captured.graph.op_kinds))
    return {
        "seconds": seconds,
        "ops": captured.graph.num_ops,
        "traced": sum(kind != "update" for kind in captured.graph.op_kinds),
        "parameters": sum(entry.kind == "parameter" for entry in captured.inputs),
        "same": all(each == targets[0] for each in targets),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        answer(measure(args.part))
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    report, right = Report("Captures at five batch sizes", COLUMNS), True
    for name in args.models:
        found = ask(__file__, "--part", name)
        first, *others = found["seconds"]
        later = statistics.median(others)
        sizes = [found["ops"], found["traced"], found["parameters"]]
        report.rows.append([name, *sizes, first, later, sum(found["seconds"]), f"{1000 * later / found['ops']:.2f}"])
        right &= found["same"]
    report.summary["batch sizes"] = ", ".join(map(str, BATCHES))
    report.print()
    if args.markdown is not None:
        report.save(args.markdown)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
