"""A script for torchrun: a Trainer on several processes, as it is and with OllaCallback; each rank writes a file.

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

from olla.integrations.transformers import OllaCallback

torch.manual_seed(0)
CONFIG = transformers.LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=97, use_cache=False, attention_dropout=0.1,
)  # fmt: skip
MODEL = transformers.LlamaForCausalLM(CONFIG)
MODEL.loss_type = "ForCausalLM"
DATA = [{"input_ids": row, "labels": row} for row in torch.randint(3, 97, (64, 64))]


def trained(folder: str, callback: OllaCallback | None) -> list[Any]:
    """Train a copy of the model; return losses and norms of gradients."""
    torch.manual_seed(0)
    arguments = transformers.TrainingArguments(
        folder, per_device_train_batch_size=8, max_steps=8, report_to=[], use_cpu=True, logging_steps=1, seed=0,
        ddp_backend="gloo", disable_tqdm=True,
    )  # fmt: skip
    callbacks = [] if callback is None else [callback]
    trainer = transformers.Trainer(copy.deepcopy(MODEL), arguments, train_dataset=DATA, callbacks=callbacks)
    trainer.train()
    parameters = [float(p.double().sum()) for p in trainer.model.parameters()]
    return [(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e] + parameters


def main() -> None:
    """Write one line of JSON for each way, into a file of this rank."""
    torch.set_num_threads(1)
    expected = trained(sys.argv[1], None)
    for how, goal in (("checkpoint", {"max_slowdown": 0.3}), ("checkpoint", {"budget": "12MB"}), ("aten", {})):
        callback = OllaCallback(how=how, **goal)  # type: ignore[arg-type]
        found = trained(sys.argv[1], callback)
        report: Any = callback.report()
        chosen = sorted(report.modules) if how == "checkpoint" else len(report.planned)
        line = {"how": how, "goal": goal, "same": found == expected, "chosen": chosen}
        with (Path(sys.argv[1]) / f"rank{os.environ['RANK']}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
