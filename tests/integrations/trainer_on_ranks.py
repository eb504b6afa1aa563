"""A script for torchrun: a Trainer on several processes, as it is, with OllaCallback and as OllaTrainer.

Each rank writes a file.

python -m torch.distributed.run --nproc-per-node 2 tests/integrations/trainer_on_ranks.py FOLDER
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from olla.errors import CaptureError
from olla.integrations.transformers import OllaCallback, OllaTrainer

torch.manual_seed(0)
CONFIG = transformers.LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=97, use_cache=False, attention_dropout=0.1,
)  # fmt: skip
MODEL = transformers.LlamaForCausalLM(CONFIG)
MODEL.loss_type = "ForCausalLM"
DATA = [{"input_ids": row, "labels": row} for row in torch.randint(3, 97, (64, 64))]


def trained(
    folder: str,
    callback: OllaCallback | None,
    kind: type[transformers.Trainer] = transformers.Trainer,
    optim: str = "adamw_torch_fused",
    accumulation: int = 1,
) -> tuple[list[Any], transformers.Trainer]:
    """Train a copy of the model; return losses, norms of gradients and sums of parameters, and the Trainer."""
    torch.manual_seed(0)
    arguments = transformers.TrainingArguments(
        folder, per_device_train_batch_size=8, max_steps=8, report_to=[], use_cpu=True, logging_steps=1, seed=0,
        ddp_backend="gloo", disable_tqdm=True, optim=optim, gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    callbacks = [] if callback is None else [callback]
    trainer = kind(copy.deepcopy(MODEL), arguments, train_dataset=DATA, callbacks=callbacks)
    trainer.train()
    parameters = [float(p.double().sum()) for p in trainer.model.parameters()]
    return [(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e] + parameters, trainer


def whole_steps(folder: str) -> dict[str, Any]:
    """Train with planned steps, gradients of DistributedDataParallel and an update that is not fused included."""
    expected, _ = trained(folder, None, optim="adamw_torch")
    found, trainer = trained(folder, None, OllaTrainer, "adamw_torch")
    assert isinstance(trainer, OllaTrainer)
    report: Any = trainer.step_report()
    try:
        trained(folder, None, OllaTrainer, accumulation=2)
    except CaptureError as error:
        refusal = str(error)
    exact = report.num_misses == 0 and report.planned_peak_bytes == report.measured_peak_bytes
    return {"how": "step", "same": found == expected, "chosen": exact, "refusal": refusal}


def main() -> None:
    """Write what came out of each way, into a file of this rank."""
    torch.set_num_threads(1)
    expected, _ = trained(sys.argv[1], None)
    lines = [whole_steps(sys.argv[1])]
    for how, goal in (("checkpoint", {"max_slowdown": 0.3}), ("checkpoint", {"budget": "12MB"}), ("aten", {})):
        callback = OllaCallback(how=how, **goal)  # type: ignore[arg-type]
        found, _ = trained(sys.argv[1], callback)
        report: Any = callback.report()
        chosen = sorted(report.modules) if how == "checkpoint" else len(report.planned)
        lines.append({"how": how, "goal": goal, "same": found == expected, "chosen": chosen})
    (Path(sys.argv[1]) / f"rank{os.environ['RANK']}.json").write_text(json.dumps(lines))


if __name__ == "__main__":
    main()
