"""Capture, plan and report training steps of GPT-2 small and ResNet-50, without downloads and without their memory.

python bench/pytorch/demo.py [MODEL:BATCH:OPTIMIZER ...] [--time-limit SECONDS]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla
from tests.support.pytorch import models

STEPS = ("gpt2:1:adamw", "resnet50:1:momentum", "resnet50:32:adamw")


@contextlib.contextmanager
def progress(text: str) -> Iterator[None]:
    """Show what is going on and for how long; on a terminal the seconds count."""
    start = time.perf_counter()
    done = threading.Event()

    def count() -> None:
        while not done.wait(0.5):
            print(f"\r{text} ... {time.perf_counter() - start:.0f} s", end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=count, daemon=True)
    if sys.stderr.isatty():
        thread.start()
    try:
        yield
    finally:
        done.set()
        if thread.ident is not None:
            thread.join()
        end = "\r" if sys.stderr.isatty() else ""
        print(f"{end}{text} ... {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


def show(step: str, time_limit: float) -> str:
    """Capture and plan one step, print its report, and return its line of the summary."""
    name, batch_size, optimizer_name = step.split(":")
    title = f"{name}, batch {batch_size}, {optimizer_name}"
    with progress(f"{title}: capture"):
        example = models.build(name, int(batch_size))
        optimizer = models.optimizer(optimizer_name, example.model)
        captured = olla.capture(example.model, example.batch, optimizer=optimizer, loss=example.loss, name=title)
    with progress(f"{title}: plan"):
        plan = olla.plan(captured.graph, time_limit=time_limit)
    print(f"\n{plan}\n", flush=True)
    return (
        f"{title:28} {plan.program_peak_bytes / 2**20:>11,.1f} {plan.peak_bytes / 2**20:>11,.1f} "
        f"{100 * plan.saved_bytes / plan.program_peak_bytes:>6.2f} % "
        f"{'proved' if plan.gap == 0 else f'gap {100 * plan.gap:.3f} %':>12} "
        f"{sum(captured.seconds.values()):>9.1f} {plan.seconds['total']:>7.1f}"
    )


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "steps", nargs="*", default=STEPS, metavar="MODEL:BATCH:OPTIMIZER", help=f"models: {', '.join(models.NAMES)}"
    )
    parser.add_argument("--time-limit", type=float, default=20.0, metavar="SECONDS", help="for planning, per step")
    arguments = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    lines = [show(step, arguments.time_limit) for step in arguments.steps]
    print(
        f"{'step':28} {'before MiB':>11} {'after MiB':>11} {'saved':>8} {'optimum':>12} {'capture s':>9} {'plan s':>7}"
    )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
