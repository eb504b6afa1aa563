"""Sharded parameters of large models, planned by one process: beside FSDP2's fixed answers, at equal added time.

    python bench/recompute/bench_sharded.py --markdown bench/results/recompute/sharded.md
    python bench/recompute/bench_sharded.py --cases 8b --layers 4

Llama by shapes alone, no weights: parameters, gradients and AdamW's state in bfloat16, micro batch 1 of 4,096 tokens,
arithmetic at 989 TFLOP/s. "8b": 8 ranks, 450 GB/s between them; "70b": 64 ranks, 50 GB/s. Every all-gather takes its
time on the link and 5 us for each of its messages, as if nothing ran beside it. For every rival (`sharded_rivals.py`):

fixed GiB       what it needs, of one rank
added %         time that it adds; of the step's operators and its first all-gathers
olla GiB        the least peak that was found within that time, and the bound on every other plan of it
sent GiB        in all-gathers by that plan; at least: with everything else at its place, see `least_gathered_bytes`
step s          of the timeline, both with collectives beside other ops as far as their peaks allow
planning s      processor seconds of the plan; those of the capture are below

Exit status: 1 if a plan needs more than the rival, or sends more than 5 % above the least.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla
from bench.recompute.sharded_rivals import fixed, gathered_bytes, keeps_products, least_gathered_bytes
from bench.support.harness import Cell, Report
from olla.graph import PROFILES, rules

GIB = 2**30
TOKENS = 4096
VOCABULARY = 128_256
CASES: dict[str, tuple[int, float, dict[str, int]]] = {  # ranks, bytes per second between them, shapes
    "8b": (8, 450e9, {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                      "num_attention_heads": 32, "num_key_value_heads": 8}),
    "70b": (64, 50e9, {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                       "num_attention_heads": 64, "num_key_value_heads": 8}),
}  # fmt: skip
RIVALS: dict[str, Any] = {"gather again": None, "selective": keeps_products, "full": lambda target: False}


def captured(case: str, layers: int | None) -> olla.Graph:
    """Return the step of one rank."""
    import torch
    import transformers

    ranks, _, shapes = CASES[case]
    if layers is not None:
        shapes = {**shapes, "num_hidden_layers": layers}
    config = transformers.LlamaConfig(**shapes, vocab_size=VOCABULARY, max_position_embeddings=TOKENS)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        tokens = torch.zeros((1, TOKENS), dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())
    found = olla.capture(
        model,
        {"input_ids": tokens, "labels": tokens},
        optimizer=optimizer,
        loss=lambda model, batch: model(**batch).loss,
        world_size=ranks,
        parallel="fsdp",
    )
    return found.graph


def compared(case: str, layers: int | None, report: Report) -> bool:
    """Add the rows of a case to a report; return whether all is as it should be."""
    start = time.process_time()
    graph = captured(case, layers)
    report.summary[f"{case}: processor seconds of the capture"] = time.process_time() - start
    report.summary[f"{case}: ops"] = graph.num_ops
    ranks, speed, _ = CASES[case]
    h100 = PROFILES["h100"]
    device = dataclasses.replace(h100, name="h100, bfloat16", flops_per_second=989e12, peer_bytes_per_second=speed)
    allowed = rules(graph, device)
    base, good = float(allowed.seconds.sum()), True
    for name, keeps in RIVALS.items():
        rival = fixed(graph, allowed, device, keeps)
        start = time.process_time()
        share = rival.added_seconds / base
        plan = olla.plan(graph, device=device, max_slowdown=share, layout=False, time_limit=240.0)
        seconds = time.process_time() - start
        olla.check(graph, plan)
        assert plan.graph is not None
        sent = gathered_bytes(plan.graph)
        least = least_gathered_bytes(plan.graph, plan.order, plan.peak_bytes)
        timeline = olla.timeline(plan.graph, plan.order, device)
        bound = plan.peak_lower_bound_bytes
        row: list[Cell] = [case, ranks, name, rival.peak_bytes / GIB, 100 * share, plan.peak_bytes / GIB, bound / GIB]
        row += [100 * (plan.peak_bytes / bound - 1), 100 * (1 - plan.peak_bytes / rival.peak_bytes)]
        row += [rival.gathered_bytes / GIB, sent / GIB, least / GIB, rival.step_seconds, timeline.seconds, seconds]
        report.rows.append(row)
        good &= plan.peak_bytes <= rival.peak_bytes and sent <= 1.05 * least
    return good


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description="Plans of sharded steps beside FSDP2's fixed answers.")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--layers", type=int, help="of the model, in place of its own number")
    parser.add_argument("--markdown", type=Path, help="write a page there")
    options = parser.parse_args()
    columns = ["model", "ranks", "rival", "fixed GiB", "added %", "olla GiB", "bound GiB", "gap %", "lower by %"]
    columns += ["fixed sends GiB", "olla sends GiB", "at least GiB", "fixed step s", "olla step s", "planning s"]
    report = Report("Sharded parameters beside FSDP2's fixed answers", columns)
    results = [compared(case, options.layers, report) for case in options.cases]
    report.print()
    if options.markdown:
        report.save(options.markdown)
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
