"""Does a graph that swaps compute what the graph without swaps does, and do the copies run as a plan says?

Swaps are contracted, the copies' times compared with one another; no planner code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import numpy as np
from numpy.typing import NDArray

from olla.errors import PlanError
from olla.graph import Graph

if TYPE_CHECKING:
    from olla.swap import Swaps

_ROUNDING = 1e-9  # of sums of seconds, as a share
_OUT, _IN = "olla::swap_out", "olla::swap_in"


def _fail(rule: str, message: str, *ids: int) -> NoReturn:
    raise PlanError(message, rule=rule, ids=tuple(map(int, ids)))


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
        _fail("swap_ops", "the graph with swaps does not hold every op of the original once")
    stands_for = _contracted(swapped, own, original.num_tensors)
    for i in np.flatnonzero(own).tolist():
        v = int(origin[i])
        for before, after in ((original.reads, swapped.reads), (original.mutates, swapped.mutates)):
            if before.of(v).tolist() != [stands_for[t] for t in after.of(i).tolist()]:
                _fail("swap_uses", f"op {i} is op {v}, but uses other tensors than that op", i, v)
        if original.writes.of(v).tolist() != swapped.writes.of(i).tolist():
            _fail("swap_uses", f"op {i} is op {v}, but writes other tensors than that op", i, v)
    num = original.num_tensors
    same = (
        np.array_equal(swapped.tensor_bytes[:num], original.tensor_bytes)
        and np.array_equal(swapped.donated[:num], original.donated)
        and not swapped.donated[num:].any()
        and np.array_equal(swapped.workspace_bytes[own], original.workspace_bytes[origin[own]])
        and np.array_equal(swapped.random[own], original.random[origin[own]])
        and [stands_for[t] for t in swapped.outputs.tolist()] == original.outputs.tolist()
    )
    if not same:
        _fail("swap_uses", "sizes, workspaces or outputs of the graph with swaps differ from the original's")
    if not original.core.is_order(np.ascontiguousarray(origin[own])):
        _fail("swap_order", "the ops of the graph with swaps stand in no order of the original")


def _contracted(swapped: Graph, own: NDArray[np.bool_], num: int) -> dict[int, int]:
    """Return whose value, among the tensors of the original, each tensor on the device holds."""
    stands_for = {t: t for t in range(num)}
    copied: dict[int, int] = {}  # handle -> the tensor it is a copy of
    gone: set[int] = set()  # nobody may use these any more
    for i in range(swapped.num_ops):
        reads, writes, changed = (column.of(i).tolist() for column in (swapped.reads, swapped.writes, swapped.mutates))
        if bad := [
            t for t in (*reads, *changed) if t in gone or (t >= num and t not in stands_for and t not in copied)
        ]:
            _fail("swap_uses", f"op {i} uses tensor {bad[0]}, which is in host memory", i, bad[0])
        if own[i]:
            if bad := [t for t in (*reads, *changed) if t in copied]:
                _fail("swap_uses", f"op {i} uses tensor {bad[0]}, which is in host memory", i, bad[0])
            continue
        if len(reads) != 1 or len(writes) != 1 or changed or swapped.workspace_bytes[i] or swapped.random[i]:
            _fail("swap_ops", f"op {i} is no swap: it must read one tensor and write one", i)
        source, target = reads[0], writes[0]
        if swapped.targets[i] == _OUT and source not in copied and target >= num and swapped.tensor_bytes[target] == 0:
            copied[target] = stands_for[source]
            gone.add(source)
        elif swapped.targets[i] == _IN and source in copied and target >= num:
            stands_for[target] = copied[source]
            gone.add(source)
            if swapped.tensor_bytes[target] != swapped.tensor_bytes[stands_for[target]]:
                _fail("swap_copy", f"op {i} brings back a tensor of another size", i, target)
        else:
            _fail("swap_copy", f"op {i} is neither a copy to host memory nor one back", i)
    if lost := [t for t in swapped.outputs.tolist() if t in gone or t in copied]:
        _fail("swap_uses", f"output {lost[0]} is in host memory at the end", lost[0])
    return stands_for


def check_copies(swapped: Graph, origin: NDArray[np.int32], num_tensors: int, swaps: Swaps) -> None:
    """Raise PlanError unless a plan's copies are those of its graph, and their times go together.

    Args:
        swapped: a graph that passed `check_swaps`.
        origin: as there.
        num_tensors: of the graph without swaps.
        swaps: what the plan says; its steps count the ops that are no swaps.

    Raises:
        PlanError: "swap_times": a copy overlaps another on its stream, starts before its data is there or ends after it
            is needed, memory counts as free too soon, or a figure is not the sum of its parts.

    Complexity:
        O(ops + copies log copies).
    """
    s, num_bytes = swaps, swapped.tensor_bytes[swaps.tensor]
    if len(s.start) != int(np.sum(origin >= 0)) or np.any(np.diff(s.start) < 0) or np.any(s.start[:1] < 0):
        _fail("swap_times", "the plan's ops start in another order than they stand in")
    step = np.cumsum(origin >= 0)  # own ops up to op i: swaps stand before the step of that number
    stands_for = _contracted(swapped, origin >= 0, num_tensors)
    for target, column, copies in ((_OUT, s.freed, swapped.reads), (_IN, s.issue, swapped.writes)):
        found = sorted(
            (stands_for[int(copies.of(i)[0])], int(step[i]))
            for i in np.flatnonzero(origin < 0).tolist()
            if swapped.targets[i] == target
        )
        if found != sorted(zip(s.tensor.tolist(), column.tolist(), strict=True)):
            _fail("swap_times", f"the copies of the plan are not the {target} ops of its graph")
    slack = _ROUNDING * max(1.0, float(s.start[-1]) if len(s.start) else 0.0)
    inner = (s.ready >= 0) & (s.ready <= s.last) & (s.last < s.freed) & (s.freed < s.issue) & (s.issue <= s.next)
    if not np.all(inner & (s.next < max(1, len(s.start)))):
        _fail("swap_times", "a copy leaves before its last use, or comes back after its next")
    good = (s.out_start >= s.start[s.ready]) & (s.out_end <= s.start[s.freed] + slack)
    good &= (s.in_start >= np.maximum(s.out_end, s.start[s.issue - 1])) & (s.in_end <= s.start[s.next] + slack)
    for i in np.flatnonzero(~good).tolist():
        _fail("swap_times", f"the copies of tensor {s.tensor[i]} do not fit between its uses", int(s.tensor[i]))
    for begin, end in ((s.out_start, s.out_end), (s.in_start, s.in_end)):
        by_begin = np.argsort(begin, kind="stable")
        if np.any(begin > end) or np.any(begin[by_begin][1:] < end[by_begin][:-1] - slack):
            _fail("swap_times", "two copies run at once on one stream")
    events = sorted([*zip(s.out_start, num_bytes, strict=True), *zip(s.in_end, -num_bytes, strict=True)])
    held = np.cumsum([0, *(change for _, change in events)])
    if int(held.max()) != s.host_bytes or int(num_bytes.sum()) != s.swapped_bytes:
        _fail("swap_times", f"the copies take {held.max()} bytes of host memory, not {s.host_bytes} as the plan says")
    if len(s.start) and s.start[-1] > s.base_seconds + s.stall_seconds + slack:
        _fail("swap_times", "the ops start later than their own time and what they wait")
