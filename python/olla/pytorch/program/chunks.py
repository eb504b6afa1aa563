"""A captured step with its losses in chunks of rows: operators for the graph that `olla.chunk.rewrite` makes."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from olla.chunk import LossRegion
from olla.chunk.losses import NONE, regions
from olla.chunk.rewrite import SHAPE_ONLY
from olla.graph import operators
from olla.plan import Chunked
from olla.plan.chunks import Part
from olla.pytorch.capture import Captured

_MEAN = 1  # reductions of aten.nll_loss_forward; 0, a loss for each row, is no region
_SUM = 2
_FILLS = {"aten.ones_like": 1, "aten.zeros_like": 0}
_aten = torch.ops.aten


def suits(captured: Captured, region: LossRegion) -> bool:
    """Whether a loss can be computed row by row, as its graph suggests: nothing is transposed or weighted."""
    first = _kernels(captured, region)
    linear, softmax, loss, back = first["linear"], first["log_softmax"], first["loss"], first["logits_grad"]
    shape = linear.meta["val"].shape
    x, *_ = softmax.args
    grads = [a for v in ("input_grad", "bias_grad") if v in first for a in first[v].args[:1]]
    rows = (x, softmax, back, *grads)
    in_rows = all(isinstance(n, fx.Node) and _is_whole(n.meta["val"], shape) for n in rows)
    plain = (
        softmax.args[1] in (1, -1) and not softmax.args[2] and loss.args[2] is None and loss.args[3] in (_MEAN, _SUM)
    )
    return in_rows and plain and not linear.kwargs and _is_alone(captured, region)


def with_chunks(captured: Captured, chunks: Chunked) -> Captured:
    """Return the step with its losses in chunks.

    Args:
        captured: the step as it was captured.
        chunks: of its graph; every loss must suit.

    Returns:
        The step whose graph is ``chunks.graph``, with ``original`` the one it was made from.

    Complexity: O(nodes + edges).

    Example:
        >>> import olla
        >>> from olla.chunk.rewrite import chunked
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
        >>> loss = lambda model, x: torch.nn.functional.cross_entropy(model(x), torch.zeros(6, dtype=torch.long))
        >>> captured = olla.capture(model, torch.ones(6, 8), loss=loss)
        >>> with_chunks(captured, chunked(captured.graph, 2)).graph.num_ops > captured.graph.num_ops
        True
    """
    return _Builder(captured, chunks).build()


_OPS = ("linear", "log_softmax", "loss", "loss_grad", "logits_grad", "input_grad", "weight_grad", "bias_grad")


def _kernels(captured: Captured, region: LossRegion) -> dict[str, Any]:
    """Return the operators of a loss by their part in it."""
    return {name: captured.nodes[v][0] for name, v in vars(region).items() if name in _OPS and v != NONE}


def _is_whole(value: Any, shape: torch.Size) -> bool:
    return bool(value.shape == shape and value.is_contiguous() and value.storage_offset() == 0)


def _is_alone(captured: Captured, region: LossRegion) -> bool:
    """Whether no node outside a loss uses a value inside it; views count, which a graph does not show."""
    kept = {region.loss, region.input_grad, region.weight_grad, region.bias_grad}
    own = {node for v in region.ops for node in captured.nodes[v]}
    inner = {node for v in region.ops if v not in kept for node in captured.nodes[v]}
    items = (node for node in captured.nodes[region.loss] if node.target is operator.getitem)
    inner |= {node for node in items if node.args[1] == 1}
    return all(user in own for node in inner for user in node.users)


class _Builder:
    """Writes the nodes of the chunked step in the order of its graph."""

    def __init__(self, captured: Captured, chunks: Chunked) -> None:
        self.captured, self.chunks = captured, chunks
        self.graph = fx.Graph()
        self.copy_of: dict[fx.Node, fx.Node] = {}
        self.nodes: list[tuple[fx.Node, ...]] = []
        self.tensors: dict[fx.Node, tuple[int, ...]] = {}
        found = {region.linear: region for region in regions(captured.graph)}
        starts = np.flatnonzero((chunks.part == Part.LOGITS) & (chunks.chunk == 0))
        self.losses = {
            int(chunks.loss[i]): _Loss(self, found[int(chunks.origin[i])], int(chunks.loss[i])) for i in starts
        }

    def build(self) -> Captured:
        captured, chunks = self.captured, self.chunks
        for node in captured.module.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.copy(node)
        prologue = [self.copy(node) for node in captured.prologue]
        for i, (v, part) in enumerate(zip(chunks.origin.tolist(), chunks.part.tolist(), strict=True)):
            if part != Part.WHOLE:
                self.nodes.append(self.losses[int(chunks.loss[i])].write(i, Part(part), int(chunks.chunk[i])))
                continue
            kernel, *followers = captured.nodes[v]
            first = self._filled(kernel) if self._is_cut_off(i) else self.copy(kernel)
            self.nodes.append((first, *(self.copy(n) for n in followers)))
        self.graph.node_copy(captured.module.graph.output_node(), self.copy_of.__getitem__)
        return dataclasses.replace(
            captured,
            graph=chunks.graph,
            module=fx.GraphModule(captured.module, self.graph),
            nodes=self.nodes,
            prologue=prologue,
            tensors=self.tensors,
            original=captured,
        )

    def copy(self, node: fx.Node) -> fx.Node:
        new = self.copy_of[node] = self.graph.node_copy(node, self.copy_of.__getitem__)
        self.tensors[new] = self.captured.tensors[node]
        return new

    def _is_cut_off(self, i: int) -> bool:
        """Whether an op read a loss for its shape alone and reads nothing now: it comes before the loss."""
        graph, v = self.captured.graph, int(self.chunks.origin[i])
        return len(graph.reads.of(v)) > 0 and len(self.chunks.graph.reads.of(i)) == 0

    def _filled(self, kernel: fx.Node) -> fx.Node:
        name = operators.operator(str(kernel.target))
        assert name in SHAPE_ONLY
        number = _FILLS[name] if name in _FILLS else kernel.args[1]
        value = kernel.meta["val"]
        args = (list(value.shape), number)
        tensors = self.captured.tensors[kernel]
        new = self.add(_aten.full.default, args, value, tensors, dtype=value.dtype, device=value.device)
        self.copy_of[kernel] = new
        return new

    def add(
        self, target: Callable[..., Any], args: Sequence[Any], value: Any, tensors: Sequence[int], **kwargs: Any
    ) -> fx.Node:
        """Add a node that calls a function."""
        node = self.graph.call_function(target, tuple(args), kwargs)
        node.meta["val"] = value
        self.tensors[node] = tuple(tensors)
        return node


class _Loss:
    """Writes the ops of one loss."""

    def __init__(self, builder: _Builder, region: LossRegion, number: int) -> None:
        self.builder, self.region = builder, region
        captured, chunks = builder.captured, builder.chunks
        num_chunks = int(chunks.chunk[chunks.loss == number].max()) + 1
        self.first = [c * region.num_rows // num_chunks for c in range(num_chunks + 1)]  # row of each chunk
        self.kernels = _kernels(captured, region)
        self.linear = self.kernels["linear"]
        _, self.target, _, self.reduction, self.ignored = self.kernels["loss"].args[:5]
        self.made: dict[Part, list[fx.Node]] = {}  # the kernels so far; of COUNT and ROWS their results

    def write(self, i: int, part: Part, chunk: int) -> tuple[fx.Node, ...]:
        """Return the nodes of op i of the chunked graph."""
        written = self.builder.chunks.graph.writes.of(i).tolist()
        nodes: tuple[fx.Node, ...] = getattr(self, f"_{part.name.lower()}")(chunk, written)
        self.made.setdefault(part, []).append(nodes[0])
        return nodes

    def _count(self, chunk: int, written: list[int]) -> tuple[fx.Node, ...]:
        dtype = self.kernels["loss"].meta["val"][0].dtype
        return (self._add(_count, [self.target, self.ignored, dtype], self._value(dtype), written),)

    def _rows(self, chunk: int, written: list[int]) -> tuple[fx.Node, ...]:
        dtype, num_rows = self.kernels["loss"].meta["val"][0].dtype, self.region.num_rows
        values = (self._value(dtype, num_rows), self._value(torch.int64, num_rows))
        scale = self.kernels["loss_grad"].args[0]
        args = [self.target, self.ignored, self.made[Part.COUNT][0], scale, self.reduction == _MEAN]
        kernel = self._add(_rows, args, values, written)
        items = [self._add(operator.getitem, [kernel, k], values[k], written[k : k + 1]) for k in range(2)]
        self.scales, self.classes = items
        return (kernel, *items)

    def _logits(self, chunk: int, written: list[int]) -> tuple[fx.Node, ...]:
        *bias, x, weight = self.linear.args
        return (self._add(_logits, [x, weight, *self._range(chunk), *bias], self._of_rows(chunk), written),)

    def _log_probs(self, chunk: int, written: list[int]) -> tuple[fx.Node, ...]:
        args = [self.made[Part.LOGITS][chunk], 1, False]
        return (self._add(_aten._log_softmax.default, args, self._of_rows(chunk), written),)

    def _loss(self, chunk: int, written: list[int]) -> tuple[fx.Node, ...]:
        args = [self.made[Part.LOG_PROBS][chunk], self.target, self.ignored, *self._range(chunk)]
        return (self._add(_loss, args, self._value(self.kernels["loss"].meta["val"][0].dtype), written),)

    def _probs(self, chunk: int, written: list[int]) -> tuple[fx.Node, ...]:
        args = [self.made[Part.LOG_PROBS][chunk]]
        return (self._add(_aten.exp.default, args, self._of_rows(chunk), written),)

    def _logits_grad(self, chunk: int, written: list[int]) -> tuple[fx.Node, ...]:
        args = [self.made[Part.PROBS][chunk], self.classes, *self._range(chunk)]
        return (self._add(_subtract_targets, args, None, written),)

    def _weight_grad(self, chunk: int, written: list[int]) -> tuple[fx.Node, ...]:
        kernel = self.kernels["weight_grad"]
        is_transposed = self.builder.captured.tensors[kernel.args[0]] == (self.region.input,)  # inputs x classes
        args = [self.linear.args[-2], self.made[Part.PROBS][chunk], self.scales, *self._range(chunk), is_transposed]
        return self._added_up(_weight_grad, args, Part.WEIGHT_GRAD, written)

    def _bias_grad(self, chunk: int, written: list[int]) -> tuple[fx.Node, ...]:
        shape = list(self.kernels["bias_grad"].meta["val"].shape)
        args = [self.made[Part.PROBS][chunk], self.scales, *self._range(chunk), shape]
        return self._added_up(_bias_grad, args, Part.BIAS_GRAD, written)

    def _input_grad(self, chunk: int, written: list[int]) -> tuple[fx.Node, ...]:
        weight = self.kernels["input_grad"].args[1]
        args = [self.made[Part.PROBS][chunk], weight, self.scales, *self._range(chunk), self.region.num_rows]
        return self._added_up(_input_grad, args, Part.INPUT_GRAD, written)

    def _mean(self, chunk: int, written: list[int]) -> tuple[fx.Node, ...]:
        kernel, *followers = self.builder.captured.nodes[self.region.loss]
        args = [self.made[Part.LOSS], self.made[Part.COUNT][0], self.reduction == _MEAN]
        new = self._add(_mean, args, kernel.meta["val"][0], written)
        kept = [n for n in followers if self.builder.captured.tensors[n] == tuple(written)]
        return self._in_place_of(kept[0], new, kept[1:])

    def _added_up(
        self, function: Callable[..., Any], args: list[Any], part: Part, written: list[int]
    ) -> tuple[fx.Node, ...]:
        """Return the first chunk's op, which makes the sum and stands for the original; or one that adds to it."""
        if part in self.made:
            return (self._add(function, [*args, self.made[part][0]], None, written),)
        kernel, *followers = self.builder.captured.nodes[getattr(self.region, part.name.lower())]
        new = self._add(function, [*args, None], kernel.meta["val"], written)
        return self._in_place_of(kernel, new, followers)

    def _in_place_of(self, old: fx.Node, new: fx.Node, followers: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
        self.builder.copy_of[old] = new
        return (new, *(self.builder.copy(n) for n in followers))

    def _range(self, chunk: int) -> tuple[int, int]:
        return self.first[chunk], self.first[chunk + 1]

    def _of_rows(self, chunk: int) -> FakeTensor:
        first, last = self._range(chunk)
        value = self.linear.meta["val"]
        return self._value(value.dtype, last - first, value.shape[1])

    def _value(self, dtype: torch.dtype, *shape: int) -> FakeTensor:
        like = self.linear.meta["val"]
        return FakeTensor(like.fake_mode, torch.empty(shape, dtype=dtype, device="meta"), like.device)

    def _add(self, function: Callable[..., Any], args: Sequence[Any], value: Any, written: list[int]) -> fx.Node:
        """Add a node; nodes of the captured step among the arguments are those it is copied to."""
        new, copy_of = self.builder.graph, self.builder.copy_of
        args = fx.node.map_arg(tuple(args), lambda n: n if n.graph is new else copy_of[n])
        return self.builder.add(function, args, value, written)


# Functions that the ops of a loss call. Rows are [first, last); scales is 0 for a row that is ignored.


def _count(target: torch.Tensor, ignored: int, dtype: torch.dtype) -> torch.Tensor:
    return (target != ignored).sum().to(dtype)


def _rows(
    target: torch.Tensor, ignored: int, count: torch.Tensor, scale: torch.Tensor, is_mean: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of each row's loss, and a class for each row."""
    counts = target != ignored
    return torch.where(counts, scale / count if is_mean else scale, 0), torch.where(counts, target, 0)


def _logits(
    x: torch.Tensor, weight: torch.Tensor, first: int, last: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return torch.mm(x[first:last], weight) if bias is None else torch.addmm(bias, x[first:last], weight)


def _loss(log_probs: torch.Tensor, target: torch.Tensor, ignored: int, first: int, last: int) -> torch.Tensor:
    result: torch.Tensor = _aten.nll_loss_forward(log_probs, target[first:last], None, _SUM, ignored)[0]
    return result


def _subtract_targets(probs: torch.Tensor, classes: torch.Tensor, first: int, last: int) -> None:
    one_less = probs.new_full((1, 1), -1).expand(last - first, 1)
    probs.scatter_add_(1, classes[first:last, None], one_less)


def _weight_grad(
    x: torch.Tensor,
    grads: torch.Tensor,
    scales: torch.Tensor,
    first: int,
    last: int,
    is_transposed: bool,
    total: torch.Tensor | None,
) -> torch.Tensor:
    scaled = x[first:last] * scales[first:last, None]
    left, right = (scaled.t(), grads) if is_transposed else (grads.t(), scaled)
    return torch.mm(left, right) if total is None else total.addmm_(left, right)


def _bias_grad(
    grads: torch.Tensor, scales: torch.Tensor, first: int, last: int, shape: list[int], total: torch.Tensor | None
) -> torch.Tensor:
    if total is None:
        return torch.mv(grads.t(), scales[first:last]).view(shape)
    total.view(-1).addmv_(grads.t(), scales[first:last])
    return total


def _input_grad(
    grads: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    first: int,
    last: int,
    num_rows: int,
    total: torch.Tensor | None,
) -> torch.Tensor:
    if total is None:
        total = grads.new_empty((num_rows, weight.shape[1]))
    rows = total[first:last]
    torch.mm(grads, weight, out=rows).mul_(scales[first:last, None])
    return total


def _mean(sums: list[torch.Tensor], count: torch.Tensor, is_mean: bool) -> torch.Tensor:
    total = torch.stack(sums).sum()
    return total / count if is_mean else total
