"""torchtitan's GraphTrainer on a CPU: its own test model and trainer, traced for real, with olla's memory policy."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import olla
from olla import _core
from olla.integrations import torchtitan as ours
from tests.support.pages import ROOT, blocks

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def titan() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reason = 'needs torchtitan, and Triton: pip install "olla-planner[torchtitan]" triton'
        pytest.importorskip("torchtitan", reason=reason)
        return pytest.importorskip("torchtitan.experiments.graph_trainer.tests._trainer_test_utils", reason=reason)


def trained(titan: Any, policy: str | None) -> tuple[Any, list[Any], Any]:
    """Return loss, gradients and traced graph of one step of its Llama 3 debug model; None: eager, by its Trainer."""
    from torchtitan.experiments.graph_trainer.common_utils import annotate_module_fqns
    from torchtitan.experiments.graph_trainer.llama3 import model_registry
    from torchtitan.experiments.graph_trainer.trainer import GraphTrainer
    from torchtitan.trainer import Trainer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec = model_registry("debugmodel", attn_backend="sdpa")
        torch.manual_seed(0)
        model = spec.model.build()
        with torch.no_grad():
            model.init_states(buffer_device=None)
        trainer = titan.build_minimal_trainer(
            model.train(),
            spec.model,
            Trainer if policy is None else GraphTrainer,
            # the first is for CUDA; the second asks a GPU for its bandwidth, though nothing communicates here
            compile_disable_passes=["cudagraph_pass", "joint_transformer_block_bucketing_reordering_pass"],
        )
        trainer.device = torch.device("cpu")
        if policy is not None:
            annotate_module_fqns(model)
            trainer.config.compile.memory_policy = policy
        tokens, labels = torch.randint(2048, (2, 8, 256))
        positions = torch.arange(256, dtype=torch.int32).expand(8, 256)
        loss = trainer.forward_backward_step(
            input_dict={"input": tokens, "positions": positions},
            labels=labels,
            global_valid_tokens=torch.tensor(float(labels.numel())),
        )
    step = getattr(trainer, "_traced_step", None)
    return loss.detach(), [p.grad for p in model.parameters()], step.gm if step else None


def peak_bytes(module: Any) -> int:
    graph = olla.from_fx(module)
    return int(_core.profile(graph.core, np.arange(graph.num_ops, dtype=np.int32)).peak_bytes)


@pytest.mark.parametrize("goal", [{"minimise": "peak"}, {"max_slowdown": 0.1}])
def test_a_step_is_the_eager_one_and_needs_what_was_foreseen(
    titan: Any, goal: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = []
    choose = ours.choose
    monkeypatch.setattr(ours, "choose", lambda *given: choices.append(choose(*given)) or choices[-1])
    ours.register(**goal)
    loss, gradients, module = trained(titan, "olla")
    (choice,) = choices
    assert choice.recomputed
    assert peak_bytes(module) == choice.peak_bytes < choice.saved_peak_bytes
    names = {node.name for node in module.graph.nodes}
    assert {f"{name}_recomputed" for name in choice.recomputed} & names
    if "max_slowdown" in goal:
        assert choice.added_seconds <= goal["max_slowdown"] * choice.base_seconds
    eager_loss, eager_gradients, _ = trained(titan, None)
    torch.testing.assert_close(loss, eager_loss)
    torch.testing.assert_close(gradients, eager_gradients)


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
