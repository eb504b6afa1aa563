"""Ranks checkpoint the same modules, whatever their own batches and searches say."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import olla  # noqa: E402
from olla.checkpointing.checkpoint import _Search  # noqa: E402
from olla.checkpointing.first_batch import AtFirstBatch  # noqa: E402
from olla.errors import BudgetError  # noqa: E402
from tests.checkpointing.blocks import Residual, mlp  # noqa: E402

pytestmark = pytest.mark.torch


def _never(_: Any) -> None:
    raise AssertionError("the second rank searches")


def _rank(rank: int, folder: str, answers: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = Residual(*(mlp() for _ in range(4)))
    if rank == 1:
        _Search.run = _never  # type: ignore[assignment, method-assign]
    found = olla.checkpoint(model, torch.randn(256 * (rank + 1), 32), max_slowdown=0.2, plan_for="a100")
    try:
        olla.checkpoint(model, torch.randn(256, 32), budget=300_000)
        message = ""
    except BudgetError as error:
        message = str(error)
    told: list[Any] = []
    waiting = AtFirstBatch(model, {"max_slowdown": 0.2, "plan_for": "a100"}, told.append)
    for rows in (256, 256 + 512 * rank):  # a larger batch on one rank alone
        model(torch.randn(rows, 32)).sum().backward()
    waiting.close()
    assert len(told) == 1
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
