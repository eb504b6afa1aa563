"""A captured step as JSON, and back: names of operators instead of code, nothing that runs when it is read.

What comes back has the same graph, nodes, inputs and outputs. The values of its nodes, ``node.meta["val"]``, are fake
tensors again, but no two of them share a storage: which tensors lie in one storage is written in ``tensors`` alone.
"""

from __future__ import annotations

import base64
import builtins
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.utils import _pytree as pytree

from olla.graph import Graph
from olla.pytorch import generator  # noqa: F401  its operators may stand in an entry
from olla.pytorch.capture import Captured
from olla.pytorch.inputs import Input
from olla.pytorch.results import Structure
from olla.pytorch.run import attribute

_MAX_CONSTANT_BYTES = 2**24
_KIND = "olla_kind"
_SPACES = {"operator": operator, "math": math, "builtins": builtins, "torch": torch}
_FUNCTIONS = {
    "builtins": {"round", "abs", "min", "max", "float", "int", "bool"},
    "torch": {n for n in dir(torch) if n.startswith(("sym_", "_sym_"))},
}
_NAMED = (torch.dtype, torch.layout, torch.memory_format)
_DTYPES = {str(getattr(torch, n)): getattr(torch, n) for n in dir(torch) if isinstance(getattr(torch, n), _NAMED)}


class NotStorable(Exception):
    """A captured step holds something that cannot be written down."""


def to_object(captured: Captured, constants: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return a captured step as what ``json.dumps`` takes.

    Args:
        captured: the step.
        constants: tensors that are found again in every process; where the step holds one of them, it is bound to it.

    Raises:
        NotStorable: names what cannot be written down.
    """
    module = captured.module
    known = {id(t): i for i, t in enumerate(constants)}
    nodes = list(module.graph.nodes)
    number = {node: i for i, node in enumerate(nodes)}
    return {
        "graph": captured.graph.to_dict(),
        "nodes": [_node(module, node, number, known) for node in nodes],
        "ops": [[number[n] for n in group] for group in captured.nodes],
        "prologue": [number[n] for n in captured.prologue],
        "tensors": [[number[node], *tensors] for node, tensors in captured.tensors.items()],
        "inputs": [asdict(entry) for entry in captured.inputs],
        "outputs": list(captured.outputs),
        "structure": _structure(captured.structure),
    }


def from_object(content: dict[str, Any], constants: Sequence[torch.Tensor]) -> Captured:
    """Return the step that to_object wrote down; any exception means that the object is damaged or from elsewhere.

    Args:
        content: what ``json.loads`` returned.
        constants: the same tensors, in the same order.
    """
    root = torch.nn.Module()
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    mode = FakeTensorMode()
    for name, op, target, args, kwargs, value, kind in content["nodes"]:
        if not name.isidentifier():
            raise ValueError(f"{name!r} is no name of a node")
        what: Any = target
        if op == "call_function":
            what = _function(target)
        elif op == "get_attr":
            what = name
            setattr(root, name, _constant(target, constants))
        node = graph.create_node(op, what, tuple(_value(a, nodes) for a in args), _kwargs(kwargs, nodes), name)
        if node.name != name:
            raise ValueError(f"two nodes are called {name!r}")
        node.meta["val"] = _fact(value, mode)
        if kind:
            node.meta[_KIND] = kind
        nodes.append(node)
    with _use_lazy_graph_module(True):  # nobody needs its Python code
        module = _make_graph_module(root, graph)
    return Captured(
        graph=Graph.from_dict(content["graph"]),
        module=module,
        nodes=[tuple(nodes[i] for i in group) for group in content["ops"]],
        prologue=tuple(nodes[i] for i in content["prologue"]),
        tensors={nodes[i]: tuple(tensors) for i, *tensors in content["tensors"]},
        inputs=[Input(**entry) for entry in content["inputs"]],
        outputs=list(content["outputs"]),
        structure=_read_structure(content["structure"]),
    )


def _node(module: fx.GraphModule, node: fx.Node, number: dict[fx.Node, int], known: dict[int, int]) -> list[Any]:
    target: Any = node.target
    if node.op == "call_function":
        target = _function_name(target)
    elif node.op == "get_attr":
        target = _write_constant(attribute(module, str(target)), known)
    elif node.op not in ("placeholder", "output"):
        raise NotStorable(f"{node.name} is a {node.op} node")
    args = [_text(a, number) for a in node.args]
    kwargs = {k: _text(a, number) for k, a in node.kwargs.items()}
    return [node.name, node.op, target, args, kwargs, _write_fact(node.meta.get("val")), node.meta.get(_KIND, "")]


def _function_name(target: Any) -> str:
    """Return ``"aten::add.Tensor"`` for an operator, ``"operator:mul"`` for a function of Python or torch."""
    if isinstance(target, torch._ops.OpOverload):
        return f"{target._schema.name}.{target._overloadname}"
    for space in _SPACES:
        name = f"{space}:{getattr(target, '__name__', '')}"
        try:
            if _function(name) is target:
                return name
        except ValueError:
            continue
    raise NotStorable(f"the operator {target} has no name that another process knows")


def _function(name: str) -> Any:
    space, colons, path = name.partition("::")
    if colons:
        packet, _, overload = path.rpartition(".")
        return getattr(getattr(getattr(torch.ops, space), packet), overload)
    space, _, path = name.partition(":")
    if space not in _SPACES or path not in _FUNCTIONS.get(space, {path}) or path.startswith("__"):
        raise ValueError(f"{name!r} is no operator")
    function: Callable[..., Any] | None = getattr(_SPACES[space], path, None)
    if function is None:
        raise ValueError(f"{name!r} is no operator")
    return function


def _text(value: Any, number: dict[fx.Node, int]) -> Any:
    """Return an argument as JSON: plain values as they are, everything else as [kind, ...]."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return ["float", value.hex()]
    if type(value) is complex:
        return ["complex", value.real.hex(), value.imag.hex()]
    if isinstance(value, fx.Node):
        return ["node", number[value]]
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return [kind, *(_text(item, number) for item in value)]
    if isinstance(value, slice):
        return ["slice", *(_text(part, number) for part in (value.start, value.stop, value.step))]
    if isinstance(value, _NAMED):
        return ["torch", str(value)]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    raise NotStorable(f"an operator takes a {type(value).__name__}")


def _value(text: Any, nodes: Sequence[fx.Node]) -> Any:
    if not isinstance(text, list):
        return text
    kind, *parts = text
    if kind == "float":
        return float.fromhex(parts[0])
    if kind == "complex":
        return complex(float.fromhex(parts[0]), float.fromhex(parts[1]))
    if kind == "node":
        return nodes[parts[0]]
    if kind in ("tuple", "list", "slice"):
        items = [_value(part, nodes) for part in parts]
        return slice(*items) if kind == "slice" else tuple(items) if kind == "tuple" else items
    if kind == "torch":
        return _DTYPES[parts[0]]
    if kind == "device":
        return torch.device(parts[0])
    raise ValueError(f"{kind!r} is no kind of argument")


def _kwargs(kwargs: dict[str, Any], nodes: Sequence[fx.Node]) -> dict[str, Any]:
    if not all(name.isidentifier() for name in kwargs):
        raise ValueError("a keyword is no name")
    return {name: _value(text, nodes) for name, text in kwargs.items()}


def _write_fact(value: Any) -> Any:
    """Return the shape of a node's value: a list for a tensor, ["many", ...] for several, None for anything else."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), list(value.stride()), str(value.device)]
    if isinstance(value, tuple | list):
        return ["many", *(_write_fact(item) for item in value)]
    return None


def _fact(value: Any, mode: FakeTensorMode) -> Any:
    if value is None:
        return None
    if value[0] == "many":
        return tuple(_fact(item, mode) for item in value[1:])
    dtype, shape, stride, device = value
    empty = torch.empty_strided(shape, stride, dtype=_DTYPES[dtype], device="meta")
    return FakeTensor(mode, empty, torch.device(device))  # ten times as fast as a call in the mode


def _write_constant(value: Any, known: dict[int, int]) -> list[Any]:
    if not isinstance(value, torch.Tensor):
        raise NotStorable(f"the step holds a {type(value).__name__}")
    if id(value) in known:
        return ["known", known[id(value)]]
    num_bytes = value.numel() * value.element_size()
    if type(value) is not torch.Tensor or value.layout != torch.strided or num_bytes > _MAX_CONSTANT_BYTES:
        raise NotStorable(f"the step holds a constant of {num_bytes} bytes")
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    text = base64.b64encode(flat.numpy().tobytes()).decode()
    return ["value", str(value.dtype), list(value.shape), list(value.stride()), str(value.device), text]


def _constant(content: list[Any], constants: Sequence[torch.Tensor]) -> torch.Tensor:
    kind, *parts = content
    if kind == "known":
        known: torch.Tensor = constants[parts[0]]
        return known
    dtype, shape, stride, device, text = parts
    flat = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8) if text else torch.empty(0)
    tensor = torch.empty_strided(shape, stride, dtype=_DTYPES[dtype], device=device)
    return tensor.copy_(flat.view(_DTYPES[dtype]).reshape(shape)) if text else tensor


def _structure(structure: Structure) -> list[Any]:
    try:
        spec = pytree.treespec_dumps(structure.spec)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise NotStorable(f"what the step returns has a structure of its own: {error}") from None
    return [
        spec,
        *(["tensor"] if Structure.is_tensor(leaf) else ["constant", _text(leaf, {})] for leaf in structure.leaves),
    ]


def _read_structure(content: list[Any]) -> Structure:
    spec, *leaves = content
    read = [_value(leaf[1], ()) if leaf[0] == "constant" else Structure.tensor() for leaf in leaves]
    return Structure(pytree.treespec_loads(spec), tuple(read))
