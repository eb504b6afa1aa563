"""The body of a training loop under trace: backward(), zero_grad() and optimizer.step() work on lent tensors."""

from __future__ import annotations

import contextlib
import inspect
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
from olla.pytorch.capture.updates import Updates
from olla.pytorch.checks import failures
from olla.pytorch.guards.modes import kernel_modes
from olla.pytorch.guards.reads import Reads
from olla.pytorch.guards.values import MISSING
from olla.pytorch.ranks.reduced import DataParallel

Loss = Callable[[Any, Any], Any]
Body = Callable[[Any, Any, Any], Any]
Gradients = dict[str, torch.Tensor]
# They take values of tensors out of the step; of one that is no input nothing else would say so.
_READ_VALUES = {
    torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__bool__, torch.Tensor.__int__,
    torch.Tensor.__float__, torch.Tensor.__index__, torch.Tensor.__array__, torch.Tensor.__contains__, torch.equal,
    torch.allclose,
}  # fmt: skip
_VERSION = torch.Tensor._version.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
# What scripted functions, autograd.Function.apply before torch 2.14, torch.func.grad and torch.func.vmap hand the
# tensors they are given.
_UNASKED = (
    (torch._C.ScriptFunction, "__call__"), (torch._C.ScriptMethod, "__call__"),
    (functorch_utils, "unwrap_dead_wrappers"), (eager_transforms, "_wrap_for_grad"), (vmap, "_add_batch_dim"),
)  # fmt: skip
_APPLY: Any = inspect.getattr_static(torch.autograd.Function, "apply")
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

    Gradients that the pass before might have left are stood for by ``stale`` tensors: a body that adds to them is
    refused unless it leaves none, because gradients of a captured step live inside the step.
    """

    _parameters: dict[str, torch.Tensor]  # name -> the tensor that stands for the parameter
    _stale: Gradients  # name -> a tensor of the parameter's shape; empty if the body is not the user's own
    _updates: Updates | None  # traces those of the optimizer; None: there is no optimizer
    _mark: Callable[[str], None]  # called with a kind for all nodes recorded since its last call
    _capture: Capture  # that runs the body
    _parallel: DataParallel | None = None  # reduces gradients over ranks; None: nothing does
    phase: str = field(default="forward", init=False)
    num_updates: int = field(default=0, init=False)
    _added_to: set[str] = field(default_factory=set, init=False)
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
        for name, gradient in self._stale.items():
            self._parameters[name].grad = gradient
        with self._watched_backward(), self._watched_optimizers():
            yield
        self._mark("backward" if self.phase == "backward" else "forward")
        self._check_end()

    def gradients(self) -> Gradients:
        """Return the gradients there are, in the order of the parameters."""
        found = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        failures.check_gradients(found)
        return found

    def step(self, *_: Any, **__: Any) -> None:
        """Stand in for the optimizer's step."""
        if self._depth:
            raise CaptureError("the optimizer steps inside backward(): step it after backward() instead")
        if any(self._is_stale(name) for name in self._parameters) and self.phase == "forward":
            raise CaptureError(
                "optimizer.step() comes before any backward(): it would use gradients of the step before. "
                "Let the step function begin with the forward pass."
            )
        self._drop_stale()
        if self._parallel is not None:
            self._parallel.check_finished()
        found = self.gradients()
        self._mark("backward")
        self.phase = "update"
        assert self._updates is not None
        self._updates.trace(found)
        self._mark("update")
        self.num_updates += 1

    def _watched_backward(self) -> contextlib.AbstractContextManager[None]:
        original = torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            if self._depth:  # recomputation calls it from inside
                return original(*args, **kwargs)
            self._mark("forward")
            self._added_to |= {name for name in self._stale if self._is_stale(name)}
            self._drop_stale()
            self.phase = "backward"
            self._depth += 1
            try:
                original(*args, **kwargs)
            finally:
                self._depth -= 1
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

    def _drop_stale(self) -> None:
        for name, gradient in self._stale.items():
            if gradient._version:
                raise CaptureError(
                    "the step function changes gradients of the step before: call zero_grad(), which drops them, "
                    "and not zero_grad(set_to_none=False)"
                )
            if self._is_stale(name):
                self._parameters[name].grad = None

    def _check_end(self) -> None:
        self._drop_stale()
        if self._parallel is not None:
            self._parallel.check_finished()
        if not self._stale:
            return
        if self.num_updates == 0:
            raise CaptureError(
                "the step function never calls optimizer.step(): call it, or pass loss=... to leave gradients in .grad"
            )
        left = [name for name in sorted(self._added_to) if self._parameters[name].grad is not None]
        if left:
            raise CaptureError(
                f"gradients would add up over steps ({', '.join(left[:3])}{', ...' if left[3:] else ''}): "
                "the step function must call model.zero_grad() before backward() or after optimizer.step()"
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
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], reads: Reads) -> None:
        super().__init__()
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
            return self._stand_ins.get(id(value), value)
        # A shape stays what it is: Tensor.new would take a tuple for data.
        return pytree.tree_map_only(torch.Tensor, self.stand_ins_in, value, is_leaf=lambda v: isinstance(v, torch.Size))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        watching = sys.gettrace()
        sys.settrace(None)  # torch's own functions read nothing of the user's, and there is much code in them
        try:
            _refuse(func, args, self._stand_ins)
            args, kwargs = self.stand_ins_in((args, kwargs or {}))
            for argument in (*args, *kwargs.values()):
                if isinstance(argument, torch.Generator):
                    self._reads.generators.draws(argument)
            result = self._run(func, args, kwargs, watching)
            return self._originals.get(id(result), result)
        finally:
            sys.settrace(watching)

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
            if not isinstance(_APPLY, classmethod):
                stack.enter_context(replaced(type(torch.autograd.Function), "apply", self._apply(capture)))
            autograd: Any = torch.autograd
            run = autograd._engine_run_backward

            def backward(*args: Any, **kwargs: Any) -> Any:
                with self:  # for hooks, and for what is computed again
                    return run(*args, **kwargs)

            stack.enter_context(capture.replaced(autograd, "_engine_run_backward", backward))
            stack.enter_context(capture.replaced(torch.utils.dlpack, "to_dlpack", torch.Tensor.__dlpack__))
            yield

    def _apply(self, capture: Capture) -> property:
        """Return what finds the apply of a class of autograd functions.

        Since torch 2.14 torch's own is C that calls nothing which could be replaced. It stands in a class whose
        attributes guards compare, and stays there: its metaclass is asked first.
        """

        def find(cls: Any) -> Any:
            own = inspect.getattr_static(cls, "apply")
            bound = own.__get__(None, cls)
            return self._lent_to(bound) if own is _APPLY and capture.is_here() else bound

        return property(find)

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
