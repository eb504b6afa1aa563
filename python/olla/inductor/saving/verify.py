"""Checks that a rewritten joint graph computes the same as before, and that its two halves fit together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from typing import Any

from torch import fx

from olla.errors import PlanError
from olla.inductor.compat import compat
from olla.inductor.saving.kinds import is_random, is_view


def rewritten(old: fx.Graph, new: fx.Graph, origin: Mapping[fx.Node, fx.Node]) -> None:
    """Check that a rewritten graph computes the same: each node has the operator and arguments of its origin.

    Checked too: no node reads an input after it is mutated, and a node that is random or mutates an input runs once, or
    twice where a checkpoint recomputes it with the same random numbers.

    Args:
        old: the graph as it came.
        new: the rewritten graph; each recomputation is a node of its own.
        origin: of a new node, the old one it stands for.

    Raises:
        PlanError: rule "inductor_graph"; the node is named.

    Complexity:
        O(nodes + edges).
    """
    new.lint()  # nothing is used before it is there
    for node in new.nodes:
        before: Any = origin.get(node)
        if before is None:
            raise _error(f"{node.name} stands for nothing")
        if is_kept_input(node, before):
            if origin[node.args[0]] is not before:
                raise _error(f"{node.name} keeps another input than {before.name}")
            continue
        if node.op == "placeholder" and before.op == "placeholder":
            continue
        args: Any = fx.node.map_arg((node.args, node.kwargs), origin.__getitem__)
        if node.op == before.op == "output":
            if list(args[0][0]) != list(before.args[0]):
                raise _error("the results are not those of the joint graph")
            continue
        if node.op != before.op or node.target != before.target or args != (before.args, before.kwargs):
            raise _error(f"{node.name} does not compute what {before.name} does")
    runs = Counter(origin[node] for node in new.nodes if not is_kept_input(node, origin[node]))
    for node in old.nodes:
        once = node.op == "placeholder" or is_random(node) or compat.changes_inputs(node)
        if once and runs[node] != 1 and not (runs[node] == 2 and is_random(node) and compat.must_recompute(node)):
            raise _error(f"{node.name} runs {runs[node]} times, expected once")
    _unchanged(new)


def waiting(written: Mapping[fx.Node, Any], forward: Set[fx.Node]) -> None:
    """Check that offloaded tensors are copied out in forward and back in backward, which reads only the copies.

    Args:
        written: the nodes that copy a tensor, by the node that makes it; see `offload.Inserted`.
        forward: the nodes of forward.

    Raises:
        PlanError: rule "inductor_graph".
    """
    for node, (offload, host, reload, back) in written.items():
        before, after = node.meta["val"], back.meta["val"]
        chained = offload.args[0] is node and host.args[0] is offload and reload.args[0] is host
        placed = {offload, host} <= forward and forward.isdisjoint((reload, back))
        if not (chained and back.args[0] is reload and placed):
            raise _error(f"{node.name} is not copied to host memory in forward and back in backward")
        if (before.shape, before.stride(), before.dtype) != (after.shape, after.stride(), after.dtype):
            raise _error(f"{back.name} is not as {node.name} is")
        if any(user not in forward for user in node.users) or set(host.users) != {reload, back}:
            raise _error(f"backward reads {node.name} itself, not what is copied back")


def is_kept_input(node: fx.Node, before: fx.Node) -> bool:
    """Return whether a new node is a copy of an input that forward changes later."""
    return node.target is compat.clone and before.op == "placeholder"


def _unchanged(graph: fx.Graph) -> None:
    """Check that no node reads an input after it was mutated, except to mutate it again."""
    changed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "output":
            return  # a mutated input may be returned
        target = node.args[0] if compat.changes_inputs(node) and node.args else None
        for read in node.all_input_nodes:
            if read is not target and root(read) in changed:
                raise _error(f"{node.name} reads {root(read).name} behind what changes it")
        if isinstance(target, fx.Node):
            changed.add(root(target))


def root(node: fx.Node) -> fx.Node:
    """Return the node whose memory a chain of views looks at."""
    while is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def halves(forward: Any, backward: Any, joint: fx.Graph, num_forward: int) -> None:
    """Check that forward returns its results and what backward takes, and backward the rest of the results.

    Args:
        forward, backward: graph modules.
        joint: what they were made of.
        num_forward: results of the joint graph that are forward's.

    Raises:
        PlanError: rule "inductor_graph".

    Complexity:
        O(nodes + edges).
    """
    for half in (forward, backward):
        half.graph.lint()
    results: Any = joint.output_node().args[0]
    first, second = (half.graph.output_node().args[0] for half in (forward, backward))
    if not _alike(first[:num_forward], results[:num_forward]) or not _alike(second, results[num_forward:]):
        raise _error("the two graphs do not return what the joint graph returns")
    saved = {getattr(node, "name", repr(node)) for node in first[num_forward:]}
    taken = {node.name for node in backward.graph.find_nodes(op="placeholder") if not compat.is_tangent(node)}
    if saved != taken:
        raise _error(
            f"forward saves {sorted(saved - taken)} beside what backward takes, and not {sorted(taken - saved)}"
        )


def _alike(found: Any, expected: Any) -> bool:
    """Return whether results are of the same kinds, shapes and types, in order."""
    return len(found) == len(expected) and all(map(_same_kind, found, expected))


def _same_kind(a: Any, b: Any) -> bool:
    if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)):
        return bool(a == b)
    first, second = a.meta.get("val"), b.meta.get("val")
    if not (compat.is_tensor_node(a) and compat.is_tensor_node(b)):
        return type(first) is type(second)
    return bool(first.dtype == second.dtype and compat.hinted(first) == compat.hinted(second))  # type: ignore[union-attr]


def _error(reason: str) -> PlanError:
    return PlanError(f"the divided graph is not the one that was given: {reason}", rule="inductor_graph")
