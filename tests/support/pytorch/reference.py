"""Run a captured step op by op, in any order its graph allows, on torch's own allocator: the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from olla.pytorch.capture import Captured
from olla.pytorch.memory.requests import last_steps


def run(
    captured: Captured,
    values: Sequence[torch.Tensor],
    order: Sequence[int] | None = None,
    observe: Callable[[int, dict[fx.Node, Any]], None] | None = None,
) -> list[torch.Tensor]:
    """Run one step: parameters, buffers and optimizer state change in place, tensors are freed after their last use.

    Args:
        captured: the step.
        values: tensor i is for ``captured.inputs[i]``; see olla.pytorch.capture.inputs.gather.
        order: int[num_ops], ops in the order to run them; program order if not given.
        observe: called as observe(step, values of all nodes alive) after each op, before anything is freed.

    Returns:
        Tensor i is ``captured.outputs[i]``.

    Example:
        >>> import torch, olla
        >>> from olla.pytorch.capture.inputs import gather
        >>> model, batch = torch.nn.Linear(2, 1), torch.ones(3, 2)
        >>> captured = olla.capture(model, batch)
        >>> [output] = run(captured, gather(captured.inputs, model, batch, None))
        >>> bool((output == model(batch)).all())
        True
    """
    steps = range(len(captured.nodes)) if order is None else [int(op) for op in order]
    values_of: dict[fx.Node, Any] = {}
    arguments = iter(values)
    for node in captured.module.graph.nodes:
        if node.op == "placeholder":
            values_of[node] = next(arguments)
        elif node.op == "get_attr":
            values_of[node] = attrgetter(str(node.target))(captured.module)
    output: Any = captured.module.graph.output_node()
    last = last_steps(captured.graph, steps).tolist()
    freed: list[list[fx.Node]] = [[] for _ in steps]  # after each step: the nodes whose value is not needed any more
    for node, tensors in captured.tensors.items():
        if ends := [last[t] for t in tensors if last[t] >= 0]:
            freed[min(ends)].append(node)
    with torch.no_grad():
        _call(captured.prologue, values_of)
        for step, op in enumerate(steps):
            _call(captured.nodes[op], values_of)
            if observe is not None:
                observe(step, values_of)
            for node in freed[step]:
                values_of.pop(node, None)
        results: list[torch.Tensor] = fx.node.map_arg(output.args[0], values_of.__getitem__)
    return list(results)


def _call(nodes: Sequence[fx.Node], values_of: dict[fx.Node, Any]) -> None:
    for node in nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values_of.__getitem__)
        assert callable(node.target)
        values_of[node] = node.target(*args, **kwargs)
    # A tuple would keep all its tensors alive as long as the last of them.
    if nodes and isinstance(values_of[nodes[0]], tuple | list):
        del values_of[nodes[0]]
