"""Slow, plain answers straight from the memory model, to judge the fast ones by. Nothing here uses olla's core.

At op v live = resident + donated not yet freed + live temporaries + what v writes + v's workspace. After v every
written or donated tensor whose last user has run, and which is not an output, is freed. A tensor nobody reads is live
during its own op; a donated tensor nobody uses is freed before the first op.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

from olla import Graph


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
    """Return the least peak of all orders: for about 12 ops or fewer.

    What is live after some ops depends on the set of these ops alone (a downset: closed under dependencies), not on
    their order. So best[downset] = min over the op v that ran last of max(best[downset without v], memory while v ran).
    """
    n = graph.num_ops
    before = [sum(1 << u for u in ops) for ops in dependencies(graph)]
    uses = uses_of(graph)
    writes = [set(graph.writes.of(v).tolist()) for v in range(n)]
    producer = {t: v for v in range(n) for t in writes[v]}
    size = graph.tensor_bytes.tolist()
    outputs = set(graph.outputs.tolist())

    def bytes_after(done: int) -> int:
        """Bytes live between two steps, when exactly the ops in done have run."""
        total = 0
        for t in range(graph.num_tensors):
            exists = t not in producer or done >> producer[t] & 1
            wanted = t in outputs or any(t in uses[v] and not done >> v & 1 for v in range(n))
            resident = t not in producer and not graph.donated[t]
            total += size[t] if resident or (exists and wanted) else 0
        return total

    best = {0: 0}
    for _ in range(n):
        longer: dict[int, int] = {}
        for done, so_far in best.items():
            live = bytes_after(done)
            for v in range(n):
                if done >> v & 1 or before[v] & ~done:
                    continue
                highest = max(so_far, live + sum(size[t] for t in writes[v]) + int(graph.workspace_bytes[v]))
                after = done | 1 << v
                longer[after] = min(longer.get(after, highest), highest)
        best = longer
    return max(best[(1 << n) - 1], 0 if n else _resident_bytes(graph))


def _resident_bytes(graph: Graph) -> int:
    written = set(graph.writes.item.tolist())
    return sum(
        int(graph.tensor_bytes[t]) for t in range(graph.num_tensors) if t not in written and not graph.donated[t]
    )


def best_height(lower: Sequence[int], upper: Sequence[int], size: Sequence[int], alignment: int = 1) -> int:
    """Return the least height of all layouts: for 7 buffers or fewer.

    Every permutation of the buffers is placed bottom-left: each buffer at the lowest aligned offset that fits those
    placed already. That is exact. Proof: take a best layout and the permutation by its offsets. Each buffer then lands
    at or below its offset o in the best layout, by induction: a buffer placed before it that lives at the same time
    starts at or below o there, hence ends at or below o there, hence ends at or below o here; so o is free, and the
    lowest free offset is at most o.
    """
    least = -1
    for permutation in permutations(range(len(size))):
        placed: list[tuple[int, int]] = []  # (buffer, offset)
        for b in permutation:
            placed.append((b, _lowest_offset(b, placed, lower, upper, size, alignment)))
        height = max((offset + size[b] for b, offset in placed), default=0)
        least = height if least < 0 else min(least, height)
    return least


def _lowest_offset(
    b: int,
    placed: list[tuple[int, int]],
    lower: Sequence[int],
    upper: Sequence[int],
    size: Sequence[int],
    alignment: int,
) -> int:
    together = [(o, o + size[a]) for a, o in placed if size[a] and lower[a] < upper[b] and lower[b] < upper[a]]
    # The lowest fit stands at the bottom or right above another buffer.
    for offset in sorted({0} | {-(-top // alignment) * alignment for _, top in together}):
        if all(offset + size[b] <= bottom or top <= offset for bottom, top in together):
            return offset
    raise AssertionError("above all the others there is always room")
