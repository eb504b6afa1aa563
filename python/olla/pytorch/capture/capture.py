"""olla.capture: the training step of a PyTorch model as an olla.Graph. Importing this module does not import torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from olla.errors import MISUSE, CaptureError
from olla.graph import Graph

if TYPE_CHECKING:
    import torch
    from torch import fx

    from olla.pytorch.capture.inputs import Input
    from olla.pytorch.capture.results import Gradients, Structure
    from olla.pytorch.guards.reads import Reads
    from olla.pytorch.ranks.reduced import Left

OLDEST_TORCH = (2, 11)


@dataclass(frozen=True, eq=False)
class Captured:
    """A captured training step: what olla plans, and what is needed to run it.

    Attributes:
        graph: the whole step. Op i is ``nodes[i]``.
        module: the step in ATen operators. It takes one tensor per entry of ``inputs``, returns one per entry of
            ``outputs``, and changes parameters, buffers and optimizer state in place.
        nodes: of op i: the node with the kernel, then the nodes without one that follow from it (views, tuple items,
            numbers).
        prologue: nodes without kernel that follow from the inputs alone; they come before every op.
        tensors: the tensors of the graph that a node's value lives in.
        inputs: what the module takes.
        outputs: what the module returns: ``"loss"``, ``"output..."``, ``"gradient of ..."``.
        structure: of what the loss function or the model returned; the first of ``outputs`` are its tensors.
        seconds: by stage: ``trace``, ``fold``.
        reads: what the step read from Python while it was captured.
        left: side effects of a DistributedDataParallel beside the operators; None: the model is none.
        gradients: what the step does to ``.grad``.
        original: the step as it was before its losses were put in chunks of rows; None: this is how it was captured.
    """

    graph: Graph
    module: fx.GraphModule
    nodes: Sequence[tuple[fx.Node, ...]]
    prologue: Sequence[fx.Node]
    tensors: dict[fx.Node, tuple[int, ...]]
    inputs: Sequence[Input]
    outputs: Sequence[str]
    structure: Structure
    seconds: dict[str, float] = field(default_factory=dict)
    original: Captured | None = None
    reads: Reads | None = None
    left: Left | None = None
    gradients: Gradients | None = None

    def __repr__(self) -> str:
        return f"Captured({self.graph.name!r}: {self.graph.num_ops} ops, {self.graph.num_tensors} tensors)"

    @property
    def device_type(self) -> str:
        """Where the step runs, "cuda" for example; a learning rate is on the CPU everywhere."""
        import torch

        values = (node.meta.get("val") for node in self.module.graph.nodes)
        kinds = (value.device.type for value in values if isinstance(value, torch.Tensor))
        return next((kind for kind in kinds if kind != "cpu"), "cpu")


def capture(
    model: torch.nn.Module,
    batch: Any,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    step: Callable[[Any, Any, Any], Any] | None = None,
    device: torch.device | str | None = None,
    name: str = "",
    checks: str = "run",
    world_size: int | None = None,
    parallel: str | None = None,
    keep_gradients: bool = False,
) -> Captured:
    """Capture one step of a model as a graph; nothing is run and no memory is allocated.

    The step is ``loss(model, batch)``, its gradients and the optimizer's update, as the ordinary loop computes them.
    Model, optimizer and random state stay as they are. The model may be real, on the meta device, or of fake tensors.

    Args:
        model: in the mode (train or eval) it shall run in; in a DistributedDataParallel, in FSDP2, or in neither.
        batch: what the loss function takes: tensors in any structure of dicts, lists and tuples. Shapes and types are
            captured, values are not.
        optimizer: over parameters of the model; SGD, Adam, AdamW, or any other that keeps its state in tensors and took
            a step before. Learning rates are inputs of the captured step, all other settings are constants. None:
            forward and backward only, and the gradients are outputs.
        loss: ``loss(model, batch)`` returns the loss, or a tuple that starts with it. None: inference,
            ``model(**batch)`` for a dict, ``model(*batch)`` for a tuple or list, ``model(batch)`` for a tensor.
        step: ``step(model, optimizer, batch)``, the body of a training loop, in place of ``loss``: zero_grad(), forward
            and backward passes, what is done to gradients, optimizer.step(). What it returns are the outputs.
        device: where a model on the meta device is meant to run; the CPU if not given.
        name: of the graph; the model's class if not given.
        checks: for branches on tensor values of which one outcome only raises an error (``assert x.min() >= 0``, the
            validation of torch.distributions): "run", the captured step checks and raises too, or "skip".
        world_size: how many ranks run the step; the batch is that of one of them. Nothing is launched for it, and the
            captured step is that of the first rank: the others hold no more.
        parallel: what the ranks share, with world_size: "fsdp", every parameter, gradient and optimizer state is in
            shards of dim 0, as FSDP2 has them, and gathered where it is used; "ddp", every rank has all, and gradients
            are averaged.
        keep_gradients: whether gradients that the optimizer has used stay in ``.grad`` until the next step, as in an
            ordinary loop, and are outputs; without, each one's memory is free right after its update.

    Returns:
        The captured step; ``.graph`` is its olla.Graph.

    Raises:
        CaptureError: the step cannot be captured; the message says what to change.
        ValueError: an option is out of its range.

    Complexity: one traced forward, backward and update: about 1 ms per operator.

    Example:
        >>> import torch, olla
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loss = lambda model, x: model(x).square().mean()
        >>> captured = olla.capture(model, torch.ones(2, 8), optimizer=optimizer, loss=loss)
        >>> captured.outputs
        ['loss']
        >>> [captured.graph.op_kinds.count(kind) for kind in ("forward", "backward", "update")]
        [3, 7, 2]
    """
    _require_torch()
    import torch

    from olla.pytorch.capture import exclusive, optimizers
    from olla.pytorch.capture.loop import AddsUpError
    from olla.pytorch.capture.storages import fold
    from olla.pytorch.capture.trace import trace
    from olla.pytorch.ranks.wrapped import is_wrapped
    from olla.pytorch.sharded.fully import idle_hooks, ranks_of_model
    from olla.pytorch.sharded.group import ranks_of, require_parallel

    if not isinstance(model, torch.nn.Module):
        raise CaptureError(f"model is a {type(model).__name__}, expected a torch.nn.Module", rule=MISUSE)
    _require_functions(optimizer, loss, step)
    require_choice(checks)
    require_parallel(world_size, parallel, step)
    where = None if device is None else torch.device(device)
    start = time.perf_counter()
    with (
        exclusive.collecting_no_garbage(),
        exclusive.bounded_memos(),
        exclusive.Silence(),
        ranks_of(world_size, parallel) as ranks,
    ):
        if ranks is None:
            is_elementwise = optimizer is not None and optimizers.updates_are_elementwise(optimizer)
            ranks = ranks_of_model(model, loss is not None and optimizer is not None, is_elementwise)
        with idle_hooks(model), exclusive.capture() as current:
            of_step = (current, model, batch, loss, optimizer, where, step, checks == "run", ranks, keep_gradients)
            try:
                traced = trace(*of_step)
            except AddsUpError:
                if is_wrapped(model):
                    raise
                traced = trace(*of_step, adds_up=True)
        middle = time.perf_counter()
        inside = model if traced.left is None else model.module
        folded = fold(traced.module, traced.inputs, name or type(inside).__name__)
    seconds = {"trace": middle - start, "fold": time.perf_counter() - middle}
    return Captured(**(vars(traced) | vars(folded)), seconds=seconds)  # of the inputs, those that folding has left


def require_choice(checks: str) -> None:
    """Raise a ValueError unless ``checks`` is "run" or "skip"."""
    if checks not in ("run", "skip"):
        raise ValueError(f"checks is {checks!r}, expected 'run' or 'skip'")


def _require_functions(optimizer: Any, loss: Any, step: Any) -> None:
    for name, function, of in (("loss", loss, "model and batch"), ("step", step, "model, optimizer and batch")):
        if function is not None and not callable(function):
            raise CaptureError(f"{name} is a {type(function).__name__}, expected a function of {of}", rule=MISUSE)
    if loss is not None and step is not None:
        raise CaptureError(
            "both loss and step are given: pass loss for the ordinary loop, step for the body of your own",
            rule=MISUSE,
        )
    if step is not None and optimizer is None:
        raise CaptureError(
            "a step function needs an optimizer: pass optimizer=..., or loss=... to leave gradients in .grad",
            rule=MISUSE,
        )
    if optimizer is not None and loss is None and step is None:
        raise CaptureError(
            "an optimizer needs a loss: pass loss=lambda model, batch: ..., or optimizer=None for inference",
            rule=MISUSE,
        )


def _require_torch() -> None:
    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise CaptureError(
            f"olla.capture needs PyTorch {oldest} or later, and {torch.__version__} is installed: pip install -U torch"
        )
