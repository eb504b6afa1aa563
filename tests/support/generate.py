"""Generated graphs of any size: training steps with the structure of captured ones, and random graphs.

python tests/support/generate.py transformer --num-ops 60000 -o step.json.gz
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla
from tests.support.tape import ITEM_BYTES, Optimizer, Tape

Family = Literal["transformer", "convnet"]
Vary = Callable[[int], int]  # a layer's inner width from its usual one


def stack(
    num_ops: int = 60_000,
    *,
    family: Family = "transformer",
    optimizer: Optimizer = "adam",
    clip: bool = False,
    batch: int = 1,
    width: int = 768,
    spread: float = 0.0,
    seed: int = 0,
) -> olla.Graph:
    """Generate a training step of stacked layers: forward, backward, weight updates at the end in program order.

    Args:
        num_ops: ops asked for; the number of layers follows from it, and a few small blocks fill up the rest.
        family: ``transformer`` (GPT-2's layers) or ``convnet`` (residual and inception blocks in turn).
        optimizer: ``adam`` (seven ops per parameter), ``sgd`` with momentum (three), or ``none``.
        clip: whether the gradients are clipped to a global norm, so that no update can run before the last gradient.
        batch: samples per step.
        width: channels of a token (transformer) or of the last stage's input (convnet).
        spread: largest relative change of the layers' inner widths; 0 makes all layers alike.
        seed: seed of the changes. Same arguments, same graph.

    Returns:
        The graph. Its number of ops is within half a filling block of num_ops, or the least that one layer allows.

    Complexity: O(num_ops).

    Example:
        >>> stack(1000, family="convnet", optimizer="sgd").op_kinds[-1]
        'update'
    """

    def record(num_layers: int, num_fillers: int) -> Tape:
        tape = Tape(f"{family}_{num_layers}x{width}_b{batch}")
        widths = random.Random(seed)
        model = _transformer if family == "transformer" else _convnet
        loss = model(tape, num_layers, num_fillers, batch, width, lambda n: _vary(n, spread, widths))
        tape.backward(loss)
        tape.update(optimizer, clip)
        tape.builder.output(loss)
        return tape

    few, more, filled = (record(*size).num_ops for size in ((4, 0), (5, 0), (4, 1)))
    num_layers = max(1, 4 + (num_ops - few) // (more - few))
    rest = num_ops - record(num_layers, 0).num_ops
    return record(num_layers, max(0, round(rest / (filled - few)))).builder.build()


def _vary(width: int, spread: float, rng: random.Random) -> int:
    """Return a width near the given one, a multiple of eight; the same width where spread is 0."""
    return max(8, round(width * (1 + rng.uniform(-spread, spread)) / 8) * 8)


def _transformer(tape: Tape, num_layers: int, num_fillers: int, batch: int, width: int, vary: Vary) -> int:
    """Record the forward pass of a GPT-2 with the given number of layers; the fillers are residual linear layers."""
    tokens, vocabulary, heads = 1024, 50_257, max(1, width // 64)
    rows = batch * tokens
    table, positions = tape.parameter(vocabulary * width), tape.parameter(tokens * width)
    ids, labels = tape.tensor(rows * 8, "input"), tape.tensor(rows * 8, "input")
    (places,) = tape.op("arange", (), tokens * 8)
    x = tape.embedding(table, ids, rows * width * ITEM_BYTES)
    x = tape.dropout(tape.add(x, tape.embedding(positions, places, tape.bytes[x])))
    (causal,) = tape.op("le", (places,), tokens * tokens)
    (mask,) = tape.op("where", (causal,), batch * tokens * tokens * ITEM_BYTES)
    for _ in range(num_layers):
        qkv = tape.linear(tape.layer_norm(x, rows, width), rows, width, 3 * width)
        y = tape.attention(qkv, mask, batch * heads * tokens * tokens * ITEM_BYTES)
        x = tape.add(x, tape.dropout(tape.linear(y, rows, width, width)))
        inner = vary(4 * width)
        y = tape.gelu(tape.linear(tape.layer_norm(x, rows, width), rows, width, inner))
        x = tape.add(x, tape.dropout(tape.linear(y, rows, inner, width)))
    for _ in range(num_fillers):
        x = tape.add(x, tape.linear(x, rows, width, width))
    x = tape.layer_norm(x, rows, width)
    return tape.cross_entropy(tape.project(x, table, rows * vocabulary * ITEM_BYTES), labels)


def _convnet(tape: Tape, num_layers: int, num_fillers: int, batch: int, width: int, vary: Vary) -> int:
    """Record the forward pass of a convnet: four stages of layers, each a residual and an inception block."""
    image, labels = tape.tensor(batch * 3 * 224 * 224 * ITEM_BYTES, "input"), tape.tensor(batch * 8, "input")
    side = 112

    def unit(x: int, fan_in: int, fan_out: int, kernel: int, relu: bool = True) -> int:
        y = tape.convolution(x, fan_in, fan_out, kernel, batch * fan_out * side * side)
        y = tape.batch_norm(y, fan_out)
        return tape.relu_(y) if relu else y

    channels = max(8, width // 8)
    x = unit(image, 3, channels, 7)
    side = 56
    x = tape.max_pool(x, batch * channels * side * side)
    stage = 0
    for layer in range(num_layers):
        entering = 4 * layer // num_layers > stage
        stage = 4 * layer // num_layers
        shortcut, wide = x, channels
        if entering:  # half the resolution, twice the channels, and a projection on the shortcut
            side, wide = side // 2, 2 * channels
            shortcut = unit(x, channels, wide, 1, relu=False)
        inner = vary(wide // 4)
        y = unit(unit(unit(x, channels, inner, 1), inner, inner, 3), inner, wide, 1, relu=False)
        x = tape.relu_(tape.add_(y, shortcut))
        channels = wide
        thin = vary(channels // 8)
        branches = [
            unit(x, channels, channels - 2 * (channels // 4) - channels // 8, 1),
            unit(unit(x, channels, thin, 1), thin, channels // 4, 3),
            unit(unit(x, channels, thin, 1), thin, channels // 4, 3),
            unit(tape.max_pool(x, batch * channels * side * side), channels, channels // 8, 1),
        ]
        x = tape.cat(branches)
    for _ in range(num_fillers):
        x = unit(x, channels, channels, 3)
    x = tape.mean(x, batch * channels * ITEM_BYTES)
    return tape.cross_entropy(tape.linear(x, batch, channels, 1000), labels)


def random_graph(num_ops: int, *, seed: int = 0, window: int = 12, max_bytes: int = 64) -> olla.Graph:
    """Generate a random graph with every feature: mutation, workspaces, donation, extra precedences, draws, outputs.

    Args:
        num_ops: exact number of ops.
        seed: same arguments, same graph.
        window: an op reads tensors among the latest so many; smaller makes deeper graphs.
        max_bytes: largest tensor; many sizes coincide and some are zero when it is small.

    Example:
        >>> random_graph(9, seed=3).num_ops
        9
    """
    rng = random.Random(seed)
    builder = olla.Graph.builder(f"random_{num_ops}_{seed}")
    tensors = [
        builder.tensor(rng.randint(0, max_bytes), kind="input", donated=rng.random() < 0.4)
        for _ in range(rng.randint(0, 3))
    ]
    for op in range(num_ops):
        near = tensors[-window:]
        reads = rng.sample(near, min(len(near), rng.choice((0, 1, 1, 2, 2, 3))))
        mutates = rng.sample(near, 1) if near and rng.random() < 0.15 else []
        writes = [builder.tensor(rng.randint(0, max_bytes)) for _ in range(rng.choice((0, 1, 1, 1, 2)))]
        builder.op(
            f"op{op}",
            reads=reads,
            writes=writes,
            mutates=mutates,
            after=[rng.randrange(op)] if op and rng.random() < 0.1 else [],
            workspace_bytes=rng.randint(1, max_bytes) if max_bytes and rng.random() < 0.15 else 0,
            random=rng.random() < 0.1,
        )
        tensors += writes
    for t in tensors:
        if rng.random() < 0.1:
            builder.output(t)
    return builder.build()


def small_random_graph(seed: int, max_ops: int = 9) -> olla.Graph:
    """Generate a random graph for exhaustive search: its number of ops, depth and sizes are drawn too.

    Example:
        >>> small_random_graph(3, max_ops=5).num_ops <= 5
        True
    """
    rng = random.Random(seed)
    # Larger sizes without a common divisor pass what floating point tells apart: the integer program then says so.
    window, max_bytes = rng.choice((3, 6, 12)), rng.choice((3, 64, 1 << 20))
    return random_graph(rng.randint(0, max_ops), seed=seed, window=window, max_bytes=max_bytes)


def main() -> None:
    """Write one generated graph to a file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("family", choices=("transformer", "convnet", "random"))
    parser.add_argument("--num-ops", type=int, default=60_000)
    parser.add_argument("--optimizer", choices=("adam", "sgd", "none"), default="adam")
    parser.add_argument("--clip", action="store_true", help="clip the gradients to a global norm")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--spread", type=float, default=0.0, help="largest relative change of the layers' inner widths")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, required=True, help="a name that ends in .json or .json.gz")
    options = parser.parse_args()
    if options.family == "random":
        graph = random_graph(options.num_ops, seed=options.seed, max_bytes=1 << 20)
    else:
        graph = stack(
            options.num_ops, family=options.family, optimizer=options.optimizer, clip=options.clip,
            batch=options.batch, width=options.width, spread=options.spread, seed=options.seed,
        )  # fmt: skip
    graph.save(options.output)
    print(f"{options.output.name}: {graph.num_ops:,} ops, {graph.num_tensors:,} tensors")


if __name__ == "__main__":
    main()
