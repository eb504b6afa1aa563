"""What docs/trainers.md shows runs as printed, one namespace for each section.

Sections take for granted a tiny GPT-2 `model`, its `optimizer`, `dataset` and `loader`, `arguments` of transformers'
Trainer, and a LightningModule `module` with that model.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
SECTIONS = {section.partition("\n")[0]: section for section in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]}
BLOCKS = {
    title: re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE) for title, text in SECTIONS.items()
}
NEEDS = {"transformers": "accelerate", "Accelerate": "accelerate", "Lightning": "lightning.pytorch"}


def given() -> dict[str, Any]:
    """Return the names that a section takes for granted."""
    import torch
    import transformers

    torch.compiler.reset()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    dataset = [{"input_ids": row, "labels": row} for row in torch.randint(64, (32, 16))]
    return {
        "torch": torch,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "dataset": dataset,
        "loader": torch.utils.data.DataLoader(dataset, batch_size=8),
        "arguments": transformers.TrainingArguments(
            "out", per_device_train_batch_size=8, num_train_epochs=1, report_to=[], use_cpu=True
        ),
    }


def module_of(model: Any) -> Any:
    import lightning.pytorch as pl
    import torch

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    return Module()


def test_every_way_of_every_trainer_has_an_example() -> None:
    ways = ("a pool", "checkpoints with a budget", "torch.compile with a budget", "the whole step planned")
    assert [title for title, found in BLOCKS.items() if found] == [f"{name}: {way}" for name in NEEDS for way in ways]
    assert "```py\n" not in TEXT


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("section", [title for title, found in BLOCKS.items() if found])
def test_examples_run(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("transformers")
    package = NEEDS[section.partition(":")[0]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(package, reason=f"the examples of {section!r} need {package}")
    names = given()
    if section.startswith("Lightning"):
        names["module"] = module_of(names["model"])
    before = [parameter.detach().clone() for parameter in names["model"].parameters()]
    for block in BLOCKS[section]:
        exec(compile(block, "trainers.md", "exec"), names)
    changed = [not a.equal(b) for a, b in zip(before, names["model"].parameters(), strict=True)]
    assert all(changed)  # it was trained
    if "print(" in "".join(BLOCKS[section]):
        assert capsys.readouterr().out.strip()
