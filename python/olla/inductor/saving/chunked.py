"""Compute a large linear layer and its loss in chunks of rows: at most one chunk of logits is in memory.

If the loss is a scalar and the gradient of the logits proportional to its tangent, forward computes each chunk's
gradients along with its loss, and backward only scales their sums: logits are computed once. Otherwise forward computes
each chunk's loss, and backward recomputes each chunk's logits for its gradients, whatever the gradient of each row is.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import fx

from olla.inductor.saving.emission import Emission
from olla.inductor.saving.losses import Unsuitable, descendants, found, tangents_of
from olla.inductor.saving.rows import FORWARD, MARK, MATRIX_PRODUCTS, bytes_of, is_zero, shape_of

_log = logging.getLogger(__name__)
_aten = torch.ops.aten
_FEW_ROWS = 256  # with fewer, matrix products are memory-bound
_MOST_TRIED = 8  # products per graph whose rows are followed, largest first


def in_chunks(module: fx.GraphModule, num_chunks: int | str) -> tuple[int, str]:
    """Rewrite a joint graph so that linear layers with their losses run on chunks of rows, one after the other.

    Args:
        module: a joint graph of forward and backward, functional; it is changed.
        num_chunks: how many; "auto": the smallest power of two with which a chunk of logits takes no more memory than
            a quarter of the layer's weight, or has no more than 256 rows.

    Returns:
        The number of losses in chunks; if there is none, why the largest product is none.

    Complexity:
        O((nodes + edges) * tried products + members * chunks).
    """
    graph = module.graph
    _divide_means(graph)
    count, why = 0, "no product of matrices is wider than what it is made from"
    for tried, logits in enumerate(_candidates(graph)):
        try:
            loss = found(graph, logits)
            number = min(_automatic(logits) if num_chunks == "auto" else int(num_chunks), loss.num_rows)
            if number > 1:
                Emission(graph, loss, number).run()
                count += 1
            elif not tried:
                why = "one chunk is the whole"
        except Unsuitable as reason:
            _log.debug("%s runs whole: %s", logits.name, reason)
            if not tried:
                why = f"of the widest product, {logits.name}, {reason}"
    if count:
        _add_in_place(graph)
        graph.eliminate_dead_code()
        graph.lint()
    return count, why


def _divide_means(graph: fx.Graph) -> None:
    """Rewrite means as sums and divisions, so that means over rows become sums over chunks."""
    for target in (_aten.mean.default, _aten.mean.dim):
        for node in graph.find_nodes(op="call_function", target=target):
            before, shape = shape_of(node.args[0]), shape_of(node)
            if before is None or shape is None or not math.prod(shape):
                continue
            with graph.inserting_before(node):
                args = node.args if len(node.args) > 1 else (*node.args, list(range(len(before))))
                total = graph.call_function(_aten.sum.dim_IntList, args, node.kwargs)
                mean = graph.call_function(_aten.div.Tensor, (total, math.prod(before) // math.prod(shape)))
            total.meta.update(node.meta)
            mean.meta.update(node.meta)
            node.replace_all_uses_with(mean)
            graph.erase_node(node)


def _add_in_place(graph: fx.Graph) -> None:
    """Scatter an embedding's gradient right into the one it is added to: one buffer for a tied weight, not three."""
    target = _aten._unsafe_masked_index_put_accumulate.default
    for scattered in graph.find_nodes(op="call_function", target=target):
        user = next(iter(scattered.users)) if len(scattered.users) == 1 else scattered
        if user.target is not _aten.add.Tensor or user.kwargs or not is_zero(scattered.args[0]):
            continue
        other = user.args[0] if user.args[1] is scattered else user.args[1]
        same = isinstance(other, fx.Node) and shape_of(other) == shape_of(scattered)
        if not same or other.meta["val"].dtype != scattered.meta["val"].dtype:
            continue
        with graph.inserting_before(user):
            new = graph.call_function(target, (other, *scattered.args[1:]), scattered.kwargs)
        new.meta.update(scattered.meta)
        user.replace_all_uses_with(new)
        graph.erase_node(user)


def in_forward(graph: fx.Graph, info: Any) -> None:
    """Make forward run the chunks, their gradients included, by changing torch's classification of nodes."""
    needed = {node for node in graph.nodes if node.meta.get(MARK) == FORWARD}
    for node in reversed(graph.nodes):
        if node in needed and node.op == "call_function":
            needed.update(node.all_input_nodes)
    before = info.is_required_fw
    info.is_required_fw = lambda node: node in needed or before(node)


def _candidates(graph: fx.Graph) -> list[fx.Node]:
    """Return forward's matrix products that are over twice as wide as their left operands, largest first."""
    later = descendants(tangents_of(graph))
    found = []
    for target in MATRIX_PRODUCTS:
        for node in graph.find_nodes(op="call_function", target=target):
            shape, left = shape_of(node), shape_of(node.args[-2])
            if shape is not None and left is not None and node not in later and shape[1] > 2 * left[1]:
                found.append(node)
    return sorted(found, key=bytes_of, reverse=True)[:_MOST_TRIED]


def _automatic(logits: fx.Node) -> int:
    rows, number = (shape_of(logits) or (0,))[0], 1
    most = bytes_of(logits.args[-1]) // 4  # type: ignore[arg-type]
    while bytes_of(logits) > number * most and rows > number * _FEW_ROWS:
        number *= 2
    return number
