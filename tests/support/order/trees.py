"""Generated trees, series-parallel graphs, steps of very many parallel branches, and graphs wired at random."""

from __future__ import annotations

import random
from collections.abc import Callable

from olla import Graph

Edges = list[tuple[int, int]]  # from op to op, the earlier number first


def in_tree(num_ops: int, rng: random.Random) -> Edges:
    """Draw a tree whose ops are each read by one later op."""
    return [(num_ops - 1 - v, num_ops - 1 - u) for u, v in reversed(out_tree(num_ops, rng))]


def out_tree(num_ops: int, rng: random.Random) -> Edges:
    """Draw a tree whose ops each read one earlier op, as a rule a recent one: chains, and branches of unequal size."""
    recent = rng.choice((1, 4, 20, num_ops))
    return [(max(0, v - 1 - rng.randrange(recent)), v) for v in range(1, num_ops)]


def glued_trees(num_ops: int, rng: random.Random) -> Edges:
    """Draw an in-tree whose root is the root of an out-tree."""
    half = max(1, num_ops // 2)
    behind = out_tree(num_ops - half + 1, rng)
    return in_tree(half, rng) + [(u + half - 1, v + half - 1) for u, v in behind]


def series_parallel(num_ops: int, rng: random.Random) -> Edges:
    """Draw a nested series-parallel graph: one part split in two, in series or parallel, again and again."""
    edges: Edges = []
    # A part has its first and one-past-last op; its sources and sinks are known once both halves are done.
    stack: list[tuple[int, int, bool]] = [(0, num_ops, False)]
    ends: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    split: dict[tuple[int, int], tuple[int, bool]] = {}
    while stack:
        lo, hi, ready = stack.pop()
        if hi - lo == 1:
            ends[lo, hi] = [lo], [lo]
        elif not ready:
            split[lo, hi] = rng.randint(lo + 1, hi - 1), rng.random() < 0.5
            middle = split[lo, hi][0]
            stack += [(lo, hi, True), (lo, middle, False), (middle, hi, False)]
        else:
            middle, parallel = split[lo, hi]
            (first, last), (next_first, next_last) = ends.pop((lo, middle)), ends.pop((middle, hi))
            if not parallel and len(last) * len(next_first) > 64:
                parallel = True  # joints of many ops with many: few, or the graph is all edges
            if parallel:
                ends[lo, hi] = first + next_first, last + next_last
            else:
                edges += [(u, v) for u in last for v in next_first]
                ends[lo, hi] = first, next_last
    return edges


def wired(num_ops: int, rng: random.Random) -> Edges:
    """Wire ops at random, without stages: each reads up to three earlier ones, near or far."""
    edges = set()
    for v in range(1, num_ops):
        for _ in range(rng.randint(1, 3)):
            edges.add((max(0, v - 1 - int(rng.expovariate(1 / 12))), v))
    return sorted(edges)


SHAPES: dict[str, Callable[[int, random.Random], Edges]] = {
    "in_tree": in_tree,
    "out_tree": out_tree,
    "glued_trees": glued_trees,
    "series_parallel": series_parallel,
    "wired": wired,
}


def tensors_along(
    shape: str,
    num_ops: int,
    *,
    seed: int = 0,
    max_bytes: int = 4096,
    shared: bool = False,
    workspaces: bool = False,
    outputs: bool = False,
) -> Graph:
    """Generate a graph of a shape with random sizes.

    Args:
        shape: a name in SHAPES.
        num_ops: number of ops.
        seed: same arguments, same graph.
        max_bytes: of a tensor; when small, many sizes are equal and some are zero.
        shared: one tensor for all readers of an op, not one for each.
        workspaces: whether some ops have one.
        outputs: whether what nobody reads lasts.

    Example:
        >>> tensors_along("in_tree", 9, seed=3).num_ops
        9
    """
    rng = random.Random(seed)
    edges = SHAPES[shape](num_ops, rng)
    b = Graph.builder(f"{shape}_{num_ops}_{seed}")
    reads: list[list[int]] = [[] for _ in range(num_ops)]
    writes: list[list[int]] = [[] for _ in range(num_ops)]
    for u, v in edges:
        if not (shared and writes[u]):
            writes[u].append(b.tensor(rng.randint(0, max_bytes)))
        reads[v].append(writes[u][-1])
    for v in range(num_ops):
        unread = not writes[v]
        if unread:
            writes[v].append(b.tensor(rng.randint(0, max_bytes)))
        workspace = rng.randint(0, 2 * max_bytes) if workspaces and rng.random() < 0.3 else 0
        b.op(f"op {v}", reads=reads[v], writes=writes[v], workspace_bytes=workspace)
        if unread and outputs:
            b.output(writes[v][-1])
    return b.build()


def tables(num: int, *, seed: int = 0, width: int = 64, chain: int = 2) -> Graph:
    """Generate a step of so many embedding tables of unequal sizes: each looked up, all joined, and back again.

    Args:
        num: number of tables, each a branch forward and a branch backward.
        seed: same arguments, same graph.
        width: bytes of what a table gives.
        chain: ops between lookup and joint.
    """
    rng = random.Random(seed)
    b = Graph.builder(f"{num} tables")
    rows = [width * rng.choice((1, 3, 10, 100, 1000)) + rng.randint(0, width) for _ in range(num)]
    params = [b.tensor(size, kind="parameter") for size in rows]
    ids = [b.tensor(8, kind="input") for _ in range(num)]
    parts = []
    for i in range(num):
        last = b.tensor(4 * width)
        b.op("lookup", kind="forward", reads=[params[i], ids[i]], writes=[last])
        for _ in range(chain):
            before, last = last, b.tensor(width)
            b.op("pool", kind="forward", reads=[before], writes=[last])
        parts.append(last)
    joined, hidden, loss, back = b.tensor(num * width), b.tensor(8 * width), b.tensor(4), b.tensor(8 * width)
    b.op("join", kind="forward", reads=parts, writes=[joined])
    b.op("dense", kind="forward", reads=[joined], writes=[hidden])
    b.op("loss", kind="forward", reads=[hidden], writes=[loss])
    b.op("loss backward", kind="backward", reads=[hidden], writes=[back])
    gradient = b.tensor(num * width)
    b.op("dense backward", kind="backward", reads=[back, joined], writes=[gradient])
    pieces = [b.tensor(width) for _ in range(num)]
    for piece in pieces:
        b.op("slice", kind="backward", reads=[gradient], writes=[piece])
    grads = [b.tensor(size) for size in rows]
    for i in range(num):
        b.op("lookup backward", kind="backward", reads=[pieces[i], ids[i]], writes=[grads[i]])
    for i in range(num):
        b.op("update", kind="update", reads=[grads[i]], mutates=[params[i]])
    b.output(loss)
    return b.build()
