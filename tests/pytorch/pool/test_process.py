"""The memory of a process whose loop is in a pool: what recording freed is given back, and reports say what it had."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import olla

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator, and Linux counts"),
]
SCRIPT = """
import json, sys
from pathlib import Path
import torch, olla
torch.set_num_threads(1)
way, kind = sys.argv[1:]
torch.manual_seed(0)
if kind == "layers":  # many blocks below the size that glibc maps on its own
    parts = [m for _ in range(10) for m in (torch.nn.Linear(192, 768), torch.nn.GELU(), torch.nn.Linear(768, 192))]
    model, batches = torch.nn.Sequential(*parts), [torch.rand(1024, 192)] * 8
else:  # lengths that grow: the arena is taken several times
    parts = [m for _ in range(10) for m in (torch.nn.Linear(192, 192), torch.nn.GELU())]
    model, batches = torch.nn.Sequential(*parts), [torch.rand(n, 192) for n in (2048, 3072, 4096) for _ in range(4)]
optimizer = torch.optim.AdamW(model.parameters())
pool = olla.pool() if way == "pool" else None
if pool: pool.__enter__()
for i, x in enumerate(batches):
    if i == len(batches) - 2: Path("/proc/self/clear_refs").write_text("5")
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    if pool: pool.step()
lines = Path("/proc/self/status").read_text().splitlines()
most = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
report = pool.report() if pool else None
print(json.dumps([most, report and report.arena_bytes, report and report.served]))
"""


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def measured(way: str, kind: str) -> tuple[int, int, float]:
    """Return the most resident in the last two iterations, the arena, and the share that was served."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, way, kind], capture_output=True, text=True, check=True)
    most, arena, served = json.loads(done.stdout.splitlines()[-1])
    return most, arena, served


@pytest.mark.parametrize("kind", ["layers", "lengths"])
def test_a_pool_needs_no_more_resident_memory_than_the_loop_on_its_own(kind: str) -> None:
    stock, _, _ = measured("stock", kind)
    pooled, arena, served = measured("pool", kind)
    assert served > 0.3
    assert arena > 30 << 20
    assert pooled <= stock + (4 << 20)  # the planner's own code and data; the arena on top would be ten times that


def test_what_is_freed_once_the_arena_is_planned_goes_back_before_it_is_taken() -> None:
    # As gradients that zero_grad() frees: made by the iteration before, in pieces that glibc keeps.
    gradients = [torch.ones(20_000) for _ in range(800)]
    kept = gradients[::20]
    num_bytes = (len(gradients) - len(kept)) * gradients[0].nbytes
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    batch = torch.ones(4096, 256)
    with olla.pool() as pool:
        for _ in range(6):
            was_planned, before = pool.report().state == "planned", resident_bytes()
            if was_planned:
                gradients.clear()
            model.zero_grad()
            model(batch).square().mean().backward()
            if was_planned:
                break
            pool.step()
        grown = resident_bytes() - before
        arena_bytes = pool.report().arena_bytes
    assert was_planned
    assert grown <= arena_bytes - num_bytes + (4 << 20)


def test_the_report_has_the_memory_of_the_process_before_and_with_the_arena() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    batch = torch.ones(4096, 256)
    with olla.pool() as pool:
        assert pool.report().process_peak_bytes is None
        for _ in range(4):
            model.zero_grad()
            model(batch).square().mean().backward()
            pool.step()
        report = pool.report()
    assert report.process_peak_before_bytes is not None
    assert report.process_peak_bytes is not None
    assert report.process_peak_bytes > report.arena_bytes
    assert report.process_peak_before_bytes > report.arena_bytes
    assert "resident" in str(report)
