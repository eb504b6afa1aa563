"""torchtitan's GraphTrainer on a CPU: its own test model and trainer, traced for real, with olla's memory policy."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import olla
from olla import _core
from olla.integrations import torchtitan as ours
from olla.plan import asked
from tests.support.pages import ROOT, blocks
from tests.support.ranks.processes import ranks
from tests.support.ranks.titan import Traced, fake_ranks, trained
from tests.support.ranks.work import titan_trained

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def titan() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reason = 'needs torchtitan, and Triton: pip install "olla-planner[torchtitan]" triton'
        pytest.importorskip("torchtitan", reason=reason)
        return pytest.importorskip("torchtitan.experiments.graph_trainer.tests._trainer_test_utils", reason=reason)


def peak_bytes(module: Any) -> int:
    graph = olla.from_fx(module)
    return int(_core.profile(graph.core, np.arange(graph.num_ops, dtype=np.int32)).peak_bytes)


@pytest.mark.parametrize("goal", [{"minimise": "peak"}, {"max_slowdown": 0.1}])
def test_a_step_is_the_eager_one_and_needs_what_was_foreseen(
    titan: Any, goal: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = []
    choose = ours.choose
    monkeypatch.setattr(
        ours, "choose", lambda *given, **options: choices.append(choose(*given, **options)) or choices[-1]
    )
    ours.register(**goal)
    loss, gradients, module = trained("olla")
    (choice,) = choices
    assert choice.recomputed
    assert peak_bytes(module) == choice.peak_bytes < choice.saved_peak_bytes
    names = {node.name for node in module.graph.nodes}
    assert {f"{name}_recomputed" for name in choice.recomputed} & names
    if "max_slowdown" in goal:
        assert choice.added_seconds <= goal["max_slowdown"] * choice.base_seconds
    eager_loss, eager_gradients, _ = trained(None)
    torch.testing.assert_close(loss, eager_loss)
    torch.testing.assert_close(gradients, eager_gradients)


@pytest.mark.parametrize("sizes", [(8, 1), (64, 1), (4, 2)])
@pytest.mark.parametrize("goal", [{"minimise": "peak"}, {"max_slowdown": 0.1}])
def test_a_step_of_many_ranks_needs_what_was_foreseen(titan: Any, sizes: tuple[int, int], goal: dict[str, Any]) -> None:
    from torchtitan.experiments.graph_trainer.llama3 import model_registry
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    found, _ = asked(in_place=False, device="a100", **goal)
    assert found is not None
    with fake_ranks(sizes[0] * sizes[1]):
        config = model_registry("debugmodel", attn_backend="sdpa").model
        step = Traced(config, set_llama3_sharding_config, sizes, (4, 1024))
        ours.name_sums(step.module)
        for sends_ahead in (False, True):
            module = copy.deepcopy(step.module)
            choice = ours.choose(module, found, sends_ahead=sends_ahead)
            ours.tag(module, choice)
            program = step.recomputed(module)
            again = {node.name for node in program.graph.nodes if "_recomputed" in node.name}
            assert again.issuperset(f"{name}_recomputed" for name in choice.recomputed if "gather" in name)
            assert choice.peak_bytes < choice.saved_peak_bytes
            assert peak_bytes(step.gathered(program) if sends_ahead else program) == choice.peak_bytes


def test_two_ranks_train_as_the_eager_trainer_does(titan: Any, tmp_path: Path) -> None:
    for found in ranks(titan_trained, 2, tmp_path, goal={"minimise": "peak"}):
        assert found["recomputed"]
        assert any("gather" in name for name in found["recomputed"])
        for own, eager in zip(found["olla"], found["eager"], strict=True):
            np.testing.assert_allclose(own, eager, rtol=1e-5, atol=1e-7)


def test_wrong_goals_are_told_before_anything_is_trained() -> None:
    with pytest.raises(ValueError, match="budget and minimise are given"):
        ours.register(budget="1GB", minimise="peak")
    with pytest.raises(olla.errors.BudgetError, match="'much' is no number of bytes"):
        ours.register(budget="much")


def test_the_example_of_the_docs_runs_as_printed(titan: Any) -> None:
    from torchtitan.experiments.graph_trainer.trainer import GraphTrainer

    (block,) = blocks(ROOT / "docs/torchtitan.md")
    config = GraphTrainer.Config()
    exec(compile(block.text, "torchtitan.md", "exec"), {"config": config})
    assert config.compile.memory_policy == "olla"
