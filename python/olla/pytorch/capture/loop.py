"""The body of a training loop under trace: backward(), zero_grad() and optimizer.step() work on lent tensors."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.optim import optimizer as torch_optimizer

from olla.errors import CaptureError
from olla.pytorch.capture import optimizers
from olla.pytorch.capture.exclusive import ExclusiveCapture, replaced
from olla.pytorch.capture.results import Gradients
from olla.pytorch.capture.substitutes import Leaves, is_plain
from olla.pytorch.capture.updates import Updates
from olla.pytorch.checks import failures
from olla.pytorch.guards.values import MISSING
from olla.pytorch.ranks.reduced import DataParallel

Loss = Callable[[Any, Any], Any]
Body = Callable[[Any, Any, Any], Any]
_Named = dict[str, torch.Tensor]
Lend = Callable[[Any], Any]  # returns a value with the stand-ins of the tensors in it
_OUR_HOOK = -1  # its key; those of torch count from 0


@dataclass(frozen=True)
class GraphLoss:
    """A loss that is a graph of Dynamo's, which guards what it has read. In place of the batch it takes a `Lend`.

    Attributes:
        run: runs the graph; returns the loss, and what else the step gives back.
        inputs: of the graph, the user's own.
        names: of those that are neither parameters nor buffers, which are the batch of the capture.
        trains: whether it is a loss; otherwise it is inference, and all that it returns is given back.
    """

    run: Callable[[Any], Any]
    inputs: Any
    names: tuple[str, ...]
    trains: bool

    def __call__(self, model: Any, lend: Lend) -> Any:
        return self.run(lend(self.inputs))


def ordinary(loss: Loss) -> Body:
    """Return the body of the ordinary loop around a loss function: backward and, with an optimizer, its step."""

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, batch: Any) -> Any:
        result = loss(model, batch)
        first = result[0] if isinstance(result, tuple | list) else result
        wanted = {name: p for name, p in model.named_parameters() if p.requires_grad}
        failures.check_loss(first, wanted)
        first.backward()
        if optimizer is not None:
            optimizer.step()
        return result

    return train


class AddsUpError(CaptureError):
    """The step uses gradients that were there before it: they have to be inputs of the captured step."""


@dataclass(eq=False)
class Loop:
    """One pass through the body of a loop.

    ``stale`` tensors stand for gradients that the previous pass may have left. If the body drops them before its
    backward pass, and uses its own in an update, gradients live inside the step and none is left. If it adds to them,
    they have to be inputs of the step: an AddsUpError says so.
    """

    _parameters: _Named  # name -> the tensor that stands for the parameter
    _stale: _Named  # name -> a tensor of the parameter's shape; empty if the body is not the user's own
    _present: _Named  # name -> what stands for a gradient that is there, and that the step adds to
    _waiting: frozenset[str]  # parameters that have a gradient which no tensor in _present stands for
    _own: frozenset[str]  # parameters that the optimizer updates
    _updates: Updates | None  # traces those of the optimizer; None: there is no optimizer
    _mark: Callable[[str], None]  # called with a kind for all nodes recorded since its last call
    _capture: ExclusiveCapture  # that runs the body
    _is_ordinary: bool  # the body is not the user's own: it begins with optimizer.zero_grad()
    _keeps_used: bool  # gradients that the optimizer has used stay in .grad
    _parallel: DataParallel | None = None  # reduces gradients over ranks; None: nothing does
    phase: str = field(default="forward", init=False)
    _is_seen: bool = field(default=False, init=False)  # the body looks at gradients, or its hooks do
    _added_to: set[str] = field(default_factory=set, init=False)  # of the stale ones: the body did not drop them
    _used: frozenset[str] = field(default=frozenset(), init=False)  # names updated since the last backward pass
    _depth: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self._parallel is not None:
            self._parallel.watch(self._parameters, self._capture.mode.tracer.graph)

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Run the body inside this context.

        Raises:
            CaptureError: the body does what a captured step cannot do.
        """
        for name, gradient in (*self._stale.items(), *self._present.items()):
            self._parameters[name].grad = gradient
        with self._watched_backward(), self._watched_optimizers():
            yield
        self._mark("backward" if self.phase == "backward" else "forward")
        if self._parallel is not None:
            self._parallel.check_finished()

    def see(self) -> None:
        """Take note that the body, or a hook, looks at a gradient."""
        self._is_seen = True

    def left(self, leaves: Leaves) -> tuple[_Named, Gradients]:
        """Return the gradients that the step leaves, in the order of the parameters, and what it does to others.

        Raises:
            AddsUpError: some of them add up over steps.
        """
        outputs: _Named = {}
        dropped, cleared = [], []
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            if self._is_stale(name):
                self._require_untouched(name)
                continue
            if name in self._added_to:
                if gradient is not None or name in self._waiting:
                    raise self._adds_up(name)
                continue
            if name in self._stale:
                dropped.append(name)
                gradient = None if name in self._used and not self._keeps_used else gradient
            elif self._is_ordinary and name in self._own:
                gradient = gradient if self._keeps_used else None
            elif name in self._present:
                if gradient is self._present[name]:
                    continue
                cleared.append(name)
            if gradient is not None:
                outputs[name] = gradient
        depends = bool(self._present) or (not self._stale and (self._is_seen or not self._is_ordinary))
        others = [name for name in self._parameters if not (self._is_ordinary and name in self._own)]
        absent = [n for n in others if n not in self._present] if depends else sorted(self._added_to)
        if self._is_ordinary:
            dropped = sorted(self._own)
        of_leaves = leaves.gradients()
        if outputs or of_leaves or (self._updates is None and not self._present):
            failures.check_gradients(outputs | of_leaves)
        named = {name: leaf for name, leaf in leaves.named().items() if name in of_leaves}
        found = Gradients(tuple(dropped), tuple(self._present), tuple(absent), tuple(cleared), named)
        return outputs | of_leaves, found

    def step(self, *_: Any, **__: Any) -> None:
        """Stand in for the optimizer's step."""
        if self._depth:
            raise CaptureError("the optimizer steps inside backward(): step it after backward() instead")
        stale = {name: self._stale[name] for name in self._own if self._is_stale(name)}
        for name in stale:  # this update would use it, if it were there
            self._require_untouched(name)
            if name in self._waiting:
                raise self._adds_up(name)
            self._added_to.add(name)
            self._parameters[name].grad = None
        if self._parallel is not None:
            self._parallel.check_finished()
        found = {name: p.grad for name, p in self._parameters.items() if p.grad is not None and name in self._own}
        if not found and self.phase == "forward" and not self._is_ordinary:
            return  # before any backward pass, and no gradient is there
        failures.check_gradients(found)
        self._mark("backward")
        self.phase = "update"
        assert self._updates is not None
        self._updates.trace(found)
        self._mark("update")
        self.phase = "forward"
        self._used = self._own

    def _watched_backward(self) -> contextlib.AbstractContextManager[None]:
        original = torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            if self._depth:  # recomputation calls it from inside
                return original(*args, **kwargs)
            self._mark("forward")
            stale = {name: gradient for name, gradient in self._stale.items() if self._is_stale(name)}
            for name in stale:
                self._require_untouched(name)
                self._parameters[name].grad = None
            self.phase, self._used = "backward", frozenset()
            self._depth += 1
            seen, self._is_seen = self._is_seen, False
            try:
                original(*args, **kwargs)
            finally:
                self._depth -= 1
            if stale and self._is_seen:  # a hook looks at gradients, and there might be some
                raise self._adds_up(next(iter(stale)))
            self._is_seen |= seen
            for name, gradient in stale.items():
                if self._parameters[name].grad is None:
                    self._parameters[name].grad = gradient
                else:
                    self._added_to.add(name)
            if self._parallel is not None:
                self._parallel.reduce()
            self._mark("backward")

        return self._capture.replaced(torch.autograd, "backward", backward)

    @contextlib.contextmanager
    def _watched_optimizers(self) -> Iterator[None]:
        """Raise a CaptureError if another optimizer steps in the body: it would find no gradients."""
        ours = {id(p) for p in self._parameters.values()}

        def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if self._capture.is_here() and not all(
                id(p) in ours for group in optimizer.param_groups for p in group["params"]
            ):
                raise CaptureError(
                    f"the step function steps a second optimizer ({type(optimizer).__name__}), which the captured step "
                    "knows nothing of. Call it behind the compiled step, which leaves the gradients that it needs in "
                    ".grad, or pass one optimizer of all parameters as optimizer=..."
                )

        # Replaced, not changed in place: the optimizer of another thread may be iterating over the global hooks.
        hooks = torch_optimizer._global_optimizer_pre_hooks
        with_ours = OrderedDict({**hooks, _OUR_HOOK: refuse})
        try:
            with replaced(torch_optimizer, "_global_optimizer_pre_hooks", with_ours):
                yield
        finally:
            hooks.update({key: hook for key, hook in with_ours.items() if key != _OUR_HOOK})

    def _is_stale(self, name: str) -> bool:
        return name in self._stale and self._parameters[name].grad is self._stale[name]

    def _require_untouched(self, name: str) -> None:
        if self._stale[name]._version:
            raise self._adds_up(name)

    def _adds_up(self, name: str) -> AddsUpError:
        return AddsUpError(
            f"the step adds to gradients that were there before it ({name}.grad): call model.zero_grad() before "
            "backward() or after optimizer.step(), and not zero_grad(set_to_none=False), which keeps them"
        )


@contextlib.contextmanager
def lent_optimizer(
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    state: dict[torch.Tensor, dict[str, Any]],
    step: Callable[..., None],
) -> Iterator[None]:
    """Give the user's optimizer other parameter groups, state and step function inside this context.

    Raises:
        CaptureError: the settings of a group were changed meanwhile.
    """
    saved = {k: v for k, v in optimizer.__dict__.items() if k in ("param_groups", "state", "step")}
    before = [dict(group) for group in groups]
    lent = defaultdict(dict, state) if optimizer.state else optimizers.NoState()
    optimizer.__dict__ |= {"param_groups": groups, "state": lent, "step": step}
    try:
        yield
        pairs = zip(optimizer.param_groups, before, strict=False)
        changed = [key for group, old in pairs for key in group if group[key] is not old.get(key, MISSING)]
        if changed or len(optimizer.param_groups) != len(before):
            raise CaptureError(
                f"the step function changes settings of the optimizer ({', '.join(changed) or 'its groups'}): "
                "change them between steps; call schedule.step() after the compiled step"
            )
    finally:
        del optimizer.__dict__["step"]
        optimizer.__dict__.update(saved)


def require_plain(name: str, parameter: torch.Tensor) -> None:
    """Raise a CaptureError unless a gradient is a plain dense tensor without a graph, which a step can add to."""
    gradient = parameter.grad
    assert gradient is not None
    is_dense = is_plain(gradient) and gradient.layout == torch.strided
    if not is_dense or gradient.requires_grad:
        what = f"a {type(gradient).__name__} ({gradient.layout})" if not is_dense else "part of a graph itself"
        raise CaptureError(f"{name}.grad, which the step adds to, is {what}: drop it (zero_grad()) before the step.")


def check_stale(module: fx.GraphModule, stale: dict[str, torch.Tensor]) -> None:
    """Raise an AddsUpError where a body computes with gradients that were there before it."""
    name_of = {id(gradient): name for name, gradient in stale.items()}
    for node in module.graph.find_nodes(op="get_attr") if name_of else ():
        if (name := name_of.get(id(getattr(module, str(node.target), None)))) is not None:
            raise AddsUpError(f"the step computes with {name}.grad as it was before the step: call zero_grad() first")
