"""One training step as a flat ATen graph: forward, autograd.grad and the stock optimizer, recorded on fake tensors."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from olla.errors import CaptureError
from olla.pytorch.capture import constants, costs, exclusive, generator, optimizers
from olla.pytorch.capture.inputs import Fakes, Input, batch_leaves, step_device
from olla.pytorch.capture.loop import Body, GraphLoss, Loop, Loss, check_stale, lent_optimizer, ordinary, require_plain
from olla.pytorch.capture.recurrent import plain_recurrent_layers
from olla.pytorch.capture.results import Gradients, Structure, with_own_storage
from olla.pytorch.capture.substitutes import Substitution
from olla.pytorch.capture.updates import TEMPLATE, Updates, copy_updates
from olla.pytorch.checks import checks, failures
from olla.pytorch.guards.object_parts import hooks_of
from olla.pytorch.guards.reads import Reads
from olla.pytorch.ranks.reduced import DataParallel, Left
from olla.pytorch.ranks.wrapped import ATTRIBUTES, is_wrapped
from olla.pytorch.sharded.fully import is_sharded, local
from olla.pytorch.sharded.ranks import ShardedRanks, settle
from olla.pytorch.sites.sites import Sites

_Tensors = tuple[torch.Tensor, ...]
KIND = "olla_kind"  # key of node.meta: forward, backward or update


@dataclass
class Traced:
    """A recorded step: placeholder i of the module takes inputs[i], element i of its result is called outputs[i].

    The first outputs fill `structure`, what the loss function or the model returned; `reads`, what it read from Python;
    `gradients`, what it does to ``.grad``.
    """

    module: fx.GraphModule
    inputs: list[Input]
    outputs: list[str]
    structure: Structure
    reads: Reads
    left: Left | None
    gradients: Gradients


@dataclass
class _Step:
    """Everything the traced function needs, by name, beside its tensors."""

    capture: exclusive.ExclusiveCapture
    model: torch.nn.Module
    body: Body | None  # None: inference
    is_ordinary: bool  # the body is not the user's own
    optimizer: torch.optim.Optimizer | None
    batch: list[Any]  # leaves; tensors among them are replaced by inputs
    batch_spec: pytree.TreeSpec
    ranks: ShardedRanks | None  # that share the step, where that is not for the user's own code to say
    keep_gradients: bool
    graph: GraphLoss | None  # of Dynamo's; None: the user's own code runs
    inputs: list[Input] = field(default_factory=list)
    fakes: list[torch.Tensor] = field(default_factory=list)
    stale: dict[str, torch.Tensor] = field(default_factory=dict)  # see Loop
    outputs: list[str] = field(default_factory=list)
    structure: Structure = field(init=False)
    reads: Reads = field(init=False)
    loop: Loop | None = None
    updates: Updates | None = None
    parallel: DataParallel | None = None
    gradients: Gradients = field(default_factory=Gradients)

    @property
    def phase(self) -> str:
        return "forward" if self.loop is None else self.loop.phase

    def add(self, entry: Input, fake: torch.Tensor) -> None:
        self.inputs.append(entry)
        self.fakes.append(fake)

    def values(self, tensors: _Tensors, kind: str) -> dict[str | int, torch.Tensor]:
        return {i.key: t for i, t in zip(self.inputs, tensors, strict=True) if i.kind == kind}


def trace(
    capture: exclusive.ExclusiveCapture,
    model: torch.nn.Module,
    batch: Any,
    loss: Loss | None,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device | None,
    body: Body | None,
    run_checks: bool,
    ranks: ShardedRanks | None,
    keep_gradients: bool = False,
    adds_up: bool = False,
) -> Traced:
    """Record one step without running it: no memory is allocated, nothing the user owns is changed.

    In-place operations stay what they are, and Python numbers read from tensors (Adam's step counter, learning rates)
    are recorded as scalars, so that the graph computes what the ordinary step computes, to the bit.

    Args:
        capture: under way; one thread captures at a time, and signals such as Ctrl-C wait for the next operator.
        model, batch, loss, optimizer, device, body: see olla.capture, which calls the last one ``step``; the loss may
            be a `GraphLoss`.
        run_checks: whether the recorded step makes the checks of values that the step makes.
        ranks: that share the step; None: its own code says so.
        keep_gradients: whether gradients that the optimizer has used stay in ``.grad``.
        adds_up: whether the body adds to gradients that are there before it; they are inputs then.

    Raises:
        AddsUpError: the body does, and adds_up is not set.
        CaptureError: see olla.capture.
    """
    graph = loss if isinstance(loss, GraphLoss) else None
    leaves, spec, leaf_names = batch_leaves(batch, None if graph is None else graph.names)
    body_of = ordinary(loss) if loss is not None and (graph is None or graph.trains) else body
    failures.check_modes(body_of is not None)
    failures.check_modules(model)
    named = [(name, local(t)) for name, t in (*model.named_parameters(), *model.named_buffers())]
    failures.check_memory((name, t, True) for name, t in named)
    of_user = (model, body_of, body is None, optimizer, leaves, spec)
    step = _Step(capture, *of_user, ranks, keep_gradients, graph)
    named += [(n, leaf) for n, leaf in zip(leaf_names, leaves, strict=True) if isinstance(leaf, torch.Tensor)]
    if step.body is not None:
        failures.check_inputs(zip(leaf_names, leaves, strict=True))
    shapes = checks.Shapes(_run.__code__, run_checks, lambda: step.phase)
    mode = exclusive.InterruptedMode(shape_env=shapes, static_shapes=True, allow_non_fake_inputs=True)
    mode.check = capture.check
    held = ranks.hold(step.model.named_parameters(), optimizer) if ranks else None
    fakes = Fakes(mode, step_device(named, device), held)
    _add_inputs(step, fakes, mode, leaf_names)
    step.reads = reads = _reads(step, loss)
    if is_wrapped(model):
        step.parallel = DataParallel(model)
        reads.names_are_read(ATTRIBUTES)
    if step.body is not None:
        _add_gradients(step, fakes, mode, adds_up)
    with contextlib.ExitStack() as stack:
        stack.callback(shapes.forget)
        stack.enter_context(exclusive.unchanged(model, leaves))
        for context in (exclusive.checkpoints, plain_recurrent_layers, constants.for_transformers, generator.traced):
            stack.enter_context(context(capture))
        stack.enter_context(_use_lazy_graph_module(True))  # nobody needs the module's Python code
        if parallel := step.parallel:
            stack.enter_context(capture.replaced(DistributedDataParallel, "forward", parallel.forward))
        explained = failures.explained(lambda: step.phase, model)
        unwatched = exclusive.unwatched_operators(capture, Sites(lambda: capture.mode, model, _run.__code__).note)
        for block in (exclusive.released(capture), reads.told(), explained, checks.traced(), reads.undone(), unwatched):
            stack.enter_context(block)
        # Puts back what torch writes into every node it records from now on: checkpoints leave their policy there.
        stack.enter_context(fx.traceback.preserve_node_meta(fx.traceback.should_preserve_node_meta))
        module = make_fx(lambda *tensors: _run(step, tensors), tracing_mode="fake")(*step.fakes)
        if shapes.refused is not None:
            raise shapes.refused
        _finish(module, step, named, run_checks)
        stack.enter_context(mode)
        copy_updates(module, step.updates.made if step.updates else [], len(step.outputs))
    reads.forget()
    left = parallel.left if parallel else None
    return Traced(module, step.inputs, step.outputs, step.structure, reads, left, step.gradients)


def _finish(module: fx.GraphModule, step: _Step, named: list[tuple[str, torch.Tensor]], run_checks: bool) -> None:
    """Clean a module as it was recorded, and check that it can be run as often as one likes."""
    settle(module)
    generator.drop_unneeded(module, costs.is_random)
    if not run_checks:
        checks.drop(module)
    constants.fix_types(module)
    check_stale(module, step.stale)
    left = ((n, p.grad) for n, p in step.model.named_parameters() if p.grad is not None)
    dense = [(f"the gradient of {n}", local(grad)) for n, grad in left if grad.layout is torch.strided]
    failures.check_constants(module, [*named, *dense])
    failures.check_recomputed(module)


def _reads(step: _Step, loss: Loss | None) -> Reads:
    """Begin to record the Python state that the step reads; for a graph of Dynamo's, only its optimizer's."""
    roots: dict[str, Any] = {"the optimizer": step.optimizer}
    if step.graph is None:
        roots |= {"model": step.model}
        roots |= {"the loss function": loss} if step.is_ordinary else {"the step function": step.body}
    states = step.optimizer.state.values() if step.optimizer is not None else ()
    state = [t for entries in states for t in entries.values() if isinstance(t, torch.Tensor)]
    inputs = [*step.model.parameters(), *step.model.buffers(), *state]
    return Reads(step.model, roots, [*inputs, *(leaf for leaf in step.batch if isinstance(leaf, torch.Tensor))])


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
        for entry in optimizers.rates(group):
            fake = fakes.of(optimizers.rate_tensor(group, entry))
            step.add(Input("rate", f"{entry} of group {number}", number, entry), fake)
        made: dict[torch.dtype, optimizers.State] = {}
        for parameter in group["params"]:
            if not parameter.requires_grad:
                continue
            name = names[id(parameter)]
            state = optimizers.existing_state(optimizer, parameter, name)
            exists = bool(state)
            if not exists:
                with mode:
                    state = optimizers.first_state_of_fake(optimizer, group, fakes.of(parameter), made)
            for entry, value in state.items():
                if value is not None:
                    fake = fakes.of(value) if exists else value
                    step.add(Input("optimizer_state", f"{entry} of {name}", name, entry, exists), fake)


def _own(step: _Step) -> frozenset[str]:
    """Return the names of the parameters that the optimizer updates."""
    names = {id(p): n for n, p in step.model.named_parameters()}
    groups = step.optimizer.param_groups if step.optimizer is not None else ()
    return frozenset(names[id(p)] for group in groups for p in group["params"])


def _add_gradients(step: _Step, fakes: Fakes, mode: FakeTensorMode, adds_up: bool) -> None:
    """Add the gradients that are there as inputs, if the step may add to them; see Loop for the others."""
    own = _own(step)
    if not step.is_ordinary and not adds_up:
        with mode:
            step.stale = {
                name: torch.empty_like(fakes.of(p))
                for name, p in step.model.named_parameters()
                if p.requires_grad or p.grad is not None
            }
        return
    if step.ranks is not None or is_wrapped(step.model):
        return  # see Left.begin
    for name, parameter in step.model.named_parameters():
        if parameter.grad is not None and not (step.is_ordinary and (name in own or not parameter.requires_grad)):
            require_plain(name, parameter)
            step.add(Input("gradient", f"gradient of {name}", name), fakes.of(parameter.grad))


def _run(step: _Step, tensors: _Tensors) -> list[torch.Tensor]:
    """The traced function: one step on the given tensors, in the order of step.inputs."""
    try:
        return _record(step, tensors)
    finally:
        for tensor in tensors:
            tensor.grad = None  # it leads back to the tensor, by ways that the garbage collector does not see


def _record(step: _Step, tensors: _Tensors) -> list[torch.Tensor]:
    """Record the user's own code on stand-ins, and return what the step returns."""
    step.capture.mode = get_proxy_mode()
    parameters = {str(name): p for name, p in step.values(tensors, "parameter").items()}
    batch = pytree.tree_unflatten(step.batch, step.batch_spec)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(step.body is not None))
        whole = step.ranks.whole(parameters) if step.ranks else parameters
        stand_ins: dict[Any, torch.Tensor] = {**whole, **step.values(tensors, "buffer")}
        pairs = [(t, stand_ins[name]) for name, t in (*step.model.named_parameters(), *step.model.named_buffers())]
        pairs += [(step.batch[int(i)], t) for i, t in step.values(tensors, "input").items()]
        if step.body is not None:
            _enter_loop(step, tensors, parameters, stack)
        lent = Substitution(pairs, step.reads, step.loop.see if step.loop is not None else None)
        stack.callback(lent.leaves.restore)
        hooks = [[key for key, _ in hooks_of(t)] for _, t in pairs]
        stack.enter_context(lent.in_functions(step.capture))
        stack.enter_context(lent)
        with step.reads.recording(step.capture.is_here):
            result = _call(step, batch if step.graph is None else lent.lend)
        result = lent.stand_ins_in(result)
        if step.loop is not None:
            with torch._C.DisableTorchFunction():
                left, step.gradients = step.loop.left(lent.leaves)
            if left and is_sharded(step.model):
                raise CaptureError(
                    f"{next(iter(left))} gets a gradient and is updated by no optimizer of the step, which leaves no "
                    "gradients of shards: freeze it (requires_grad_(False)), or give it to the optimizer."
                )
    failures.check_gradients_followed(step.model.named_parameters())
    if [[key for key, _ in hooks_of(t)] for _, t in pairs] != hooks:
        raise CaptureError(
            "the step registers a hook on a parameter, a buffer or the batch and leaves it there: register it before "
            "the step, or remove it with handle.remove()"
        )
    _mark("forward")
    step.reads.check(lambda value: constants.is_constant(lent.stand_ins_in(value)))
    step.structure = Structure.of(result)
    if step.loop is None:
        return with_own_storage(_outputs(step, result), tensors)
    if step.is_ordinary:
        first, *rest = result if isinstance(result, tuple | list) else (result,)
        step.outputs.append("loss")
        outputs = with_own_storage([first.detach(), *_outputs(step, rest)], tensors)
    else:
        outputs = with_own_storage(_outputs(step, result), tensors)
    assert step.updates is not None or step.optimizer is None
    step.outputs += [f"gradient of {name}" for name in left]
    return [*outputs, *left.values(), *(step.updates.gradients if step.updates is not None else ())]


def _call(step: _Step, batch: Any) -> Any:
    """Run the user's own code: it sees the user's own tensors, and their stand-ins do the work."""
    before, parameters = dict(step.model.named_buffers()), dict(step.model.named_parameters())
    if step.body is not None:
        result = step.body(step.model, step.optimizer, batch)
    elif step.graph is not None:
        result = step.graph(step.model, batch)
    elif isinstance(batch, dict):
        result = step.model(**batch)
    else:
        result = step.model(*batch) if isinstance(batch, tuple | list) else step.model(batch)
    # A buffer the model replaced by a new tensor is written back, so that the step updates it in place.
    with torch.no_grad():
        failures.check_replaced(step.model, parameters, before)
        for name, now in step.model.named_buffers():
            if now is not before[name]:
                before[name].copy_(now)
    return result


def _enter_loop(
    step: _Step, tensors: _Tensors, parameters: dict[str, torch.Tensor], stack: contextlib.ExitStack
) -> None:
    """Watch the body of the loop, and lend it the optimizer; the user's hooks on gradients run in it."""
    if step.ranks:
        step.ranks.average(parameters)
    for name, original in step.model.named_parameters():
        for hook in (original._backward_hooks or {}).values():
            parameters[name].register_hook(hook)  # type: ignore[no-untyped-call]
        for hook in (original._post_accumulate_grad_hooks or {}).values():
            of_original: Any = functools.partial(lambda hook, parameter, _: hook(parameter), hook, original)
            parameters[name].register_post_accumulate_grad_hook(of_original)  # type: ignore[no-untyped-call]
    if step.optimizer is not None:
        names = {id(p): n for n, p in step.model.named_parameters()}
        step.updates = Updates(step.optimizer, step.inputs, tensors, names, lambda template: _mark("update", template))
    waiting = frozenset(name for name, p in step.model.named_parameters() if p.grad is not None)
    present = {str(name): t for name, t in step.values(tensors, "gradient").items()}
    step.loop = Loop(
        parameters, step.stale, present, waiting, _own(step), step.updates, _mark, step.capture, step.is_ordinary,
        step.keep_gradients, step.parallel,
    )  # fmt: skip
    stack.enter_context(step.loop.run())
    if step.optimizer is not None and step.updates is not None:
        lent = lent_optimizer(step.optimizer, step.updates.groups, step.updates.state, step.loop.step)
        stack.enter_context(lent)


def _outputs(step: _Step, result: Any) -> list[torch.Tensor]:
    """Detach the tensors in a result of any structure, and note what they are called."""
    found = [(path, t) for path, t in pytree.tree_flatten_with_path(result)[0] if isinstance(t, torch.Tensor)]
    step.outputs += ["output" + pytree.keystr(path).replace("'", "") for path, _ in found]
    return [t.detach() for _, t in found]


def _mark(kind: str, template: int | None = None) -> None:
    """Give every node recorded since the last call its kind, and the template it belongs to."""
    mode = get_proxy_mode()
    assert mode is not None
    for node in reversed(mode.tracer.graph.nodes):
        if KIND in node.meta:
            break
        node.meta[KIND] = kind
        if template is not None:
            node.meta[TEMPLATE] = template
