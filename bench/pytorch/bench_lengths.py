"""Run a loop whose batches are of random lengths: as it is, in olla.pool, and through olla.compile with buckets.

    python bench/pytorch/bench_lengths.py --markdown bench/results/pytorch/lengths.md

GPT-2 of 4 layers and 128 channels, 4 sequences of 40 to 99 tokens, AdamW, without dropout. Each way runs in a process
of its own, in turns. Seconds are those of the processor, captures and plans included: "seconds" for all steps, "first"
for those that capture, which are the slowest ones, "rest" for the second half of the steps; wall seconds are those of
the clock, for all steps. Ratios are medians of the rounds. Peak is the most that is resident (VmHWM) above what was
before the first step. Losses are compared with the loop's. Exit status: 0; 1 losses differ by more than is promised,
less than 90 % of the pool's bytes were served as planned, or no choice of buckets takes at most 1.5 times the
processor time of the loop (of 100 steps or more).
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench

import olla
from bench.pytorch.bench_run import resident_bytes
from bench.support.harness import Report, answer, ask

WAYS = {"loop": [], "pool": [], "buckets 99": [99], "buckets 72, 99": [72, 99]}
FILL = {"input_ids": 0, "labels": -100}
MOST = 1.5  # times the loop's processor time
COLUMNS = ["way", "seconds", "of the loop's", "first", "rest", "of the loop's ", "wall seconds", "of the loop's  "]
COLUMNS += ["peak MiB", "arena MiB", "served", "captures", "largest difference of losses"]


def measure(way: str, num_steps: int) -> dict[str, Any]:
    """Run the loop in this process and return its figures."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=4, n_embd=128, n_head=4, vocab_size=1024, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    optimizer = torch.optim.AdamW(model.parameters())
    generator = torch.Generator().manual_seed(0)
    pool = olla.pool() if way == "pool" else None
    step = None
    if WAYS[way]:
        step = olla.compile(
            model, optimizer=optimizer, loss=lambda m, b: m(**b).loss, disk_cache=False, buckets=WAYS[way], fill=FILL
        )
    losses, each, middle, clock = [], [], 0.0, time.perf_counter()
    start = time.process_time()
    before = resident_bytes("VmRSS")
    with pool or contextlib.nullcontext():
        for i in range(num_steps):
            if i == num_steps // 2:
                middle = time.process_time()
            length = int(torch.randint(40, 100, (1,), generator=generator))
            tokens = torch.randint(1024, (4, length), generator=generator)
            batch = {"input_ids": tokens, "labels": tokens}
            if step is not None:
                before_step = time.process_time()
                losses.append(float(step(batch)))
                each.append(time.process_time() - before_step)
                continue
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if pool is not None:
                pool.step()
    end = time.process_time()
    found = {"seconds": end - start, "rest": end - middle, "wall": time.perf_counter() - clock, "losses": losses}
    found |= {"served": None, "captures": None, "first": None, "peak": resident_bytes("VmHWM") - before, "arena": None}
    if pool is not None:
        found |= {"served": pool.report().served, "arena": pool.report().arena_bytes}
    if step is not None:
        num = len(step._captures)
        found |= {"captures": num, "first": sum(sorted(each)[-num:]), "arena": step.report().arena_bytes}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        answer(measure(args.part, args.num_steps))
    answers: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(args.rounds):
        for way, found in answers.items():
            found.append(ask(__file__, "--part", way, "--num-steps", str(args.num_steps)))
    report = Report("Batches of random lengths, on the CPU", COLUMNS)
    right, best = True, float("inf")
    for way, found in answers.items():
        first, loop = found[0], answers["loop"]
        share = [
            statistics.median(mine[what] / its[what] for mine, its in zip(found, loop, strict=True))
            for what in ("seconds", "rest", "wall")
        ]
        seconds = [statistics.median(f[what] for f in found) for what in ("seconds", "rest", "wall")]
        captures = statistics.median(f["first"] for f in found) if WAYS[way] else ""
        difference = max(abs(a - b) for a, b in zip(first["losses"], loop[0]["losses"], strict=True))
        served = "" if first["served"] is None else f"{first['served']:.2%}"
        sizes = ["" if b is None else round(b / 2**20) for b in (first["peak"], first["arena"])]
        report.rows.append([
            way, seconds[0], f"{share[0]:.2f}", captures, seconds[1], f"{share[1]:.2f}", seconds[2], f"{share[2]:.2f}",
            *sizes, served, first["captures"] or "", f"{difference:.1e}" if difference else "0 (to the bit)",
        ])  # fmt: skip
        right &= difference <= (1e-4 if WAYS[way] else 0) and (way != "pool" or first["served"] >= 0.9)
        best = min(best, share[0]) if WAYS[way] else best
    report.summary["threads"] = torch.get_num_threads()
    report.summary["rounds"] = args.rounds
    report.summary["least with buckets"] = f"{best:.2f} times the loop's processor time, at most {MOST} are asked for"
    right &= best <= MOST or args.num_steps < 100
    report.print()
    for path in (args.markdown, args.json):
        if path is not None:
            report.save(path)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
