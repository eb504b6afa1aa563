"""Figures of a partitioned joint graph."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from olla.inductor.compat import compat
from olla.inductor.compat.host import is_copy
from olla.inductor.simulate.wrappers import storage_of


@dataclass(frozen=True, kw_only=True)
class Split:
    """One graph, divided into forward and backward.

    Attributes:
        num_ops: of the graph before it was divided; elements of tuples are no ops.
        num_recomputed: runs of ops beyond the graph's, in forward and backward together, counted per operator: an op
            that a pass removed does not offset a recomputed one.
        num_saved: values the forward graph hands to the backward graph, parameters and inputs left out.
        saved_bytes: of their storages; views of parameters and inputs cost nothing, and no storage counts twice.
        host_bytes: the part of these that is offloaded to host memory, in graphs on a GPU.
        flops: of matrix products and convolutions before the graph was divided, attention included.
        recomputed_flops: of those run beyond that.
        seconds: processor time of the partitioner and of the passes before it.
        digest: equal for equal pairs of graphs.
    """

    num_ops: int
    num_recomputed: int
    num_saved: int
    saved_bytes: int
    host_bytes: int
    flops: int
    recomputed_flops: int
    seconds: float
    digest: str


@dataclass(frozen=True, kw_only=True)
class Splits:
    """What became of all graphs of a step.

    Attributes:
        splits: one per graph that was divided into forward and backward, in the order of compilation; several where
            the graph breaks.
    """

    splits: list[Split]

    @property
    def flops(self) -> int:
        """Of matrix products and convolutions, as the graphs were before they were divided."""
        return sum(split.flops for split in self.splits)

    @property
    def recomputed_flops(self) -> int:
        """Of matrix products and convolutions, run beyond that."""
        return sum(split.recomputed_flops for split in self.splits)

    @property
    def partition_seconds(self) -> float:
        """Processor time in which it was decided what to save."""
        return sum(split.seconds for split in self.splits)


def figures(graph: fx.Graph) -> tuple[Counter[Any], int]:
    """Count how often a graph runs which operator, and the flops of products; inner graphs are left out."""
    ops: Counter[Any] = Counter()
    total = 0
    for node in graph.nodes:
        if node.op != "call_function" or compat.is_getitem(node):
            continue
        ops[node.target] += 1
        total += compat.node_flops(node, lambda value: value)
    return ops, total


def split_of(
    given: tuple[Counter[Any], int], joint: fx.Graph, forward: Any, backward: Any, num_outputs: int, seconds: float
) -> Split:
    """Describe a divided graph.

    Args:
        given: figures of the joint graph as it came.
        joint: the joint graph after the passes that simplified it, or added copies to it.
        forward, backward: graph modules; the first ``num_outputs`` outputs of forward are not saved values.
        seconds: processor time of dividing it.
    """
    (given_ops, given_flops), (joint_ops, joint_flops) = given, figures(joint)
    flops = min(given_flops, joint_flops)
    ops = Counter({op: min(given_ops.get(op, n), n) for op, n in joint_ops.items()})  # passes leave out, and replace
    (forward_ops, forward_flops), (backward_ops, backward_flops) = figures(forward.graph), figures(backward.graph)
    num_saved, saved_bytes, host_bytes = _saved(forward.graph, num_outputs)
    return Split(
        num_ops=ops.total(),
        num_recomputed=(forward_ops + backward_ops - ops).total(),
        num_saved=num_saved,
        saved_bytes=saved_bytes,
        host_bytes=host_bytes,
        flops=flops,
        recomputed_flops=max(0, forward_flops + backward_flops - flops),
        seconds=seconds,
        digest=hashlib.sha256(f"{forward.graph}\n{backward.graph}".encode()).hexdigest(),
    )


@contextlib.contextmanager
def recorded(splits: list[Split], watch: Callable[[Split], None] | None = None) -> Iterator[None]:
    """Note in a block what becomes of every joint graph that Inductor divides; what comes out of caches is not seen.

    Args:
        splits: receives them, in the order of compilation.
        watch: is told of every one.
    """

    def partition(joint: Any, inputs: Any, **kwargs: Any) -> Any:
        given = figures(joint.graph)
        start = time.process_time()
        forward, backward = divide(joint, inputs, **kwargs)
        seconds = time.process_time() - start
        splits.append(split_of(given, joint.graph, forward, backward, kwargs["num_fwd_outputs"], seconds))
        if watch is not None:
            watch(splits[-1])
        return forward, backward

    with compat.patched("partition_fn", partition) as divide:
        yield


def _saved(forward: fx.Graph, num_outputs: int) -> tuple[int, int, int]:
    """Return how many values a forward graph saves, the bytes of their storages, and those that wait in host memory."""
    given = {None, *map(storage_of, forward.find_nodes(op="placeholder"))}
    results: Any = forward.output_node().args[0]
    saved = [node for node in results[num_outputs:] if storage_of(node) not in given]
    num_bytes = {storage_of(node): int(compat.hint(node.meta["val"].untyped_storage().nbytes())) for node in saved}
    waiting = {storage_of(node) for node in saved if is_copy(node.target)}
    return len(saved), sum(num_bytes.values()), sum(num_bytes[key] for key in waiting)
