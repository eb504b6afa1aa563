"""A graph of operators as one Python function that frees each value behind its last use."""

from __future__ import annotations

import keyword
import operator
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from olla.aten.halves import OVER
from olla.inductor.saving.kinds import is_view
from olla.pytorch.program.source import PythonSource
from olla.pytorch.program.variants import overwriting

Program = Callable[[list[Any]], list[Any]]


def compile_program(module: fx.GraphModule, name: str) -> Program:
    """Write a graph as a Python function and compile it: no dispatch of ours between two operators.

    Args:
        module: its nodes are in the order to run them; those with the note `OVER` write over one of their inputs.
        name: of the function, as tracebacks show it.

    Returns:
        A function that takes a list of the graph's inputs, which it empties, and returns a list of its results. It is
        called without gradients being recorded. Where autograd keeps its graph, as with ``retain_graph=True``, inputs
        that the graph writes over are copied first.

    Complexity: O(nodes + edges).
    """
    writer = _Writer(name)
    writer.write(module)
    return writer.compile()


class _Writer:
    """The lines of the function, and the constants they name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: list[str] = []
        self.names: dict[fx.Node, str] = {}
        self._source = PythonSource(self.names.__getitem__)
        self._source.constants["keeps_graph"] = torch._C._autograd._get_current_graph_task_keep_graph

    def write(self, module: fx.GraphModule) -> None:
        last: dict[fx.Node, fx.Node] = {}
        for node in module.graph.nodes:
            last.update(dict.fromkeys(node.all_input_nodes, node))
        ends: dict[fx.Node, list[fx.Node]] = {}
        for node, user in last.items():
            ends.setdefault(user, []).append(node)
        given = module.graph.find_nodes(op="placeholder")
        for node in given:
            self.names[node] = f"v{len(self.names)}"
        self._line(f"[{', '.join(self.names[node] for node in given)}] = values")
        self._line("values.clear()")
        if written := [self.names[node] for node in written_inputs(module.graph)]:
            self._line("if keeps_graph():")
            self._line("  " + "; ".join(f"{name} = {name}.clone()" for name in written))
        self._delete([node for node in given if node not in last])
        for node in module.graph.nodes:
            if node.op == "get_attr":
                self.names[node] = self._source.constant(attrgetter(str(node.target))(module))
            elif node.op == "call_function":
                self._call(node, kept=node in last)
            elif node.op == "output":
                results = node.args[0] if isinstance(node.args[0], tuple | list) else (node.args[0],)
                self._line(f"return [{', '.join(map(self._source.text, results))}]")
                return
            self._delete(ends.get(node, ()))

    def _call(self, node: fx.Node, *, kept: bool) -> None:
        target, args, kwargs = node.target, node.args, dict(node.kwargs)
        if (place := node.meta.get(OVER)) is not None:
            variant = overwriting(target, node.meta["val"].device.type)
            assert variant is not None
            target = variant.target
            if variant.keyword:
                kwargs[variant.keyword] = node.all_input_nodes[place]
        arguments = [self._source.text(a) for a in args]
        arguments += [f"{k}={self._source.text(a)}" for k, a in kwargs.items() if not keyword.iskeyword(k)]
        arguments += [f"**{{{k!r}: {self._source.text(a)}}}" for k, a in kwargs.items() if keyword.iskeyword(k)]
        call = f"{self._source.constant(target._op if isinstance(target, torch._ops.OpOverload) else target)}"
        call = f"{call}({', '.join(arguments)})"
        if kept:
            self.names[node] = f"v{len(self.names)}"
            call = f"{self.names[node]} = {call}"
        self._line(call)

    def compile(self) -> Program:
        code = "\n".join([f"def {self.name}(values):", *self.lines])
        exec(compile(code, f"<{self.name}>", "exec"), self._source.constants)
        program: Program = self._source.constants[self.name]
        return program

    def _line(self, text: str) -> None:
        self.lines.append(f"  {text}")

    def _delete(self, nodes: Sequence[fx.Node]) -> None:
        names = [self.names[node] for node in nodes if node.op != "get_attr"]
        if names:
            self._line(f"del {', '.join(names)}")


def written_inputs(graph: fx.Graph) -> list[fx.Node]:
    """Return the inputs whose memory results of the graph take over."""
    root: dict[fx.Node, fx.Node] = {}
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        place = node.meta.get(OVER) if node.op == "call_function" else None  # an input has the notes of what it was
        looks_at = is_view(node) or node.target is operator.getitem
        source = node.all_input_nodes[place or 0] if place is not None or looks_at else None
        root[node] = node if source is None else root[source]
        if place is not None and root[node].op == "placeholder":
            found[root[node]] = None
    return list(found)
