"""A large linear layer and the loss of its results in chunks of rows: no more than one chunk of logits is in memory.

The gradients of a chunk are computed together with its part of the loss, since the loss is one number: the tangent is
a factor that backward multiplies the sums by. Logits are computed once.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from olla.inductor.compat import compat
from olla.inductor.saving.rows import (
    MARK,
    MATRIX_PRODUCTS,
    Rows,
    Treated,
    bytes_of,
    is_proportional,
    is_zero,
    shape_of,
    treated,
)

_log = logging.getLogger(__name__)
_aten = torch.ops.aten
_FEW_ROWS = 256  # with fewer, products of matrices wait for memory
_MOST_ROUNDS = 8  # of following what is computed of what was pulled in
_MOST_TRIED = 8  # products per graph whose rows are followed, largest first


class _Unsuitable(Exception):
    """Why the rows of a product cannot be computed in chunks."""


@dataclass
class Loss:
    """What is computed of one product's rows, from logits to sums.

    Attributes:
        logits: the product.
        num_rows: of it.
        members: what runs on chunks, in the order of the graph.
        sums: members that sum over rows.
        joined: members with rows that others read: their chunks are put together.
        rows: of what is computed in chunks and has rows: where they are.
        tangent: the one number from behind the loss.
        linear: members that are proportional to it.
    """

    logits: fx.Node
    num_rows: int
    rows: dict[fx.Node, Rows] = field(default_factory=dict)
    members: dict[fx.Node, Treated] = field(default_factory=dict)
    sums: list[fx.Node] = field(default_factory=list)
    joined: list[fx.Node] = field(default_factory=list)
    tangent: fx.Node | None = None
    linear: set[fx.Node] = field(default_factory=set)


def in_chunks(module: fx.GraphModule, num_chunks: int | str) -> tuple[int, str]:
    """Rewrite a joint graph so that linear layers with their losses run on chunks of rows, one after the other.

    Args:
        module: a joint graph of forward and backward, functional; it is changed.
        num_chunks: how many; "auto": the smallest power of two with which a chunk of logits takes no more memory than
            a quarter of the layer's weight, or has no more than 256 rows.

    Returns:
        How many losses there are, and why the largest product is none where there is none.

    Complexity:
        O((nodes + edges) * tried products + members * chunks).
    """
    graph = module.graph
    count, why = 0, "no product of matrices is wider than what it is made from"
    for tried, logits in enumerate(_candidates(graph)):
        try:
            loss = _found(graph, logits)
            number = min(_automatic(logits) if num_chunks == "auto" else int(num_chunks), loss.num_rows)
            if number > 1:
                _Emission(graph, loss, number).run()
                count += 1
            elif not tried:
                why = "one chunk is the whole"
        except _Unsuitable as reason:
            _log.debug("%s runs whole: %s", logits.name, reason)
            if not tried:
                why = f"of the widest product, {logits.name}, {reason}"
    if count:
        _add_in_place(graph)
        graph.eliminate_dead_code()
        graph.lint()
    return count, why


def _add_in_place(graph: fx.Graph) -> None:
    """Scatter the gradient of an embedding into what is added to it: a tied weight has one gradient, not three."""
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
    """Have forward run what chunks compute, gradients too, by torch's classification of the nodes of a graph."""
    needed = {node for node in graph.nodes if node.meta.get(MARK)}
    for node in reversed(graph.nodes):
        if node in needed and node.op == "call_function":
            needed.update(node.all_input_nodes)
    before = info.is_required_fw
    info.is_required_fw = lambda node: node in needed or before(node)


def _candidates(graph: fx.Graph) -> list[fx.Node]:
    """Return products whose results are larger than what they are made from, and wider, largest first."""
    later = _descendants(_tangents(graph))
    found = []
    for target in MATRIX_PRODUCTS:
        for node in graph.find_nodes(op="call_function", target=target):
            shape, left = shape_of(node), shape_of(node.args[-2])
            if shape is not None and left is not None and node not in later and shape[1] > 2 * left[1]:
                found.append(node)
    return sorted(found, key=bytes_of, reverse=True)[:_MOST_TRIED]


def _tangents(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.find_nodes(op="placeholder") if compat.is_tangent(node)]


def _descendants(nodes: Any) -> set[fx.Node]:
    found = set(nodes)
    stack = list(found)
    while stack:
        new = [user for user in stack.pop().users if user not in found]
        found.update(new)
        stack += new
    return found


def _automatic(logits: fx.Node) -> int:
    rows, number = (shape_of(logits) or (0,))[0], 1
    most = bytes_of(logits.args[-1]) // 4  # type: ignore[arg-type]
    while bytes_of(logits) > number * most and rows > number * _FEW_ROWS:
        number *= 2
    return number


def _found(graph: fx.Graph, logits: fx.Node) -> Loss:
    """Return what is computed of a product's rows.

    Raises:
        _Unsuitable: it is not a loss, or not one that chunks of rows can compute.
    """
    shape = shape_of(logits)
    assert shape is not None
    loss = Loss(logits, shape[0])
    how = treated(logits, {logits.args[-2]: Rows(0)}, loss.num_rows)  # type: ignore[dict-item]
    if how is None or how.rows != Rows(0):
        raise _Unsuitable("its operands are one tensor")
    loss.members[logits], loss.rows[logits] = how, Rows(0)
    behind = _descendants(_tangents(graph))
    for _ in range(_MOST_ROUNDS):
        size = len(loss.members)
        _follow(graph, loss)
        _pull_in(graph, loss, behind)
        if len(loss.members) == size:
            break
    _close(graph, loss)
    _factor(loss, behind)
    return loss


def _follow(graph: fx.Graph, loss: Loss) -> None:
    """Add what is computed of the logits, row by row, up to sums over rows and to what is as small as hidden states."""
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
                raise _Unsuitable(f"{node.name} takes {large.name} whole")
            continue
        loss.members[node] = how
        if how.rows is None:
            loss.sums.append(node)
        else:
            loss.rows[node] = how.rows


def _pull_in(graph: fx.Graph, loss: Loss, behind: set[fx.Node]) -> None:
    """Add what members read that is as large as logits and made of less: where the label is, in every column.

    And what has rows only because the gradient of the loss, one number, goes to all that have a label.
    """
    large = loss.num_rows * (shape_of(loss.logits) or (0, 0))[1]
    stack = list(loss.members)
    while stack:
        for source, rows in loss.members[stack.pop()].reads.items():
            size = shape_of(source)
            if source in loss.members or size is None or (math.prod(size) < large and source not in behind):
                continue
            if source.op == "placeholder":
                continue  # in memory anyway
            how = treated(source, loss.rows, loss.num_rows, rows)
            if how is None or how.rows != rows:
                raise _Unsuitable(f"{source.name} is as large and is not made row by row")
            loss.members[source], loss.rows[source] = how, rows
            stack.append(source)
    loss.members = {node: loss.members[node] for node in graph.nodes if node in loss.members}


def _close(graph: fx.Graph, loss: Loss) -> None:
    """Note what others read of members."""
    for node in loss.members:
        if loss.members[node].rows is None or all(user in loss.members for user in node.users):
            continue
        if bytes_of(node) > bytes_of(loss.logits) // 2:
            raise _Unsuitable(f"{node.name} is needed whole")
        loss.joined.append(node)
    if not any(shape_of(node) == () for node in loss.sums):
        raise _Unsuitable("its rows are not summed up to one number")


def _factor(loss: Loss, behind: set[fx.Node]) -> None:
    """Find the one number that everything from behind the loss is proportional to.

    Raises:
        _Unsuitable: there are several, or a gradient per row, or something is not proportional to it.
    """
    behind = behind | (_descendants(loss.sums) - set(loss.members))
    given = {n for node in loss.members for n in node.all_input_nodes if n in behind and n not in loss.members}
    if not given:
        raise _Unsuitable("no gradient of it is computed")
    if len(given) > 1:
        raise _Unsuitable("its gradient depends on several numbers")
    (loss.tangent,) = given
    if shape_of(loss.tangent) != () or loss.tangent in loss.rows:
        raise _Unsuitable(f"the gradient of the loss, {loss.tangent.name}, is not one number")
    linear = {loss.tangent}
    for node in loss.members:
        if any(n in linear for n in node.all_input_nodes):
            if not is_proportional(node, linear):
                raise _Unsuitable(f"{node.name} is not proportional to the gradient of the loss")
            linear.add(node)
    loss.linear = linear
    if loss.logits.meta["val"].dtype == torch.float16:
        raise _Unsuitable("float16 needs the scale of the loss in its gradients")


class _Emission:
    """Writes the chunks of one loss into the graph, and takes the whole out."""

    def __init__(self, graph: fx.Graph, loss: Loss, num_chunks: int) -> None:
        self.graph, self.loss = graph, loss
        size = -(-loss.num_rows // num_chunks)
        self.bounds = [(at, min(at + size, loss.num_rows)) for at in range(0, loss.num_rows, size)]
        self.flat: dict[fx.Node, fx.Node] = {}
        self.results: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        marker = self.place()
        with self.graph.inserting_before(marker):
            self.write()
        self.graph.erase_node(marker)
        self.replace()

    def place(self) -> fx.Node:
        """Return a new node before which chunks run: what they read is there, what depends on them comes behind it."""
        members, position = self.loss.members, {node: i for i, node in enumerate(self.graph.nodes)}
        read = {n for node in members for n in node.all_input_nodes if n not in members} - {self.loss.tangent}
        late = _descendants([*members, *_tangents(self.graph)])
        if read & late:
            raise _Unsuitable("what it reads depends on the loss itself")
        anchor = max((*read, self.loss.logits), key=position.__getitem__)
        ahead = [n for n in self.graph.nodes if position[n] <= position[anchor] and n in late and n.op != "placeholder"]
        with self.graph.inserting_after(anchor):
            marker = cursor = self.graph.call_function(_aten.scalar_tensor.default, (0,))
        for node in ahead:
            cursor.append(node)
            cursor = node
        return marker

    def write(self) -> None:
        parts: dict[fx.Node, list[fx.Node]] = {node: [] for node in self.loss.joined}
        for start, end in self.bounds:
            new: dict[fx.Node, fx.Node] = {}
            for node, how in self.loss.members.items():
                new[node] = self.copy(node, how, new, start, end)
            for node in self.loss.joined:
                parts[node].append(new[node])
        for node, chunks in parts.items():
            joined = self.call(_aten.cat.default, (chunks, self.loss.rows[node].first), node)
            self.results[node] = self.shaped(joined, list(shape_of(node) or ()), node)

    def copy(self, node: fx.Node, how: Treated, new: dict[fx.Node, fx.Node], start: int, end: int) -> fx.Node:
        """Append what a member computes of a chunk; sums go on from those of the chunks before."""
        slices = {
            source: self.slice(source, rows, start, end, node)
            for source, rows in how.reads.items()
            if source not in new
        }

        def argument(n: fx.Node) -> fx.Node:
            return new.get(n) or slices.get(n) or (self.one(n) if n is self.loss.tangent else n)

        args = fx.node.map_arg(how.on(end - start), argument)
        before = self.results.get(node)
        if how.rows is not None or before is None:
            made = self.call(node.target, args, node, node.kwargs)
        elif node.target is _aten.mm.default:
            made = self.call(_aten.addmm.default, (before, *args), node)
        else:
            made = self.call(_aten.add.Tensor, (before, self.call(node.target, args, node, node.kwargs)), node)
        if how.rows is None:
            self.results[node] = made
        return made

    def one(self, tangent: fx.Node) -> fx.Node:
        """Return the number one in place of the tangent."""
        if tangent not in self.flat:
            value = tangent.meta["val"]
            kwargs = {"dtype": value.dtype, "device": value.device}
            self.flat[tangent] = self.call(_aten.full.default, ([], 1), tangent, kwargs)
        return self.flat[tangent]

    def slice(self, source: fx.Node, rows: Rows, start: int, end: int, like: fx.Node) -> fx.Node:
        if source not in self.flat:
            shape = shape_of(source) or ()
            self.flat[source] = self.shaped(source, rows.sizes(shape, self.loss.num_rows), source)
        return self.call(_aten.slice.Tensor, (self.flat[source], rows.first, start, end), like)

    def shaped(self, node: fx.Node, sizes: list[int], like: fx.Node) -> fx.Node:
        return node if list(shape_of(node) or ()) == sizes else self.call(_aten.reshape.default, (node, sizes), like)

    def call(self, target: Any, args: Any, like: fx.Node, kwargs: Any = None, *, in_chunk: bool = True) -> fx.Node:
        """Append a node with its value and what is noted of the one it is part of."""
        new = self.graph.call_function(target, args, dict(kwargs or {}))
        value = like.meta["val"]
        new.meta = {
            key: note for key, note in like.meta.items() if key not in ("val", "tensor_meta", "partitioner_tag")
        }
        values, named = fx.node.map_arg((new.args, new.kwargs), lambda n: n.meta["val"])
        with getattr(value, "fake_mode", torch.no_grad()):
            new.meta["val"] = target(*values, **named)
        if in_chunk:
            new.meta[MARK] = True
            new.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return new

    def replace(self) -> None:
        """Put the sums over chunks, times what backward brings, where those over all rows were."""
        tangent = self.loss.tangent
        for node, result in self.results.items():
            outside = [user for user in node.users if user not in self.loss.members]
            if node in self.loss.linear:
                with self.graph.inserting_before(node):
                    result = self.call(_aten.mul.Tensor, (result, tangent), node, in_chunk=False)
            for user in outside:
                user.replace_input_with(node, result)
        for node in reversed(self.loss.members):
            if not node.users:
                self.graph.erase_node(node)
