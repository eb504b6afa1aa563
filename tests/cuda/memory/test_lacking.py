"""Where the device has too little memory, torch's error says what the step needs and which goal would fit; it does."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from tests.cuda.standin import Standin

SCRIPT = """
import gc, torch, olla
loss = lambda model, batch: model(batch).square().mean()
def run(depth, **options):
    torch.manual_seed(0)
    block = lambda: (torch.nn.Linear(256, 256), torch.nn.LayerNorm(256), torch.nn.GELU())
    layers = [part for _ in range(depth) for part in block()]
    model = torch.nn.Sequential(*layers).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = olla.compile(model, optimizer=optimizer, loss=loss, disk_cache=False, time_limit=2.0, **options)
    for _ in range(4):
        step(torch.ones(16384, 256, device="cuda"))
    return step.report()
def told(depth, **options):
    try:
        run(depth, **options)
    except torch.OutOfMemoryError as error:
        return str(error), "".join(error.__notes__)
    raise SystemExit("there is memory enough")
"""
FITS = """
text, note = told(12)
print(note)
del text
gc.collect(); torch.cuda.empty_cache()
slowdown = float(note.split("max_slowdown=")[1].split(":")[0])
budget = int(note.split("budget=")[1].split(")")[0])
for goal in ({"max_slowdown": slowdown}, {"budget": budget}):
    report = run(12, **goal)
    assert report.num_steps == 4 and report.num_misses == 0, report
    gc.collect(); torch.cuda.empty_cache()
print("both fit")
"""
NOTHING = """
text, note = told(12)
print(note)
"""


def done(code: str, num_bytes: int) -> str:
    variables = {**os.environ, "STANDIN_MEMORY": str(num_bytes)}
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT + code], env=variables, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_goal_that_the_error_names_fits(faults: Standin) -> None:
    said = done(FITS, 560 << 20)
    assert "both fit" in said
    assert re.search(r"needs [\d.]+ MiB as it is planned: [\d.]+ MiB resident, an arena of [\d.]+ MiB", said)
    assert "The device has 560.00 MiB" in said


def test_where_no_goal_fits_the_error_says_so(faults: Standin) -> None:
    said = done(NOTHING, 80 << 20)
    assert "at least: take a smaller batch" in said
    assert "max_slowdown" not in said
