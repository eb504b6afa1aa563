"""olla.checkpoint beside the rules that people set by hand, at equal added time: peaks of twelve models.

    python bench/checkpointing/bench_checkpoint.py --markdown bench/results/checkpointing/checkpoint.md
    python bench/checkpointing/bench_checkpoint.py --cases gpt2 vit

Rules: torch's checkpoint on every n-th block (n = 1: on all of them; n = 2: alternate blocks; transformers has that as
`every_n_layers`), blocks being modules of one class in one list. All peaks are of forward and backward on fake tensors
(parameters, gradients, batch and activations), all seconds estimated for an A100, both by the same code; the LSTM,
whose kernels keep what fake ones do not know, runs on the CPU. Of all n, the rule of the least peak that adds at most
so much time is beside the least peak that `olla.checkpoint(max_slowdown=...)` finds within that. "of the rule's": peak
against peak; "activations": what is above parameters and gradients alone. Seconds: one call of `olla.checkpoint`.

Exit status: 1 if a peak is above a rule's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla
from bench.support.harness import Report
from olla.checkpointing.regions import ModuleRegion
from olla.checkpointing.trace import TrainingStep
from olla.graph import PROFILES
from tests.support.pytorch import compile_cases, models

MIB = 2**20
SLOWDOWNS = (0.05, 0.1, 0.2, 0.3, 0.4)
COLUMNS = [
    "model",
    "blocks",
    "at most",
    "eager MiB",
    "best rule",
    "adds",
    "rule MiB",
    "olla MiB",
    "adds ",
    "of the rule's",
]
COLUMNS += ["activations", "bound MiB", "modules", "seconds"]


class LSTM(nn.Module):
    """A language model of recurrent layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 128)
        self.layers = nn.ModuleList([nn.LSTM(128, 128, batch_first=True) for _ in range(6)])
        self.head = nn.Linear(128, 1000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a number per token and word."""
        x = self.table(tokens)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x)  # type: ignore[no-any-return]


class LoRA(nn.Module):
    """A frozen linear layer with two small ones that train."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.drop = nn.Dropout(0.05)
        self.down = nn.Linear(base.in_features, 16, bias=False)
        self.up = nn.Linear(16, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the layer returns, and the small ones' part."""
        return self.base(x) + self.up(self.down(self.drop(x)))  # type: ignore[no-any-return]


def lora() -> models.Example:
    """Return a frozen llama with small layers beside its projections."""
    with torch.device("meta"):
        example = models.build("llama_100m", 4, length=512)
        example.model.requires_grad_(False)
        for module in list(example.model.modules()):
            for name, part in module.named_children():
                if isinstance(part, nn.Linear) and name in ("q_proj", "v_proj", "up_proj", "down_proj"):
                    setattr(module, name, LoRA(part))
    return example


def lstm() -> models.Example:
    """Return recurrent layers with their loss."""
    tokens = torch.randint(1000, (16, 64))
    return models.Example(LSTM(), {"tokens": tokens}, lambda model, batch: model(**batch).float().square().mean())


CASES: dict[str, Callable[[], models.Example]] = {
    "gpt2": lambda: models.build("gpt2", 8, length=512),
    "llama_1b": lambda: models.build("llama_1b", 2, length=1024),
    "bert": lambda: models.build("bert_base", 32, length=128),
    "t5": lambda: models.build("t5_small", 16, length=512),
    "whisper": lambda: compile_cases.build("whisper b8")[0],
    "deberta": lambda: models.build("deberta_v2", 16, length=256),
    "vit": lambda: models.build("vit_b16", 32),
    "convnext": lambda: models.build("convnext_t", 32),
    "unet": lambda: compile_cases.build("unet b8")[0],
    "mixtral": lambda: models.build("mixtral_100m", 4, length=512),
    "lora": lora,
    "lstm": lstm,
}


def blocks_of(model: nn.Module, traced: set[str]) -> list[list[str]]:
    """Return lists of modules of one class that run, the outermost of them."""
    found: list[list[str]] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
            continue
        names = [f"{name}.{i}".lstrip(".") for i in range(len(module))]
        alike = len({type(part) for part in module}) == 1 and all(n in traced for n in names)
        if alike and not any(n.startswith(f"{outer}.") for group in found for outer in group for n in names):
            found.append(names)
    return found


def rules_of(blocks: list[list[str]]) -> dict[str, list[str]]:
    """Return what each rule checkpoints."""
    most = max((len(group) for group in blocks), default=0)
    chosen = {f"every {n}": [name for group in blocks for name in group[n - 1 :: n]] for n in range(1, most + 1)}
    return {("all" if rule == "every 1" else rule): names for rule, names in chosen.items() if names}


def measure(case: str, time_limit: float) -> list[list[Any]]:
    """Return the rows of a model."""
    torch.manual_seed(0)
    example = CASES[case]()
    is_real = case == "lstm"
    step = TrainingStep(example.model, example.batch, example.loss, PROFILES["a100"], is_real=is_real)
    traced = step.trace()
    base = step.measure({})
    held = [*example.model.parameters(), *example.model.buffers()]
    static = sum(t.nbytes * (2 if t.requires_grad else 1) for t in held)
    blocks = blocks_of(example.model, {call.module for call in traced.calls})
    ruled = {rule: step.measure({n: ModuleRegion() for n in names}) for rule, names in rules_of(blocks).items()}
    rows: list[list[Any]] = []
    for share in SLOWDOWNS:
        within = {rule: m for rule, m in ruled.items() if m.seconds - base.seconds <= share * base.seconds}
        rule, best = min(within.items(), key=lambda item: item[1].peak_bytes, default=("none", base))
        begin = time.perf_counter()
        found = olla.checkpoint(
            example.model, example.batch, loss=example.loss, max_slowdown=share, plan_for="a100", time_limit=time_limit
        )
        seconds = time.perf_counter() - begin
        olla.checkpoint.remove(example.model)
        rows.append([
            case, sum(map(len, blocks)), f"{share:.0%}", round(base.peak_bytes / MIB, 1), rule,
            f"{(best.seconds - base.seconds) / base.seconds:.1%}", round(best.peak_bytes / MIB, 1),
            round(found.peak_bytes / MIB, 1), f"{found.added_seconds / found.base_seconds:.1%}",
            found.peak_bytes / best.peak_bytes,
            max(0, found.peak_bytes - static) / max(1, best.peak_bytes - static),
            round((found.bound_bytes or 0) / MIB, 1), len(found.modules), seconds,
        ])  # fmt: skip
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> int:
    """Print the table; return 1 if a peak is above a rule's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds of each search (default: %(default)s)")
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    report = Report("olla.checkpoint and checkpoints by hand, at equal added time", COLUMNS)
    for case in args.cases:
        report.rows += measure(case, args.time_limit)
    ratios = [row[9] for row in report.rows]
    report.summary["above a rule"] = sum(ratio > 1 for ratio in ratios)
    report.summary["peak, mean"] = f"{sum(ratios) / len(ratios):.3f} of the best rule's"
    report.summary["activations, mean"] = f"{sum(row[10] for row in report.rows) / len(ratios):.3f} of the best rule's"
    report.print()
    if args.markdown is not None:
        report.save(args.markdown)
    return 1 if report.summary["above a rule"] else 0


if __name__ == "__main__":
    sys.exit(main())
