"""Operators that communicate: what they do, in which group, and what waits for them."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from olla.errors import CaptureError

_FUNCTIONAL = "_c10d_functional::"
_WAIT = _FUNCTIONAL + "wait_tensor"
_GATHER = _FUNCTIONAL + "all_gather_into_tensor"
_KINDS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "broadcast": "broadcast",
    "all_to_all_single": "all_to_all",
}


class Communication(NamedTuple):
    """What an operator sends: the columns of `olla.Graph` for it.

    Attributes:
        kind: of the collective, or "wait".
        group: name of the process group.
        ranks: how many are in it.
        message_bytes: the larger of what one rank gives and gets.
    """

    kind: str
    group: str
    ranks: int
    message_bytes: int


def name_of(node: fx.Node) -> str:
    """Return ``"aten::add_"`` for ``aten.add_.Tensor``; empty for what is no operator of torch."""
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""


def is_wait(node: fx.Node) -> bool:
    """Whether the operator waits for a collective."""
    return name_of(node) == _WAIT


def require_functional(function: Any) -> None:
    """Refuse an operator that communicates behind the back of a graph.

    Raises:
        CaptureError: names it.
    """
    if getattr(function, "namespace", "") == "c10d":
        name = function._schema.name.removeprefix("c10d::").rstrip("_")
        raise CaptureError(
            f"the step calls a collective of torch.distributed ({name}), whose end no graph can name: call the "
            "functional one, torch.distributed._functional_collectives.all_reduce and its like"
        )


def issues(node: fx.Node) -> bool:
    """Whether the operator begins a collective.

    Raises:
        CaptureError: single ranks take part in it.
    """
    name = name_of(node)
    if not name.startswith(_FUNCTIONAL) or name == _WAIT:
        return False
    if _kind(name) is None:
        if name.removeprefix(_FUNCTIONAL) == "_wrap_tensor_autograd":
            return False
        raise CaptureError(
            f"the step calls {name}, in which single ranks take part: only collectives of whole groups can be planned, "
            f"which are {', '.join(_KINDS)}"
        )
    return True


def gathers(node: fx.Node) -> bool:
    """Whether the operator begins an all-gather."""
    return _kind(name_of(node)) == "all_gather"


def communication(node: fx.Node, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> Communication:
    """Return what an operator that begins a collective sends, from the tensors it is given and those it has made."""
    group = group_name(node)
    size = [sum(t.numel() * t.element_size() for t in tensors) for tensors in (given, made)]
    return Communication(str(_kind(name_of(node))), group, group_size(group), max(size))


def group_name(node: fx.Node) -> str:
    """Return the name of the group that an operator communicates in."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    at = names.index("group_name")
    value = node.args[at] if at < len(node.args) else node.kwargs["group_name"]
    return str(getattr(value, "group_name", value))


def group_size(name: str) -> int:
    """Return how many ranks a group has, by its name.

    Raises:
        CaptureError: this process has no such group.
    """
    return int(resolved(name).size())


def resolved(name: str) -> Any:
    """Return the group of a name.

    Raises:
        CaptureError: this process has no such group.
    """
    try:
        from torch.distributed import distributed_c10d

        return vars(distributed_c10d)["_resolve_process_group"](name)
    except Exception as error:
        raise CaptureError(
            f"the step communicates in group {name!r}, which this process does not have: make the groups before the "
            "step, and keep them while it runs"
        ) from error


def issue_of(node: fx.Node) -> fx.Node | None:
    """Return the operator that began what a wait ends; None where what it waits for is no collective's result."""
    found = node.all_input_nodes[0] if node.all_input_nodes else None
    while found is not None and found.op == "call_function":
        if name_of(found).startswith(_FUNCTIONAL) and not is_wait(found):
            return found
        found = found.all_input_nodes[0] if found.all_input_nodes else None
    return None


def may_run_again(node: fx.Node, parameters: Container[fx.Node]) -> bool:
    """Whether an operator may run twice, for all that it communicates: if it gathers a parameter, or waits for that.

    All ranks recompute it at the same place, since they have the same plan, and from what they hold throughout.
    """
    issue = issue_of(node) if is_wait(node) else node
    if issue is None or not (issues(issue) or is_wait(node)):
        return issue is not None
    return name_of(issue) == _GATHER and all(_is_shard(source, parameters) for source in issue.all_input_nodes)


def _is_shard(node: fx.Node, parameters: Container[fx.Node]) -> bool:
    """Whether a node is a parameter, or a copy of one in another type."""
    if node.target is torch.ops.aten._to_copy.default:
        node = node.all_input_nodes[0]
    return node in parameters


def _kind(name: str) -> str | None:
    short = name.removeprefix(_FUNCTIONAL).removesuffix("_out").removesuffix("_").removesuffix("_coalesced")
    return _KINDS.get(short)
