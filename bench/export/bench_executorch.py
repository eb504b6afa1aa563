"""What memory do ExecuTorch programs need, planned by its own greedy rule and by olla.layout?

Models of transformers' default configurations with random weights, in evaluation mode, exported without a delegate:
with one (XNNPACK, say) most tensors live inside it, where no planner of the program reaches. Every program is planned
twice, each plan goes through ExecuTorch's verifier and through a check of our own.

    python bench/export/bench_executorch.py --markdown bench/results/export/executorch.md
    python bench/export/bench_executorch.py swin_tiny vit_b16

It needs the packages executorch and transformers. Exit status: 0; 1 if a program needs more than with the greedy rule.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tr
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge
from executorch.exir.memory_planning import MemoryPlanningAlgorithmSuite, Verifier, greedy
from executorch.exir.passes import MemoryPlanningPass

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench

from bench.support.harness import Cell, Report
from olla.integrations.executorch import layout_algorithm
from tests.support.overlap import highest_end, overlapping

_MIB = 2**20


class First(torch.nn.Module):
    """A model whose only output is its logits, or its first output where it has none."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.eval()

    def forward(self, x: Any) -> Any:
        found = self.model(x)
        return found.logits if hasattr(found, "logits") else found[0]


def image(model: Any, size: int = 224) -> Any:
    return First(model), (torch.randn(1, 3, size, size),)


def text(model: Any) -> Any:
    model.config.use_cache = False
    return First(model), (torch.randint(1000, (1, 128)),)


def llama() -> Any:
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
    return tr.LlamaForCausalLM(tr.LlamaConfig(**sizes, vocab_size=8192))


def whisper() -> Any:
    sizes = {"d_model": 384, "encoder_layers": 4, "encoder_attention_heads": 6, "decoder_layers": 1}
    return tr.WhisperModel(tr.WhisperConfig(**sizes, decoder_attention_heads=6)).encoder


def efficientnet() -> Any:
    config = tr.EfficientNetConfig(width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280)
    return tr.EfficientNetForImageClassification(config)


MODELS: dict[str, Callable[[], Any]] = {
    "swin_tiny": lambda: image(tr.SwinForImageClassification(tr.SwinConfig())),
    "convnext_tiny": lambda: image(tr.ConvNextForImageClassification(tr.ConvNextConfig())),
    "vit_b16": lambda: image(tr.ViTForImageClassification(tr.ViTConfig())),
    "whisper_tiny encoder": lambda: (First(whisper()), (torch.randn(1, 80, 3000),)),
    "efficientnet_b0": lambda: image(efficientnet()),
    "mobilenet_v2": lambda: image(tr.MobileNetV2ForImageClassification(tr.MobileNetV2Config())),
    "resnet50": lambda: image(tr.ResNetForImageClassification(tr.ResNetConfig())),
    "segformer_b0, 512": lambda: image(tr.SegformerForSemanticSegmentation(tr.SegformerConfig()), 512),
    "bert, 128 tokens": lambda: text(tr.BertForMaskedLM(tr.BertConfig())),
    "gpt2, 128 tokens": lambda: text(tr.GPT2LMHeadModel(tr.GPT2Config())),
    "llama 8 x 512, 128 tokens": lambda: text(llama()),
}


class Timed:
    """An algorithm of a suite, with the seconds it took and the tensors it was given."""

    def __init__(self, algorithm: Any) -> None:
        self.algorithm, self.seconds, self.bound, self.num_tensors = algorithm, 0.0, 0, 0
        self.__name__ = "timed"

    def __call__(self, alignment: int, specs: Any, *rest: Any) -> Any:
        start = time.perf_counter()
        result = self.algorithm(alignment, specs, *rest)
        self.seconds += time.perf_counter() - start
        self.num_tensors += len(specs)
        self.bound += check(specs, result)
        return result


def check(specs: Any, result: Any) -> int:
    """Refuse a plan in which tensors share bytes while both live; return the most bytes that live at once."""
    roots = [spec for spec in specs if spec.storage_base is None]
    lower = np.array([spec.lifetime[0] for spec in roots])
    upper = np.array([spec.lifetime[1] + 1 for spec in roots])
    size = np.array([spec.allocated_memory for spec in roots])
    offset = np.array([result.spec_dict[spec].mem_offset for spec in roots])
    assert {result.spec_dict[spec].mem_id for spec in roots} == {1}, "one memory was expected"
    assert overlapping(lower, upper, size, offset) < 0
    assert highest_end(lower, upper, size, offset) <= result.bufsizes[1]
    change = np.zeros(int(upper.max()) + 1, dtype=np.int64)
    np.add.at(change, lower, size)
    np.add.at(change, upper, -size)
    return int(np.cumsum(change).max())


def planned(make: Callable[[], Any], algorithm: Any) -> tuple[int, Timed]:
    """Return the bytes of a program's memories, after ExecuTorch's verifier."""
    model, inputs = make()
    torch.manual_seed(0)
    edge = to_edge(torch.export.export(model, inputs), compile_config=EdgeCompileConfig(_check_ir_validity=False))
    timed = Timed(algorithm)
    suite = MemoryPlanningAlgorithmSuite([timed])
    program = edge.to_executorch(ExecutorchBackendConfig(memory_planning_pass=MemoryPlanningPass(suite)))
    exported = program.exported_program()
    Verifier(exported.graph_module, True, True, True, exported.graph_signature).verify_storage_reuse()
    return sum(program.executorch_program.execution_plan[0].non_const_buffer_sizes), timed


def row(name: str, time_limit: float) -> list[Cell]:
    theirs, first = planned(MODELS[name], greedy)
    gc.collect()
    ours, second = planned(MODELS[name], layout_algorithm(time_limit=time_limit))
    gc.collect()
    assert (first.bound, first.num_tensors) == (second.bound, second.num_tensors), "two different programs"
    over = 100 * (theirs / ours - 1)
    mib = [theirs / _MIB, ours / _MIB, second.bound / _MIB]
    return [name, second.num_tensors, *mib, over, ours == second.bound, first.seconds, second.seconds]


def main() -> int:
    """Run it; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)}; all by default")
    parser.add_argument("--time-limit", type=float, default=5.0, help="seconds of olla.layout (default: 5)")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    parser.add_argument("--json", type=Path, help="write the table there")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    columns = ["model", "tensors", "greedy MiB", "olla MiB", "bound MiB", "greedy above olla, %", "olla optimal"]
    report = Report("Memory of ExecuTorch programs: its greedy rule, and olla.layout", [*columns, "greedy s", "olla s"])
    for name in args.names or MODELS:
        report.rows.append(row(name, args.time_limit))
        print(report.rows[-1], flush=True)
    above = [float(r[5]) for r in report.rows if isinstance(r[5], float)]
    report.summary["programs where greedy needs more"] = f"{sum(x > 0 for x in above)} of {len(above)}"
    report.summary["programs where olla needs more"] = f"{sum(x < 0 for x in above)} of {len(above)}"
    report.summary["proved optimal"] = f"{sum(r[6] is True for r in report.rows)} of {len(above)}"
    report.summary["checked"] = "every plan by ExecuTorch's verifier and by tests/support/overlap.py"
    report.summary["programs"] = (
        "float32, batch 1, random weights, no delegate, alignment 16 bytes, inputs and outputs included"
    )
    for package in ("executorch", "transformers"):
        report.machine[package] = metadata.version(package)
    report.print()
    for path in (args.markdown, args.json):
        if path:
            report.save(path)
    return int(any(x < 0 for x in above))


if __name__ == "__main__":
    sys.exit(main())
