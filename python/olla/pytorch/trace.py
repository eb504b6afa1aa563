"""One training step as a flat ATen graph: forward, autograd.grad and the stock optimizer, recorded on fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from olla.pytorch import failures, optimizers, updates
from olla.pytorch.inputs import Fakes, Input, batch_leaves, step_device
from olla.pytorch.results import Structure

Loss = Callable[[Any, Any], Any]
_Tensors = tuple[torch.Tensor, ...]
_Gradients = dict[Any, torch.Tensor | None]
KIND = "olla_kind"  # key of node.meta: forward, backward or update


@dataclass
class Traced:
    """A recorded step: placeholder i of the module takes inputs[i], element i of its result is called outputs[i].

    The first outputs fill `structure`, what the loss function or the model returned.
    """

    module: fx.GraphModule
    inputs: list[Input]
    outputs: list[str]
    structure: Structure


@dataclass
class _Step:
    """Everything the traced function needs, by name, beside its tensors."""

    model: torch.nn.Module
    loss: Loss | None
    optimizer: torch.optim.Optimizer | None
    batch: list[Any]  # leaves; tensors among them are replaced by inputs
    batch_spec: pytree.TreeSpec
    inputs: list[Input] = field(default_factory=list)
    fakes: list[torch.Tensor] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    structure: Structure | None = None
    updates: list[updates.Update] = field(default_factory=list)
    phase: str = "forward"

    def add(self, entry: Input, fake: torch.Tensor) -> None:
        self.inputs.append(entry)
        self.fakes.append(fake)

    def values(self, tensors: _Tensors, kind: str) -> dict[str | int, torch.Tensor]:
        return {i.key: t for i, t in zip(self.inputs, tensors, strict=True) if i.kind == kind}


class _Forward(torch.nn.Module):
    """loss(model, batch) as a module, so that functional_call can lend the model other parameters and buffers."""

    def __init__(self, step: _Step) -> None:
        super().__init__()
        self.model = step.model
        self._step = step

    def forward(self, batch: Any, buffers: dict[str, torch.Tensor]) -> Any:
        if self._step.loss is not None:
            result = self._step.loss(self.model, batch)
        elif isinstance(batch, dict):
            result = self.model(**batch)
        else:
            result = self.model(*batch) if isinstance(batch, tuple | list) else self.model(batch)
        # A buffer the model replaced by a new tensor is written back, so that the step updates it in place.
        with torch.no_grad():
            for name, now in self.model.named_buffers():
                if now is not buffers[name]:
                    buffers[name].copy_(now)
        return result


def trace(
    model: torch.nn.Module,
    batch: Any,
    loss: Loss | None,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device | None,
) -> Traced:
    """Record one step without running it: no memory is allocated, nothing the user owns is changed.

    In-place operations stay what they are, and Python numbers read from tensors (Adam's step counter, learning rates)
    are recorded as scalars, so that the graph computes what the ordinary step computes, to the bit.

    Raises:
        CaptureError: see olla.capture.
    """
    leaves, spec, leaf_names = batch_leaves(batch)
    step = _Step(model, loss, optimizer, leaves, spec)
    named = [*model.named_parameters(), *model.named_buffers()]
    named += [(n, leaf) for n, leaf in zip(leaf_names, leaves, strict=True) if isinstance(leaf, torch.Tensor)]
    where = step_device(named, device)
    shapes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=False)
    mode = FakeTensorMode(shape_env=shapes, static_shapes=True, allow_non_fake_inputs=True)
    _add_inputs(step, Fakes(mode, where), mode, leaf_names)
    with contextlib.ExitStack() as stack:
        no_code = _use_lazy_graph_module(True)  # nobody needs the module's Python code
        for context in (_unchanged(model), _plain_recurrent_layers(model), torch.random.fork_rng(devices=[]), no_code):
            stack.enter_context(context)
        stack.enter_context(failures.explained(lambda: step.phase))
        module = make_fx(lambda *tensors: _run(step, tensors), tracing_mode="fake")(*step.fakes)
        stack.enter_context(mode)
        updates.copy_updates(module, step.updates, len(step.outputs))
    assert step.structure is not None
    return Traced(module, step.inputs, step.outputs, step.structure)


def _add_inputs(step: _Step, fakes: Fakes, mode: FakeTensorMode, leaf_names: list[str]) -> None:
    for name, parameter in step.model.named_parameters():
        step.add(Input("parameter", name, name), fakes.of(parameter))
    for name, buffer in step.model.named_buffers():
        step.add(Input("buffer", name, name), fakes.of(buffer))
    if step.optimizer is not None:
        _add_optimizer_inputs(step, step.optimizer, fakes, mode)
    seen: set[int] = set()
    for i, leaf in enumerate(step.batch):
        if isinstance(leaf, torch.Tensor) and id(leaf) not in seen:
            seen.add(id(leaf))
            step.add(Input("input", leaf_names[i], i), fakes.of(leaf))


def _add_optimizer_inputs(step: _Step, optimizer: torch.optim.Optimizer, fakes: Fakes, mode: FakeTensorMode) -> None:
    names = {id(p): n for n, p in step.model.named_parameters()}
    optimizers.check(optimizer, names)
    for number, group in enumerate(optimizer.param_groups):
        step.add(Input("rate", f"lr of group {number}", number), fakes.of(optimizers.rate_tensor(group["lr"])))
        for parameter in group["params"]:
            if not parameter.requires_grad:
                continue
            name = names[id(parameter)]
            state = optimizers.existing_state(optimizer, parameter, name)
            exists = bool(state)
            if not exists:
                with mode:
                    state = optimizers.first_state(optimizer, group, fakes.of(parameter))
            for entry, value in state.items():
                if value is not None:
                    fake = fakes.of(value) if exists else value
                    step.add(Input("optimizer_state", f"{entry} of {name}", name, entry, exists), fake)


def _run(step: _Step, tensors: _Tensors) -> list[torch.Tensor]:
    """The traced function: one step on the given tensors, in the order of step.inputs."""
    parameters: dict[Any, torch.Tensor] = step.values(tensors, "parameter")
    buffers: dict[Any, torch.Tensor] = step.values(tensors, "buffer")
    of_leaf = {id(step.batch[int(i)]): t for i, t in step.values(tensors, "input").items()}
    batch = pytree.tree_unflatten([of_leaf.get(id(leaf), leaf) for leaf in step.batch], step.batch_spec)
    lent = {f"model.{name}": t for name, t in (parameters | buffers).items()}
    with contextlib.nullcontext() if step.loss is not None else torch.no_grad():
        result = torch.func.functional_call(_Forward(step), lent, (batch, buffers))
    _mark("forward")
    step.structure = Structure.of(result)
    if step.loss is None:
        return _outputs(step, result)

    first, *rest = result if isinstance(result, tuple | list) else (result,)
    wanted = {name: p for name, p in parameters.items() if p.requires_grad}
    failures.check_loss(first, wanted)
    step.phase = "backward"
    grads = dict(zip(wanted, torch.autograd.grad(first, list(wanted.values()), allow_unused=True), strict=True))
    _mark("backward")
    failures.check_gradients(grads)
    outputs = [first.detach(), *_outputs(step, rest, "output")]
    step.outputs.insert(0, "loss")
    if step.optimizer is None:
        found = {name: g for name, g in grads.items() if g is not None}
        step.outputs += [f"gradient of {name}" for name in found]
        return [*outputs, *found.values()]

    step.phase = "update"
    return [*outputs, *_update(step, step.optimizer, tensors, grads)]


def _outputs(step: _Step, result: Any, name: str = "output") -> list[torch.Tensor]:
    """Detach the tensors in a result of any structure, and note what they are called."""
    with_paths, _ = pytree.tree_flatten_with_path(result)
    found = [
        (name + pytree.keystr(path).replace("'", ""), t.detach())
        for path, t in with_paths
        if isinstance(t, torch.Tensor)
    ]
    step.outputs += [n for n, _ in found]
    return [t for _, t in found]


def _update(step: _Step, optimizer: torch.optim.Optimizer, tensors: _Tensors, grads: _Gradients) -> list[torch.Tensor]:
    """Trace the optimizer's step; where it treats parameters one by one, only one update of each kind.

    Returns:
        Gradient i belongs to step.updates[i].
    """
    positions_of: dict[str | int, list[int]] = {}  # of each parameter and its state, the parameter first
    for position, i in enumerate(step.inputs):
        if i.kind in ("parameter", "optimizer_state"):
            positions_of.setdefault(i.key, []).append(position)
    names = {id(p): n for n, p in step.model.named_parameters()}
    rates = step.values(tensors, "rate")
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        is_tensor = isinstance(group["lr"], torch.Tensor)
        groups.append({**group, "lr": rates[number] if is_tensor else rates[number].item()})
    members = [
        [names[id(p)] for p in g["params"] if grads.get(names[id(p)]) is not None] for g in optimizer.param_groups
    ]
    _mark("update")
    if not optimizers.updates_are_independent(optimizer):
        wanted = [(group, [positions_of[n] for n in names_in]) for group, names_in in zip(groups, members, strict=True)]
        _run_optimizer(step, optimizer, wanted, tensors, grads)
        _mark("update")
        return []

    templates: dict[Any, int] = {}
    for number, group in enumerate(groups):
        for name in members[number]:
            positions, gradient = positions_of[name], grads[name]
            assert gradient is not None
            entries = [step.inputs[p].entry for p in positions]
            key = updates.signature(number, [*(tensors[p] for p in positions), gradient], entries)
            traced = key not in templates
            template = templates.setdefault(key, len(templates))
            step.updates.append(updates.Update(positions, template, traced))
            if traced:
                _run_optimizer(step, optimizer, [(group, [positions])], tensors, grads)
                _mark("update", template)
    return [g for names_in in members for name in names_in if (g := grads[name]) is not None]


def _run_optimizer(
    step: _Step,
    optimizer: torch.optim.Optimizer,
    members: list[tuple[dict[str, Any], list[list[int]]]],
    tensors: _Tensors,
    grads: _Gradients,
) -> None:
    """Let the optimizer update some parameters: those whose positions stand beside each group's settings."""
    groups, state, parameters = [], {}, []
    for group, positions in members:
        groups.append({**group, "params": [tensors[p[0]] for p in positions]})
        for first, *rest in positions:
            parameter = tensors[first]
            parameters.append(parameter)
            parameter.grad = grads[step.inputs[first].key]
            state[parameter] = {step.inputs[p].entry: tensors[p] for p in rest}
    try:
        optimizers.stand_in(optimizer, groups, state).step()
    finally:
        for parameter in parameters:
            parameter.grad = None


def _mark(kind: str, template: int | None = None) -> None:
    """Give every node recorded since the last call its kind, and the template it belongs to."""
    mode = get_proxy_mode()
    assert mode is not None
    for node in reversed(mode.tracer.graph.nodes):
        if KIND in node.meta:
            break
        node.meta[KIND] = kind
        if template is not None:
            node.meta[updates.TEMPLATE] = template


@contextlib.contextmanager
def _plain_recurrent_layers(model: torch.nn.Module) -> Iterator[None]:
    """Keep recurrent layers on a CPU from oneDNN, whose operator hands its backward a workspace no graph can carry."""
    enabled = torch.backends.mkldnn.enabled
    if any(isinstance(module, torch.nn.RNNBase) for module in model.modules()):
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = enabled


@contextlib.contextmanager
def _unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Undo what a forward pass on fake tensors leaves in the modules: caches, replaced buffers, counters."""
    saved = [(m, dict(m.__dict__), dict(m._buffers), dict(m._parameters)) for m in model.modules()]
    try:
        yield
    finally:
        for module, attributes, buffers, parameters in saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
            module._parameters.clear()
            module._parameters.update(parameters)
