"""Does a graph that swaps compute what the graph without swaps does, and do the copies run as a plan says?

Swaps are contracted, the copies' times compared with one another; no planner code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from olla.check.values import fail, residents
from olla.graph import Graph

if TYPE_CHECKING:
    from olla.plan import Swaps

_ROUNDING = 1e-9  # of sums of seconds, as a share
_OUT, _IN = "olla::swap_out", "olla::swap_in"


def check_swaps(original: Graph, swapped: Graph, origin: NDArray[np.int32]) -> None:
    """Raise PlanError unless a graph is the original with tensors copied to host memory and back.

    Args:
        original: the graph without swaps; the ids of its tensors are the same in both.
        swapped: the graph with them.
        origin: int32[swapped.num_ops], the op of the original each op is; -1 for swap-outs and swap-ins.

    Raises:
        PlanError: "swap_ops": an op is missing, or twice, or what is no op of the original is no swap; "swap_copy": a
            swap-in brings back something else than was copied out; "swap_uses": an op uses, or the step keeps, other
            tensors than in the original; "swap_order": the ops stand in no order of the original.

    Complexity:
        O(ops + tensors + uses) of both graphs.
    """
    own = origin >= 0
    if len(origin) != swapped.num_ops or not np.array_equal(np.sort(origin[own]), np.arange(original.num_ops)):
        fail("swap_ops", "the graph with swaps does not hold every op of the original once")
    num = original.num_tensors
    hosted = _hosted(original, swapped)
    stands_for = _contracted(swapped, own, num, hosted)
    for i in np.flatnonzero(own).tolist():
        v = int(origin[i])
        for before, after in ((original.reads, swapped.reads), (original.mutates, swapped.mutates)):
            if before.of(v).tolist() != [stands_for[t] for t in after.of(i).tolist()]:
                fail("swap_uses", f"op {i} is op {v}, but uses other tensors than that op", i, v)
        if original.writes.of(v).tolist() != swapped.writes.of(i).tolist():
            fail("swap_uses", f"op {i} is op {v}, but writes other tensors than that op", i, v)
    for t, of in stands_for.items():
        if t >= num and swapped.tensor_bytes[t] != original.tensor_bytes[of]:
            fail("swap_copy", f"tensor {t} is brought back for tensor {of}, but has another size", t, of)
    on_device = [t for t in range(num) if t not in hosted]
    same = (
        np.array_equal(swapped.tensor_bytes[on_device], original.tensor_bytes[on_device])
        and np.array_equal(swapped.donated[:num], original.donated)
        and not swapped.donated[num:].any()
        and np.array_equal(swapped.workspace_bytes[own], original.workspace_bytes[origin[own]])
        and np.array_equal(swapped.random[own], original.random[origin[own]])
        and [stands_for.get(t) for t in swapped.outputs.tolist()] == original.outputs.tolist()
    )
    if not same:
        fail("swap_uses", "sizes, workspaces or outputs of the graph with swaps differ from the original's")
    if not original.core.is_order(np.ascontiguousarray(origin[own])):
        fail("swap_order", "the ops of the graph with swaps stand in no order of the original")


def _hosted(original: Graph, swapped: Graph) -> set[int]:
    """Return the resident tensors that the graph with swaps has in host memory when it starts, and when it ends."""
    emptied = (original.tensor_bytes > 0) & (swapped.tensor_bytes[: original.num_tensors] == 0)
    return set(np.flatnonzero(emptied & residents(original) & ~original.donated).tolist())


def _contracted(swapped: Graph, own: NDArray[np.bool_], num: int, hosted: set[int]) -> dict[int, int]:
    """Return whose value, among the tensors of the original, each tensor on the device holds."""
    stands_for = {t: t for t in range(num) if t not in hosted}
    copied = {t: t for t in hosted}  # handle -> the tensor it is a copy of
    gone: set[int] = set()  # nobody may use these any more
    for i in range(swapped.num_ops):
        reads, writes, changed = (column.of(i).tolist() for column in (swapped.reads, swapped.writes, swapped.mutates))
        used = reads if not own[i] and not writes else [*reads, *changed]  # else what changes is its own handle
        if bad := [t for t in used if t in gone or (t >= num and t not in stands_for and t not in copied)]:
            fail("swap_uses", f"op {i} uses tensor {bad[0]}, which is in host memory", i, bad[0])
        if own[i]:
            if bad := [t for t in used if t in copied]:
                fail("swap_uses", f"op {i} uses tensor {bad[0]}, which is in host memory", i, bad[0])
            continue
        if len(reads) != 1 or len(writes) + len(changed) != 1 or swapped.workspace_bytes[i] or swapped.random[i]:
            fail("swap_ops", f"op {i} is no swap: it must read one tensor and write one", i)
        source, target = reads[0], (writes or changed)[0]
        out = swapped.targets[i] == _OUT and source not in copied
        if out and writes and target >= num and swapped.tensor_bytes[target] == 0:
            copied[target] = stands_for[source]
            gone.add(source)
        elif out and changed and target in hosted and stands_for[source] == target:
            copied[target] = target
            gone.discard(target)
            gone.add(source)
        elif swapped.targets[i] == _IN and source in copied and writes and target >= num:
            stands_for[target] = copied.pop(source)
            gone.add(source)
        else:
            fail("swap_copy", f"op {i} is neither a copy to host memory nor one back", i)
    if lost := [t for t in swapped.outputs.tolist() if t in gone or t in copied]:
        fail("swap_uses", f"output {lost[0]} is in host memory at the end", lost[0])
    if lost := sorted(hosted - copied.keys()):
        fail("swap_uses", f"tensor {lost[0]} is not in host memory at the end, but at the start", lost[0])
    return stands_for


def check_copies(original: Graph, swapped: Graph, origin: NDArray[np.int32], swaps: Swaps) -> None:
    """Raise PlanError unless a plan's copies are those of its graph, and their times go together.

    Args:
        original: the graph without swaps.
        swapped: a graph that passed `check_swaps`.
        origin: as there.
        swaps: what the plan says; its steps count the ops that are no swaps.

    Raises:
        PlanError: "swap_times": a copy overlaps another on its stream, starts before its data is there or ends after it
            is needed, memory counts as free too soon, or a figure is not the sum of its parts.

    Complexity:
        O(ops + copies log copies).
    """
    s, n, num_bytes = swaps, original.num_ops, original.tensor_bytes[swaps.tensor]
    if len(s.start) != n or np.any(np.diff(s.start) < 0) or np.any(s.start[:1] < 0):
        fail("swap_times", "the plan's ops start in another order than they stand in")
    leaves, returns = s.last >= 0, s.next < n  # the others are in host memory when the step starts, or when it ends
    _check_places(original, swapped, origin, swaps)
    start = np.append(s.start, s.base_seconds + s.stall_seconds)
    slack = _ROUNDING * max(1.0, float(start[-1]))
    if start[-1] + slack < float(start.max()):
        fail("swap_times", "the ops start later than their own time and what they wait")
    good = ~leaves | ((s.out_start >= start[s.ready]) & (s.out_end <= start[s.freed] + slack))
    in_host = np.where(leaves, s.out_end, 0.0)
    good &= ~returns | (
        (s.in_start >= np.maximum(in_host, start[np.maximum(s.issue - 1, 0)])) & (s.in_end <= start[s.next] + slack)
    )
    for i in np.flatnonzero(~good).tolist():
        fail("swap_times", f"the copies of tensor {s.tensor[i]} do not fit between its uses", int(s.tensor[i]))
    for begin, end in ((s.out_start[leaves], s.out_end[leaves]), (s.in_start[returns], s.in_end[returns])):
        by_begin = np.argsort(begin, kind="stable")
        if np.any(begin > end) or np.any(begin[by_begin][1:] < end[by_begin][:-1] - slack):
            fail("swap_times", "two copies run at once on one stream")
    begin, end = np.where(leaves, s.out_start, 0.0), np.where(returns, s.in_end, start[-1])
    events = sorted([*zip(begin, num_bytes, strict=True), *zip(end, -num_bytes, strict=True)])
    held = np.cumsum([0, *(change for _, change in events)])
    if int(held.max()) != s.host_bytes or int(num_bytes[returns].sum()) != s.swapped_bytes:
        fail("swap_times", f"the copies take {held.max()} bytes of host memory, not {s.host_bytes} as the plan says")


def _check_places(original: Graph, swapped: Graph, origin: NDArray[np.int32], s: Swaps) -> None:
    n = original.num_ops
    leaves, returns = s.last >= 0, s.next < n
    inner = (s.last < s.issue) & (s.issue <= s.next) & (s.next <= n) & (~returns | (s.freed < s.issue))
    inner &= np.where(leaves, (s.ready >= 0) & (s.ready <= s.last) & (s.last < s.freed) & (s.freed <= n), s.freed == 0)
    if not np.all(inner & (leaves | returns)):
        fail("swap_times", "a copy leaves before its last use, or comes back after its next")
    step = np.cumsum(origin >= 0)  # own ops up to op i: swaps stand before the step of that number
    stands_for = _contracted(swapped, origin >= 0, original.num_tensors, _hosted(original, swapped))
    for target, rows, column, copies in (
        (_OUT, leaves, s.freed, swapped.reads),
        (_IN, returns, s.issue, swapped.writes),
    ):
        found = sorted(
            (stands_for[int(copies.of(i)[0])], int(step[i]))
            for i in np.flatnonzero(origin < 0).tolist()
            if swapped.targets[i] == target
        )
        if found != sorted(zip(s.tensor[rows].tolist(), column[rows].tolist(), strict=True)):
            fail("swap_times", f"the copies of the plan are not the {target} ops of its graph")
