"""What does a rank in DistributedDataParallel need, in an ordinary loop and planned, and are its numbers the same?

    python bench/pytorch/bench_ddp.py --markdown bench/results/pytorch/ddp.md

torchrun starts the ranks of each case, of a gloo group on this machine's CPU. The ordinary loop begins with the buckets
that DistributedDataParallel keeps, which it makes after its first step. Peaks are of the worst rank: parameters,
buffers, optimizer state, batch, DistributedDataParallel's buckets, and the most bytes requested at once in a step.

Exit status: 1 if a loss or a parameter differs by a bit, a rank misses a planned place, measures another peak than the
planned one, or needs more than the ordinary loop.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla
from bench.support.harness import Cell, Report
from bench.support.ranks import arguments, as_rank, launched, of_all_ranks
from bench.support.requested import requested
from tests.support.pytorch import models

_SMALL_GPT2 = {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 8192, "n_positions": 128}
CASES: dict[str, dict[str, Any]] = {
    "gpt2-small": {"name": "gpt2", "batch_size": 4, "length": 128, "settings": _SMALL_GPT2},
    "resnet18": {"name": "resnet18", "batch_size": 4, "image_size": 64},
    "tiny": {"name": "gpt2", "batch_size": 2, "tiny": True},
}
WAYS: dict[str, dict[str, Any]] = {"olla": {}, "olla 5 %": {"max_slowdown": 0.05}}
NUM_STEPS = 10
MIB = 2**20


class World:
    """A wrapped model with its optimizer, and the batches of this rank."""

    def __init__(self, case: str, **options: Any) -> None:
        torch.manual_seed(0)
        example = models.build(device="cpu", **CASES[case])
        self.loss = example.loss
        self.model = DistributedDataParallel(example.model, **options)
        torch.manual_seed(1 + dist.get_rank())
        self.batches = [models.build(device="cpu", **CASES[case]).batch for _ in range(NUM_STEPS)]
        self.optimizer = models.optimizer("adamw", self.model)
        torch.manual_seed(100 + dist.get_rank())  # of dropout

    def train(self, batch: Any) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(self.model, batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def rebuild(self) -> None:
        """Let the wrapper make the buckets that it keeps, and leave the model and the random state as they are."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        before, random = [t.detach().clone() for t in tensors], torch.get_rng_state()
        for _ in range(2):
            self.loss(self.model, self.batches[0]).backward()
            self.model.zero_grad()
        with torch.no_grad():
            for tensor, old in zip(tensors, before, strict=True):
                tensor.copy_(old)
        torch.set_rng_state(random)

    def values(self) -> list[torch.Tensor]:
        return [t.detach().clone() for t in (*self.model.parameters(), *self.model.buffers())]

    def bucket_bytes(self) -> int:
        return sum(_bytes([bucket.buffer()]) for bucket in self.model.reducer._get_zeros_like_grad_buckets())

    def resident_bytes(self) -> int:
        state = [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        return _bytes([*self.model.parameters(), *self.model.buffers(), *state, *self.batches[0].values()])


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def eager(case: str, **options: Any) -> tuple[list[float], list[torch.Tensor], dict[str, int]]:
    """Train in an ordinary loop; return losses, parameters and buffers, and what the rank needs."""
    world = World(case, **options)
    world.rebuild()
    losses = [float(world.train(batch)) for batch in world.batches]
    values = world.values()
    asked = requested(lambda: world.train(world.batches[0]), world.optimizer.zero_grad)
    buckets = world.bucket_bytes()
    sent = buckets + _bytes(list(world.model.buffers()))
    return losses, values, {"peak": world.resident_bytes() + buckets + asked.loop_bytes, "sent": sent}


def planned(case: str, **options: Any) -> tuple[list[float], list[torch.Tensor], dict[str, int]]:
    """Train through olla.compile; return the same, and what the report says."""
    world = World(case)
    step = olla.compile(world.model, optimizer=world.optimizer, loss=world.loss, time_limit=5.0, **options)
    losses = [float(step(batch)) for batch in world.batches]
    report, graph = step.report(), step.graph
    olla.check(graph, step.plan)
    found = {
        "peak": report.planned_peak_bytes,
        "measured": report.measured_peak_bytes,
        "misses": report.num_misses,
        "sent": int(graph.message_bytes.sum()),
        "collectives": sum(kind not in ("", "wait") for kind in graph.collectives),
    }
    return losses, world.values(), found


def measure(case: str) -> list[dict[str, Any]]:
    """Train in all ways on this rank; return a row for each way beside the ordinary loop, the worst of all ranks."""
    losses, values, plain = eager(case)
    _, _, views = eager(case, gradient_as_bucket_view=True)
    rows = []
    for way, options in WAYS.items():
        own_losses, own_values, found = planned(case, **options)
        same = own_losses == losses and all(map(torch.equal, own_values, values))
        rows.append({"way": way, "same": same, "ddp": plain["peak"], "views": views["peak"], **found})
        rows[-1]["same sent"] = found["sent"] == plain["sent"]
    found_rows = []
    for way in of_all_ranks(rows):
        worst = max(way, key=lambda row: row["peak"])
        as_planned = all(row["misses"] == 0 and row["peak"] == row["measured"] for row in way)
        together = {key: all(row[key] for row in way) for key in ("same", "same sent")}
        misses = sum(row["misses"] for row in way)
        found_rows.append({**worst, **together, "misses": misses, "as planned": as_planned})
    return found_rows


def main() -> int:
    options = arguments(__doc__, CASES)
    if options.one:
        as_rank(measure, options.one)
        return 0
    table: list[list[Cell]] = []
    is_well = True
    for case in options.cases:
        for num_ranks in options.ranks:
            for row in launched(__file__, case, num_ranks):
                is_well &= row["same"] and row["as planned"] and row["same sent"]
                is_well &= row["peak"] <= min(row["ddp"], row["views"])
                peaks: list[Cell] = [row[key] / MIB for key in ("ddp", "views", "peak")]
                less = 100 * (1 - row["peak"] / min(row["ddp"], row["views"]))
                sent: list[Cell] = [row["collectives"], row["sent"] / MIB, row["same sent"]]
                facts = [row["same"], row["misses"], row["as planned"]]
                table.append([case, num_ranks, row["way"], *peaks, less, *facts, *sent])
                print(*table[-1], file=sys.stderr, flush=True)
    columns = [
        "case",
        "ranks",
        "way",
        "DDP MiB",
        "DDP, views MiB",
        "planned MiB",
        "less %",
        "equal to the bit",
        "misses",
    ]
    columns += ["measured = planned", "collectives", "reduced and broadcast MiB", "as much as DDP"]
    notes: dict[str, Cell] = {
        "peaks": "of the worst rank",
        "DDP, views": "gradient_as_bucket_view=True",
        "less": "than the better of both",
        "equal": f"losses of {NUM_STEPS} steps, parameters and buffers, on all ranks",
        "optimizer": "AdamW",
    }
    report = Report("DistributedDataParallel, planned", columns, table, notes)
    report.print()
    if options.markdown:
        report.save(options.markdown)
    return 0 if is_well else 1


if __name__ == "__main__":
    raise SystemExit(main())
