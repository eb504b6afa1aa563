"""Find a linear layer and its loss in a joint graph: nodes computed from its rows, and its incoming gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from olla.inductor.compat import compat
from olla.inductor.saving.rows import (
    MATRIX_PRODUCTS,
    SUMS,
    VIEWS,
    Rows,
    Treated,
    bytes_of,
    is_zero,
    shape_of,
    treated,
)

_aten, _prims = torch.ops.aten, torch.ops.prims
_MOST_ROUNDS = 8  # of `_follow` and `_pull_in`


class Unsuitable(Exception):
    """Why the rows of a product cannot be computed in chunks."""


@dataclass
class Loss:
    """What is computed of one product's rows, from logits to sums.

    Attributes:
        logits: the product.
        num_rows: of it.
        members: what runs on chunks, in the order of the graph.
        sums: members that sum over rows.
        joined: members with rows that nodes outside read: their chunks are concatenated.
        rows: of what is computed in chunks and has rows: where they are.
        tangent: the scalar that all gradients are proportional to; None: there is none.
        linear: nodes proportional to it.
        ahead: nodes between it and the members, in order: forward computes them for a tangent of one.
        later: members that backward runs, chunk by chunk, if there is no such scalar.
    """

    logits: fx.Node
    num_rows: int
    rows: dict[fx.Node, Rows] = field(default_factory=dict)
    members: dict[fx.Node, Treated] = field(default_factory=dict)
    sums: list[fx.Node] = field(default_factory=list)
    joined: list[fx.Node] = field(default_factory=list)
    tangent: fx.Node | None = None
    linear: set[fx.Node] = field(default_factory=set)
    ahead: list[fx.Node] = field(default_factory=list)
    later: set[fx.Node] = field(default_factory=set)


def tangents_of(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.find_nodes(op="placeholder") if compat.is_tangent(node)]


def descendants(nodes: Any) -> set[fx.Node]:
    found = set(nodes)
    stack = list(found)
    while stack:
        new = [user for user in stack.pop().users if user not in found]
        found.update(new)
        stack += new
    return found


def ancestors(nodes: Any) -> set[fx.Node]:
    found = set(nodes)
    stack = list(found)
    while stack:
        new = [n for n in stack.pop().all_input_nodes if n not in found]
        found.update(new)
        stack += new
    return found


def found(graph: fx.Graph, logits: fx.Node) -> Loss:
    """Return what is computed of a product's rows.

    Raises:
        Unsuitable: it is not a loss, or not one that chunks of rows can compute.
    """
    shape = shape_of(logits)
    assert shape is not None
    loss = Loss(logits, shape[0])
    how = treated(logits, {logits.args[-2]: Rows(0)}, loss.num_rows)  # type: ignore[dict-item]
    if how is None or how.rows != Rows(0):
        raise Unsuitable("its operands are one tensor")
    loss.members[logits], loss.rows[logits] = how, Rows(0)
    behind = descendants(tangents_of(graph))
    for _ in range(_MOST_ROUNDS):
        size = len(loss.members)
        _follow(graph, loss)
        _pull_in(graph, loss, behind)
        if len(loss.members) == size:
            break
    _close(loss)
    if not _has_factor(graph, loss, behind):
        _divide(loss, behind)
    return loss


def _follow(graph: fx.Graph, loss: Loss) -> None:
    """Add nodes computed from the logits row by row, up to sums over rows and results as small as hidden states."""
    small = bytes_of(loss.logits.args[-2]) if isinstance(loss.logits.args[-2], fx.Node) else 0
    for node in graph.nodes:
        if node in loss.members:
            continue
        reads = [n for n in node.all_input_nodes if n in loss.rows]
        if not any(n is loss.logits or n.target not in MATRIX_PRODUCTS for n in reads):
            continue  # behind the products of backward the rest of the model begins
        how = treated(node, loss.rows, loss.num_rows)
        if how is None:
            large = next((n for n in reads if bytes_of(n) > max(small, bytes_of(loss.logits) // 4)), None)
            if large is not None:
                raise Unsuitable(f"{node.name} takes {large.name} whole")
            continue
        loss.members[node] = how
        if how.rows is None:
            loss.sums.append(node)
        else:
            loss.rows[node] = how.rows


def _pull_in(graph: fx.Graph, loss: Loss, behind: set[fx.Node]) -> None:
    """Add inputs of members that are as large as the logits but made from less, such as one-hot labels.

    Also inputs that have rows only because the scalar gradient of the loss is broadcast to all labelled rows.
    """
    large = loss.num_rows * (shape_of(loss.logits) or (0, 0))[1]
    stack = list(loss.members)
    while stack:
        for source, rows in loss.members[stack.pop()].reads.items():
            size = shape_of(source)
            if source in loss.members or size is None or (2 * math.prod(size) < large and source not in behind):
                continue
            if source.op == "placeholder":
                continue  # in memory anyway
            how = treated(source, loss.rows, loss.num_rows, rows)
            if (how is None or how.rows != rows) and 2 * math.prod(size) < large:
                continue  # a gradient per row
            if how is None or how.rows != rows:
                raise Unsuitable(f"{source.name} is as large and is not made row by row")
            loss.members[source], loss.rows[source] = how, rows
            stack.append(source)
    loss.members = {node: loss.members[node] for node in graph.nodes if node in loss.members}


def _close(loss: Loss) -> None:
    """Note the members with rows that nodes outside read."""
    loss.joined.clear()
    for node in loss.members:
        if loss.members[node].rows is None or all(user in loss.members for user in node.users):
            continue
        if bytes_of(node) > bytes_of(loss.logits) // 2:
            raise Unsuitable(f"{node.name} is needed whole")
        loss.joined.append(node)


def _has_factor(graph: fx.Graph, loss: Loss, behind: set[fx.Node]) -> bool:
    """Find the scalar that all incoming gradients are proportional to, and the nodes between it and the members.

    Returns:
        Whether there is one with which gradients can be computed in forward.
    """
    results = descendants(loss.sums + loss.joined) - set(loss.members)
    given = {n for node in loss.members for n in node.all_input_nodes if n not in loss.members}
    given &= behind | results
    if loss.logits.meta["val"].dtype == torch.float16:  # needs the scale of the loss in its gradients
        return False
    if any(n in loss.sums for node in loss.members for n in node.all_input_nodes):
        return False
    loss.tangent = next(iter(given)) if len(given) == 1 else None
    if loss.tangent is None or shape_of(loss.tangent) != () or loss.tangent in loss.rows:
        tangents = {n for n in ancestors(given) if compat.is_tangent(n)}
        loss.tangent = next(iter(tangents)) if len(tangents) == 1 and len(behind & given) == len(given) else None
    if loss.tangent is None or shape_of(loss.tangent) != ():
        return False
    between = ancestors(given) & descendants([loss.tangent])
    loss.ahead = [node for node in graph.nodes if node in between and node is not loss.tangent]
    linear = {loss.tangent}
    for node in [*loss.ahead, *loss.members]:
        if any(n in linear for n in node.all_input_nodes):
            if not is_proportional(node, linear) or (node in between and node in results):
                return False
            linear.add(node)
    loss.linear = linear
    return True


def _divide(loss: Loss, behind: set[fx.Node]) -> None:
    """Note the members that run in backward: they read results of other members, or forward does not need them.

    Raises:
        Unsuitable: there is no gradient, or a third run over the chunks would be needed.
    """
    loss.tangent, loss.ahead, loss.linear = None, [], set()
    while narrow := _left_to_backward(loss, behind):  # such as gradients per row, which need no chunks
        for node in narrow:
            del loss.members[node]
            loss.rows.pop(node, None)
        loss.sums = [node for node in loss.sums if node in loss.members]
        _close(loss)
    sums = set(loss.sums)
    if not loss.later:
        raise Unsuitable("no gradient of it is computed")
    if any(n in sums and n in loss.later for node in loss.members for n in node.all_input_nodes):
        raise Unsuitable("sums over its rows are made of sums over its rows more than once")
    first = ancestors([node for node in (*loss.sums, *loss.joined) if node not in loss.later])
    loss.later.update(node for node in loss.members if node not in first)


def _left_to_backward(loss: Loss, behind: set[fx.Node]) -> list[fx.Node]:
    """Note the members that read results of other members; return those that neither are nor read wide ones."""
    outside = (behind | descendants(loss.sums + loss.joined)) - set(loss.members)
    loss.later = set()
    for node in loss.members:
        if any(n in outside or n in loss.sums or n in loss.later for n in node.all_input_nodes):
            loss.later.add(node)
    return [n for n in loss.later if not any(is_wide(m, loss) for m in (n, *n.all_input_nodes) if m in loss.members)]


def is_wide(node: fx.Node, loss: Loss) -> bool:
    return math.prod(shape_of(node) or ()) > loss.num_rows


def is_proportional(node: fx.Node, linear: set[fx.Node]) -> bool:
    """Whether a node's result is proportional to the number that these nodes are proportional to."""
    args = node.args
    if node.target in (_aten.mul.Tensor, _aten.mm.default):
        return sum(arg in linear for arg in args[:2] if isinstance(arg, fx.Node)) == 1
    if node.target in (_aten.div.Tensor, _aten.div.Scalar, _aten.mul.Scalar):
        return args[0] in linear and args[1] not in linear
    if node.target in (_aten.add.Tensor, _aten.sub.Tensor):
        return all(isinstance(arg, fx.Node) and (arg in linear or is_zero(arg)) for arg in args[:2])
    if node.target is _aten.where.self:
        return args[0] not in linear and all(arg in linear or is_zero(arg) for arg in args[1:])
    if node.target in (_aten.slice_scatter.default, _aten.select_scatter.default):
        return is_zero(args[0]) and args[1] in linear
    if node.target in (_aten.scatter.src, _aten.scatter_add.default):
        return is_zero(args[0]) and args[3] in linear and args[2] not in linear
    if node.target is _aten.constant_pad_nd.default:
        return args[0] in linear and not any(args[2:])
    one = (
        _aten.slice.Tensor,
        _aten.select.int,
        _aten.gather.default,
        _aten.neg.default,
        _prims.convert_element_type.default,
        _aten.clone.default,
        _aten.alias.default,
        *SUMS,
    )
    return node.target in (*one, *VIEWS) and args[0] in linear
