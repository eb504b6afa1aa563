"""The backend in trainers that people have: transformers' Trainer, and FSDP2 with blocks compiled one by one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import olla
from olla.inductor.kernels import order
from tests.support.pytorch.compiling import LEAST, fresh  # noqa: F401
from tests.support.pytorch.steps import torch

pytestmark = pytest.mark.torch


def _trained(folder: Path, goal: dict[str, Any] | None) -> tuple[list[float], list[float]]:
    """Return the losses and gradient norms that Trainer logs of a tiny GPT-2; with a goal its code is planned."""
    import transformers

    torch.compiler.reset()
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(64, (32, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, max_steps=6, logging_steps=1, max_grad_norm=1.0,
        gradient_accumulation_steps=2, torch_compile=True, report_to=[], save_strategy="no", use_cpu=True, seed=0,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
    with olla.inductor.enable(**goal) if goal is not None else contextlib.nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [entry["loss"] for entry in logged], [entry["grad_norm"] for entry in logged]


@pytest.mark.slow
def test_trainer_compiles_with_plans_and_trains_the_same(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    theirs = _trained(tmp_path, None)
    before = len(order.records())
    ours = _trained(tmp_path, LEAST)
    assert len(order.records()) > before  # the plans were in force while it trained
    assert len(ours[0]) == 6
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs))


_FSDP = """
import sys, warnings
warnings.simplefilter("ignore")
sys.path[:0] = sys.argv[3:]
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

rank = int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))

def train(backend, options=None):
    torch.compiler.reset()
    torch.manual_seed(0)
    blocks = []
    for _ in range(3):
        layers = [torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 64)]
        blocks.append(torch.compile(torch.nn.Sequential(*layers), backend=backend, options=options))
        fully_shard(blocks[-1], mesh=mesh)
    model = torch.nn.Sequential(*blocks)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for seed in range(4):
        torch.manual_seed(10 * seed + rank)
        optimizer.zero_grad()
        loss = model(torch.randn(16, 64)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), [p.to_local().detach() for p in model.parameters()]

from olla.inductor.kernels import order
ours = train("olla", {"minimise": "peak"})
planned = len(order.records())
torch.testing.assert_close(ours, train("inductor"))
assert planned, "no graph was planned"
print("trained")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_train_the_same_with_sharded_blocks(tmp_path: Path) -> None:
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    environment = {**os.environ, **caches}
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", _FSDP, str(tmp_path / "rendezvous"), str(rank)],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(2)
        ]
        for process in processes:
            out, errors = process.communicate(timeout=900)
            assert process.returncode == 0, errors[-3000:]
            assert out == "trained\n"
