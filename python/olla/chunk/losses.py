"""Linear layers with their cross-entropy and the backward of both, as they stand in the graph of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from olla.graph import Graph, operator

LINEAR = ("aten.mm", "aten.addmm")
NONE = -1
OPS = ("linear", "log_softmax", "loss", "loss_grad", "logits_grad", "input_grad", "weight_grad", "bias_grad")


@dataclass(frozen=True, kw_only=True)
class LossRegion:
    """One linear layer with its cross-entropy and their backward: ops and tensors of a graph; -1: there is none."""

    linear: int
    log_softmax: int
    loss: int
    loss_grad: int
    logits_grad: int
    input_grad: int
    weight_grad: int
    bias_grad: int
    num_rows: int
    input: int  # tensors from here on
    weight: int
    target: int
    scale: int

    @property
    def ops(self) -> list[int]:
        """Its ops, in program order."""
        return sorted(v for name in OPS if (v := getattr(self, name)) != NONE)


def regions(graph: Graph) -> list[LossRegion]:
    """Return the losses of a graph that can be chunked, in program order.

    Complexity:
        O(graph).
    """
    targets = [operator(target) for target in graph.targets]
    read, changed = (lists.inverted(graph.num_tensors).to_lists() for lists in (graph.reads, graph.mutates))
    users = [sorted({*own, *more}) for own, more in zip(read, changed, strict=True)]
    for t in graph.outputs.tolist():
        users[t].append(graph.num_ops)
    starts = (v for v, name in enumerate(targets) if name == "aten._log_softmax")
    found = (_region(graph, v, targets, users) for v in starts)
    named = {*graph.after.item.tolist(), *np.flatnonzero(np.diff(graph.after.offset)).tolist()}
    return [region for region in found if region is not None and not named & set(region.ops)]


def _region(graph: Graph, log_softmax: int, targets: list[str], users: list[list[int]]) -> LossRegion | None:
    """Return the region around a log_softmax, or None where its tensors are used in other ways as well."""

    def reads(v: int) -> set[int]:
        return set(graph.reads.of(v).tolist())

    def results(v: int, num: int) -> list[int]:
        written = graph.writes.of(v).tolist()
        return written if len(written) == num and not len(graph.mutates.of(v)) else []

    def used_by(t: int, names: Sequence[str]) -> list[int]:
        """The users of a tensor, in the order of the names of their operators; none where these are not all."""
        found = [next((v for v in users[t] if v < graph.num_ops and targets[v] == name), NONE) for name in names]
        return found if sorted(found) == sorted(users[t]) else []

    inputs = graph.reads.of(log_softmax).tolist()
    if len(inputs) != 1 or not results(log_softmax, 1) or users[inputs[0]] != [log_softmax]:
        return None
    logits, probs = inputs[0], results(log_softmax, 1)[0]
    linear = int(graph.writer[logits])
    passes = used_by(probs, ("aten.nll_loss_forward", "aten.nll_loss_backward", "aten._log_softmax_backward_data"))
    if linear == NONE or targets[linear] not in LINEAR or not results(linear, 1) or not passes:
        return None
    loss, loss_grad, logits_grad = passes
    target = reads(loss) - {probs}
    if len(target) != 1 or len(results(loss, 2)) != 2 or graph.shapes[loss] != ():
        return None  # weights of classes, or a loss per row
    if graph.tensor_bytes[logits] != graph.tensor_bytes[probs]:
        return None  # in another precision
    weight_of_rows = results(loss, 2)[1]
    scale = reads(loss_grad) - {probs, weight_of_rows} - target
    through = results(loss_grad, 1)
    back = results(logits_grad, 1)
    if len(scale) != 1 or not through or not back or reads(logits_grad) != {probs, *through}:
        return None
    if users[through[0]] != [logits_grad] or users[weight_of_rows] != [loss_grad]:
        return None
    kinds = _gradients(graph, linear, back[0], targets, users)
    if kinds is None:
        return None
    rows = graph.shapes[linear][0] if len(graph.shapes[linear]) == 2 else 0
    return LossRegion(
        linear=linear,
        log_softmax=log_softmax,
        loss=loss,
        loss_grad=loss_grad,
        logits_grad=logits_grad,
        num_rows=rows,
        target=target.pop(),
        scale=scale.pop(),
        **kinds,
    )


def _gradients(
    graph: Graph, linear: int, grad: int, targets: list[str], users: list[list[int]]
) -> dict[str, int] | None:
    """Tell the gradients of input, weight and bias apart by their shapes; None where anything else uses the logits'."""
    shape = graph.shapes[linear]
    found = dict.fromkeys(("input_grad", "weight_grad", "bias_grad", "weight", "input"), NONE)
    inputs = set(graph.reads.of(linear).tolist())
    if len(shape) != 2 or not users[grad] or len(inputs) != (2 if targets[linear] == LINEAR[0] else 3):
        return None
    for v in users[grad]:
        if v >= graph.num_ops or len(graph.writes.of(v)) != 1 or len(graph.mutates.of(v)):
            return None
        others = set(graph.reads.of(v).tolist()) - {grad}
        if targets[v] == "aten.sum" and not others and graph.shapes[v] in ((shape[1],), (1, shape[1])):
            kind = "bias_grad"
        elif targets[v] == "aten.mm" and len(others) == 1 and others <= inputs and len(graph.shapes[v]) == 2:
            by_rows = [graph.shapes[v][0] == shape[0], shape[1] in graph.shapes[v]]
            kind = "input_grad" if by_rows[0] else "weight_grad"
            if all(by_rows) or not any(by_rows):
                return None
            if kind == "input_grad":
                found["weight"] = others.pop()
        else:
            return None
        if found[kind] != NONE:
            return None
        found[kind] = v
    num_bytes = graph.tensor_bytes[graph.writes.of(linear)[0]]
    rest = [t for t in inputs if t != found["weight"] and shape[0] * graph.tensor_bytes[t] != num_bytes]  # not the bias
    found["input"] = rest[0] if len(rest) == 1 else NONE
    known = found["weight"] != NONE and found["input"] != NONE
    if found["weight_grad"] != NONE:
        known &= found["input"] in graph.reads.of(found["weight_grad"])
    return found if known else None
