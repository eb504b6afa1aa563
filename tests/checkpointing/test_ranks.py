"""Ranks checkpoint the same modules, whatever their own batches and searches say."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import olla
from olla.checkpointing.checkpoint import _Search
from olla.errors import BudgetError
from tests.checkpointing.blocks import Residual, mlp
from tests.support.pytorch.steps import torch

pytestmark = pytest.mark.torch


def _rank(rank: int, folder: str, answers: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = Residual(*(mlp() for _ in range(4)))
    if rank == 1:

        def never(_: Any) -> None:
            raise AssertionError("the second rank searches")

        _Search.run = never  # type: ignore[assignment, method-assign]
    found = olla.checkpoint(model, torch.randn(256 * (rank + 1), 32), max_slowdown=0.2, plan_for="a100")
    try:
        olla.checkpoint(model, torch.randn(256, 32), budget=300_000)
        message = ""
    except BudgetError as error:
        message = str(error)
    answers.put((rank, found.modules, found.eager_peak_bytes, message))
    dist.barrier()
    dist.destroy_process_group()


def test_all_ranks_take_what_the_first_one_chooses(tmp_path: Path) -> None:
    context = torch.multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, str(tmp_path), answers)) for rank in range(2)]
    for process in ranks:
        process.start()
    (_, first, peak, why), (_, second, other_peak, also) = sorted(answers.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(60)
    assert first
    assert first == second
    assert peak < other_peak  # each measures its own batch
    assert "the least one needs" in why
    assert also == why
