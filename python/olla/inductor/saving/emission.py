"""Write a loss in chunks into a joint graph: its nodes once per chunk, running sums, concatenated rows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from olla.inductor.compat import codegen
from olla.inductor.saving.losses import Loss, Unsuitable, descendants, is_wide, tangents_of
from olla.inductor.saving.rows import (
    BACKWARD,
    BY_INDEX,
    FORWARD,
    MARK,
    MATRIX_PRODUCTS,
    Rows,
    Treated,
    bytes_of,
    is_zero,
    shape_of,
)

_aten, _prims = torch.ops.aten, torch.ops.prims


class Emission:
    """Writes the chunks of one loss into the graph, and removes the nodes of the whole loss."""

    def __init__(self, graph: fx.Graph, loss: Loss, num_chunks: int) -> None:
        self.graph, self.loss = graph, loss
        size = -(-loss.num_rows // num_chunks)
        self.bounds = [(at, min(at + size, loss.num_rows)) for at in range(0, loss.num_rows, size)]
        self.flat: dict[tuple[fx.Node, str], fx.Node] = {}
        self.results: dict[fx.Node, fx.Node] = {}
        self.made: list[dict[fx.Node, fx.Node]] = [{} for _ in self.bounds]  # of every chunk
        self.ahead: dict[fx.Node, fx.Node] = {}  # tangent, or `Loss.ahead` -> its value for a tangent of one
        self.keeps_rows = any(node not in loss.later and not is_wide(node, loss) for node in loss.joined)
        self.small = bytes_of(loss.logits.args[-2]) // num_chunks  # type: ignore[arg-type]
        self.stage = FORWARD

    def run(self) -> None:
        for self.stage in (FORWARD, BACKWARD):
            members = [n for n in self.loss.members if (n in self.loss.later) == (self.stage == BACKWARD)]
            if not members:
                continue
            marker = self.place(members)
            with self.graph.inserting_before(marker):
                self.write(members)
            self.graph.erase_node(marker)
            self.replace(members)
        for node in reversed(self.loss.members):
            if not node.users:
                self.graph.erase_node(node)

    def place(self, members: list[fx.Node]) -> fx.Node:
        """Return a marker to insert chunks before: behind all that they read, ahead of all that depends on them."""
        position = {node: i for i, node in enumerate(self.graph.nodes)}
        others = {*self.loss.members, *self.loss.ahead, self.loss.tangent}
        read = {n for node in (*members, *self.loss.ahead) for n in node.all_input_nodes if n not in others}
        made = [node for chunk in self.made for node in chunk.values()]
        late = descendants([*members, *(tangents_of(self.graph) if self.stage == FORWARD else ())])
        if read & late:
            raise Unsuitable("what it reads depends on the loss itself")
        anchor = max((*read, *made, *(() if made else (self.loss.logits,))), key=position.__getitem__)
        ahead = [n for n in self.graph.nodes if position[n] <= position[anchor] and n in late and n.op != "placeholder"]
        with self.graph.inserting_after(anchor):
            marker = cursor = self.graph.call_function(_aten.scalar_tensor.default, (0,))
        for node in ahead:
            cursor.append(node)
            cursor = node
        return marker

    def write(self, members: list[fx.Node]) -> None:
        for node in self.loss.ahead:
            self.ahead[node] = self.call(node.target, fx.node.map_arg(node.args, self.known), node, node.kwargs)
        for new, (start, end) in zip(self.made, self.bounds, strict=True):
            for node in members:
                new[node] = self.copy(node, self.loss.members[node], new, start, end)
        for node in members:
            if self.loss.members[node].rows is None:
                self.results[node] = self.shaped(self.results[node], list(shape_of(node) or ()), node)
            elif node in self.loss.joined:
                rows = self.loss.rows[node]
                whole = self.call(_aten.cat.default, ([new[node] for new in self.made], rows.first), node)
                self.results[node] = self.shaped(self.cut(whole, rows, node), list(shape_of(node) or ()), node)

    def copy(self, node: fx.Node, how: Treated, new: dict[fx.Node, fx.Node], start: int, end: int) -> fx.Node:
        """Append a member's node for one chunk; a sum continues that of the chunks before."""
        slices = {}
        for source, rows in how.reads.items():
            given = self.known(source)
            slices[source] = new.get(source) or self.slice(given, rows, start, end, node)
            if rows.window and (how.masked or how.rows is None):
                slices[source] = self.masked(slices[source], rows, start, end, node)

        def argument(n: fx.Node) -> fx.Node:
            return slices.get(n) or (self.results[n] if n in self.loss.sums else new.get(n)) or self.known(n)

        args = fx.node.map_arg(how.on(end - start), argument)
        before = self.results.get(node)
        chosen = self.at_index(node, args)
        if chosen is not None:
            made = chosen
        elif self.sums_columns(node, how):
            made = self.column_sums(node, args[0], before)
        elif how.rows is not None or before is None:
            made = self.call(how.target or node.target, args, node, {} if how.target else node.kwargs)
        elif node.target is _aten.mm.default:
            made = self.call(_aten.addmm.default, (before, *args), node)
        else:
            made = self.call(_aten.add.Tensor, (before, self.call(node.target, args, node, node.kwargs)), node)
        if how.rows is None:
            self.results[node] = made
        return made

    def at_index(self, node: fx.Node, args: Any) -> fx.Node | None:
        """Append a gather of one column per row as a masked sum over all columns, or the scatter of one as a `where`.

        A gather is inlined into its reader and would keep the logits alive until then; a scatter is an unfused kernel.

        Returns:
            The result; None for what is neither.
        """
        if node.target not in BY_INDEX or isinstance(args[-1], float | int):
            return None
        gathers, (first, dim, index) = node.target is _aten.gather.default, args[:3]
        shape = shape_of(index) or ()
        if dim != len(shape) - 1 or shape[-1] != 1 or not (self.keeps_rows if gathers else is_zero(node.args[0])):
            return None
        value = first.meta["val"]
        kwargs = {"start": 0, "step": 1, "dtype": torch.int64, "device": value.device, "requires_grad": False}
        places = self.call(_prims.iota.default, (value.shape[-1],), node, kwargs)
        zero = self.call(_aten.full.default, ([], 0), node, {"dtype": value.dtype, "device": value.device})
        there = self.call(_aten.eq.Tensor, (places, index), node)
        chosen = self.call(_aten.where.self, (there, first if gathers else args[3], zero), node)
        return self.call(_aten.sum.dim_IntList, (chosen, [-1], True), node) if gathers else chosen

    def sums_columns(self, node: fx.Node, how: Treated) -> bool:
        """Whether a node sums every column of something as wide as logits, as the gradient of a bias does."""
        if how.rows is not None or node.target is not _aten.sum.dim_IntList or not node.meta["val"].is_floating_point():
            return False
        (source, rows), *_ = how.reads.items()
        columns = math.prod(shape_of(node) or ())
        return rows.first == 0 and columns > 1 and len(rows.sizes(shape_of(source) or (), 0)) == 2

    def column_sums(self, node: fx.Node, chunk: fx.Node, before: fx.Node | None) -> fx.Node:
        """Append the sums of a chunk's columns as a product of ones with it, added to those of the chunks before.

        Inductor would fuse plain sums of several chunks into one kernel, and keep all these chunks alive for it.
        """
        value = node.meta["val"]
        if chunk.meta["val"].dtype != value.dtype:
            chunk = self.call(_prims.convert_element_type.default, (chunk, value.dtype), node)
        rows = (shape_of(chunk) or (0,))[0]
        ones = self.call(_aten.full.default, ([1, rows], 1), node, {"dtype": value.dtype, "device": value.device})
        if before is None:
            return self.call(_aten.mm.default, (ones, chunk), node)
        return self.call(_aten.addmm.default, (before, ones, chunk), node)

    def known(self, node: fx.Node) -> fx.Node:
        """Return what stands for a node outside the loss: a one for the tangent, a copy for `ahead`, else itself."""
        if node is self.loss.tangent and node not in self.ahead:
            value = node.meta["val"]
            self.ahead[node] = self.call(
                _aten.full.default, ([], 1), node, {"dtype": value.dtype, "device": value.device}
            )
        return self.ahead.get(node, node)

    def slice(self, source: fx.Node, rows: Rows, start: int, end: int, like: fx.Node) -> fx.Node:
        key = source, self.stage
        if key not in self.flat:
            whole = source
            if rows.window:  # the rows that are cut off are zeros
                sizes = [end - start for _, start, end in rows.window]
                shape, last = shape_of(source) or (), rows.first + rows.count
                pads = [n for w in reversed(rows.window) for n in (w[1], w[0] - w[2])]
                whole = self.shaped(source, [*shape[: rows.first], *sizes, *shape[last:]], source)
                whole = self.call(_aten.constant_pad_nd.default, (whole, [0, 0] * len(shape[last:]) + pads), source)
            sizes = rows.sizes(shape_of(source) or (), self.loss.num_rows)
            self.flat[key] = self.shaped(whole, sizes, source)
        return self.call(_aten.slice.Tensor, (self.flat[key], rows.first, start, end), like)

    def cut(self, whole: fx.Node, rows: Rows, like: fx.Node) -> fx.Node:
        """Return a tensor of all rows without those that were sliced off."""
        if not rows.window:
            return whole
        shape = shape_of(whole) or ()
        sizes = [*shape[: rows.first], *(size for size, _, _ in rows.window), *shape[rows.first + 1 :]]
        whole = self.shaped(whole, sizes, like)
        for dim, (_, start, end) in enumerate(rows.window, rows.first):
            whole = self.call(_aten.slice.Tensor, (whole, dim, start, end), like)
        return whole

    def masked(self, chunk: fx.Node, rows: Rows, start: int, end: int, like: fx.Node) -> fx.Node:
        """Return a chunk with zeros in place of the rows that were sliced off."""
        assert rows.window
        value, shape = chunk.meta["val"], shape_of(chunk) or ()
        sizes = [end - start for _, start, end in rows.window]
        there = self.call(_aten.full.default, (sizes, True), like, {"dtype": torch.bool, "device": value.device})
        mask = self.slice(there, replace(rows, first=0, count=len(sizes)), start, end, like)
        mask = self.shaped(mask, [end - start] + [1] * (len(shape) - rows.first - 1), like)
        zero = self.call(_aten.full.default, ([], 0), like, {"dtype": value.dtype, "device": value.device})
        return self.call(_aten.where.self, (mask, chunk, zero), like)

    def shaped(self, node: fx.Node, sizes: list[int], like: fx.Node) -> fx.Node:
        return node if list(shape_of(node) or ()) == sizes else self.call(_aten.reshape.default, (node, sizes), like)

    def call(self, target: Any, args: Any, like: fx.Node, kwargs: Any = None, *, in_chunk: bool = True) -> fx.Node:
        """Append a node with its fake value, and the `meta` of the node it is part of."""
        new = self.graph.call_function(target, args, dict(kwargs or {}))
        value = like.meta["val"]
        new.meta = {
            key: note for key, note in like.meta.items() if key not in ("val", "tensor_meta", "partitioner_tag")
        }
        values, named = fx.node.map_arg((new.args, new.kwargs), lambda n: n.meta["val"])
        with getattr(value, "fake_mode", torch.no_grad()):
            new.meta["val"] = target(*values, **named)
        new.meta.pop("recompute", None)
        if in_chunk:
            new.meta[MARK] = self.stage
        if in_chunk and self.stage == FORWARD:
            again = self.loss.later and bytes_of(new) > self.small
            new.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE
        return new

    def replace(self, members: list[fx.Node]) -> None:
        """Replace results of the whole loss by those of the chunks, times the tangent where they are linear in it."""
        tangent = self.loss.tangent
        for node in members:
            result = self.results.get(node)
            if result is None:
                continue
            outside = [user for user in node.users if user not in self.loss.members]
            if node in self.loss.linear:
                with self.graph.inserting_before(node):
                    result = self.call(_aten.mul.Tensor, (result, tangent), node, in_chunk=False)
            for user in outside:
                user.replace_input_with(node, result)


def goes_on(node: fx.Node) -> bool:
    """Whether a node adds a chunk's product to the running sum of those before, which nothing else reads."""
    if node.target is not _aten.addmm.default or not node.meta.get(MARK):
        return False
    before: Any = node.args[0]
    made = before.target in (*MATRIX_PRODUCTS, _aten.addmm_.default) and before.meta.get(MARK)
    return bool(made and len(before.users) == 1 and shape_of(before) == shape_of(node))


def add_in_place(graph: fx.Graph) -> None:
    """Update running sums over chunks in place, in a graph that Inductor is about to lower."""
    codegen.call_itself(_aten.addmm_.default)
    for node in graph.find_nodes(op="call_function", target=_aten.addmm.default):
        if goes_on(node):
            node.target = _aten.addmm_.default
