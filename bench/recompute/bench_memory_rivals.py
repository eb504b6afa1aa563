"""What do planners of memory need beside olla, at equal added time: PyTorch's sac_milp, min-cut, checkpoints, Rotor?

    python bench/recompute/bench_memory_rivals.py gpt2 --markdown bench/results/recompute/memory_rivals_gpt2.md
    python bench/recompute/bench_memory_rivals.py bert --markdown bench/results/recompute/memory_rivals_bert.md
    python bench/recompute/bench_memory_rivals.py llama --markdown bench/results/recompute/memory_rivals_llama.md

Training steps with AdamW, float32, without dropout, captured without weights. One cost model for all, ours: simulated
bytes with all that is resident, seconds of a roofline of the device. sac_milp is judged by the step as it is captured
with its checkpoints, in program order, as PyTorch runs it; the others by their choice on our best order. Our plan gets
the added time of each and goes through olla.check; once more without results in place, which none of the others has.

sac_milp needs pulp, pwlf and scipy. Where its trackers fail, a row says so: with torch 2.13 on modules that are made
in a forward pass (the loss of BERT in transformers) or have no backward pass (the rotary embedding of Llama).
torch's auto_chunker is a part of Inductor: see bench/inductor/bench_chunked.py. Exit status: 0; 1 if a rival needs less
than our plan at its added time.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers as tr

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench

import olla
from bench.recompute import recompute_rivals, sac_rival
from bench.recompute.recompute_rivals import Point
from bench.recompute.rotor import rotor
from bench.recompute.versus import frontier
from bench.support.harness import Cell, Report
from olla.graph import profile_of

_MIB = 2**20
_SHOWN = (0.05, 0.1, 0.2, 0.33)  # of added time, for which a rival's best point is shown
COLUMNS = ["model", "rival", "setting", "says, MiB", "needs, MiB", "added time, %", "rival s"]
COLUMNS += ["olla, MiB", "bound, MiB", "olla s", "olla is lower by, %", "without in-place, %"]
_CAUSAL = {"use_cache": False, "bos_token_id": 0, "eos_token_id": 0}


def gpt2() -> Any:
    off = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0)
    return _plain(tr.GPT2LMHeadModel(tr.GPT2Config(**off, **_CAUSAL)))


def bert() -> Any:
    off = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0)
    return _plain(tr.BertForMaskedLM(tr.BertConfig(**off)))


def llama() -> Any:
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16}
    return _plain(tr.LlamaForCausalLM(tr.LlamaConfig(**sizes, vocab_size=8192, use_cache=False)))


def _plain(model: Any) -> Any:
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"
    return model.train()


MODELS: dict[str, tuple[str, Callable[[], Any], tuple[int, int]]] = {
    "gpt2": ("GPT-2 small, 8 x 512", gpt2, (8, 512)),
    "bert": ("BERT base, 16 x 256", bert, (16, 256)),
    "llama": ("Llama 12 x 1024, 4 x 1024", llama, (4, 1024)),
}


class Ours:
    """Our plans of one step, each checked."""

    def __init__(self, graph: olla.Graph, device: str) -> None:
        self.graph, self.device = graph, device
        self.base_seconds = float(profile_of(device).op_seconds(graph).sum())
        self.beaten: list[str] = []

    def plan(self, added_seconds: float, in_place: bool) -> olla.Plan:
        """Return our plan within an added time."""
        share = added_seconds / self.base_seconds * (1 + 1e-9)
        found = olla.plan(self.graph, max_slowdown=share, device=self.device, in_place=in_place)
        olla.check(self.graph, found)
        return found

    def row(self, model: str, point: Point, says: int | None = None) -> list[Cell]:
        """Return the row of a rival's point."""
        start = time.perf_counter()
        plan = self.plan(point.added_seconds, True)
        spent = time.perf_counter() - start
        plain = self.plan(point.added_seconds, False)
        if plan.peak_bytes > point.peak_bytes:
            self.beaten.append(f"{model}: {point.rival} {point.setting}")
        lower = [100 * (1 - p.peak_bytes / point.peak_bytes) for p in (plan, plain)]
        added = 100 * point.added_seconds / self.base_seconds
        theirs = [None if says is None else says / _MIB, point.peak_bytes / _MIB, added, point.seconds]
        ours = [plan.peak_bytes / _MIB, plan.peak_lower_bound_bytes / _MIB, spent]
        return [model, point.rival, point.setting, *theirs, *ours, *lower]


def rows(key: str, device: str, shares: list[float]) -> tuple[list[list[Cell]], list[str]]:
    """Return the rows of a model, and the points at which a rival needs less."""
    model, build, shape = MODELS[key]

    def batch() -> dict[str, torch.Tensor]:
        return {name: torch.zeros(shape, dtype=torch.long) for name in ("input_ids", "labels")}

    graph = sac_rival.capture(build, batch)
    ours = Ours(graph, device)
    plain = olla.plan(graph)
    olla.check(graph, plain)
    found: list[list[Cell]] = []
    ordinary = [None, plain.program_peak_bytes / _MIB, 0.0, None]
    best = [plain.peak_bytes / _MIB, plain.lower_bound_bytes / _MIB, plain.seconds["total"]]
    lower = 100 * (1 - plain.peak_bytes / plain.program_peak_bytes)
    found.append([model, "none", "the ordinary step; ours: order alone", *ordinary, *best, None, lower])
    found += sac_rows(model, build, batch, ours, shares)
    order = recompute_rivals.base_order(graph)
    for sweep in (rotor, recompute_rivals.checkpoint, recompute_rivals.min_cut):
        for point in shown(frontier(sweep(graph, order, device)), ours.base_seconds):
            found.append(ours.row(model, point))
            print(found[-1], flush=True)
    return found, ours.beaten


def sac_rows(
    model: str, build: Callable[[], Any], batch: Callable[[], Any], ours: Ours, shares: list[float]
) -> list[list[Cell]]:
    """Return the rows of sac_milp, for shares of the peak that it sees itself."""
    try:
        watched = sac_rival.watch(build, batch, ours.device)
    except (KeyError, TypeError) as error:
        return [[model, "sac_milp", f"fails: {type(error).__name__}: {error}", *[None] * 9]]
    found: list[list[Cell]] = []
    for share in shares:
        decision = sac_rival.decide(watched, share)
        if decision is None:
            found.append([model, "sac_milp", f"budget {share:.0%}: infeasible, it says", *[None] * 9])
            continue
        theirs = sac_rival.capture(build, batch, watched, decision)
        added = float(profile_of(ours.device).op_seconds(theirs).sum()) - ours.base_seconds
        peak = int(olla.plan(theirs, method="program", layout=False).peak_bytes)
        setting = f"budget {share:.0%} of {watched.peak_bytes / _MIB:,.0f} MiB: {len(decision.shares)} modules"
        point = Point("sac_milp", setting, peak, max(0.0, added), decision.seconds)
        found.append(ours.row(model, point, decision.peak_bytes))
        print(found[-1], flush=True)
    return found


def shown(points: list[Point], base_seconds: float) -> list[Point]:
    """Return a rival's best points within some added times, and its least peak."""
    best = [
        min(within, key=lambda p: p.peak_bytes)
        for share in (*_SHOWN, float("inf"))
        if (within := [p for p in points if p.added_seconds <= share * base_seconds])
    ]
    return [p for p in dict.fromkeys(best) if p.added_seconds > 0]


def main() -> int:
    """Run it; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; all by default")
    parser.add_argument("--device", default="a100", help="whose roofline says the time (default: a100)")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.8, 0.5], help="budgets of sac_milp")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    parser.add_argument("--json", type=Path, help="write the table there")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    report = Report("Planners of memory beside olla, at equal added time", COLUMNS)
    for package in ("transformers", "pulp", "pwlf", "scipy"):
        report.machine[package] = metadata.version(package)
    beaten: list[str] = []
    for key in args.models or MODELS:
        more, below = rows(key, args.device, args.shares)
        report.rows += more
        beaten += below
        points = [row for row in report.rows if row[1] != "none" and row[4] is not None]
        plain = [float(row[-1]) for row in points if isinstance(row[-1], float)]
        report.summary["device"] = args.device
        report.summary["points of rivals"] = len(points)
        report.summary["points below ours"] = f"{len(beaten)} {'; '.join(beaten)}".strip()
        report.summary["points below ours without in-place results"] = sum(x < 0 for x in plain)
        for path in (args.markdown, args.json):
            if path:
                report.save(path)
    report.print()
    return int(bool(beaten))


if __name__ == "__main__":
    sys.exit(main())
