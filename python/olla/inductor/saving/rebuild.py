"""Rewrite a joint graph by a choice: forward, then backward with recomputed nodes where they are needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from olla._core import Runs, Values
from olla.inductor.compat import compat
from olla.inductor.saving import split_sums, verify
from olla.inductor.saving.joint import Joint, elements
from olla.inductor.saving.kinds import is_random


@dataclass
class Rebuilt:
    """A rewritten joint graph.

    Attributes:
        graph: every run of an op is a node of its own, and readers take the run that computes the value for them.
        saved, saved_sizes: nodes of forward that backward reads: tensors, and numbers.
        origin: the old node that a new one stands for.
        forward: the nodes of forward.
        drawn_again: a node of backward that draws random numbers -> the one of forward that has drawn the same.
        made: of copy c of a value, the node that makes it.
        starts: of run r, the first node that was appended for it, or for the next that has any; one more for the end.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    saved: dict[fx.Node, None] = field(default_factory=dict)
    saved_sizes: dict[fx.Node, None] = field(default_factory=dict)
    origin: dict[fx.Node, fx.Node] = field(default_factory=dict)
    forward: set[fx.Node] = field(default_factory=set)
    drawn_again: dict[fx.Node, fx.Node] = field(default_factory=dict)
    made: dict[int, fx.Node] = field(default_factory=dict)
    starts: list[fx.Node] = field(default_factory=list)


class _Rebuilder:
    def __init__(self, old: fx.Graph, joint: Joint, values: Values) -> None:
        self.old, self.joint = old, joint
        self.value_tensor = values.tensor.tolist()
        self.result = Rebuilt()
        self.backward = False
        self.given: dict[fx.Node, fx.Node] = {}  # inputs and constants
        self.changed = compat.changed_inputs(old)
        self.kept: dict[fx.Node, fx.Node] = {}  # input that forward mutates -> a clone from before, for backward
        self.present: dict[int, fx.Node] = {}  # of tensor: the node that makes it for the run at hand, or made it last
        self.seen: dict[tuple[fx.Node, fx.Node, bool], fx.Node] = {}  # views, by what they look at
        self.sizes: dict[fx.Node, fx.Node] = {}
        self.tuples: dict[fx.Node, fx.Node] = {}  # of a node that returns several values: its last run
        self.first_drawn: dict[fx.Node, fx.Node] = {}  # of a node that draws random numbers: its run in forward
        self.drawn: dict[fx.Node, dict[int, fx.Node]] = {}  # and what makes its tensors in backward
        self.roots: dict[int, fx.Node] = {}
        for node, tensor in joint.tensor.items():
            self.roots.setdefault(tensor, node)

    def run(self, runs: Runs, num_forward: int) -> Rebuilt:
        for node in self.old.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.given[node] = self.put(node, self.resolve)
        read_offset, reads = runs.reads[0].tolist(), runs.reads[1].tolist()
        make_offset, makes = runs.makes[0].tolist(), runs.makes[1].tolist()
        tensors = [self.value_tensor[value] for value in runs.value.tolist()]  # of copy c
        made = self.result.made
        ends: list[fx.Node] = []  # the last node before each run
        (output,) = self.old.find_nodes(op="output")
        results = output.args[0]
        forward_results: list[Any] = []
        for r, (op, position) in enumerate(zip(runs.op.tolist(), runs.position.tolist(), strict=True)):
            node = self.joint.nodes[op]
            ends.append(next(iter(reversed(self.result.graph.nodes))))
            if not self.backward and position >= self.joint.split:
                forward_results = [self.mapped(item) for item in results[:num_forward]]
                self.result.forward = set(self.result.graph.nodes)
                self.backward = True
            if node is None:
                continue
            for c in reads[read_offset[r] : read_offset[r + 1]]:
                if c in made:
                    self.present[tensors[c]] = made[c]
            self.emit(node)
            for c in makes[make_offset[r] : make_offset[r + 1]]:
                made[c] = self.present[tensors[c]]
        out = self.result.graph.output((*forward_results, *(self.mapped(item) for item in results[num_forward:])))
        out.meta.update(output.meta)
        self.result.origin[out] = output
        self.result.starts = [*(end.next for end in ends), out]
        return self.result

    def put(self, node: fx.Node, argument: Callable[[fx.Node], fx.Node]) -> fx.Node:
        """Append a copy of a node; an impure one is pinned to the half it is put in."""
        new = self.result.graph.node_copy(node, argument)
        self.result.origin[new] = node
        if node.op == "call_function" and new.is_impure():
            compat.keep_in(new, backward=self.backward)
        return new

    def emit(self, node: fx.Node) -> None:
        """Append one run of a node, and the elements of the tuple it returns.

        A random node runs at most once in forward and once in backward; later readers take that result.
        """
        if self.backward and node in self.drawn:
            self.present.update(self.drawn[node])
            return
        changed = node.args[0] if compat.changes_inputs(node) else None  # the input itself, not its clone
        new = self.put(
            node, lambda n: self.read(self.given[n]) if n is changed and n in self.given else self.resolve(n)
        )
        made = {node: new}
        if not compat.is_tensor_node(node):
            self.tuples[node] = new
            for user in elements(node):
                made[user] = self.put(user, lambda n: made.get(n) or self.resolve(n))
        tensors = {self.joint.tensor[n]: copy for n, copy in made.items() if n in self.joint.tensor}
        self.present.update(tensors)
        if is_random(node):
            self.note_drawn(node, new, tensors)

    def note_drawn(self, node: fx.Node, new: fx.Node, tensors: dict[int, fx.Node]) -> None:
        if not self.backward:
            self.first_drawn[node] = new
            return
        self.drawn[node] = tensors
        if node in self.first_drawn:
            self.result.drawn_again[new] = self.first_drawn[node]

    def before(self, node: fx.Node) -> fx.Node:
        """Return a clone of an input that forward mutates; it is made ahead of all other nodes, and saved."""
        if node not in self.kept:
            first = next(n for n in self.result.graph.nodes if n.op not in ("placeholder", "get_attr"))
            with self.result.graph.inserting_before(first):
                new = self.result.graph.call_function(compat.clone, (self.given[node],))
            new.meta["val"] = node.meta["val"]
            self.kept[node], self.result.origin[new] = new, node
            self.result.forward.add(new)
        return self.kept[node]

    def mapped(self, item: Any) -> Any:
        return self.read(self.resolve(item)) if isinstance(item, fx.Node) else item

    def read(self, new: fx.Node) -> fx.Node:
        """Return the node; note it as saved if it is one of forward that backward reads."""
        held = new.op == "get_attr" and not compat.is_tensor_node(new)  # a subgraph of an operator: both halves have it
        if self.backward and new in self.result.forward and not (compat.is_tangent(new) or held):
            saved = self.result.saved_sizes if compat.is_symbolic(new) else self.result.saved
            saved[new] = None
        return new

    def input(self, node: fx.Node) -> fx.Node:
        return self.before(node) if self.backward and node in self.changed else self.given[node]

    def resolve(self, node: fx.Node) -> fx.Node:
        """Return the new node that stands for an old one at this point of the graph."""
        if compat.is_symbolic(node) and node not in self.given:
            return self.size(node)
        chain = []
        while node not in self.given and self.roots.get(self.joint.tensor.get(node, -1)) is not node:
            if node in self.tuples and node not in self.joint.tensor:
                return self.read(self.tuples[node])
            chain.append(node)
            node = node.args[0]  # type: ignore[assignment]
        new = self.read(self.input(node) if node in self.given else self.present[self.joint.tensor[node]])
        for view in reversed(chain):
            key = (view, new, self.backward)
            if key not in self.seen:
                source = view.args[0]
                self.seen[key] = self.put(
                    view,
                    lambda n, source=source, new=new: new if n is source else self.resolve(n),  # type: ignore[misc]
                )
            new = self.seen[key]
        return new

    def size(self, node: fx.Node) -> fx.Node:
        """Return a number computed from sizes; backward gets whole numbers saved, and computes others from those."""
        stack = [node]
        while stack:
            top = stack[-1]
            missing = [n for n in top.all_input_nodes if compat.is_symbolic(n) and n not in self.sizes | self.given]
            if top in self.sizes or not missing:
                stack.pop()
                if top not in self.sizes:
                    before, self.backward = self.backward, False
                    self.sizes[top] = self.put(top, lambda n: self.sizes.get(n) or self.resolve(n))
                    self.backward = before
                    self.result.forward.add(self.sizes[top])
            stack += missing
        new = self.sizes[node]
        if self.backward and not isinstance(node.meta.get("val"), torch.SymInt | int):
            for n in node.all_input_nodes:
                self.resolve(n)
            return new
        return self.read(new)


def rebuild(old: fx.Graph, joint: Joint, values: Values, runs: Runs, num_forward: int) -> Rebuilt:
    """Return the joint graph in which every run of a choice is a node.

    Args:
        old: the joint graph.
        joint: its model.
        values, runs: of the core's RecomputeSearch.
        num_forward: results of the joint graph that are forward's.

    Raises:
        PlanError: what came out would not compute what the joint graph does.
    """
    result = _Rebuilder(old, joint, values).run(runs, num_forward)
    verify.rewritten(old, result.graph, result.origin)
    split_sums.keep_apart(result.graph, result.forward)
    return result
