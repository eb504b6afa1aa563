"""Steps and pools in processes of their own: two devices, threads, other settings of the allocator, and the end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from tests.cuda.standin import Standin

SCRIPT = """
import gc, sys, threading, torch, olla
def train(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8)).to(device)
    step = olla.compile(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                        loss=lambda model, batch: model(batch).square().mean(), disk_cache=False)
    for _ in range(4):
        step(torch.ones(32, 64, device=device))
    report = step.report()
    assert (report.num_misses, report.measured_peak_bytes) == (0, report.planned_peak_bytes), report
    print("trained on", device, flush=True)
"""
POOLS = """
def pool(device):
    weight = torch.ones(64, 64, device=device, requires_grad=True)
    with olla.pool(device) as made:
        for _ in range(8):
            weight.grad = None
            (weight @ weight).tanh().square().mean().backward()
            made.step()
        report = made.report()
    assert (report.state, report.num_misses, made.report().served_bytes > 0) == ("planned", 0, True), report
    print("trained on", device, flush=True)

def at_once(*calls):
    threads = [threading.Thread(target=call, args=arguments) for call, *arguments in calls]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""
# Blocks that another stream of their device used are freed while the other device is the current one.
ELSEWHERE = """
home, away = torch.device("cuda:1"), torch.device("cuda:0")
torch.cuda.set_device(home)
own, other = {streams}
weight = torch.ones(64, 64, device=home, requires_grad=True)
torch.cuda.synchronize()
with torch.cuda.stream(own), olla.pool(home) as made:
    for _ in range(8):
        weight.grad = None
        y = (weight @ weight).tanh()
        other.wait_stream(own)
        with torch.cuda.stream(other):
            read = y.detach() * 2
        y.record_stream(other)
        y.square().mean().backward()
        with torch.cuda.device(away):
            del y
        torch.cuda.synchronize(home)
        del read
        made.step()
    report = made.report()
assert report.state == "planned" and report.served > 0.5, report
print("trained on", home)
"""
# Half of the layers are on each device: a pool has the requests of its own.
HALVES = """
first = torch.nn.Linear(64, 512).to("cuda:0")
second = torch.nn.Linear(512, 8).to("cuda:1")
arenas = []
for device in ("cuda:0", "cuda:1"):
    with olla.pool(device) as made:
        for _ in range(8):
            first.zero_grad(); second.zero_grad()
            second(first(torch.ones(256, 64, device="cuda:0")).relu().to("cuda:1")).square().mean().backward()
            made.step()
        report = made.report()
    assert (report.state, report.num_misses, report.served) == ("planned", 0, 1.0), report
    arenas.append(report.arena_bytes)
activation = 256 * 512 * 4
assert 2 * activation <= arenas[0] < 4 * activation and activation <= arenas[1] < 3 * activation, arenas
print("trained on both")
"""
# The thread of a device lets go of what the last backward held, in plain torch too, and for that needs the interpreter:
# where it comes while that is being finalized, the process is aborted.
SETTLED = "\nimport time; time.sleep(0.5)"
TWO = {"STANDIN_DEVICES": "2"}
DEFAULT, SIDE = "torch.cuda.default_stream()", "torch.cuda.Stream()"
ENDS = {
    "a pool on another device than the present one": (POOLS + "pool('cuda:1')", TWO),
    "expandable segments": ("train('cuda')", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    "two devices": ("train('cuda:1'); train('cuda:0')", TWO),
    "two threads": (POOLS + "at_once((train, 'cuda'), (train, 'cuda'))", {}),
    "two steps on two devices and threads": (POOLS + "at_once((train, 'cuda:0'), (train, 'cuda:1'))", TWO),
    "two pools on two devices and threads": (POOLS + "at_once((pool, 'cuda:0'), (pool, 'cuda:1'))", TWO),
    "two devices, a step and a pool on threads": (POOLS + "at_once((train, 'cuda:0'), (pool, 'cuda:1'))", TWO),
    "a block freed elsewhere": (ELSEWHERE.format(streams=f"{DEFAULT}, {SIDE}"), TWO),
    "a block freed elsewhere that the default stream used": (ELSEWHERE.format(streams=f"{SIDE}, {DEFAULT}"), TWO),
    "halves of a model on each device": (HALVES, TWO),
    "garbage at the end": ("train('cuda'); sys.modules['kept'] = [torch.ones(3, device='cuda')]", {}),
}


@pytest.mark.parametrize("end", ENDS)
def test_processes_train_and_end_well(faults: Standin, end: str) -> None:
    code, settings = ENDS[end]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + code + SETTLED],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert done.stdout.count("trained on") == (2 if end.startswith("two") else 1)
