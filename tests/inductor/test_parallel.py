"""The backend on several ranks: DDP, FSDP2, tensor parallel, each with checkpointed blocks; and ranks that differ."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.pytorch.steps import torch

pytestmark = pytest.mark.torch

_SCRIPT = """
import functools, hashlib, json, sys, warnings
warnings.simplefilter("ignore")
folder, rank, size, ways, paths = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *map(json.loads, sys.argv[4:])
sys.path[:0] = paths
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from olla.inductor.compat import fallback
from olla.inductor.saving import partition

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + folder + "/rendezvous", rank=rank, world_size=size)
mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
torch._dynamo.config.optimize_ddp = False  # torch's buckets refuse graphs with checkpoints, whatever the backend

choices = []
choose = partition.saving.Front.choose

def chosen(*arguments):
    choice = choose(*arguments)
    runs = b"".join(values.tobytes() for values in (choice.runs.op, choice.runs.position, choice.runs.again))
    choices.append([choice.peak_bytes, choice.saved_peak_bytes, hashlib.sha256(runs).hexdigest()])
    return choice

partition.saving.Front.choose = chosen

def keep_products(context, op, *arguments, **names):
    kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

class Block(torch.nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(64), torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)
        self.run = functools.partial(checkpoint, self.inner, **settings) if settings else self.inner

    def inner(self, x):
        return self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

    def forward(self, x):
        return x + self.run(x)

def train(way, backend=None, options=None):
    torch.compiler.reset()
    torch.manual_seed(0)
    selective = functools.partial(create_selective_checkpoint_contexts, keep_products)
    model = torch.nn.Sequential(Block(use_reentrant=False), Block(use_reentrant=False, context_fn=selective), Block())
    blocks = list(model)
    if way == "blocks":
        for block in blocks:
            block.compile(backend=backend or "eager", options=options)
    if way in ("whole", "blocks"):
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if way == "tensor":
        for block in blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    run = DistributedDataParallel(model) if way == "ddp" else model
    step = torch.compile(run, backend=backend, options=options) if backend and way != "blocks" else run
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for seed in range(4):
        torch.manual_seed(10 * seed + (0 if way == "tensor" else rank))  # tensor parallel: the same batch everywhere
        optimizer.zero_grad()
        loss = step(torch.randn(512, 64)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

found = {}
for name, way, goal in ways:
    if name == "busy" and rank == 1:
        partition.saving._RUN_SECONDS = partition.saving._SEED_SECONDS = 1e-9
    choices.clear()
    eager = train(way)
    ours = train(way, "olla", goal)
    found[name] = {"eager": eager, "ours": ours, "choices": list(choices)}
print(json.dumps({"found": found, "warned": sorted(map(str, fallback._warned))}))
dist.destroy_process_group()
"""


LEAST = {"minimise": "peak"}
Found = dict[str, dict[str, Any]]


def trained(folder: Path, ways: list[tuple[str, str, dict[str, str]]]) -> list[Found]:
    """Return what two ranks found, by name: losses of eager steps and of compiled ones, and what was chosen.

    Args:
        folder: where the ranks meet.
        ways: name ("busy": the second rank has no time to choose); "ddp", "whole" or "blocks" of FSDP2, or "tensor";
            the goal.
    """
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    (folder / "rendezvous").unlink(missing_ok=True)
    anew = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(2):
            arguments = [str(folder), str(rank), "2", json.dumps(ways), json.dumps(sys.path)]
            process = subprocess.Popen(
                [sys.executable, "-c", _SCRIPT, *arguments],
                env={**os.environ, **anew}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            processes.append(stack.enter_context(process))
        answers = []
        for process in processes:
            out, errors = process.communicate(timeout=900)
            assert process.returncode == 0, errors[-3000:]
            answers.append(json.loads(out.splitlines()[-1]))
    for answer in answers:
        assert answer["warned"] == []
        for way in answer["found"].values():
            torch.testing.assert_close(torch.tensor(way["ours"]), torch.tensor(way["eager"]))
    return [answer["found"] for answer in answers]


@pytest.mark.slow
def test_two_ranks_train_as_eager_steps_do_and_choose_the_same(tmp_path: Path) -> None:
    first, second = trained(
        tmp_path, [("whole", "whole", LEAST), ("tensor", "tensor", LEAST), ("busy", "tensor", LEAST)]
    )
    for way in ("whole", "tensor"):
        assert first[way]["choices"]
        assert first[way]["choices"] == second[way]["choices"]
    assert first["tensor"]["choices"] == first["busy"]["choices"] == second["busy"]["choices"]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "blocks"])
def test_two_ranks_of_replicas_or_sharded_blocks_do_so_too(tmp_path: Path, way: str) -> None:
    first, second = trained(tmp_path, [(way, way, LEAST)])
    assert first[way]["choices"] == second[way]["choices"] != []
