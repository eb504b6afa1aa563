"""Bit-identical variants of a captured operator: in place over an argument, or recomputed from what it saved."""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from olla.graph import Rerun, Rules, operators
from olla.pytorch.capture import Captured
from olla.pytorch.capture.costs import results_of
from olla.pytorch.capture.generator import Source, can_rewind

_STATISTICS = ("running_mean", "running_var")


class Overwriting(NamedTuple):
    """An operator that writes its result into memory it is given.

    Attributes:
        target: the operator.
        keyword: of the argument that takes that memory; empty: it is the first argument, which is read too.
    """

    target: torch._ops.OpOverload
    keyword: str


@functools.lru_cache(maxsize=4096)
def overwriting(target: Any, device: str) -> Overwriting | None:
    """Return the variant that runs an operator in place over one of its arguments, or None.

    Variants that torch generates allocate and copy: only those with a kernel of their own count.
    """
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.name.startswith("aten::"):
        return None
    wanted = _arguments(target)
    for candidate in _overloads(target._overloadpacket):
        results = [a.name for a in candidate._schema.arguments if a.is_out]
        if len(results) == 1 and _arguments(candidate) == wanted and _has_kernel(candidate, device.upper()):
            return Overwriting(candidate, results[0])
    for candidate in _overloads(getattr(torch.ops.aten, f"{target._schema.name.removeprefix('aten::')}_", None)):
        first = candidate._schema.arguments[0].alias_info
        keys = (device.upper(), "CompositeExplicitAutograd")
        if _arguments(candidate) == wanted and first is not None and any(_has_kernel(candidate, k) for k in keys):
            return Overwriting(candidate, "")
    return None


def _overloads(packet: Any) -> list[torch._ops.OpOverload]:
    return [getattr(packet, name) for name in packet.overloads()] if packet is not None else []


def _arguments(target: torch._ops.OpOverload) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in target._schema.arguments if not a.is_out]


def _has_kernel(target: torch._ops.OpOverload, key: str) -> bool:
    name = target.name()  # type: ignore[no-untyped-call]
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def restrict_rules(captured: Captured, device: str, rules: Rules, replays: bool = True) -> Rules:
    """Return the rules of a captured step without what its operators have no variant for.

    An operator that changes a tensor in place in the program does so in every plan: what else lies in that tensor
    would have to move with it. Numbers are drawn again only where the generator's state may be set: `replays`.
    """
    rerun, in_place = rules.rerun.copy(), rules.in_place.copy()
    communicates = captured.graph.communicates
    for v, nodes in enumerate(captured.nodes):
        if rerun[v] == Rerun.REPLAY and not communicates[v]:
            rerun[v] = _draws_again(captured.module, nodes[0], replays)
        if rerun[v] == Rerun.FIRST_RESULT and not _has_rerun(nodes[0]):
            rerun[v] = Rerun.NEVER
        in_place[v] = in_place[v] and _may_overwrite(captured, v, device)
    return rules._replace(rerun=rerun, in_place=in_place)


def drawn_from(module: fx.GraphModule, kernel: fx.Node) -> Source:
    """Return the generator a kernel draws from: the user's own, or the device whose default one it is."""
    for value in (*kernel.args, *kernel.kwargs.values()):
        if isinstance(value, fx.Node) and value.op == "get_attr":  # torch names what is no tensor, from 2.13 on
            value = operator.attrgetter(str(value.target))(module)
        if isinstance(value, torch.Generator):
            return value
    return str(results_of(kernel)[0].device)


def _draws_again(module: fx.GraphModule, kernel: fx.Node, replays: bool) -> Rerun:
    """Return how a kernel that draws numbers may be recomputed: with those it drew if its generator can be rewound."""
    if is_dropout(kernel) and mask_of(kernel) is None:
        return Rerun.NEVER
    if replays and can_rewind(drawn_from(module, kernel)):
        return Rerun.REPLAY
    return Rerun.FIRST_RESULT if is_dropout(kernel) else Rerun.NEVER


def _has_rerun(kernel: fx.Node) -> bool:
    if is_dropout(kernel):
        return mask_of(kernel) is not None
    assert isinstance(kernel.target, torch._ops.OpOverload)
    types = {a.name: str(a.type) for a in kernel.target._schema.arguments}
    return all(types.get(name, "").startswith("Optional") for name in _STATISTICS)


def _may_overwrite(captured: Captured, v: int, device: str) -> bool:
    """Whether op v may write over each argument of its result's size that a plan could choose."""
    graph, kernel = captured.graph, captured.nodes[v][0]
    result, variant = kernel.meta.get("val"), overwriting(kernel.target, device)
    written = graph.writes.of(v)
    if variant is None or not isinstance(result, torch.Tensor) or len(written) != 1 or len(graph.mutates.of(v)):
        return False
    num_bytes = graph.tensor_bytes[written[0]]
    if num_bytes != result.numel() * result.element_size() or result.is_complex():
        return False
    temporary = [t for t in graph.reads.of(v).tolist() if graph.tensor_kinds[t] == "temporary"]
    candidates = [t for t in temporary if graph.tensor_bytes[t] == num_bytes]
    for t in candidates:
        for node in kernel.all_input_nodes:
            if t not in captured.tensors[node]:
                continue
            alone = captured.tensors[node] == (t,) and (variant.keyword != "" or node is kernel.args[0])
            if not alone or _geometry(node.meta.get("val")) != _geometry(result):
                return False
    return len(candidates) > 0


def _geometry(value: Any) -> Any:
    """Return where the elements of a tensor are in its storage; unlike any other for what is no tensor."""
    if not isinstance(value, torch.Tensor):
        return object()
    return value.dtype, value.device, tuple(value.shape), tuple(value.stride()), value.storage_offset()


def is_dropout(kernel: fx.Node) -> bool:
    """Whether the node's kernel is a dropout that keeps its mask."""
    return operators.operator(str(kernel.target)) in operators.DROPOUTS


def mask_of(kernel: fx.Node) -> fx.Node | None:
    """Return the node that takes the mask of a dropout, or None where the step never does."""
    return next((n for n in kernel.users if n.target is operator.getitem and n.args == (kernel, 1)), None)


def dropout_again(x: torch.Tensor, mask: torch.Tensor, probability: float) -> tuple[torch.Tensor]:
    """Return what dropout made of x, from the mask it drew; in the steps of torch's own kernel.

    Args:
        x: what it read.
        mask: bool, in x's shape; its second result.
        probability: of an element to become 0.

    Example:
        >>> x = torch.randn(1000)
        >>> result, mask = torch.native_dropout(x, 0.3, True)
        >>> torch.equal(dropout_again(x, mask, 0.3)[0], result)
        True
    """
    kept = 1.0 - probability
    scale = 1.0 / kept if kept else 0.0
    if x.device.type == "cpu":
        return (x.mul(mask).mul_(scale),)
    return (torch.ops.aten.native_dropout_backward.default(x, mask, scale),)


def norm_again(node: fx.Node) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments that recompute a batch norm without another update of its running statistics.

    In training it recomputes the statistics of the batch rather than reading the saved ones: no operator of torch
    takes those in the form in which they are saved. The bits are the same.
    """
    assert isinstance(node.target, torch._ops.OpOverload)
    arguments = node.target._schema.arguments
    args = [None if arguments[i].name in _STATISTICS else a for i, a in enumerate(node.args)]
    return args, {k: None if k in _STATISTICS else a for k, a in node.kwargs.items()}
