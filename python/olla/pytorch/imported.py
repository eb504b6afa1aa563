"""Graphs that others traced: fx graphs of ATen operators, and exported programs."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from olla.errors import CaptureError
from olla.graph import Graph
from olla.pytorch.capture.inputs import Input
from olla.pytorch.capture.storages import fold

if TYPE_CHECKING:
    from torch.export import ExportedProgram

KINDS = ("parameter", "buffer", "optimizer_state", "input", "constant")
_REMEDY = "trace it with torch.export or torch.fx.experimental.proxy_tensor.make_fx"


def from_fx(module: fx.GraphModule, *, kinds: Mapping[str, str] | None = None, name: str = "") -> Graph:
    """Return the graph of an fx module of ATen operators, as make_fx, AOTAutograd and torch.export trace them.

    Views are folded into the storage they show, and changes in place are marked. What has no effect is left out.
    Nothing is computed, and the module stays as it is.

    Args:
        module: its placeholders have what they were traced with in ``meta["val"]``: tensors, real or fake, whose shapes
            are numbers; or device meshes and other values, which the graph leaves out.
        kinds: of placeholders by name: parameter, buffer, optimizer_state, constant, or input, as all others are.
        name: of the graph.

    Returns:
        The graph; its ops are named as the nodes.

    Raises:
        CaptureError: it calls modules or methods, a placeholder has no value, or an operator does not run on fake
            tensors.
        ValueError: a kind is none of these, or belongs to no placeholder.

    Complexity: one run of the operators on fake tensors.

    Example:
        >>> import torch, olla
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> module = make_fx(lambda x, w: (x @ w).relu(), tracing_mode="fake")(torch.ones(2, 8), torch.ones(8, 4))
        >>> graph = olla.from_fx(module, kinds={"w_1": "parameter"})
        >>> graph.op_names, graph.resident_bytes
        (['mm', 'relu'], 192)
    """
    kinds = dict(kinds or {})
    placeholders = module.graph.find_nodes(op="placeholder")
    for key, kind in kinds.items():
        if kind not in KINDS:
            raise ValueError(f"kinds[{key!r}] is {kind!r}, expected one of {', '.join(KINDS)}")
    if unknown := kinds.keys() - {node.name for node in placeholders}:
        names = ", ".join(node.name for node in placeholders)
        raise ValueError(f"kinds names {sorted(unknown)[0]!r}, which is no placeholder of the module: it has {names}")
    return _graph(_copy(module), kinds, name)


def from_export(program: ExportedProgram, *, name: str = "") -> Graph:
    """Return the graph of an exported program; parameters, buffers and constants are told apart.

    A parameter that two modules share has two placeholders, and counts once.

    Args:
        program: of torch.export.export, decomposed or not.
        name: of the graph.

    Raises:
        CaptureError: see `from_fx`.

    Example:
        >>> import torch, olla
        >>> program = torch.export.export(torch.nn.Linear(8, 4), (torch.ones(2, 8),))
        >>> graph = olla.from_export(program)
        >>> graph.tensor_kinds
        ['parameter', 'parameter', 'input', 'temporary']
    """
    signature = program.graph_signature
    kinds = dict.fromkeys(signature.inputs_to_parameters, "parameter")
    kinds |= dict.fromkeys(signature.inputs_to_buffers, "buffer")
    kinds |= dict.fromkeys(signature.inputs_to_lifted_tensor_constants, "constant")
    module = _copy(program.graph_module)
    shown = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    _merge(module, {name: program.state_dict[key] for name, key in shown.items() if key in program.state_dict})
    return _graph(module, kinds, name)


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule(module, graph)


def _merge(module: fx.GraphModule, tensors: Mapping[str, torch.Tensor]) -> None:
    """Merge placeholders of the same tensor into one."""
    first: dict[Any, fx.Node] = {}
    for node in module.graph.find_nodes(op="placeholder"):
        if (tensor := tensors.get(node.name)) is None or tensor.layout != torch.strided:
            continue
        place = tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        if (kept := first.setdefault(place, node)) is not node:
            node.replace_all_uses_with(kept)
            module.graph.erase_node(node)


def _graph(module: fx.GraphModule, kinds: Mapping[str, str], name: str) -> Graph:
    _fix_values(module)
    _propagate(module)
    placeholders = module.graph.find_nodes(op="placeholder")
    inputs = [Input(kinds.get(node.name, "input"), node.name, node.name) for node in placeholders]
    return fold(module, inputs, name).graph


def _fix_values(module: fx.GraphModule) -> None:
    """Replace placeholders that are no tensors, such as the device mesh of a shard, by their values."""
    for node in module.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, (torch.Tensor, torch.SymInt)) or (value is None and node.users):
            continue  # a tensor, or nothing that could stand in its place
        for user in list(node.users):
            shown = None if user.op == "output" else value  # what is returned must have a text
            user.args, user.kwargs = fx.node.map_arg((user.args, user.kwargs), lambda n: shown if n is node else n)  # noqa: B023
        module.graph.erase_node(node)


def _propagate(module: fx.GraphModule) -> None:
    """Run the operators on fakes of one mode: then results that share memory share a storage."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        shape, strides = ([int(n) for n in numbers] for numbers in (tensor.shape, tensor.stride()))
        return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)

    with mode, torch.no_grad():
        for node in module.graph.nodes:
            if node.op == "placeholder":
                if not isinstance(node.meta.get("val"), torch.Tensor):
                    raise CaptureError(f"placeholder {node.name} has no tensor in meta['val']: {_REMEDY}")
                node.meta["val"] = fake(node.meta["val"])
            elif node.op == "get_attr":
                value = operator.attrgetter(str(node.target))(module)
                node.meta["val"] = fake(value) if isinstance(value, torch.Tensor) else value
            elif node.op == "call_function":
                arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
                node.meta["val"] = _result(node, *arguments)
            elif node.op != "output":
                raise CaptureError(f"{node.name} is a {node.op} of {node.target}, expected operators: {_REMEDY}")


def _result(node: fx.Node, args: Any, kwargs: Any) -> Any:
    target: Any = node.target
    try:
        return target(*args, **kwargs)
    except Exception as error:
        raise CaptureError(f"{node.name}, a call of {target}, does not run on fake tensors: {error}") from error
