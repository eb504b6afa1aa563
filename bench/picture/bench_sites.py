"""What it costs to note the module and the line of every op: processor time of a capture, and memory of what is kept.

    python bench/picture/bench_sites.py

Captures with and without it take turns; the least of each counts.
"""

from __future__ import annotations

import argparse
import sys
import time
from unittest import mock

import torch
import transformers

import olla
from olla.pytorch.sites.sites import Sites


def _nothing(_: Sites) -> None:
    pass


def main() -> int:
    """Run it; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--layers", type=int, default=4, help="of a GPT-2")
    parser.add_argument("--rounds", type=int, default=6, help="captures each way")
    arguments = parser.parse_args()
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=arguments.layers, n_embd=96, vocab_size=1000))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(1, 64, dtype=torch.int64)
    batch = {"input_ids": tokens, "labels": tokens}

    def capture() -> tuple[float, olla.Graph]:
        start = time.process_time()
        graph = olla.capture(model, batch, optimizer=optimizer, loss=lambda model, batch: model(**batch).loss).graph
        return time.process_time() - start, graph

    capture()
    seconds: dict[str, list[float]] = {"noted": [], "not noted": []}
    for _ in range(arguments.rounds):
        spent, graph = capture()
        seconds["noted"].append(spent)
        with mock.patch.object(Sites, "note", _nothing):
            seconds["not noted"].append(capture()[0])
    with_, without = min(seconds["noted"]), min(seconds["not noted"])
    kept = sum(map(sys.getsizeof, {id(text): text for text in (*graph.modules, *graph.sources)}.values()))
    known = sum(map(bool, graph.modules)), sum(map(bool, graph.sources))
    print(f"{graph.num_ops:,} ops, of which {known[0]:,} have a module and {known[1]:,} a line")
    print(f"capture {with_:.3f} s, {without:.3f} s without: {with_ / without - 1:.1%} more")
    print(f"kept: {kept + 16 * graph.num_ops:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
