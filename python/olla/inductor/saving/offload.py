"""Offloading to host memory between forward and backward: chosen on a link's timeline, written into the joint graph.

Torch's own operators copy (`ao::offload`, `ao::reload`, `ao::wait_tensor`, torch 2.13): the copies run on a stream of
their own. Where they start and where the step waits for them is decided here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from olla import _core
from olla._core import Runs, Values
from olla.inductor.compat import compat
from olla.inductor.compat.host import offload_operators
from olla.inductor.saving.joint import Joint
from olla.plan import Swapping

LEAST_BYTES = 1 << 18  # smaller tensors take the link mostly for its latency, as in olla.swap
_NUM_SIZES = 6  # numbers of tensors tried, from the fewest that could suffice to all; 2 do nearly as well
_NUM_BISECTIONS = 8  # of the least peak for a set, to 1/256 of what it could free
_NO_LIMIT = 1 << 62


class Offload(NamedTuple):
    """Tensors that wait in host memory between forward and backward; positions are those of runs.

    Attributes:
        copy: int32[k], which, of the copies of values that the runs make.
        ready: int32[k], its copy to host memory begins behind this run.
        freed: int32[k], the first run of forward without it on the device, or the first of backward.
        issue: int32[k], memory for it is taken, and its copy back begins, before this run of backward.
        next: int32[k], the first run that reads it in backward.
        peak_bytes: most bytes alive at once on the device.
        host_bytes: pinned for all of them.
        stall_seconds: estimated, that the step waits for copies.
    """

    copy: NDArray[np.int32]
    ready: NDArray[np.int32]
    freed: NDArray[np.int32]
    issue: NDArray[np.int32]
    next: NDArray[np.int32]
    peak_bytes: int
    host_bytes: int
    stall_seconds: float


def offloaded(
    joint: Joint, values: Values, runs: Runs, host: Swapping, budget: int, most_stall_seconds: float
) -> Offload | None:
    """Return the offloads that bring a plan within the budget, or to the lowest peak; None if none lowers it.

    Tensors are ranked by how long they are idle beyond their copies, times their bytes. The first ones, few to all, are
    simulated on the link's timeline: as good as other rankings and as the greedy of olla.swap, and faster
    (bench/inductor/ablate_offload.py).

    Args:
        joint: what is planned.
        values, runs: of the core's RecomputeSearch: the plan.
        host: the link and how much host memory there is.
        budget: bytes; 0: the least peak.
        most_stall_seconds: that the step may wait for copies.

    Complexity:
        O(runs + uses), and some hundred simulations of O(runs) each.
    """
    search = _OffloadSearch(joint, values, runs, host)
    best = None
    for blocks in search.sets(budget):
        for found in search.tried(blocks, budget, most_stall_seconds):
            better = best is None or _rank(found, budget) < _rank(best, budget)
            if found.stall_seconds <= most_stall_seconds and len(found.copy) and better:
                best = found
    return best if best is not None and best.peak_bytes < int(runs.live_bytes.max()) else None


def _rank(found: Offload, budget: int) -> tuple[float, float, int]:
    """Return a key, lower is better: the peak (at least the budget), the stall, the pinned bytes."""
    return max(found.peak_bytes, budget), found.stall_seconds, found.host_bytes


class _OffloadSearch:
    """Sets of tensors that wait in host memory, for one plan; the arguments are those of `offloaded`."""

    def __init__(self, joint: Joint, values: Values, runs: Runs, host: Swapping) -> None:
        self.first = int(np.searchsorted(runs.position, joint.split))
        copies, made, last, following = _idle(joint, values, runs, self.first)
        self.num_bytes = joint.graph.tensor_bytes[values.tensor[runs.value[copies]]]
        self.copies, self.live = copies, runs.live_bytes
        self.most_pinned = _NO_LIMIT if host.host_bytes is None else host.host_bytes
        # What torch's allocator of pinned memory takes for a tensor.
        self.pinned = 1 << np.ceil(np.log2(np.maximum(self.num_bytes, 1))).astype(np.int64)
        seconds = np.where(runs.again != 0, joint.rerun_seconds[runs.op], joint.seconds[runs.op])
        self.begin = np.concatenate([np.zeros(1), np.cumsum(seconds)])  # start of run r without stalls
        link, sizes = host.link, self.num_bytes
        self.out_seconds = link.out_latency_seconds + sizes / link.out_bytes_per_second
        self.in_seconds = link.in_latency_seconds + sizes / link.in_bytes_per_second
        idle = self.begin[following] - self.begin[last + 1] - self.out_seconds - self.in_seconds
        area = np.where(idle > 0, idle * sizes, idle / np.maximum(sizes, 1))
        self.last, self.next = last, following
        self.ranking = np.argsort(-area, kind="stable").astype(np.int32)
        self.core = _core.CoreSwapSearch(
            live=self.live,
            seconds=seconds,
            blocks=_core.IdleBlocks(tensor=copies, num_bytes=sizes, made=made, last=last, next=following),
            link=_core.CoreLink(**vars(link)),
            host_bytes=_NO_LIMIT,
        )

    def sets(self, budget: int) -> Iterator[NDArray[np.int32]]:
        """Yield sets of tensors that fit into host memory and could be enough for a budget."""
        excess = int(self.live.max()) - budget if budget else 1
        most = int(np.searchsorted(np.cumsum(self.pinned[self.ranking]), self.most_pinned, side="right"))
        fewest = int(np.searchsorted(np.cumsum(self.num_bytes[self.ranking]), excess)) + 1
        if fewest <= most:
            for num in sorted({round(num) for num in np.geomspace(fewest, most, _NUM_SIZES).tolist()}):
                yield self.ranking[:num]

    def tried(self, blocks: NDArray[np.int32], budget: int, most_stall_seconds: float) -> Iterator[Offload]:
        """Yield simulated offloads of a set, copied out in the order of last use, then in that of creation."""
        for by_last in (True, False):
            if budget:
                yield self._written(self.core.evaluate(blocks, budget, True, by_last))
                continue
            low, high = self._lowest(blocks), int(self.live.max())
            for _ in range(_NUM_BISECTIONS):
                limit = (low + high) // 2
                found = self._written(self.core.evaluate(blocks, limit, True, by_last))
                fits = found.stall_seconds <= most_stall_seconds and found.peak_bytes <= limit
                low, high = (low, limit) if fits else (limit, high)
                yield found

    def _lowest(self, blocks: NDArray[np.int32]) -> int:
        """Return the peak if every tensor of a set were off the device for all its idle time."""
        return self._peak(blocks, self.last[blocks] + 1, self.next[blocks])

    def _peak(self, blocks: NDArray[np.int32], gone: NDArray[np.int32], back: NDArray[np.int32]) -> int:
        """Return the peak where each of a set is away from one run until before another."""
        away = np.zeros(len(self.live) + 1, dtype=np.int64)
        np.add.at(away, gone, self.num_bytes[blocks])
        np.add.at(away, back, -self.num_bytes[blocks])
        return int((self.live - np.cumsum(away)[:-1]).max())

    def _written(self, found: Any) -> Offload:
        """Return offloads as the two halves run them: copied out and waited for in forward, back in backward."""
        blocks, first = found.block, self.first
        freed, issue = np.minimum(found.timeline.freed, first), np.maximum(found.issue, first + 1)
        return Offload(
            copy=self.copies[blocks],
            ready=found.ready,
            freed=freed,
            issue=issue,
            next=found.next,
            peak_bytes=self._peak(blocks, freed, issue),
            host_bytes=int(self.pinned[blocks].sum()),
            stall_seconds=self._stall(blocks, found.ready, freed, issue, found.next),
        )

    def _stall(self, blocks: NDArray[np.int32], *runs: NDArray[np.int32]) -> float:
        """Return how long the step waits for copies that begin and are waited for at these runs.

        One stream copies, in the order in which the step reaches the copies, both ways.
        """
        ready, freed, issue, following = (run.tolist() for run in runs)
        out_seconds, in_seconds = self.out_seconds[blocks].tolist(), self.in_seconds[blocks].tolist()
        begin = self.begin
        events: list[tuple[int, int, int]] = []  # run before which something happens; what; of which copy
        for i in range(len(ready)):
            events += [(ready[i] + 1, 0, i), (freed[i], 1, i), (issue[i], 2, i), (following[i], 3, i)]
        stall = free = 0.0
        ends = [[0.0] * len(ready), [0.0] * len(ready)]
        for run, what, i in sorted(events):
            now = float(begin[run]) + stall
            if what in (0, 2):
                free = ends[what // 2][i] = max(now, free) + (in_seconds if what else out_seconds)[i]
            else:
                stall += max(0.0, ends[what // 2][i] - now)
        return stall


def _idle(
    joint: Joint, values: Values, runs: Runs, first: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Return what could wait in host memory, and the runs that make it, use it last in forward, and then in backward.

    Args:
        first: the first run of backward.
    """
    num_copies, num_runs = len(runs.value), len(runs.op)
    tensor = values.tensor[runs.value]
    made = np.full(num_copies, num_runs, dtype=np.int32)
    made[runs.makes[1]] = np.repeat(np.arange(num_runs, dtype=np.int32), np.diff(runs.makes[0]))
    read = np.repeat(np.arange(num_runs, dtype=np.int32), np.diff(runs.reads[0]))
    copies, kernels = runs.reads[1], _readers(runs, read)
    last, following = made.copy(), np.full(num_copies, num_runs, dtype=np.int32)
    forward = read < first
    np.maximum.at(last, copies[forward], np.minimum(kernels, first - 1)[forward])
    np.minimum.at(following, copies[~forward], read[~forward])
    may = np.zeros(joint.graph.num_tensors, dtype=bool)
    may[[t for node, t in joint.tensor.items() if _may_wait(node)]] = True
    may[joint.graph.outputs] = False
    wanted = may[tensor] & (runs.fused == 0) & (made < first) & (following < num_runs)
    wanted &= joint.graph.tensor_bytes[tensor] >= LEAST_BYTES
    chosen = np.flatnonzero(wanted).astype(np.int32)
    return chosen, made[chosen], last[chosen], following[chosen]


def _readers(runs: Runs, read: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return, for each read, the run whose kernel performs it: that of the last reader if the op is fused."""
    offset, made = runs.makes[0].tolist(), runs.makes[1].tolist()
    fused = runs.fused.tolist()
    first, items = runs.reads[0].tolist(), runs.reads[1].tolist()
    latest = list(range(len(runs.op)))  # of run r: the run of the last kernel it is part of
    of_copy = [-1] * len(fused)
    for r in reversed(range(len(latest))):
        inside = [of_copy[c] for c in made[offset[r] : offset[r + 1]] if fused[c]]
        latest[r] = max([r, *inside])
        for c in items[first[r] : first[r + 1]]:
            of_copy[c] = max(of_copy[c], latest[r])
    return np.array(latest, dtype=np.int32)[read]


def _may_wait(node: fx.Node) -> bool:
    """Return whether a node makes a tensor of known sizes that is copied as it lies in memory."""
    value = node.meta.get("val")
    if node.op == "placeholder" or not isinstance(value, torch.Tensor):
        return False
    return all(type(n) is int for n in (*value.shape, *value.stride())) and value.is_contiguous()


class Inserted(NamedTuple):
    """The four nodes that offload one tensor; forward saves the second for backward."""

    offload: fx.Node
    host: fx.Node
    reload: fx.Node
    back: fx.Node


def insert(
    offload: Offload, made: Mapping[int, fx.Node], starts: Sequence[fx.Node], forward: set[fx.Node]
) -> dict[fx.Node, Inserted]:
    """Write copies into a joint graph; returns what was written, by the node whose tensor is copied.

    Args:
        offload: the copies.
        made: of every copy of a value, the node that makes it.
        starts: of every run, the first node that was appended for it, or for the next one that has any.
        forward: the nodes of forward; those written join it.
    """
    found: dict[fx.Node, Inserted] = {}
    ops = offload_operators()
    waits = list[tuple[fx.Node, int, fx.Node]]()
    for i in np.argsort(offload.ready, kind="stable").tolist():
        node = made[int(offload.copy[i])]
        out = _call(starts[int(offload.ready[i]) + 1], ops.offload, (node,), "cpu", backward=False)
        waits.append((node, i, out))
    hosts: dict[fx.Node, fx.Node] = {}
    for node, i, out in sorted(waits, key=lambda wait: int(offload.freed[wait[1]])):
        hosts[node] = _call(starts[int(offload.freed[i])], ops.wait, (out, None, node), "cpu", backward=False)
        forward |= {out, hosts[node]}
    for node, i, out in sorted(waits, key=lambda wait: int(offload.issue[wait[1]])):
        value, host = node.meta["val"], hosts[node]
        where = (value.device, list(value.shape), list(value.stride()))
        readers = [user for user in node.users if user not in forward]
        reload = _call(starts[int(offload.issue[i])], ops.reload, (host, *where), value.device, backward=True)
        back = _call(starts[int(offload.next[i])], ops.wait, (reload, None, host), value.device, backward=True)
        for user in readers:
            user.replace_input_with(node, back)
        found[node] = Inserted(out, host, reload, back)
    return found


def _call(before: fx.Node, target: Any, args: tuple[Any, ...], device: Any, *, backward: bool) -> fx.Node:
    """Write a call before a node, its result as the first argument's on a device."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args)
    value = args[0].meta["val"]
    with value.fake_mode:
        node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    compat.keep_in(node, backward=backward)
    return node
