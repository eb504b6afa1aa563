"""OllaCallback and OllaTrainer on two processes: the losses of the Trainer as it is, and the same choice on both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.torch
SCRIPT = Path(__file__).with_name("trainer_on_ranks.py")


def test_two_processes_train_the_same_and_checkpoint_the_same_modules(tmp_path: Path) -> None:
    port = str(20000 + os.getpid() % 20000)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
    done = subprocess.run(
        [*launch, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = ((tmp_path / f"rank{rank}.json").read_text() for rank in range(2))
    lines = json.loads(first)
    assert [line["how"] for line in lines] == ["step", "checkpoint", "checkpoint", "aten"]
    assert lines[0]["refusal"].startswith("OllaTrainer: gradient_accumulation_steps=2 on several processes")
    assert all(line["same"] and line["chosen"] for line in lines)
    assert first == second
