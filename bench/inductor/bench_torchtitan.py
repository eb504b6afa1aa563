"""What torchtitan's GraphTrainer saves for backward: its memory policies beside olla's, on the same traced step.

    python bench/inductor/bench_torchtitan.py --markdown bench/results/inductor/torchtitan.md

A Llama of transformers (12 layers, width 1,024, vocabulary 8,192, 4 x 1,024 tokens, float32) is traced with its loss
and its gradients by `minimal_fx_tracer` on a CPU; then each policy marks the graph, and
`selective_activation_remat_pass` makes the program that GraphTrainer runs. Peaks are those of that program, in its
order, with parameters and gradients; added time is the roofline of an A100. Random operators, of which CPU attention is
one, are saved by all. Each row of olla may add as much time as the policy it stands below. `auto_perf_maxing`, which is
proposed and not in torchtitan (`budget_policy.py`), is asked for budgets between the peaks of `full` and of everything
saved.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import numpy as np
import torch

import olla
from bench.support.budget_policy import BudgetPolicy
from bench.support.harness import Report
from olla import _core
from olla.graph import profile_of
from olla.integrations import torchtitan as ours
from olla.plan import asked

MEBI = 2**20
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BUDGETS = (0.75, 0.5, 0.25, 0.0)  # shares of the way from the peak of "full" to that of everything saved


def traced(layers: int, width: int) -> Any:
    """Return the graph of forward, loss and backward."""
    import transformers
    from torchtitan.experiments.graph_trainer.common_utils import annotate_module_fqns
    from torchtitan.experiments.graph_trainer.make_fx_tracer import minimal_fx_tracer

    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=layers, num_attention_heads=16,
        vocab_size=8192, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train()
    annotate_module_fqns(model)

    def step(tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss = model(input_ids=tokens, labels=tokens).loss
        return (loss, *torch.autograd.grad(loss, list(model.parameters())))

    module = minimal_fx_tracer(step, module=model)(torch.zeros(4, 1024, dtype=torch.long)).gm
    for node in module.graph.nodes:
        if name := node.meta.get("custom", {}).get("module_fqn"):
            node.meta["custom"] = {**node.meta["custom"], "module_fqn": name.removeprefix("model.")}
    ours.name_sums(module)
    return module


def judged(module: Any) -> tuple[int, float]:
    """Return peak and seconds of the program that GraphTrainer makes of a marked graph."""
    from torchtitan.experiments.graph_trainer.remove_noop_passes import eliminate_dead_code_pass
    from torchtitan.experiments.graph_trainer.selective_activation_remat import selective_activation_remat_pass

    graph = olla.from_fx(eliminate_dead_code_pass(selective_activation_remat_pass(module), ()))
    peak = _core.profile(graph.core, np.arange(graph.num_ops, dtype=np.int32)).peak_bytes
    return int(peak), float(profile_of("a100").op_seconds(graph).sum())


def policies() -> dict[str, Any]:
    """Return torchtitan's rules by name."""
    from torch.utils.checkpoint import CheckpointPolicy
    from torchtitan.experiments.graph_trainer import memory_policy as theirs

    def saving_draws(rule: Any) -> Any:
        return lambda node: CheckpointPolicy.MUST_SAVE if node.target is ATTENTION else rule(node)

    made = {
        "default": theirs._make_default_memory_policy(),
        "eager": theirs._make_eager_memory_policy(),
        "full": theirs._make_full_memory_policy(),
    }
    return {name: saving_draws(rule) for name, rule in made.items()}


def main() -> int:
    """Run it; see the module."""
    from torchtitan.experiments.graph_trainer.memory_policy import tag_sac_policy

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    module = traced(arguments.layers, arguments.width)
    saved, base = judged(copy.deepcopy(module))
    columns = ["policy", "peak MiB", "added time, %", "below the policy above, %", "choosing s"]
    page = Report(f"GraphTrainer's memory policies, Llama {arguments.layers} x {arguments.width}", columns)
    page.rows.append(["everything saved", saved / MEBI, 0.0, None, None])

    def compare(name: str, peak: int, seconds: float) -> None:
        page.rows.append([name, peak / MEBI, 100 * (seconds / base - 1), None, None])
        goal, _ = asked(max_slowdown=max(seconds / base - 1, 0.0), in_place=False)
        assert goal is not None
        start, marked = time.perf_counter(), copy.deepcopy(module)
        choice = ours.choose(marked, goal)
        spent = time.perf_counter() - start
        ours.tag(marked, choice)
        least, needed = judged(marked)
        assert least == choice.peak_bytes, f"{name}: foreseen {choice.peak_bytes}, found {least}"
        below = 100 * (1 - least / peak)
        page.rows.append([f"olla, as long as {name}", least / MEBI, 100 * (needed / base - 1), below, spent])
        page.print()

    for name, rule in policies().items():
        peak, seconds = judged(tag_sac_policy(copy.deepcopy(module), policy_fn=rule))
        compare(name, peak, seconds)
    rival, fewest = BudgetPolicy(module, {ATTENTION}), peak
    for share in BUDGETS:
        budget, marked = int(fewest + share * (saved - fewest)), copy.deepcopy(module)
        name = f"auto_perf_maxing, {budget / MEBI:,.0f} MiB"
        if rival.mark(marked, budget):
            compare(name, *judged(marked))
        else:
            page.rows.append([f"{name}: no answer", None, None, None, None])
    if arguments.markdown:
        page.save(arguments.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
