"""The user's checkpointed regions: operators to recompute in backward are copied within the joint graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from olla.inductor.compat import compat
from olla.inductor.saving.kinds import is_view
from olla.pytorch.capture.costs import is_random, results_of
from olla.pytorch.capture.generator import Source, set_state, state_of


def drawn_again(state: torch.Tensor, source: Source, target: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator with the numbers that it drew when its generator was in a state.

    Args:
        state: of the generator, before it drew them.
        source: the generator.
        target, args, kwargs: the operator and what it is given.

    Example:
        >>> state, x = torch.get_rng_state(), torch.ones(8)
        >>> first = torch.bernoulli(x, 0.5)
        >>> bool((drawn_again(state, "cpu", torch.bernoulli, (x, 0.5), {}) == first).all())
        True
    """
    present = state_of(source)
    set_state(state, source)
    try:
        return target(*args, **kwargs)
    finally:
        set_state(present, source)


def write_again(graph: fx.Graph, num_forward: int) -> int:
    """Make backward read values of checkpointed regions from copies of their operators, put before their first use.

    Random operators draw the same numbers again, from the state that the generator had.

    Args:
        graph: the joint graph; it is changed.
        num_forward: results that are forward's.

    Returns:
        The number of operators that are recomputed.

    Complexity: O(nodes + edges).
    """
    output: Any = graph.output_node()
    results = {node for node in output.args[0][:num_forward] if isinstance(node, fx.Node)}
    forward = set(results)
    position = {}
    for i, node in reversed(list(enumerate(graph.nodes))):
        position[node] = i
        if node in forward:
            forward.update(node.all_input_nodes)
    for node in graph.nodes:  # an element of a tuple is there with it
        if compat.is_getitem(node) and node.args[0] in forward:
            forward.add(node)
    first = _first_uses(graph, position, forward, results)
    nodes = list(graph.nodes)
    copies: dict[fx.Node, fx.Node] = {}
    for node in [n for n in nodes if n in first]:
        with graph.inserting_before(nodes[first[node]]):
            copies[node] = _copied(graph, node, copies)
    for node in nodes:
        if node not in forward and node not in first:
            node.args = fx.node.map_arg(node.args, lambda n: copies.get(n, n))
            node.kwargs = fx.node.map_arg(node.kwargs, lambda n: copies.get(n, n))
    renew_views(graph, copies.values())
    return sum(isinstance(node.target, torch._ops.OpOverload) for node in copies)


def renew_views(graph: fx.Graph, renewed: Iterable[fx.Node]) -> None:
    """Compute anew the fake values of all views and tuple elements of nodes that have new ones."""
    new = set(renewed)
    for node in graph.nodes:
        looks = node not in new and (is_view(node) or compat.is_getitem(node))
        if looks and node.args[0] in new:
            _note_result(node, node.target, node.args, node.kwargs, node)
            new.add(node)


def _first_uses(
    graph: fx.Graph, position: dict[fx.Node, int], forward: set[fx.Node], results: set[fx.Node]
) -> dict[fx.Node, int]:
    """Return, for every node to recompute, the position of its first use in backward."""
    first: dict[fx.Node, int] = {}
    for node in reversed(graph.nodes):
        if node not in forward and node.op != "output":
            at = position[node]
        elif node in first:
            at = first[node]
        else:
            continue
        for source in node.all_input_nodes:
            if compat.must_recompute(source) and source in forward and source not in results:
                first[source] = min(at, first.get(source, at))
    return first


def _copied(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """Append a copy of a node, on copies of its arguments where there are any."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: copies.get(n, n))
    if is_random(node):
        source = str(results_of(node)[0].device)
        with graph.inserting_before(node):
            state = graph.call_function(torch.ops.olla.rng_state.default, (source, state_of(source).numel()))
        _note_result(state, state.target, state.args, state.kwargs, node)
        new = graph.call_function(drawn_again, (state, source, node.target, args, dict(kwargs)))  # type: ignore[arg-type]
    else:
        new = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
    new.meta |= {name: note for name, note in node.meta.items() if name != "recompute"}
    _note_result(new, node.target, args, kwargs, node)
    return new


def _note_result(new: fx.Node, target: Any, args: Any, kwargs: Any, node: fx.Node) -> None:
    """Note a result of a new node in memory of its own, or in that of its argument where it is a view."""
    known = next(v for n in (node, *node.all_input_nodes) for v in results_of(n))
    args, kwargs = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
    with known.fake_mode:  # type: ignore[attr-defined]
        new.meta["val"] = target(*args, **kwargs)
