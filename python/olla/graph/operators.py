"""Operator rules: which input a result may overwrite, whether an op may be recomputed, and from which tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from olla._core import CoreRecomputeSearch, CoreRules
from olla.graph.collectives import gathers, under_way
from olla.graph.columns import Lists, lists_of
from olla.graph.timeline import collective_seconds

if TYPE_CHECKING:
    from olla.graph.devices import DeviceProfile
    from olla.graph.graph import Graph


class Rerun(IntEnum):
    """How an op may be recomputed; the same numbers as in cpp/olla/graph/values.hpp."""

    NEVER = 0  # it draws random numbers, or is marked as not recomputable
    WHOLE = 1  # as it is
    FIRST_RESULT = 2  # its first result alone, from results it saved
    REPLAY = 3  # as it is, behind its own run, with its random numbers; or FIRST_RESULT where what it saved is there


class Rules(NamedTuple):
    """What may be done with each op of a graph; index v is op v.

    Attributes:
        seconds: float64[n], of one run.
        rerun: uint8[n], a `Rerun`. An op that changes what lasts beyond the step is never recomputed, in any case.
        rerun_seconds, rerun_moved_bytes: float64[n], int64[n], of recomputing it.
        rerun_reads: tensors that a FIRST_RESULT rerun reads, some of which the op itself wrote; also of a REPLAY.
        in_place: uint8[n], 1 where the one result may take over the storage of an input that dies there.
    """

    seconds: NDArray[np.float64]
    rerun: NDArray[np.uint8]
    rerun_seconds: NDArray[np.float64]
    rerun_moved_bytes: NDArray[np.int64]
    rerun_reads: Lists
    in_place: NDArray[np.uint8]

    def evictor(self, graph: Graph, order: NDArray[np.int32]) -> CoreRecomputeSearch:
        """Return a search over what not to keep, on an order of the graph that the rules are of."""
        rules = CoreRules(
            seconds=self.seconds,
            rerun=self.rerun,
            rerun_seconds=self.rerun_seconds,
            rerun_reads=self.rerun_reads,
            in_place=self.in_place,
            fusion=None,
            store_seconds=None,
            keep_seconds=None,
            unsaved=None,
            reduced_in_place=False,
            split=0,
        )
        return CoreRecomputeSearch(graph.core, order, rules)


def draws_numbers(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of a torch operator draws from a generator, by its arguments.

    Operators that may draw are marked, whatever they are called with: attention without dropout is, and draws nothing.

    Args:
        target: an operator of torch, or anything else that is called, which draws nothing.
        args, kwargs: of the call; what is known only when it runs may be anything.
    """
    if not any(tag.name == _MAY_DRAW for tag in getattr(target, "tags", ())):
        return False
    arguments = target._schema.arguments
    names = [argument.name for argument in arguments]
    values = {a.name: a.default_value for a in arguments} | dict(zip(names, args, strict=False)) | {**kwargs}
    trains = all(values.get(name) is not False for name in _TRAINING)
    return trains and all(values.get(name) != 0.0 for name in _DROPOUTS)


_MAY_DRAW = "nondeterministic_seeded"  # a tag of torch
_TRAINING, _DROPOUTS = ("train", "training"), ("dropout", "dropout_p")  # arguments; without them nothing is drawn


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in names.split())


# Element i of the result depends on element i of the inputs alone: the result may overwrite an input of its size.
POINTWISE = _aten("""
    abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil
    celu clamp clamp_max clamp_min copysign cos cosh div elu elu_backward erf erfc exp exp2 expm1 floor fmod gelu
    gelu_backward hardsigmoid hardsigmoid_backward hardswish hardswish_backward hardtanh hardtanh_backward leaky_relu
    leaky_relu_backward lerp log log10 log1p log2 log_sigmoid_backward logical_and logical_not logical_or masked_fill
    maximum minimum mish mish_backward mul native_dropout_backward neg pow reciprocal relu remainder round rsqrt rsub
    sigmoid sigmoid_backward sign silu silu_backward sin sinh softplus softplus_backward sqrt square sub tan tanh
    tanh_backward threshold threshold_backward trunc where xlogy
""")

# These read a row before they write it; torch gives the same bits when the result is the input's own storage.
IN_PLACE = POINTWISE | _aten("_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data")

# Results: the normalised tensor, its mean and its inverse deviation; running statistics are updated on the way.
BATCH_NORMS = _aten("""
    native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional _batch_norm_with_update
    cudnn_batch_norm miopen_batch_norm
""")
# Results: the tensor with zeros, and the mask.
DROPOUTS = _aten("native_dropout")
# What they draw is settled by the state of their generator and the shape alone.
DRAWS = DROPOUTS | _aten("bernoulli bernoulli_ exponential_ normal_ rand rand_like randn randn_like uniform_")


def operator(target: str) -> str:
    """Return ``"aten.add"`` for ``"aten.add.Tensor"``."""
    return ".".join(target.split(".")[:2])


def rules(graph: Graph, device: DeviceProfile, *, in_place: bool = True, recompute: bool = True) -> Rules:
    """Return what may be done with each op, by its operator.

    Norms are recomputed from their saved statistics and update no buffer twice. Random numbers are drawn again from
    the state that their generator had; dropout is recomputed from its mask where that is there. Of what communicates,
    only the all-gather of a parameter is recomputed, behind its own run; each run takes its time on the link, as if
    nothing ran beside it. What others send is made once. Which input a pointwise result overwrites is left to the
    planner; sizes in bytes must agree.

    Args:
        graph: the training step.
        device: what seconds are estimated for.
        in_place: whether results may take over inputs at all.
        recompute: whether ops may be recomputed at all.

    Complexity:
        O(graph).
    """
    may, gather = graph.recomputable & ~graph.random & ~graph.communicates, gathers(graph)
    rerun = np.where(may, Rerun.WHOLE, np.where(gather, Rerun.REPLAY, Rerun.NEVER)).astype(np.uint8)
    seconds = device.op_seconds(graph) + np.where(gather, collective_seconds(graph, device), 0.0)
    saved_bytes = np.zeros(graph.num_ops, dtype=np.int64)  # that recomputing it does not move
    reads: list[list[int]] = [[] for _ in range(graph.num_ops)]
    overwrites = np.zeros(graph.num_ops, dtype=np.uint8)
    names = {target: operator(target) for target in dict.fromkeys(graph.targets)}
    writes = graph.writes.to_lists()
    for v, target in enumerate(graph.targets):
        name, written = names[target], writes[v]
        if name in DRAWS:
            rerun[v] = Rerun.REPLAY
        if name in DROPOUTS and len(written) == 2:
            rerun[v] = Rerun.REPLAY
            reads[v] = [*graph.reads.of(v).tolist(), written[1]]
        elif name in BATCH_NORMS and len(written) >= 3 and graph.tensor_bytes[written[1]] > 0:
            rerun[v] = Rerun.FIRST_RESULT
            changed = set(graph.mutates.of(v).tolist())
            lasting = {t for t in graph.reads.of(v).tolist() if graph.tensor_kinds[t] == "buffer"}
            reads[v] = [t for t in graph.reads.of(v).tolist() if t not in changed | lasting]
            reads[v] += [written[1], written[2]]
            saved_bytes[v] = graph.tensor_bytes[written[0]]  # the pass over the input that finds the statistics
        overwrites[v] = in_place and _may_overwrite(graph, v, name, len(written))
    held = [t for found in under_way(graph) if not gather[found.issue] for t in found.held]
    if held:  # what is sent stays in one place until the wait
        makers = graph.writer[held]
        rerun[makers[makers >= 0]] = Rerun.NEVER
    if not recompute:
        rerun[:] = Rerun.NEVER
        reads = [[] for _ in reads]
    moved = np.maximum(graph.moved_bytes - saved_bytes, 0)
    shorter = device.estimate(graph.flops, moved, graph.launches)
    full = device.estimate(graph.flops, graph.moved_bytes, graph.launches)
    share = np.divide(shorter, full, out=np.ones_like(full), where=full > 0)
    share[gather] = 1.0
    return Rules(seconds, rerun, seconds * share, moved, lists_of(reads), overwrites)


def without_replays(given: Rules) -> Rules:
    """Return the rules without drawing random numbers again: a dropout is recomputed from its mask."""
    again = np.where(np.diff(given.rerun_reads.offset) > 0, Rerun.FIRST_RESULT, Rerun.NEVER)
    return given._replace(rerun=np.where(given.rerun == Rerun.REPLAY, again, given.rerun).astype(np.uint8))


def _may_overwrite(graph: Graph, v: int, name: str, num_written: int) -> bool:
    """Whether an op's result may overwrite an input, or it changes the whole of one tensor and may write elsewhere."""
    if name in IN_PLACE:
        return num_written == 1 and len(graph.mutates.of(v)) == 0
    if name.endswith("_") and name[:-1] in POINTWISE:
        changed = graph.mutates.of(v)
        whole = len(changed) == 1 and bool(graph.moved_bytes[v] >= 2 * graph.tensor_bytes[changed[0]])
        return num_written == 0 and whole
    return False
