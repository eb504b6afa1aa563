"""One graph that Dynamo makes of a loss function, or of inference: the forward pass of a step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import RandomValueSource

from olla.pytorch.dynamo.captured import AsCaptured

_ARGUMENT = re.compile(r"\b[LG]\['(\w+)'\]")
_TABLE = re.compile(r"(?:\.__dict__\['_|\._)(?:modules|parameters|buffers)(?:'\])?\['?(\w+)'?\]")


class NotFollowed(Exception):
    """Dynamo makes no single graph of a function; the message says why. Nothing was run.

    Attributes:
        reads: a function of Python's library that reads a clock, a file or another thing outside; empty: none is known.
    """

    reads = ""


def the_loss(loss: torch.Tensor) -> torch.Tensor:
    """Mark the loss in a graph."""
    return loss.view_as(loss)


class LossGraph:
    """The operators of a loss function, or of inference, for all calls for which Dynamo's guards hold.

    Args:
        module: Dynamo's graph.
        number: of the graph among those of the function.
        change: why the graphs before it do not stand for a call; empty: there are none, or nobody knows.

    Attributes:
        number, change: as given.
        trains: whether it computes a loss, its first output.
        names: of its inputs, in the words of Python: ``batch['x']``.
    """

    def __init__(self, module: fx.GraphModule, number: int, change: str) -> None:
        self.number = number
        self.change = change
        self.names = [_name(node) for node in module.graph.find_nodes(op="placeholder")]
        self._part = AsCaptured(module)
        graph = self._part.graph
        placeholders = graph.find_nodes(op="placeholder")
        output: Any = graph.output_node()
        given = list(output.args[0])
        marked = next((node for node in graph.nodes if node.target is the_loss), None)
        self.trains = marked is not None
        first: tuple[Any, ...] = () if marked is None else marked.args
        others = [n for n in given if isinstance(n, fx.Node) and n.op != "placeholder" and n is not marked]
        outputs = {n: i for i, n in enumerate(dict.fromkeys((*first, *others)))}
        inputs = {n: i for i, n in enumerate(placeholders)}
        # Python is handed inputs of the graph, outputs of the step, and constants.
        self._handed: list[Callable[[Sequence[Any], Sequence[Any]], Any]] = [
            _input(inputs[n]) if n in inputs else _output(outputs[n]) if n in outputs else _constant(n)
            for n in (first[0] if node is marked else node for node in given)
        ]
        output.args = (tuple(outputs),)
        if marked is not None:
            graph.erase_node(marked)

    def handed(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return what the function's Python code goes on with, for inputs of the graph and outputs of the step."""
        return tuple([take(inputs, outputs) for take in self._handed])

    def run(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Run its operators one by one; return the loss, if any, and what else the function's Python goes on with."""
        return tuple(self._part(*inputs))


def require_plain(module: fx.GraphModule) -> None:
    """Raise a NotFollowed for what Dynamo repeats in another way than Python does."""
    if reason := unlike_python(module):
        raise NotFollowed(reason)
    applies = any(str(node.target) == "autograd_function_apply" for node in module.graph.nodes)
    if applies and any(map(_has_own_apply, _subclasses(torch.autograd.Function))):
        raise NotFollowed("a class of autograd functions has an apply of its own, which Dynamo does not call")


def unlike_python(module: fx.GraphModule) -> str:
    """Return what a graph does in another way than Python would; empty: nothing of what is known."""
    parts = [part for part in module.modules() if isinstance(part, fx.GraphModule)]
    for node in (node for part in parts for node in part.graph.nodes):
        if isinstance(getattr(node.meta.get("grapharg"), "source", None), RandomValueSource):
            return "it draws random numbers from Python's random"  # Dynamo makes tensors of double precision of them
        if node.target is torch._assert_async:  # since torch 2.15 of torch._assert too, which raises another error
            return "it asserts that a tensor is true"
        if "shallow_copy_data_" in str(node.target):  # since torch 2.15
            return "it gives a tensor other memory (tensor.data = ...)"
    return ""


def _has_own_apply(kind: type) -> bool:
    return "apply" in vars(kind) and not kind.__module__.startswith("torch.")


def _subclasses(kind: type) -> Iterator[type]:
    below: type
    for below in kind.__subclasses__():
        yield below
        yield from _subclasses(below)


def signature(module: fx.GraphModule) -> tuple[Any, ...]:
    """Return what tells a graph of Dynamo's from others: operators, what they are given, and kinds of inputs.

    Complexity: O(nodes).
    """
    found: list[Any] = []
    numbers = {node: f"%{i}" for i, node in enumerate(module.graph.nodes)}  # names tell how Dynamo came by a value
    for node in module.graph.nodes:
        value: Any = node.target
        if node.op == "placeholder":
            kind = node.meta.get("example_value")
            value = _kind(kind) if isinstance(kind, torch.Tensor) else kind
        elif node.op == "get_attr":
            value = getattr(module, node.target)
            value = signature(value) if isinstance(value, fx.GraphModule) else _Same(value)
        given = fx.node.map_arg((node.args, node.kwargs), numbers.__getitem__)
        found.append((node.op, value, str(given)))
    return tuple(found)


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


class _Same:
    """Equal to itself: an object that may not know what it equals."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    __hash__ = None  # type: ignore[assignment]


def _input(i: int) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    return lambda inputs, outputs: inputs[i]


def _output(i: int) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    return lambda inputs, outputs: outputs[i]


def _constant(value: Any) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    return lambda inputs, outputs: value


def _name(placeholder: fx.Node) -> str:
    """Return where the function found an input: ``batch[x]`` of ``L['batch']['x']``."""
    name = getattr(getattr(placeholder.meta.get("grapharg"), "source", None), "name", "")
    return readable(str(name() if callable(name) else name)) or placeholder.name


def readable(name: str) -> str:
    """Return Dynamo's words for a place as people would have them.

    Example:
        >>> readable("L['model']._modules['layer']._modules['0'].training == True")
        'model.layer.0.training == True'
    """
    return _TABLE.sub(r".\1", _ARGUMENT.sub(r"\1", name)).replace("['", "[").replace("']", "]")
