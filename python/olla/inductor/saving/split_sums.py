"""Keep Inductor from merging a sum of gradients with a matrix product, which delays the product until the sum.

It turns ``other + a @ b`` into one addmm. Where ``other`` comes much later, as for the gradient of an embedding tied to
the last layer, ``a`` and ``b`` - the gradient of all logits - wait for it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

import torch
from torch import fx

from olla.inductor.compat import compat
from olla.inductor.saving.kinds import is_view
from olla.inductor.saving.verify import root

_aten = torch.ops.aten


def keep_apart(graph: fx.Graph, forward: Container[fx.Node]) -> int:
    """Write sums in backward such that the products in them run in their own places, where that needs less memory.

    ``other + product`` becomes ``other - (-product)``, which is the same number and no pattern of Inductor's; it costs
    nothing in the kernel that adds.

    Args:
        graph: a joint graph whose nodes are in the order in which they shall run.
        forward: its nodes that run in forward.

    Returns:
        How many sums were rewritten.

    Complexity:
        O(nodes + edges).
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    users: dict[fx.Node, list[fx.Node]] = {}  # of what is in memory, through views
    for node in graph.nodes:
        if not is_view(node):
            for source in map(root, node.all_input_nodes):
                users.setdefault(source, []).append(node)
    num_rewritten = 0
    for node in list(graph.nodes):
        if node.target is not _aten.add.Tensor or node.kwargs.get("alpha", 1) != 1 or node in forward:
            continue
        for product, other in _products(node):
            later = position[root(other)]
            waiting = {root(n) for n in product.all_input_nodes if root(n).op != "placeholder"}
            freed = [n for n in waiting if all(user is product or position[user] < later for user in users[n])]
            if later > position[product] and sum(map(compat.size_of, freed)) > compat.size_of(product):
                new = _rewrite(graph, node, product, other)
                position[new], users[new] = position[node], users.get(node, [])
                num_rewritten += 1
                break
    return num_rewritten


def _products(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield (product, the other summand) where Inductor could merge them."""
    for product, other in (node.args, reversed(node.args)):
        both = isinstance(product, fx.Node) and isinstance(other, fx.Node)
        if both and product.target is _aten.mm.default and len(product.users) == 1:  # type: ignore[union-attr]
            yield product, other  # type: ignore[misc]


def _rewrite(graph: fx.Graph, node: fx.Node, product: fx.Node, other: fx.Node) -> fx.Node:
    with graph.inserting_before(node):
        negative = graph.call_function(_aten.neg.default, (product,))
        negative.meta.update(product.meta)
        new = graph.call_function(_aten.sub.Tensor, (other, negative))
        new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return new
