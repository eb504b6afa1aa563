"""How operators treat the rows of a loss: one by one, or summed up; where its rows lie in a tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from olla.inductor.compat import codegen, compat

MARK = "olla_chunk"  # in the notes of a node: it is computed chunk by chunk
_aten, _prims = torch.ops.aten, torch.ops.prims
_SUMS = (_aten.sum.dim_IntList, _aten.sum.default)
_OVER_COLUMNS = (*_SUMS, _aten.amax.default, _aten.amin.default, _aten.logsumexp.default, _aten.mean.dim)
_SHAPED = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)
_FACTORIES = (_aten.full.default, _aten.zeros.default, _aten.ones.default)
_BY_INDEX = (_aten.gather.default, _aten.scatter.value, _aten.scatter.src)
_SQUEEZES = (_aten.squeeze.dim, _aten.squeeze.dims)
_VIEWS = (*_SHAPED, _aten.expand.default, _aten.permute.default, _aten.unsqueeze.default, *_SQUEEZES)
_LIKE = (
    _aten.alias.default,
    _aten.detach.default,
    _aten.clone.default,
    _aten._to_copy.default,
    _aten.full_like.default,
    _aten.zeros_like.default,
)
MATRIX_PRODUCTS = (_aten.mm.default, _aten.addmm.default)


@dataclass(frozen=True)
class Rows:
    """The dimensions of a tensor that together count rows: one, or several neighbours as of batch and place."""

    first: int
    count: int = 1

    @property
    def places(self) -> range:
        """These dimensions."""
        return range(self.first, self.first + self.count)

    def moved(self, dim: int) -> int:
        """Return where a dimension is once these are one."""
        return dim if dim <= self.first else max(self.first, dim - self.count + 1)

    def sizes(self, shape: tuple[int, ...], num_rows: Any) -> list[Any]:
        """Return a shape in which these dimensions are one of so many rows."""
        return [*shape[: self.first], num_rows, *shape[self.first + self.count :]]


@dataclass(frozen=True)
class Treated:
    """What one operator does with rows.

    Attributes:
        rows: of its result; None: it sums over all rows.
        reads: of every argument that has rows, by its place: where they are.
        args: with which it runs on so many rows; what stands for the number of rows is None.
    """

    rows: Rows | None
    reads: dict[fx.Node, Rows]
    args: tuple[Any, ...]

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
    """Return what a node does with the rows of its arguments; None where it is nothing that chunks of rows can do.

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
        return _product(node, known)
    if node.target in _OVER_COLUMNS:
        return _over_columns(node, known)
    if node.target in _FACTORIES:
        return Treated(result, {}, (result.sizes(shape, None), *node.args[1:])) if result else None
    if node.target in _VIEWS and node.target is not _aten.expand.default:
        return _looked_at(node, known, num_rows, result)
    if node.target in _BY_INDEX:
        return _by_index(node, known, num_rows, result)
    tags = getattr(node.target, "tags", ())
    alike = (_prims.convert_element_type.default, _aten.expand.default, *_LIKE)
    by_element = torch.Tag.pointwise in tags or node.target in alike
    if by_element and torch.Tag.nondeterministic_seeded not in tags and node.args:
        return _elementwise(node, known, num_rows, result)
    return None


def _aligned(node: fx.Node, rows: Rows, ndim: int) -> Rows:
    """Return where rows of an argument are in a result of so many dimensions, as broadcasting has it."""
    return Rows(rows.first + ndim - len(shape_of(node) or ()), rows.count)


def _elementwise(node: fx.Node, known: dict[fx.Node, Rows], num_rows: int, result: Rows | None) -> Treated | None:
    shape = shape_of(node) or ()
    found = {_aligned(n, known[n], len(shape)) for n in node.all_input_nodes if n in known} | ({result} - {None})
    if len(found) != 1:
        return None
    (rows,) = found
    reads = _broadcast(node.all_input_nodes, rows, len(shape), num_rows)  # type: ignore[arg-type]
    expands = node.target is _aten.expand.default
    args = (node.args[0], rows.sizes(shape, None)) if expands else node.args  # type: ignore[union-attr]
    return None if reads is None else Treated(rows, reads, args)


def _broadcast(nodes: list[fx.Node], rows: Rows, ndim: int, num_rows: int) -> dict[fx.Node, Rows] | None:
    """Return which arguments of an elementwise operator have rows, and where; None where one has some of them."""
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
        reads[node] = Rows(first, rows.count)
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
    dims = set(_dims(node.args[1], len(shape)) if len(node.args) > 1 else ()) or set(range(len(shape)))
    inside = dims.intersection(rows.places)
    if inside and (node.target not in _SUMS or len(inside) != rows.count):
        return None
    moved = sorted({rows.moved(d) for d in dims})
    args = node.args if node.target is _aten.sum.default else (source, moved, *node.args[2:])
    if inside:
        return Treated(None, {source: rows}, args)
    keep = len(node.args) > 2 and bool(node.args[2])
    before = 0 if keep else sum(d < rows.first for d in dims)
    return Treated(Rows(rows.first - before, rows.count), {source: rows}, args)


def _product(node: fx.Node, known: dict[fx.Node, Rows]) -> Treated | None:
    """Rows on the left stay rows; where they are what is summed over, the products of chunks are added."""
    operands: Any = node.args[-2:]
    left, right = operands
    a, b = known.get(left), known.get(right)
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
    """Columns are chosen row by row: everything has the same rows."""
    tensors = node.all_input_nodes
    found: set[Any] = {known[n] for n in tensors if n in known} | ({result} - {None})
    if len(found) != 1:
        return None
    (rows,) = found
    shapes = [shape_of(n) for n in tensors]
    if rows.count != 1 or any(s is None or s[rows.first] != num_rows for s in shapes):
        return None
    if node.args[1] % len(shapes[0] or (0,)) == rows.first:  # type: ignore[operator]
        return None
    return Treated(rows, dict.fromkeys(tensors, rows), node.args)


def _looked_at(node: fx.Node, known: dict[fx.Node, Rows], num_rows: int, result: Rows | None) -> Treated | None:
    """Views: where the rows are on one side tells where they are on the other."""
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
        there = Rows(inner[0], len(inner)) if inner else None
    if there is None or math.prod(before[there.first : there.first + there.count]) != num_rows:
        return None
    places = [i for i, d in enumerate(steps) if d in there.places]
    if [steps[p] for p in places] != list(there.places):
        return None
    if places[-1] - places[0] + 1 != there.count or (result is not None and Rows(places[0], there.count) != result):
        return None
    return Treated(Rows(places[0], there.count), {source: there}, _with_dimensions(node, there, len(before)))


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
    """Return where rows are once a tensor has another shape."""
    if rows is None:
        return None
    outside, first = math.prod(before[: rows.first]), 0
    while first < len(shape) and math.prod(shape[:first]) < outside:
        first += 1
    last = first
    while last < len(shape) and math.prod(shape[first:last]) < num_rows:
        last += 1
    fits = math.prod(shape[:first]) == outside and math.prod(shape[first:last]) == num_rows
    return Rows(first, last - first) if fits and last > first else None


def is_zero(node: Any) -> bool:
    """Whether a node makes nothing but zeros."""
    if not isinstance(node, fx.Node):
        return False
    if node.target is _aten.zeros.default:
        return True
    place = 1 if node.target is _aten.full.default else 0
    made = node.target in (_aten.full.default, _aten.scalar_tensor.default)
    return bool(made and len(node.args) > place and node.args[place] == 0)


def is_proportional(node: fx.Node, linear: set[fx.Node]) -> bool:
    """Whether a node's result is proportional to the number that these nodes are proportional to."""
    args = node.args
    if node.target in (_aten.mul.Tensor, _aten.mm.default):
        return sum(arg in linear for arg in args[:2] if isinstance(arg, fx.Node)) == 1
    if node.target is _aten.div.Tensor:
        return args[0] in linear and args[1] not in linear
    if node.target in (_aten.add.Tensor, _aten.sub.Tensor):
        return all(isinstance(arg, fx.Node) and (arg in linear or is_zero(arg)) for arg in args[:2])
    if node.target is _aten.where.self:
        return args[0] not in linear and all(arg in linear or is_zero(arg) for arg in args[1:])
    one = (_aten.neg.default, _prims.convert_element_type.default, _aten.clone.default, _aten.alias.default, *_SUMS)
    return node.target in (*one, *_VIEWS) and args[0] in linear


def bytes_of(node: fx.Node) -> int:
    """Return the bytes of a node's one tensor; 0 for everything else."""
    return int(compat.size_of(node)) if compat.is_tensor_node(node) else 0


def goes_on(node: fx.Node) -> bool:
    """Whether a node adds the product of a chunk to those of the chunks before, which nothing else reads."""
    if node.target is not _aten.addmm.default or not node.meta.get(MARK):
        return False
    before: Any = node.args[0]
    made = before.target in (*MATRIX_PRODUCTS, _aten.addmm_.default) and before.meta.get(MARK)
    return bool(made and len(before.users) == 1 and shape_of(before) == shape_of(node))


def add_in_place(graph: fx.Graph) -> None:
    """Have sums over chunks written over those of the chunks before, in a graph of forward as Inductor lowers it."""
    codegen.call_itself(_aten.addmm_.default)
    for node in graph.find_nodes(op="call_function", target=_aten.addmm.default):
        if goes_on(node):
            node.target = _aten.addmm_.default
