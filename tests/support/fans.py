"""Graphs in which one op has very many direct successors, and one very many predecessors."""

from __future__ import annotations

from collections.abc import Callable

from olla import Graph

_LARGE = 1 << 21  # bytes that are worth a swap


def readers(num: int) -> Graph:
    """One tensor is read by so many ops, by `after` edges too, then changed; one op reads what they all make."""
    b = Graph.builder(f"{num} readers")
    x, z = b.tensor(4096), b.tensor(8)
    make = b.op("make", writes=[x], seconds=1e-3)
    made = [b.tensor(64 + i % 7) for i in range(num)]
    ops = [
        b.op(f"read {i}", kind="forward", reads=[x], writes=[y], after=[make], seconds=1e-6) for i, y in enumerate(made)
    ]
    b.op("join", kind="backward", reads=made, writes=[z], seconds=1e-5)
    b.op("change", mutates=[x], after=ops, seconds=1e-6)
    b.output(z)
    return b.build()


def results(num: int) -> Graph:
    """One op makes so many tensors; one op reads what is made of them, and one changes them all."""
    b = Graph.builder(f"{num} results")
    parts, made = [b.tensor(64 + i % 7) for i in range(num)], [b.tensor(32) for _ in range(num)]
    z = b.tensor(8)
    b.op("split", writes=parts, seconds=1e-3)
    for i in range(num):
        b.op(f"use {i}", reads=[parts[i]], writes=[made[i]], seconds=1e-6)
    b.op("join", reads=made, writes=[z], seconds=1e-5)
    b.op("change", mutates=parts, seconds=1e-5)
    b.output(z)
    return b.build()


def generators(num: int) -> Graph:
    """Ops that need nothing, and ops that do, before one by name: no data flows between them."""
    b = Graph.builder(f"{num} generators")
    x, z = b.tensor(512), b.tensor(8)
    ops = [b.op("first", writes=[x], seconds=1e-3)]
    for i in range(num):
        read, y = ([x] if i % 2 else []), b.tensor(64 + i % 5)
        ops.append(b.op(f"op {i}", reads=read, writes=[y], seconds=1e-6))
    b.op("last", reads=[x], writes=[z], after=ops, seconds=1e-5)
    b.output(z)
    return b.build()


def clipped(num: int) -> Graph:
    """A step that clips the gradients of so many parameters by their common norm."""
    b = Graph.builder(f"{num} clipped gradients")
    params = [b.tensor(400, kind="parameter") for _ in range(num)]
    grads, norms = [b.tensor(400) for _ in range(num)], [b.tensor(4) for _ in range(num)]
    activation, total = b.tensor(5000), b.tensor(4)
    b.op("forward", kind="forward", reads=params, writes=[activation], seconds=1e-3)
    for p, g in zip(params, grads, strict=True):
        b.op("grad", kind="backward", reads=[activation, p], writes=[g], seconds=1e-5)
    for g, n in zip(grads, norms, strict=True):
        b.op("norm", reads=[g], writes=[n], seconds=1e-6)
    b.op("total", reads=norms, writes=[total], seconds=1e-6)
    for g in grads:
        b.op("clip", reads=[total], mutates=[g], seconds=1e-6)
    for p, g in zip(params, grads, strict=True):
        b.op("update", kind="update", reads=[g], mutates=[p], seconds=1e-6)
    return b.build()


def idle(num: int) -> Graph:
    """So many large results lie idle while one op works."""
    b = Graph.builder(f"{num} idle results")
    x, z = b.tensor(_LARGE), b.tensor(_LARGE)
    made = [b.tensor(_LARGE) for _ in range(num)]
    b.op("make", writes=[x], seconds=1e-3)
    for i, y in enumerate(made):
        b.op(f"read {i}", reads=[x], writes=[y], seconds=1e-4)
    b.op("work", reads=[x], writes=[z], workspace_bytes=1 << 24, seconds=1e-2)
    for i, y in enumerate(made):
        b.op(f"use {i}", reads=[y, z], seconds=1e-4)
    return b.build()


FANS: tuple[Callable[[int], Graph], ...] = (readers, results, generators, clipped, idle)
