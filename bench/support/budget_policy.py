"""The rules of torchtitan's proposed memory policy for a budget, `auto_perf_maxing`, written anew.

From pytorch/torchtitan#4636, as of September 2026: a linear program gives each layer a share of its saved values to
keep, so that its model of the peak stays within the budget; then each layer recomputes what is cheapest per byte until
so much is gone. Without its third answer, copies to the host. Costs are those of our roofline in place of timings.
"""

from __future__ import annotations

from typing import Any

import highspy
import numpy as np
from torch.utils.checkpoint import CheckpointPolicy

import olla
from olla.graph import profile_of

_HEADS = ("lm_head", "loss")


class BudgetPolicy:
    """What is kept of a traced step of forward, loss and backward, at any budget.

    Args:
        module: as `minimal_fx_tracer` traces it; nodes have the names of their modules.
        drawn: operators that are kept, whatever they cost.
    """

    def __init__(self, module: Any, drawn: set[Any]) -> None:
        from torchtitan.experiments.graph_trainer.common_utils import _get_layer_id, _is_backward_node

        self.graph = graph = olla.from_fx(module)
        nodes = {node.name: node for node in module.graph.nodes}
        ops = [nodes[name] for name in graph.op_names]
        self.layer = np.array([_get_layer_id(node) for node in ops])
        self.backward = np.array([_is_backward_node(node) for node in ops], dtype=bool)
        self.seconds = profile_of("a100").op_seconds(graph)
        self.num_layers = int(self.layer.max()) + 1
        last = np.full(graph.num_tensors, -1)
        self.must_keep = {v for v, node in enumerate(ops) if not self.backward[v] and node.target in drawn}
        producer = {t: v for v in range(graph.num_ops) for t in graph.writes.of(v).tolist()}
        for v in range(graph.num_ops):
            for t in {*graph.reads.of(v).tolist(), *graph.mutates.of(v).tolist()}:
                last[t] = v
                made = producer.get(t)
                if made is not None and not self.backward[v] and self.layer[v] > self.layer[made]:
                    self.must_keep.add(made)  # a layer's input
        outputs = set(graph.outputs.tolist())
        self.saved_bytes = np.zeros(graph.num_ops, dtype=np.int64)  # of each op's results that backward reads
        freed = np.zeros(graph.num_ops + 1, dtype=np.int64)
        made_bytes = np.zeros(graph.num_ops, dtype=np.int64)
        for t, v in producer.items():
            size, end = int(graph.tensor_bytes[t]), graph.num_ops if t in outputs else int(last[t])
            if self.backward[v]:
                made_bytes[v] += size
                freed[max(end, v)] += size
            elif 0 <= end < graph.num_ops and self.backward[end]:
                self.saved_bytes[v] += size
        live = np.cumsum(made_bytes) - np.concatenate(([0], np.cumsum(freed)[:-2]))  # of backward's own values
        self.backward_bytes = np.zeros(self.num_layers, dtype=np.int64)
        inside = np.flatnonzero(self.backward & (self.layer >= 0))
        np.maximum.at(self.backward_bytes, self.layer[inside], live[inside])
        given = np.array([kind == "input" for kind in graph.tensor_kinds])  # parameters; a batch of tokens is nothing
        self.parameter_bytes = int(graph.tensor_bytes[given].sum())
        self.layer_bytes = np.array([self.saved_bytes[self._saved(i)].sum() for i in range(self.num_layers)])
        heads = (
            ~self.backward
            & (self.layer < 0)
            & np.array([bool(node.meta.get("custom", {}).get("module_fqn")) for node in ops])
        )
        self.head_bytes = int(self.saved_bytes[heads].sum())

    def mark(self, module: Any, budget_bytes: int) -> bool:
        """Mark the nodes of a copy of the module; False where the linear program has no answer."""
        shares = self._shares(budget_bytes)
        if shares is None:
            return False
        again = {name for i in range(self.num_layers) for name in self._recomputed(i, shares[i])}
        kept = {self.graph.op_names[v] for v in self.must_keep | set(np.flatnonzero(self.saved_bytes).tolist())} - again
        for node in module.graph.nodes:
            forward = node.op == "call_function" and not node.meta.get("autograd_backward", False)
            if forward and not str(node.meta.get("custom", {}).get("module_fqn", "")).startswith(_HEADS):
                save, rerun = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE
                node.meta["recompute"] = save if node.name in kept else rerun
                if "wait_tensor" in str(node.target):  # goes with its collective, as torchtitan has it
                    node.meta["recompute"] = node.args[0].meta["recompute"]
        module.recompile()
        return True

    def _saved(self, layer: int) -> Any:
        return np.flatnonzero(~self.backward & (self.layer == layer) & (self.saved_bytes > 0))

    def _shares(self, budget_bytes: int) -> list[float] | None:
        """Return what share of each layer's saved bytes is kept; a layer takes the same time as any other."""
        scale = 1 / 2**30
        model, bytes_of = highspy.Highs(), self.layer_bytes * scale
        model.silent()
        held = [sum(self.saved_bytes[v] for v in self._saved(i) if v in self.must_keep) for i in range(self.num_layers)]
        least = [min(1.0, held[i] / max(self.layer_bytes[i], 1)) for i in range(self.num_layers)]
        keep = [model.addVariable(lb=low, ub=1.0) for low in least]
        room = (budget_bytes - self.parameter_bytes) * scale
        for i in range(self.num_layers + 1):
            below = [keep[j] * bytes_of[j] for j in range(i)]
            own = bytes_of[i] + self.backward_bytes[i] * scale if i < self.num_layers else self.head_bytes * scale
            if below:
                model.addConstr(sum(below[1:], below[0]) <= room - own)
            elif own > room:
                return None
        model.maximize(model.qsum(keep))
        if model.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        return [float(model.val(variable)) for variable in keep]

    def _recomputed(self, layer: int, share: float) -> list[str]:
        """Return the ops of a layer that are recomputed: the cheapest per byte, until no more than a share is kept."""
        ops = [v for v in self._saved(layer).tolist() if v not in self.must_keep]
        ops.sort(key=lambda v: (self.seconds[v] / self.saved_bytes[v], self.graph.op_names[v]))
        left, found = float((1 - share) * self.layer_bytes[layer]), []
        for v in ops:
            if self.saved_bytes[v] <= left:
                found.append(v)
                left -= self.saved_bytes[v]
        larger = [v for v in ops if v not in found and self.saved_bytes[v] >= 0.95 * left]
        if left > 0 and larger:  # what is over breaks the budget: one more
            found.append(min(larger, key=lambda v: (self.saved_bytes[v], self.graph.op_names[v])))
        return [self.graph.op_names[v] for v in found]
