"""A step of forward, loss and backward over sharded parameters, as an fx graph of GraphTrainer's kind, made by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

_COMM = torch.ops._c10d_functional
_ATEN = torch.ops.aten


class ShardedStep:
    """Layers of a product, a GELU and a norm in place; each gathers its weight and reduces its gradient.

    Args:
        group: name of the group that communicates.
        ranks: how many are in it.
        layers: how many.
        width: of every layer.
        rows: of the batch.
        is_summed: whether results of layers are summed over the ranks, as in tensor parallel.
        waits_late: whether an op stands between a gather and the wait for it.

    Attributes:
        module: the graph.
    """

    def __init__(
        self,
        group: str,
        ranks: int,
        layers: int = 4,
        width: int = 64,
        rows: int = 128,
        *,
        is_summed: bool = False,
        waits_late: bool = False,
    ) -> None:
        self._group, self._ranks = group, ranks
        self._is_summed, self._waits_late = is_summed, waits_late
        self._graph, self._meta = fx.Graph(), {"module_fqn": ""}
        self._is_backward = False
        shards = [self._given(f"shard{i}", torch.float32, width // ranks, width) for i in range(layers)]
        hidden = self._given("batch", torch.bfloat16, rows, width)
        saved = []
        for i, shard in enumerate(shards):
            hidden, kept = self._forward(i, shard, hidden)
            saved.append(kept)
        self._meta = {"module_fqn": "loss"}
        loss = self._op(_ATEN.sum.default, hidden)
        self._is_backward = True
        gradient = self._op(_ATEN.ones_like.default, hidden)
        outputs = []
        for i in reversed(range(layers)):
            gradient, reduced = self._backward(i, gradient, *saved[i])
            outputs.append(reduced)
        self._graph.output([loss, *outputs])
        self.module = fx.GraphModule({}, self._graph)

    def _given(self, name: str, dtype: torch.dtype, *shape: int) -> fx.Node:
        node = self._graph.placeholder(name)
        node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def _op(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self._graph.call_function(target, args, kwargs)
        node.meta["custom"] = dict(self._meta)
        if self._is_backward:
            node.meta["autograd_backward"] = True
        return node

    def _forward(self, i: int, shard: fx.Node, hidden: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
        self._meta = {"module_fqn": f"layers.{i}.linear"}
        cast = self._op(_ATEN._to_copy.default, shard, dtype=torch.bfloat16)
        gather = self._op(_COMM.all_gather_into_tensor.default, cast, self._ranks, self._group)
        start = self._op(_ATEN.neg.default, hidden) if self._waits_late else hidden
        weight = self._op(_COMM.wait_tensor.default, gather)
        product = self._op(_ATEN.mm.default, start, weight)
        self._meta = {"module_fqn": f"layers.{i}.norm"}
        result = self._op(_ATEN.gelu.default, product)
        if self._is_summed:
            result = self._op(_COMM.all_reduce.default, result, "sum", self._group)
            result = self._op(_COMM.wait_tensor.default, result)
        mean = self._op(_ATEN.add_.Scalar, self._op(_ATEN.mean.dim, result, [1], True), 1e-6)
        scale = self._op(_ATEN.rsqrt.default, mean)
        return self._op(_ATEN.mul.Tensor, result, scale), (start, weight, product, scale)

    def _backward(
        self, i: int, gradient: fx.Node, start: fx.Node, weight: fx.Node, product: fx.Node, scale: fx.Node
    ) -> tuple[fx.Node, fx.Node]:
        self._meta = {"module_fqn": f"layers.{i}.linear"}
        inner = self._op(_ATEN.gelu_backward.default, self._op(_ATEN.mul.Tensor, gradient, scale), product)
        own = self._op(_ATEN.mm.default, self._op(_ATEN.t.default, start), inner)
        whole = self._op(_ATEN._to_copy.default, own, dtype=torch.float32)
        reduced = self._op(_COMM.reduce_scatter_tensor.default, whole, "sum", self._ranks, self._group)
        reduced = self._op(_COMM.wait_tensor.default, reduced)
        if i == 0:
            return gradient, reduced  # a batch needs none
        return self._op(_ATEN.mm.default, inner, self._op(_ATEN.t.default, weight)), reduced


def recomputed(module: fx.GraphModule) -> fx.GraphModule:
    """Return a marked graph with what is recomputed: a plain second version of what GraphTrainer does."""
    nodes = list(module.graph.nodes)
    copies: dict[fx.Node, fx.Node] = {}

    def again(node: fx.Node) -> bool:
        return node.meta.get("recompute") in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)

    for user in nodes:
        if not user.meta.get("autograd_backward") or user.meta["custom"]["module_fqn"] == "loss":
            continue
        needed, waiting = set(), list(user.all_input_nodes)
        while waiting:
            node = waiting.pop()
            if again(node) and node not in needed:
                needed.add(node)
                waiting += node.all_input_nodes
        for node in [n for n in nodes if n in needed and n not in copies]:
            with module.graph.inserting_before(user):
                copies[node] = module.graph.node_copy(node, lambda n: copies.get(n, n))
        user.args = fx.node.map_arg(user.args, lambda n: copies.get(n, n))
    for node in reversed(nodes):
        if node in copies and not node.users:
            module.graph.erase_node(node)
    module.recompile()
    return module
