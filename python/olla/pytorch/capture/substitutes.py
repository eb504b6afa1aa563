"""Tracing with fake tensors in place of the user's: Python code sees its own, torch's functions see the fake ones."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from torch._functorch import eager_transforms, vmap
from torch._functorch import utils as functorch_utils
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from olla.errors import CaptureError
from olla.pytorch.capture import constants, recurrent
from olla.pytorch.capture.exclusive import ExclusiveCapture, replaced
from olla.pytorch.guards.modes import kernel_modes
from olla.pytorch.guards.reads import Reads

# They read values of tensors into Python; for a tensor that is no input, nothing else would notice.
_READ_VALUES = {
    torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__bool__, torch.Tensor.__int__,
    torch.Tensor.__float__, torch.Tensor.__index__, torch.Tensor.__array__, torch.Tensor.__contains__, torch.equal,
    torch.allclose,
}  # fmt: skip
_VERSION = torch.Tensor._version.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_OF_GRADIENTS = [getattr(torch.Tensor.grad, name) for name in ("__get__", "__set__", "__delete__")]
# Functions that get the tensors of scripted functions, of autograd.Function.apply before torch 2.14, of torch.func.grad
# and of torch.func.vmap, without asking a mode.
_UNASKED = (
    (torch._C.ScriptFunction, "__call__"), (torch._C.ScriptMethod, "__call__"),
    (functorch_utils, "unwrap_dead_wrappers"), (eager_transforms, "_wrap_for_grad"), (vmap, "_add_batch_dim"),
)  # fmt: skip
_APPLY: Any = inspect.getattr_static(torch.autograd.Function, "apply")
_NO_TENSORS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.Size})
_ENTERING = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)  # run the user's hooks


def is_plain(tensor: object) -> bool:
    """Whether a tensor is a plain Tensor or Parameter: no subclass, and no wrapper of torch.func."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return plain and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # type: ignore[arg-type]


class Leaves:
    """Leaf tensors that get gradients and are no inputs of the step: a scale in a closure, another model.

    During the trace ``.grad`` holds the gradients of the step; ``restore`` puts the user's own back.
    """

    def __init__(self) -> None:
        self._leaves: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}  # each with the gradient that it has

    def __contains__(self, tensor: object) -> bool:
        return id(tensor) in self._leaves

    def meet(self, tensor: torch.Tensor) -> None:
        """Note a tensor that a function of torch is given, if it requires a gradient.

        Raises:
            CaptureError: its gradient leads out of the step, or it has a hook that runs once that is there.
        """
        if id(tensor) in self._leaves or not is_plain(tensor) or not tensor.requires_grad:
            return
        shape = tuple(tensor.shape)
        if not tensor.is_leaf:
            raise CaptureError(
                f"the step uses a tensor of shape {shape} that was computed before it, with gradients: its backward "
                "pass would lead out of the step. Compute it inside the step, or pass it in detached (.detach())."
            )
        if tensor._post_accumulate_grad_hooks:
            raise CaptureError(
                f"a tensor of shape {shape} that the step trains beside its model has a hook that runs once its "
                "gradient is there, which belongs to the model's parameters alone: make it a parameter of the model."
            )
        self._leaves[id(tensor)] = (tensor, tensor.grad)
        tensor.grad = None

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients that they have got, by the names that ``named`` gives them."""
        named = self.named()
        return {name: t.grad for name, t in named.items() if t.grad is not None}

    def named(self) -> dict[str, torch.Tensor]:
        """Return them by name."""
        return {f"leaf {i}": tensor for i, (tensor, _) in enumerate(self._leaves.values())}

    def restore(self) -> None:
        """Put the user's own gradients back."""
        for tensor, gradient in self._leaves.values():
            tensor.grad = gradient


def _changes(function: Any, named: Any) -> bool:
    """Whether a function of torch may change its arguments."""
    name = getattr(function, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
    return in_place or name in ("__setitem__", "__set__", "batch_norm") or "out" in named


class Substitution(TorchFunctionMode):
    """Passes stand-ins to torch's functions in place of the user's tensors, which Python code keeps seeing.

    So a step that inspects a parameter (its identity, its class, its attributes) gets the answer it always gets.

    Args:
        pairs: tensors, each with the one that stands for it.
        reads: what the step reads from Python.
        see: called where Python looks at a gradient of one of the tensors; None: inference.

    Attributes:
        leaves: other tensors of the user's that get gradients.
    """

    def __init__(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], reads: Reads, see: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self.leaves = Leaves()
        self._see = see
        self._pairs = pairs  # holding references keeps the ids unique
        self._stand_ins = {id(tensor): stand_in for tensor, stand_in in pairs}
        self._originals = {id(stand_in): tensor for tensor, stand_in in pairs}
        self._reads = reads
        self._device_type = "cuda" if torch.cuda.is_available() else "cpu"
        self._modes = kernel_modes(self._device_type)

    def lend(self, value: Any) -> Any:
        """Return the same as ``stand_ins_in``, for callers that are no function of torch."""
        with torch._C.DisableTorchFunction():
            return self.stand_ins_in(value)

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
            if stand_in is None and self._see is not None:
                self.leaves.meet(value)
            return value if stand_in is None else stand_in
        # A shape stays what it is: Tensor.new would take a tuple for data.
        return pytree.tree_map_only(torch.Tensor, self.stand_ins_in, value, is_leaf=lambda v: isinstance(v, torch.Size))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        watching = sys.gettrace()
        sys.settrace(None)  # torch's own functions read nothing of the user's, and there is much code in them
        try:
            _refuse(func, args, self._stand_ins)
            if self._see is not None and func in _OF_GRADIENTS:
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
            assert self._see is not None
            self._see()
        elif is_plain(tensor) and tensor.requires_grad and tensor.is_leaf:
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
                if is_plain(tensor):
                    self._reads.places.save(tensor)
        if func in constants.READS and (value := constants.value(args[0])) is not None:
            return func(value)
        if func in _READ_VALUES and args and type(args[0]) in (torch.Tensor, torch.nn.Parameter):
            self._reads.value_of(args[0])
        if func is torch.lstm:
            return recurrent.lstm(*args, **kwargs)
        if func in _ENTERING or any(callable(a) for a in args):
            sys.settrace(watching)  # it runs code of the user's
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def in_functions(self, capture: ExclusiveCapture) -> Iterator[None]:
        """Pass stand-ins to what bypasses modes (scripted and autograd functions, torch.func), in backward too."""
        with contextlib.ExitStack() as stack:
            for module, name in _UNASKED:
                stack.enter_context(capture.replaced(module, name, self._lent_to(getattr(module, name))))
            if not isinstance(_APPLY, classmethod):
                stack.enter_context(replaced(type(torch.autograd.Function), "apply", self._apply(capture)))
            autograd: Any = torch.autograd
            run = autograd._engine_run_backward

            def backward(*args: Any, **kwargs: Any) -> Any:
                with self:  # for hooks, and for what is recomputed
                    return run(*args, **kwargs)

            stack.enter_context(capture.replaced(autograd, "_engine_run_backward", backward))
            stack.enter_context(capture.replaced(torch.utils.dlpack, "to_dlpack", torch.Tensor.__dlpack__))
            yield

    def _apply(self, capture: ExclusiveCapture) -> property:
        """Return a property of the metaclass that finds ``apply`` of a class of autograd functions.

        Since torch 2.14 torch's own ``apply`` is C that calls nothing which could be replaced. Guards compare the
        attributes of its class, so it stays there: the metaclass is asked first.
        """

        def find(cls: Any) -> Any:
            own = inspect.getattr_static(cls, "apply")
            bound = own.__get__(None, cls)
            return self._lent_to(bound) if own is _APPLY and capture.is_here() else bound

        return property(find)

    def _lent_to(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: function(*self.stand_ins_in(args), **self.stand_ins_in(kwargs))


def _refuse(function: Any, args: Any, known: Container[int]) -> None:
    """Raise a CaptureError for uses of a tensor that no operator can represent."""
    if function is torch.Tensor.__dlpack__:
        raise CaptureError(
            "the step hands the memory of a tensor to another library (DLPack): do that outside the step"
        )
    if function == _VERSION and id(args[0]) in known:
        raise CaptureError("the step reads how often a tensor was changed (_version), which differs at every step")
    if function is torch.Tensor.storage_offset and id(args[0]) in known and not isinstance(args[0], torch.nn.Parameter):
        raise CaptureError(
            "the step asks where a tensor of the batch, or a buffer, lies in its storage (storage_offset()), which may "
            "differ at every step: leave the offset out of as_strided(), or pass in a copy (.clone()) and count from 0"
        )
    if function == _SET_DATA and id(args[0]) in known:
        raise CaptureError(
            "the step gives a parameter, a buffer or the batch other memory (tensor.data = ...): write into it "
            "(tensor.data.copy_(...)), or do that outside the step"
        )
