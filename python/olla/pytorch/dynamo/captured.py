"""Graphs of Dynamo's run as they were captured, operator by operator, for what is not planned."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from olla.pytorch.sites.sites import NodeByNode

_KEPT = ("nn_module_stack", "stack_trace")  # of what a node notes; the rest holds fake tensors, or the first batch
_CONTEXT = "_checkpoint_context_fn"  # where Dynamo notes what is kept of a checkpointed region


def as_captured(module: fx.GraphModule) -> fx.GraphModule | AsCaptured:
    """Return what runs a graph as ordinary code would: torch's checkpoint where that has regions of it recomputed.

    The operator that stands for it in Dynamo's graphs leaves the state of generators to a compiler: in a graph that
    runs as it is, dropout would have another mask when it is recomputed, and gradients would be wrong.
    """
    regions = module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint)
    return AsCaptured(module) if regions else module


class AsCaptured(torch.nn.Module):
    """A graph of Dynamo's, or a checkpointed region of one, run operator by operator.

    Its nodes are copies that hold no tensors, and checkpointed regions call torch's checkpoint again. No code is made
    of them: Python would keep its text for as long as the process lives.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.graph.output(self.graph.graph_copy(module.graph, {}))
        for node in self.graph.nodes:
            node.meta = {key: node.meta[key] for key in _KEPT if key in node.meta}
            if node.target is torch._C._nn.one_hot:
                node.target = _one_hot
            elif node.op == "get_attr":
                value = getattr(module, node.target)
                setattr(self, node.target, AsCaptured(value) if isinstance(value, fx.GraphModule) else value)
            elif node.target is torch.ops.higher_order.tag_activation_checkpoint:
                keep = getattr(module, node.args[0].target).meta.get(_CONTEXT)
                given = {} if keep is None else {"context_fn": keep}
                node.target, node.kwargs = checkpoint, {**node.kwargs, **given, "use_reentrant": False}

    def forward(self, *inputs: Any) -> Any:
        """Run the graph."""
        return NodeByNode(self, graph=self.graph).run(*inputs)


def _one_hot(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Call what stands under the name of torch's function, which checks classes while a step is traced."""
    return torch.nn.functional.one_hot(*args, **kwargs)
