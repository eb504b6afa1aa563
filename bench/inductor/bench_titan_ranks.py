"""GraphTrainer's memory policies beside olla's where a step runs on many ranks: FSDP, and tensor parallel with it.

    python bench/inductor/bench_titan_ranks.py --markdown bench/results/inductor/titan_ranks.md

torchtitan's own models in full size, in bfloat16 with float32 shards, are traced for the first of some ranks that do
not exist, as its GraphTrainer traces and cleans them; nothing is computed. Each policy marks the graph, and its passes
make the program: what is recomputed, and one message for each layer, ahead of it. Peaks are those of that program in
its order, which olla has to foresee to the byte, with shards and their gradients. Added time is that of the roofline of
an A100 and its link, in which the parameters of a layer are gathered beside what computes. olla may add as much time as
the policy beside it. Attention on the CPU is saved by all: torch counts it as random.

`auto_perf_maxing`, which is proposed and not in torchtitan (`budget_policy.py`), is asked for budgets between the peaks
of `full` and of everything saved; it gathers again what is cheapest to gather.

Exit status: 1 if a peak is above another policy's, or takes more time.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import inspect
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import numpy as np

import olla
from bench.inductor.bench_torchtitan import ATTENTION, BUDGETS, policies
from bench.support.budget_policy import BudgetPolicy
from bench.support.harness import Report
from olla import _core
from olla.graph import profile_of
from olla.integrations import torchtitan as ours
from olla.integrations.torchtitan_program import GraphTrainerProgram
from olla.plan import asked
from tests.support.ranks.titan import Traced, fake_ranks

GIBI = 2**30
STEPS = {  # name -> registry, size, ranks of FSDP and of tensor parallel, batch of a rank
    "llama3 8B, FSDP 8": ("llama3", "8B", (8, 1), (1, 4096)),
    "llama3 8B, FSDP 64": ("llama3", "8B", (64, 1), (1, 4096)),
    "llama3 8B, FSDP 4 x TP 2": ("llama3", "8B", (4, 2), (1, 4096)),
    "qwen3 4B, FSDP 8": ("qwen3", "4B", (8, 1), (1, 4096)),
}


class Rivals:
    """One step under every policy.

    Args:
        name: of the step.
        page: to write on.
    """

    def __init__(self, name: str, page: Report) -> None:
        family, size, ranks, batch = STEPS[name]
        registry = importlib.import_module(f"torchtitan.experiments.graph_trainer.{family}").model_registry
        sharding = importlib.import_module(f"torchtitan.models.{family}.sharding")
        shard = vars(sharding)[f"set_{family}_sharding_config"]
        if "enable_ep" in inspect.signature(shard).parameters:
            shard = functools.partial(shard, enable_ep=False)
        self._step = Traced(registry(size, attn_backend="sdpa").model, shard, ranks, batch)
        self._module = self._step.module
        ours.name_sums(self._module)
        self._program = GraphTrainerProgram(olla.from_fx(self._module), self._module, profile_of("a100"))
        self._name, self._page = name, page
        self.is_above = 0

    def run(self) -> None:
        """Fill the rows of this step."""
        from torchtitan.experiments.graph_trainer.memory_policy import tag_sac_policy

        saved = self._judged(copy.deepcopy(self._module))[0]
        self._page.rows.append([self._name, "everything saved", saved / GIBI, 0.0, None, None, None, None])
        fewest = saved
        for policy, rule in policies().items():
            marked = tag_sac_policy(copy.deepcopy(self._module), policy_fn=rule)
            fewest = min(fewest, self._compare(policy, marked))
        rival = BudgetPolicy(self._module, {ATTENTION})
        for share in BUDGETS:
            budget, marked = int(fewest + share * (saved - fewest)), copy.deepcopy(self._module)
            if rival.mark(marked, budget):
                self._compare(f"auto_perf_maxing, {budget / GIBI:.1f} GiB", marked)

    def _compare(self, policy: str, marked: Any) -> int:
        peak, added = self._judged(marked)
        goal, _ = asked(max_slowdown=max(added, 0.0), in_place=False)
        assert goal is not None
        start, own = time.perf_counter(), copy.deepcopy(self._module)
        choice = ours.choose(own, goal)
        spent = time.perf_counter() - start
        ours.tag(own, choice)
        found, needed = self._judged(own)
        assert found == choice.peak_bytes, f"foreseen {choice.peak_bytes}, found {found}"
        self.is_above += found > peak or needed > max(added, 0.0) + 1e-9
        row = [
            self._name,
            policy,
            peak / GIBI,
            100 * added,
            found / GIBI,
            100 * needed,
            100 * (1 - found / peak),
            spent,
        ]
        self._page.rows.append(row)
        self._page.print()
        return peak

    def _judged(self, marked: Any) -> tuple[int, float]:
        """Return the peak of what GraphTrainer runs of a marked graph, and the share of time that it adds."""
        module = self._step.recomputed(marked)
        again = [name.removesuffix("_recomputed") for name in map(str, module.graph.nodes) if "_recomputed" in name]
        graph = olla.from_fx(self._step.gathered(module))
        peak = _core.profile(graph.core, np.arange(graph.num_ops, dtype=np.int32)).peak_bytes
        seconds = self._program.judged(self._program.ops_of(again)).added_seconds
        return int(peak), seconds / self._program.base_seconds


def main() -> int:
    """Run it; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", nargs="*", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    columns = [
        "step",
        "policy",
        "peak GiB",
        "added time, %",
        "olla GiB",
        "its added time, %",
        "lower by, %",
        "choosing s",
    ]
    page = Report("GraphTrainer's memory policies on many ranks", columns)
    above = 0
    for name in arguments.steps:
        *_, (fsdp, tensor), _ = STEPS[name]
        with fake_ranks(fsdp * tensor):
            rivals = Rivals(name, page)
            rivals.run()
            above += rivals.is_above
    lower = [row[6] for row in page.rows if row[6] is not None]
    page.summary["above a policy, in memory or time"] = f"{above} of {len(lower)}"
    page.summary["lower by, mean"] = f"{np.mean(lower):.1f} %"
    page.print()
    if arguments.markdown:
        page.save(arguments.markdown)
    return int(above > 0)


if __name__ == "__main__":
    sys.exit(main())
