"""Slow, plain answers straight from the memory model, to judge the fast ones by. Nothing here uses olla's core.

At op v live = resident + donated not yet freed + live temporaries + what v writes + v's workspace. After v every
written or donated tensor whose last user has run, and which is not an output, is freed. A tensor nobody reads is live
during its own op; a donated tensor nobody uses is freed before the first op.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations

from olla import Graph

_INFINITE = 1 << 62


def uses_of(graph: Graph) -> list[set[int]]:
    """Return for every op the tensors it reads or mutates."""
    return [set(graph.reads.of(v).tolist()) | set(graph.mutates.of(v).tolist()) for v in range(graph.num_ops)]


def dependencies(graph: Graph) -> list[set[int]]:
    """Return for every op the earlier ops it must come after, compared two by two; not reduced to the direct ones."""
    uses = uses_of(graph)
    writes = [set(graph.writes.of(v).tolist()) for v in range(graph.num_ops)]
    mutates = [set(graph.mutates.of(v).tolist()) for v in range(graph.num_ops)]
    result: list[set[int]] = []
    for v in range(graph.num_ops):
        before = set(graph.after.of(v).tolist())
        for u in range(v):
            read_after_write = uses[v] & writes[u]
            mutation = (mutates[v] & uses[u]) | (uses[v] & mutates[u])
            if read_after_write or mutation or (graph.random[u] and graph.random[v]):
                before.add(u)
        result.append(before)
    return result


def is_order(graph: Graph, order: Sequence[int]) -> bool:
    """Return whether order runs every op once, after all it depends on."""
    before = dependencies(graph)
    done: set[int] = set()
    for v in order:
        if not before[v] <= done:
            return False
        done.add(v)
    return len(order) == len(done) == graph.num_ops


def orders(graph: Graph) -> Iterator[tuple[int, ...]]:
    """Yield every valid order, by trying all permutations: for 7 ops or fewer."""
    before = dependencies(graph)
    for order in permutations(range(graph.num_ops)):
        if all(before[v] <= set(order[:step]) for step, v in enumerate(order)):
            yield order


def live_sets(graph: Graph, order: Sequence[int]) -> list[set[int]]:
    """Return the tensors live during each step, resident ones included."""
    uses = uses_of(graph)
    written = {t for v in range(graph.num_ops) for t in graph.writes.of(v).tolist()}
    kept = set(graph.outputs.tolist())
    kept |= {t for t in range(graph.num_tensors) if t not in written and not graph.donated[t]}

    def needed_from(step: int) -> set[int]:
        return kept.union(*(uses[v] for v in order[step:]))

    live = needed_from(0) - written
    result = []
    for step, v in enumerate(order):
        live |= set(graph.writes.of(v).tolist())
        result.append(set(live))
        live &= needed_from(step + 1)
    return result


def live_bytes(graph: Graph, order: Sequence[int]) -> list[int]:
    """Return the bytes live during each step, workspaces included."""
    return [
        sum(int(graph.tensor_bytes[t]) for t in live) + int(graph.workspace_bytes[v])
        for v, live in zip(order, live_sets(graph, order), strict=True)
    ]


def peak(graph: Graph, order: Sequence[int]) -> int:
    """Return the most bytes live at once."""
    return max(live_bytes(graph, order), default=_resident_bytes(graph))


def best_peak_by_permutations(graph: Graph) -> int:
    """Return the least peak of all orders, one order at a time: for 7 ops or fewer."""
    return min(peak(graph, order) for order in orders(graph))


def best_peak(graph: Graph) -> int:
    """Return the least peak of all orders: for about 12 ops, or more where few sets of ops are closed.

    What is live after some ops depends on the set of these ops alone (a downset: closed under dependencies), not on
    their order. So best[downset] = min over the op v that ran last of max(best[downset without v], memory while v ran).
    Sets of ops are bit masks.
    """
    ops, tensors = range(graph.num_ops), range(graph.num_tensors)
    before = [_mask(earlier) for earlier in dependencies(graph)]
    uses = uses_of(graph)
    writes = [set(graph.writes.of(v).tolist()) for v in ops]
    size = graph.tensor_bytes.tolist()
    added = [sum(size[t] for t in writes[v]) + int(graph.workspace_bytes[v]) for v in ops]
    producer = [_mask(v for v in ops if t in writes[v]) for t in tensors]
    users = [_mask(v for v in ops if t in uses[v]) for t in tensors]
    outputs = set(graph.outputs.tolist())
    kept = [t in outputs or not (producer[t] or graph.donated[t]) for t in tensors]
    columns = list(zip(size, producer, users, kept, strict=True))

    best = {0: _resident_bytes(graph)}
    for _ in ops:
        longer: dict[int, int] = {}
        for done, so_far in best.items():
            live = sum(s for s, p, u, k in columns if (not p or p & done) and (k or u & ~done))
            for v in ops:
                if not done >> v & 1 and not before[v] & ~done:
                    highest = max(so_far, live + added[v])
                    after = done | 1 << v
                    longer[after] = min(longer.get(after, highest), highest)
        best = longer
    return best[(1 << graph.num_ops) - 1]


def _mask(ops: Iterable[int]) -> int:
    return sum(1 << v for v in ops)


def _resident_bytes(graph: Graph) -> int:
    written = set(graph.writes.item.tolist())
    return sum(
        int(graph.tensor_bytes[t]) for t in range(graph.num_tensors) if t not in written and not graph.donated[t]
    )


def best_height(lower: Sequence[int], upper: Sequence[int], size: Sequence[int], alignment: int = 1) -> int:
    """Return the least height of all layouts: for about 8 buffers. Those never alive, or of 0 bytes, take no place.

    Every permutation of the buffers is tried: each is put on top of all buffers placed already that live at the same
    time. That is exact: in the permutation by the offsets of a best layout each of those ends at or below the buffer's
    offset there, and, by induction, here. A branch ends where it cannot fall below the best height so far.
    """
    buffers = [b for b in zip(lower, upper, size, strict=True) if b[0] < b[1] and b[2] > 0]
    load = max((sum(s for a, b, s in buffers if a <= step < b) for step, _, _ in buffers), default=0)
    best = sum(_aligned(s, alignment) for _, _, s in buffers)

    def place(placed: list[tuple[int, int, int]], left: list[tuple[int, int, int]], height: int) -> None:
        """Try all ways to go on from the placed buffers (lower, upper, top)."""
        nonlocal best
        if height >= best or best == load:
            return
        if not left:
            best = height
        for i, (first, end, num_bytes) in enumerate(left):
            floor = max((top for a, b, top in placed if a < end and first < b), default=0)
            top = _aligned(floor, alignment) + num_bytes
            place([*placed, (first, end, top)], left[:i] + left[i + 1 :], max(height, top))

    place([], buffers, 0)
    return best


def arena_buffers(graph: Graph, order: Sequence[int], alignment: int = 1) -> list[tuple[int, int, int]]:
    """Return what lies in the arena under one order as (lower, upper, size): written tensors, then workspaces."""
    live = live_sets(graph, order)
    written = {t for v in range(graph.num_ops) for t in graph.writes.of(v).tolist()}
    buffers = []
    for t in sorted(written):
        steps = [step for step, tensors in enumerate(live) if t in tensors]
        buffers.append((steps[0], steps[-1] + 1, _aligned(int(graph.tensor_bytes[t]), alignment)))
    for step, v in enumerate(order):
        buffers.append((step, step + 1, _aligned(int(graph.workspace_bytes[v]), alignment)))
    return [buffer for buffer in buffers if buffer[2] > 0]


def best_arena(graph: Graph, alignment: int = 1) -> int:
    """Return the least arena of all orders and all layouts: for 7 ops or fewer.

    Orders by rising load; those whose load is no lower than an arena already found have none that is smaller.
    """
    lifetimes = {tuple(arena_buffers(graph, order, alignment)) for order in orders(graph)}
    best = _INFINITE
    for load, buffers in sorted((_load(buffers), buffers) for buffers in lifetimes):
        if load >= best:
            break
        best = min(best, best_height(*zip(*buffers, strict=True)) if buffers else 0)
    return best


def _load(buffers: Iterable[tuple[int, int, int]]) -> int:
    buffers = list(buffers)
    return max((sum(s for a, b, s in buffers if a <= step < b) for step, _, _ in buffers), default=0)


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
