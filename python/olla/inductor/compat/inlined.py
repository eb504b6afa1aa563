"""Inline called subgraphs (`invoke_subgraph`) into the graphs that call them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from olla.inductor.compat.compat import private

_TAG = "partitioner_tag"  # in the notes of a node: of which half it is


def with_calls_inlined(module: fx.GraphModule) -> fx.GraphModule:
    """Return a graph module with called regions inlined; the module itself if it calls none.

    A region that ``torch.compiler.nested_compile_region`` marks is compiled once and called often; what is planned for
    a whole step sees all of it instead, and torch compiles every call by itself. Other operators that hold graphs stay,
    and so do calls that belong neither to forward nor to backward, as torch's chunks of a loss.

    Args:
        module: it stays as it is.

    Complexity:
        O(nodes written out), of calls in calls too.
    """
    called = private("torch", "ops").higher_order.invoke_subgraph
    while calls := [n for n in module.graph.find_nodes(op="call_function", target=called) if _TAG in n.meta]:
        module = _with_inlined(module, calls)
        _draw_seeds_at_once(module.graph)
    return module


def _with_inlined(module: fx.GraphModule, calls: list[fx.Node]) -> fx.GraphModule:
    new = fx.GraphModule(module, fx.Graph())
    new.meta.update(module.meta)
    at: dict[fx.Node, Any] = {}
    chosen = set(calls)
    for node in module.graph.nodes:
        if node in chosen:
            at[node] = _written_out(module, node, new, at)
        elif node.target is operator.getitem and isinstance(at.get(node.args[0]), tuple):
            at[node] = at[node.args[0]][node.args[1]]
        else:
            at[node] = _copied(module, node, new, at)
    new.graph.eliminate_dead_code()
    new.recompile()
    return new


def _written_out(module: fx.GraphModule, call: fx.Node, new: fx.GraphModule, at: dict[fx.Node, Any]) -> tuple[Any, ...]:
    """Write what a call runs into a graph; return its results there."""
    holder, _, *arguments = call.args
    assert isinstance(holder, fx.Node)
    inner: Any = module.get_submodule(str(holder.target))
    within = dict(zip(inner.graph.find_nodes(op="placeholder"), fx.map_arg(arguments, at.__getitem__), strict=True))
    for node in inner.graph.nodes:
        if node.op not in ("placeholder", "output"):
            within[node] = copied = _copied(inner, node, new, within)
            copied.meta[_TAG] = call.meta[_TAG]
    results: Any = fx.map_arg(inner.graph.output_node().args[0], within.__getitem__)
    return tuple(results)


def _draw_seeds_at_once(graph: fx.Graph) -> None:
    """Draw the seeds of a device in one call, as without regions: equal calls would be merged into one."""
    by_device: dict[Any, list[fx.Node]] = {}
    drawing, looking_up = torch.ops.prims.inductor_seeds.default, torch.ops.prims.inductor_lookup_seed.default
    for node in graph.find_nodes(op="call_function", target=drawing):
        by_device.setdefault(node.args[1], []).append(node)
    for device, draws in by_device.items():
        with graph.inserting_before(draws[0]):
            seeds = graph.call_function(drawing, (0, device))
        seeds.meta.update(draws[0].meta)
        count = 0
        for draw in draws:
            for lookup in list(draw.users):
                assert lookup.target is looking_up, lookup.target
                lookup.args = (seeds, count + lookup.args[1])  # type: ignore[operator]
            count += int(draw.args[0])  # type: ignore[arg-type]
            graph.erase_node(draw)
        seeds.args = (count, device)
        seeds.meta["val"] = draws[0].meta["val"].new_empty(count)


def _copied(owner: fx.GraphModule, node: fx.Node, new: fx.GraphModule, at: dict[fx.Node, Any]) -> fx.Node:
    """Write a node into a graph, with the attribute that it reads."""
    copied = new.graph.node_copy(node, at.__getitem__)
    if node.op == "get_attr":
        value: Any = operator.attrgetter(str(node.target))(owner)
        copied.target = str(node.target).replace(".", "_")
        while getattr(new, str(copied.target), value) is not value:
            copied.target = f"{copied.target}_"
        if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
            new.register_buffer(str(copied.target), value)
        else:
            setattr(new, str(copied.target), value)
    return copied
