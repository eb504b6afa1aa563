"""The body of a training loop under trace: backward(), zero_grad() and optimizer.step() work on lent tensors."""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._functorch import eager_transforms, vmap
from torch._functorch import utils as functorch_utils
from torch.optim import optimizer as torch_optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from olla.errors import CaptureError
from olla.pytorch.capture import known, optimizers, recurrent
from olla.pytorch.capture.exclusive import Capture, replaced
from olla.pytorch.capture.gradients import AddsUpError, Gradients, Leaves
from olla.pytorch.capture.updates import Updates
from olla.pytorch.checks import failures
from olla.pytorch.guards.modes import kernel_modes
from olla.pytorch.guards.reads import Reads
from olla.pytorch.guards.values import MISSING
from olla.pytorch.ranks.reduced import DataParallel

Loss = Callable[[Any, Any], Any]
Body = Callable[[Any, Any, Any], Any]
_Named = dict[str, torch.Tensor]
# They take values of tensors out of the step; of one that is no input nothing else would say so.
_READ_VALUES = {
    torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__bool__, torch.Tensor.__int__,
    torch.Tensor.__float__, torch.Tensor.__index__, torch.Tensor.__array__, torch.Tensor.__contains__, torch.equal,
    torch.allclose,
}  # fmt: skip
_VERSION = torch.Tensor._version.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_OF_GRADIENTS = [getattr(torch.Tensor.grad, name) for name in ("__get__", "__set__", "__delete__")]
# What scripted functions, autograd.Function.apply, torch.func.grad and torch.func.vmap hand the tensors they are given.
_UNASKED = (
    (torch._C.ScriptFunction, "__call__"), (torch._C.ScriptMethod, "__call__"),
    (functorch_utils, "unwrap_dead_wrappers"), (eager_transforms, "_wrap_for_grad"), (vmap, "_add_batch_dim"),
)  # fmt: skip
_NO_TENSORS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.Size})
_OUR_HOOK = -1  # its key; those of torch count from 0
_ENTERING = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)  # run the user's hooks


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


@dataclass(eq=False)
class Loop:
    """One pass through the body of a loop.

    Gradients that the pass before might have left are stood for by ``stale`` tensors. A body that drops them before its
    backward pass, and uses its own in an update, is one whose gradients live inside the step: none is left. Where it
    adds to them, they are to be inputs of the step: an AddsUpError says so.
    """

    _parameters: _Named  # name -> the tensor that stands for the parameter
    _stale: _Named  # name -> a tensor of the parameter's shape; empty if the body is not the user's own
    _present: _Named  # name -> what stands for a gradient that is there, and that the step adds to
    _waiting: frozenset[str]  # parameters that have a gradient which no tensor in _present stands for
    _own: frozenset[str]  # parameters that the optimizer updates
    _updates: Updates | None  # traces those of the optimizer; None: there is no optimizer
    _mark: Callable[[str], None]  # called with a kind for all nodes recorded since its last call
    _capture: Capture  # that runs the body
    _is_ordinary: bool  # the body is not the user's own: it begins with optimizer.zero_grad()
    _keeps_used: bool  # gradients are left that the optimizer has used
    _parallel: DataParallel | None = None  # reduces gradients over ranks; None: nothing does
    phase: str = field(default="forward", init=False)
    num_updates: int = field(default=0, init=False)
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
        self.num_updates += 1
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
        """Refuse the step of an optimizer that was not lent: it would find none of the gradients."""
        ours = {id(p) for p in self._parameters.values()}

        def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if self._capture.is_here() and not all(
                id(p) in ours for group in optimizer.param_groups for p in group["params"]
            ):
                raise CaptureError(
                    f"the step function steps a second optimizer ({type(optimizer).__name__}), which the captured step "
                    "knows nothing of. Pass the one optimizer of all parameters as optimizer=..., or make a step each."
                )

        # Hooks of all optimizers: another thread's may be going through them, so they stay as they are.
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


def _changes(function: Any, named: Any) -> bool:
    """Whether a function of torch may change its arguments."""
    name = getattr(function, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
    return in_place or name in ("__setitem__", "__set__", "batch_norm") or "out" in named


class Lent(TorchFunctionMode):
    """Lets stand-ins do the work of tensors: Python sees the tensors themselves, and torch's functions never do.

    So a step that asks what a parameter is (its identity, its class, its attributes) gets the answer it always gets.

    Args:
        pairs: tensors, each with the one that stands for it.
        reads: what the step reads from Python.
        loop: the body that is run; None: inference.

    Attributes:
        leaves: other tensors of the user's that get gradients.
    """

    def __init__(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], reads: Reads, loop: Loop | None = None
    ) -> None:
        super().__init__()
        self.leaves = Leaves()
        self._loop = loop
        self._pairs = pairs  # what is kept keeps its id
        self._stand_ins = {id(tensor): stand_in for tensor, stand_in in pairs}
        self._originals = {id(stand_in): tensor for tensor, stand_in in pairs}
        self._reads = reads
        self._device_type = "cuda" if torch.cuda.is_available() else "cpu"
        self._modes = kernel_modes(self._device_type)

    def stand_ins_in(self, value: Any) -> Any:
        """Return a value of any structure with the stand-ins of the tensors in it."""
        kind = type(value)  # what arguments mostly are; pytree would take a quarter of the time of a capture
        if kind is tuple or kind is list:
            return kind(map(self.stand_ins_in, value))
        if kind is dict:
            return {name: self.stand_ins_in(item) for name, item in value.items()}
        if kind in _NO_TENSORS:
            return value
        if isinstance(value, torch.Tensor):
            stand_in = self._stand_ins.get(id(value))
            if stand_in is None and self._loop is not None:
                self.leaves.meet(value)
            return value if stand_in is None else stand_in
        # A shape stays what it is: Tensor.new would take a tuple for data.
        return pytree.tree_map_only(torch.Tensor, self.stand_ins_in, value, is_leaf=lambda v: isinstance(v, torch.Size))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        watching = sys.gettrace()
        sys.settrace(None)  # torch's own functions read nothing of the user's, and there is much code in them
        try:
            _refuse(func, args, self._stand_ins)
            if self._loop is not None and func in _OF_GRADIENTS:
                self._see_gradient(args[0])
            args, kwargs = self.stand_ins_in((args, kwargs or {}))
            for argument in (*args, *kwargs.values()):
                if isinstance(argument, torch.Generator):
                    self._reads.generators.draws(argument)
            result = self._run(func, args, kwargs, watching)
            return self._originals.get(id(result), result)
        finally:
            sys.settrace(watching)

    def _see_gradient(self, tensor: torch.Tensor) -> None:
        if id(tensor) in self._stand_ins:
            assert self._loop is not None
            self._loop.see()
        elif type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.requires_grad and tensor.is_leaf:
            raise CaptureError(
                f"the step looks at the gradient of a tensor of shape {tuple(tensor.shape)} that is no parameter of "
                "its model: make it one, or put both models into one torch.nn.ModuleList."
            )

    def _run(self, func: Any, args: Any, kwargs: Any, watching: Any) -> Any:
        if self._modes != kernel_modes(self._device_type):
            raise CaptureError(
                "the step changes settings of torch that its kernels read (torch.backends, the precision of matrix "
                "products, deterministic algorithms): set them around the step, not in it."
            )
        if _changes(func, kwargs):
            for tensor in pytree.tree_leaves((args, kwargs)):
                if type(tensor) in (torch.Tensor, torch.nn.Parameter):
                    self._reads.places.save(tensor)
        if func in known.READS and (value := known.value(args[0])) is not None:
            return func(value)
        if func in _READ_VALUES and args and type(args[0]) in (torch.Tensor, torch.nn.Parameter):
            self._reads.value_of(args[0])
        if func is torch.lstm:
            return recurrent.lstm(*args, **kwargs)
        if func in _ENTERING or any(callable(a) for a in args):
            sys.settrace(watching)  # it runs code of the user's
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def in_functions(self, capture: Capture) -> Iterator[None]:
        """Put stand-ins into what asks no mode (scripted and autograd functions, torch.func); enter it in backward."""
        with contextlib.ExitStack() as stack:
            for module, name in _UNASKED:
                stack.enter_context(capture.replaced(module, name, self._lent_to(getattr(module, name))))
            autograd: Any = torch.autograd
            run = autograd._engine_run_backward

            def backward(*args: Any, **kwargs: Any) -> Any:
                with self:  # for hooks, and for what is computed again
                    return run(*args, **kwargs)

            stack.enter_context(capture.replaced(autograd, "_engine_run_backward", backward))
            stack.enter_context(capture.replaced(torch.utils.dlpack, "to_dlpack", torch.Tensor.__dlpack__))
            yield

    def _lent_to(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: function(*self.stand_ins_in(args), **self.stand_ins_in(kwargs))


def _refuse(function: Any, args: Any, known: Container[int]) -> None:
    """Raise a CaptureError for what no operator stands for."""
    if function is torch.Tensor.__dlpack__:
        raise CaptureError(
            "the step hands the memory of a tensor to another library (DLPack): do that outside the step"
        )
    if function == _VERSION and id(args[0]) in known:
        raise CaptureError("the step reads how often a tensor was changed (_version), which differs at every step")
    if function == _SET_DATA and id(args[0]) in known:
        raise CaptureError(
            "the step gives a parameter, a buffer or the batch other memory (tensor.data = ...): write into it "
            "(tensor.data.copy_(...)), or do that outside the step"
        )


@contextlib.contextmanager
def lent_optimizer(
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    state: dict[torch.Tensor, dict[str, Any]],
    step: Callable[..., None],
) -> Iterator[None]:
    """Lend the user's optimizer other parameter groups, another state and another step.

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
