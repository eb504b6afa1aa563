"""Analysis of a loss by rows: which operators act row by row, which sum over rows, and which dims are rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from olla.inductor.compat import compat
from olla.inductor.saving.kinds import is_random

MARK = "olla_chunk"  # in `meta` of a node: it is computed chunk by chunk, in forward or in backward
FORWARD, BACKWARD = "forward", "backward"
_aten, _prims = torch.ops.aten, torch.ops.prims
SUMS = (_aten.sum.dim_IntList, _aten.sum.default)
_OVER_COLUMNS = (*SUMS, *(getattr(_aten, name).default for name in ("amax", "amin", "logsumexp", "argmax", "argmin")))
_OVER_COLUMNS += (_aten.mean.dim, _aten.any.dim, _aten.any.dims, _aten.prod.dim_int)
_SHAPED = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)
_FACTORIES = (_aten.full.default, _aten.zeros.default, _aten.ones.default)
BY_INDEX = (_aten.gather.default, _aten.scatter.value, _aten.scatter.src, _aten.scatter_add.default)
_PADDED = (_aten.slice_scatter.default, _aten.constant_pad_nd.default)
_SQUEEZES = (_aten.squeeze.dim, _aten.squeeze.dims)
VIEWS = (*_SHAPED, _aten.expand.default, _aten.permute.default, _aten.unsqueeze.default, *_SQUEEZES)
_LIKE = (
    _aten.alias.default,
    _aten.detach.default,
    _aten.clone.default,
    _aten._to_copy.default,
    _aten.full_like.default,
    _aten.zeros_like.default,
)
_SLICE: Any = (0, None, None, 1)  # which dimension, from where, to where, in what steps, where that is left out
MATRIX_PRODUCTS = (_aten.mm.default, _aten.addmm.default)


@dataclass(frozen=True)
class Rows:
    """The dimensions of a tensor that together index rows: one, or several adjacent ones as (batch, position).

    Attributes:
        first, count: which dimensions.
        window: if rows were sliced off, (size before, start, end) of each of these dimensions; None: all rows are
            there. Chunks compute the sliced-off rows too, but their results are not used.
    """

    first: int
    count: int = 1
    window: tuple[tuple[int, int, int], ...] | None = None

    @property
    def places(self) -> range:
        """These dimensions."""
        return range(self.first, self.first + self.count)

    def moved(self, dim: int) -> int:
        """Return the index of a dimension after the row dimensions are flattened into one."""
        return dim if dim <= self.first else max(self.first, dim - self.count + 1)

    def number(self, num_rows: int) -> int:
        """Return how many of `num_rows` rows the window leaves."""
        return num_rows if self.window is None else math.prod(end - start for _, start, end in self.window)

    def cut(self, sizes: tuple[int, ...], dim: int, start: int, end: int) -> Rows | None:
        """Return the rows after [start, end) of one row dimension, narrower or wider; None if that is unknown.

        Args:
            sizes: of these dimensions.
            dim: among them.
            start, end: counted from the first that is there.
        """
        window = list(self.window or ((size, 0, size) for size in sizes))
        if len(window) != self.count:
            return None
        size, before, _ = window[dim]
        window[dim] = size, before + start, before + end
        if start > end or before + start < 0 or before + end > size:
            return None
        whole = all(w == (w[0], 0, w[0]) for w in window)
        return replace(self, window=None if whole else tuple(window))

    def sizes(self, shape: tuple[int, ...], num_rows: Any) -> list[Any]:
        """Return the shape with the row dimensions flattened into one of `num_rows`."""
        return [*shape[: self.first], num_rows, *shape[self.first + self.count :]]


@dataclass(frozen=True)
class Treated:
    """What one operator does with rows.

    Attributes:
        rows: of its result; None: it sums over all rows.
        reads: argument that has rows -> where they are.
        args: its arguments on a chunk; None stands for the number of rows.
        target: what runs in its place; None: itself.
        masked: rows sliced off its argument are zeros in its result.
    """

    rows: Rows | None
    reads: dict[fx.Node, Rows]
    args: tuple[Any, ...]
    target: Any = None
    masked: bool = False

    def on(self, num_rows: int) -> tuple[Any, ...]:
        """Return the arguments with which it runs on so many rows."""
        return tuple([num_rows if s is None else s for s in a] if isinstance(a, list) else a for a in self.args)


def shape_of(node: Any) -> tuple[int, ...] | None:
    """Return the sizes of a node's one tensor; None for what has none, or symbolic ones."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
        return None
    return tuple(value.shape)


def treated(node: fx.Node, known: dict[fx.Node, Rows], num_rows: int, result: Rows | None = None) -> Treated | None:
    """Return what a node does with the rows of its arguments; None if it cannot run on chunks of rows.

    Args:
        node: calls an operator.
        known: where rows are, of the arguments that are computed in chunks.
        num_rows: of the whole.
        result: where rows are to be in the result; None: where the arguments put them.
    """
    shape = shape_of(node)
    if shape is None or node.op != "call_function":
        return None
    if node.target in MATRIX_PRODUCTS:
        return _product(node, known, result)
    if node.target in _OVER_COLUMNS:
        return _over_columns(node, known)
    if node.target in _FACTORIES:
        return Treated(result, {}, (result.sizes(shape, None), *node.args[1:])) if result else None
    if node.target in VIEWS and node.target is not _aten.expand.default:
        return _looked_at(node, known, num_rows, result)
    if node.target in BY_INDEX:
        return _by_index(node, known, num_rows, result)
    if node.target is _aten.slice.Tensor:
        return _sliced(node, known, result)
    if node.target is _aten.select.int:
        return _selected(node, known)
    if node.target in _PADDED:
        return _padded(node, known)
    tags = getattr(node.target, "tags", ())
    alike = (_prims.convert_element_type.default, _aten.expand.default, *_LIKE)
    by_element = torch.Tag.pointwise in tags or node.target in alike
    if by_element and not is_random(node) and node.args:
        return _elementwise(node, known, num_rows, result)
    return None


def _aligned(node: fx.Node, rows: Rows, ndim: int) -> Rows:
    """Return where rows of an argument are in a result of so many dimensions, as broadcasting has it."""
    return replace(rows, first=rows.first + ndim - len(shape_of(node) or ()))


def _elementwise(node: fx.Node, known: dict[fx.Node, Rows], num_rows: int, result: Rows | None) -> Treated | None:
    shape = shape_of(node) or ()
    found = {_aligned(n, known[n], len(shape)) for n in node.all_input_nodes if n in known} | ({result} - {None})
    if len(found) != 1:
        return None
    (rows,) = found
    reads = _broadcast(node.all_input_nodes, rows, len(shape), rows.number(num_rows))  # type: ignore[union-attr, arg-type]
    expands = node.target is _aten.expand.default
    args = (node.args[0], rows.sizes(shape, None)) if expands else node.args  # type: ignore[union-attr]
    return None if reads is None else Treated(rows, reads, args)


def _broadcast(nodes: list[fx.Node], rows: Rows, ndim: int, num_rows: int) -> dict[fx.Node, Rows] | None:
    """Return which arguments of an elementwise operator have rows, and where; None if one has only part of them."""
    reads = {}
    for node in nodes:
        shape = shape_of(node)
        if shape is None:
            return None
        first = rows.first - (ndim - len(shape))
        here = shape[max(first, 0) : max(first + rows.count, 0)]
        if math.prod(here) == 1:
            if first >= 0 and rows.count > 1:
                return None  # its dimensions of one would have to become one
            continue
        if first < 0 or math.prod(here) != num_rows:
            return None
        reads[node] = replace(rows, first=first)
    return reads


def _dims(given: Any, ndim: int) -> list[int]:
    """Return one dimension or several, as an operator takes them, counted from the first."""
    return [d % ndim for d in ([given] if isinstance(given, int) else given)]


def _over_columns(node: fx.Node, known: dict[fx.Node, Rows]) -> Treated | None:
    source: Any = node.args[0]
    shape = shape_of(source)
    if shape is None or source not in known:
        return None
    rows = known[source]
    given: Any = node.args[1] if len(node.args) > 1 else None
    dims = set(() if given is None else _dims(given, len(shape))) or set(range(len(shape)))
    inside = dims.intersection(rows.places)
    if inside and (node.target not in SUMS or len(inside) != rows.count):
        return None
    moved = sorted({rows.moved(d) for d in dims})
    args = node.args if given is None else (source, moved[0] if isinstance(given, int) else moved, *node.args[2:])
    if inside:
        return Treated(None, {source: rows}, args)
    keep = len(node.args) > 2 and bool(node.args[2])
    before = 0 if keep else sum(d < rows.first for d in dims)
    return Treated(replace(rows, first=rows.first - before), {source: rows}, args)


def _product(node: fx.Node, known: dict[fx.Node, Rows], result: Rows | None) -> Treated | None:
    """Return how a matrix product treats rows: outer ones stay rows, contracted ones are summed over chunks."""
    operands: Any = node.args[-2:]
    left, right = operands
    a, b = known.get(left) or (Rows(0) if result == Rows(0) else None), known.get(right)
    if node.target is _aten.addmm.default:
        bias = shape_of(node.args[0])
        if bias is None or (len(bias) > 1 and bias[0] != 1) or a != Rows(0) or b is not None:
            return None
    if a == Rows(0) and b is None:
        return Treated(Rows(0), {left: Rows(0)}, node.args)
    if b == Rows(1) and a is None:
        return Treated(Rows(1), {right: Rows(1)}, node.args)
    if a in (None, Rows(1)) and b in (None, Rows(0)) and left is not right:
        return Treated(None, {left: Rows(1), right: Rows(0)}, node.args)
    return None


def _by_index(node: fx.Node, known: dict[fx.Node, Rows], num_rows: int, result: Rows | None) -> Treated | None:
    """Return how indexing along columns treats rows: all its tensors have the same ones."""
    tensors = node.all_input_nodes
    found: set[Any] = {known[n] for n in tensors if n in known} | ({result} - {None})
    if len(found) != 1:
        return None
    (rows,) = found
    shapes = [shape_of(n) for n in tensors]
    places = slice(rows.first, rows.first + rows.count)
    if any(s is None or math.prod(s[places]) != rows.number(num_rows) for s in shapes):
        return None
    dim = node.args[1] % len(shapes[0] or (0,))  # type: ignore[operator]
    if dim in rows.places:
        return None
    return Treated(rows, dict.fromkeys(tensors, rows), (node.args[0], rows.moved(dim), *node.args[2:]))


def _looked_at(node: fx.Node, known: dict[fx.Node, Rows], num_rows: int, result: Rows | None) -> Treated | None:
    """Return how a view treats rows, from where they are in its input or in its result."""
    source: Any = node.args[0]
    shape, before = shape_of(node), shape_of(source)
    if shape is None or before is None:
        return None
    if node.target in _SHAPED:
        there = known.get(source) or _same_rows(shape, before, result, num_rows)
        here = _same_rows(before, shape, there, num_rows)
        if there is None or here is None or (result is not None and here != result):
            return None
        return Treated(here, {source: there}, (source, here.sizes(shape, None)))
    steps = _dimensions(node, len(before))  # of every dimension of the result, the source's
    there = known.get(source)
    if there is None and result is not None:
        inner = [d for d in steps[result.first : result.first + result.count] if d is not None]
        there = replace(result, first=inner[0], count=len(inner)) if inner else None
    if there is None or math.prod(before[there.first : there.first + there.count]) != there.number(num_rows):
        return None
    places = [i for i, d in enumerate(steps) if d in there.places]
    if [steps[p] for p in places] != list(there.places):
        return None
    here = replace(there, first=places[0])
    if places[-1] - places[0] + 1 != there.count or (result is not None and here != result):
        return None
    return Treated(here, {source: there}, _with_dimensions(node, there, len(before)))


def _dimensions(node: fx.Node, ndim: int) -> list[int | None]:
    given: Any = node.args[1]
    if node.target is _aten.unsqueeze.default:
        place = given % (ndim + 1)
        return [*range(place), None, *range(place, ndim)]
    dims = _dims(given, ndim)
    if node.target is _aten.permute.default:
        return [*dims]
    before = shape_of(node.args[0]) or ()
    return [d for d in range(ndim) if d not in dims or before[d] != 1]


def _with_dimensions(node: fx.Node, rows: Rows, ndim: int) -> tuple[Any, ...]:
    """Return arguments for a source in which the rows are one dimension."""
    if rows.count == 1:
        return node.args
    given: Any = node.args[1]
    if node.target is _aten.unsqueeze.default:
        return (node.args[0], rows.moved(given % (ndim + 1)))
    dims = _dims(given, ndim)
    if node.target is _aten.permute.default:
        dims = [d for d in dims if d not in rows.places[1:]]
    return (node.args[0], [rows.moved(d) for d in dims])


def _same_rows(before: tuple[int, ...], shape: tuple[int, ...], rows: Rows | None, num_rows: int) -> Rows | None:
    """Return where rows are after a reshape."""
    if rows is None:
        return None
    num_rows = rows.number(num_rows)
    outside, first = math.prod(before[: rows.first]), 0
    while first < len(shape) and math.prod(shape[:first]) < outside:
        first += 1
    last = first
    while last < len(shape) and math.prod(shape[first:last]) < num_rows:
        last += 1
    fits = math.prod(shape[:first]) == outside and math.prod(shape[first:last]) == num_rows
    return replace(rows, first=first, count=last - first) if fits and last > first else None


def _sliced(node: fx.Node, known: dict[fx.Node, Rows], result: Rows | None) -> Treated | None:
    """Return how a slice treats rows: along rows it only narrows the window, and chunks compute all rows."""
    given: Any = (*node.args, *_SLICE[len(node.args) - 1 :])
    source, dim, start, end, step = given
    shape, after, rows = shape_of(source), shape_of(node), known.get(source, result)
    if shape is None or after is None or rows is None or step != 1:
        return None
    dim %= len(shape)
    start, end, _ = slice(start, end).indices(shape[dim])
    if dim not in rows.places:
        return Treated(rows, {source: rows}, (source, rows.moved(dim), start, end))
    inside = slice(rows.first, rows.first + rows.count)
    beyond = shape[dim] - start
    there = rows if source in known else rows.cut(after[inside], dim - rows.first, -start, beyond)
    here = rows.cut(shape[inside], dim - rows.first, start, end) if source in known else rows
    return Treated(here, {source: there}, (source,), _aten.alias.default) if there and here else None


def _selected(node: fx.Node, known: dict[fx.Node, Rows]) -> Treated | None:
    given: Any = node.args
    source, dim, place = given
    shape, rows = shape_of(source), known.get(source)
    if shape is None or rows is None or dim % len(shape) in rows.places:
        return None
    dim %= len(shape)
    return Treated(
        replace(rows, first=rows.first - (dim < rows.first)), {source: rows}, (source, rows.moved(dim), place)
    )


def _padded(node: fx.Node, known: dict[fx.Node, Rows]) -> Treated | None:
    """Return how zero padding, as in the gradient of a slice, treats rows: it pads columns or widens the window."""
    given: Any = node.args
    scatters = node.target is _aten.slice_scatter.default
    source = given[1 if scatters else 0]
    shape, before, rows = shape_of(node), shape_of(source), known.get(source)
    if shape is None or before is None or rows is None:
        return None
    around = [(0, 0)] * len(shape)
    if scatters:
        cut: Any = (*given[2:], *_SLICE[len(given) - 2 :])
        at, step = cut[0], cut[3]
        start, end, _ = slice(cut[1], cut[2]).indices(shape[at])
        around[at] = start, shape[at] - end
        if step != 1 or not is_zero(given[0]):
            return None
    else:
        for i in range(0, len(given[1]), 2):
            around[len(shape) - 1 - i // 2] = given[1][i], given[1][i + 1]
        if any(given[2:]):
            return None
    here: Rows | None = rows
    for place, dim in enumerate(rows.places):
        low, high = around[dim]
        here = here and here.cut(before[rows.first : rows.first + rows.count], place, -low, before[dim] + high)
    if here is None:
        return None
    columns = [pad for d, pad in enumerate(around) if d not in rows.places]
    columns.insert(rows.first, (0, 0))
    pads = [n for pad in reversed(columns) for n in pad]
    if any(pads):
        return Treated(here, {source: rows}, (source, pads), _aten.constant_pad_nd.default, masked=here != rows)
    return Treated(here, {source: rows}, (source,), _aten.alias.default, masked=here != rows)


def is_zero(node: Any) -> bool:
    """Whether a node makes nothing but zeros."""
    if not isinstance(node, fx.Node):
        return False
    if node.target is _aten.zeros.default:
        return True
    place = 1 if node.target is _aten.full.default else 0
    made = node.target in (_aten.full.default, _aten.scalar_tensor.default)
    return bool(made and len(node.args) > place and node.args[place] == 0)


def bytes_of(node: fx.Node) -> int:
    """Return the bytes of a node's one tensor; 0 for everything else."""
    return int(compat.size_of(node)) if compat.is_tensor_node(node) else 0
