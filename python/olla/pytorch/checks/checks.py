"""Checks of values as operators of a captured step: where Python asks a tensor for a value only to raise an error.

Importing this module registers the operator that checks.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import linecache
import math
import operator
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.distributions import constraints, distribution
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from olla.pytorch.checks import branches
from olla.pytorch.checks.ctc import ctc_loss
from olla.pytorch.checks.failures import DecidingValue
from olla.pytorch.checks.raised import message_of

_SYMBOLS = {bool: torch.SymBool, int: torch.SymInt, float: torch.SymFloat}
_COMPARISONS = {getattr(torch.ops.aten, name).Scalar: getattr(operator, name) for name in ("lt", "le", "gt", "ge")}
_TORCH = os.path.dirname(torch.__file__) + os.sep
_library: Any = torch.library.Library("olla", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("check(Scalar value, bool fails_on, str kind, str message, str place) -> ()")
_kinds: dict[str, type[BaseException]] = {}  # that cannot be imported by their name


def check(value: float, fails_on: bool, kind: str, message: str, place: str) -> None:
    """Raise the exception of an ordinary step if a value is not what it must be.

    Args:
        value: whose truth is asked for.
        fails_on: the truth that raises.
        kind: ``"module:name"`` of the exception.
        message: of the exception.
        place: the line of the step, ``"file:line, code"``.
    """
    if bool(value) is fails_on:
        raise _error(kind, message, place)


_library.impl("check", check, "CompositeExplicitAutograd")
_library._register_fake("check", lambda *_: None)
CHECK = torch.ops.olla.check.default
# Operators without result that are there to raise; the last comes from torch.linalg.
_NATIVE = (
    torch.ops.aten._assert_async.default,
    torch.ops.aten._assert_async.msg,
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten._linalg_check_errors.default,
)
for _operator in (CHECK, *_NATIVE):
    fx.node.has_side_effect(_operator)


def is_check(node: fx.Node) -> bool:
    """Whether the only effect of the node is to raise an error."""
    return node.target is CHECK or node.target in _NATIVE


def drop(module: fx.GraphModule) -> None:
    """Remove the checks from a step; what only they read goes with the other ops without effect."""
    for node in reversed(list(module.graph.nodes)):
        if is_check(node):
            module.graph.erase_node(node)


def _error(kind: str, message: str, place: str) -> BaseException:
    """Return the exception that an ordinary step raises."""
    found: Any = _kinds.get(kind)
    module, _, name = kind.partition(":")
    with contextlib.suppress(ImportError, AttributeError):
        found = found or getattr(importlib.import_module(module), name)
    try:
        error: BaseException = found(message)
        if error.args != (message,):  # it makes a message of its own arguments, which are not known
            error = found.__new__(found, message)
        str(error)
    except Exception:
        error = RuntimeError(f"{name}: {message}")
    error.add_note(f"Raised by a captured step, for {place}")
    return error


class Shapes(ShapeEnv):
    """Shape environment of a trace: numbers read from tensors are unknown, except where the step checks them.

    Args:
        last: code of the function that runs the step.
        run: whether the captured step makes the checks.
        phase: returns what is traced now.

    Attributes:
        refused: the error of a value that decides what is computed; kept because the step may catch it.
    """

    def __init__(self, last: types.CodeType, run: bool, phase: Callable[[], str]) -> None:
        super().__init__(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=False)
        self._last = last
        self._run = run
        self._phase = phase
        self._asking = False  # a message is being made
        self.refused: DecidingValue | None = None

    def forget(self) -> None:
        """Let go of what only the capture itself needed: stand-ins in the recorded graph keep this object alive."""
        self._phase = str
        self.refused = None

    def evaluate_sym_node(self, sym_node: SymNode, size_oblivious: bool = False, fallback_value: Any = None) -> Any:
        """Return the value that Python asks for: see ShapeEnv."""
        if fallback_value is None and (outcome := self._outcome(sym_node, False)) is not None:
            return outcome
        return super().evaluate_sym_node(sym_node, size_oblivious, fallback_value)

    def _get_user_frame(self) -> types.FrameType | None:
        """Return no frame for torch's logs: to look for one would import torch.export, which takes a second."""
        return None

    def expect(self, sym_node: SymNode) -> bool | None:
        """Return what torch._check finds, or None where it checks what an ordinary step does not."""
        return None if _is_symbolic(sys._getframe(2)) else self._outcome(sym_node, True)

    def _outcome(self, sym_node: SymNode, returned: bool) -> bool | None:
        """Record a check of a value, and return the outcome that does not raise.

        Raises:
            DecidingValue: the value decides what is computed.
        """
        mode = get_proxy_mode()
        if mode is None or self._asking:
            return None
        symbol: Any = _SYMBOLS[sym_node.pytype](sym_node)  # type: ignore[no-untyped-call]
        node = get_proxy_slot(symbol, mode.tracer).force().node
        if (certain := _certain(node)) is not None:
            return certain
        frame = _asking_frame()
        self._asking = True
        try:
            found = branches.find_check(frame, returned, self._last)
        finally:
            self._asking = False
        if found is None:
            self.refused = DecidingValue(sym_node.expr, _origin(node), self._phase())
            raise self.refused
        if self._run and not _is_recomputed(frame):
            error = type(found.error)
            kind = f"{error.__module__}:{error.__qualname__}"
            if "<locals>" in kind or error.__module__ == "__main__":
                _kinds[kind] = error
            arguments = (node, found.fails_on, kind, message_of(found.error), _place(frame))
            mode.tracer.graph.call_function(CHECK, arguments)
        return not found.fails_on


for _name, _method in vars(ShapeEnv).items():
    if hasattr(_method, "cache_clear"):  # such a cache is the process's, and keeps every object that it was asked for
        setattr(Shapes, _name, _method.__wrapped__)


def _asking_frame() -> types.FrameType:
    """Return the frame that asks for a value, above the frames of torch and olla that lead to the tensor."""
    frame = sys._getframe(2)
    between = ("/torch/fx/", "/torch/_subclasses/", "/olla/pytorch/")
    names = ("__torch_function__", "__torch_dispatch__", "__bool__")
    while frame.f_back is not None and (
        frame.f_code.co_name in names or any(part in frame.f_code.co_filename.replace("\\", "/") for part in between)
    ):
        frame = frame.f_back
    return frame


def _place(frame: types.FrameType) -> str:
    """Return the line outside torch that a check is made for: ``"file:line, code"``."""
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, {line}"


def _is_symbolic(frame: types.FrameType) -> bool:
    """Whether arithmetic on a symbolic number asks: an ordinary step has a plain number there."""
    codes = (caller.f_code for caller, _ in traceback.walk_stack(frame))
    of_torch = itertools.takewhile(lambda code: code.co_filename.startswith(_TORCH), codes)
    return any(code.co_qualname.startswith(("SymInt.", "SymFloat.", "SymBool.")) for code in of_torch)


def _is_recomputed(frame: types.FrameType) -> bool:
    """Whether activation checkpointing recomputes: what was checked in the forward pass is the same now."""
    names = ("unpack_hook", "backward")
    codes = (caller.f_code for caller, _ in traceback.walk_stack(frame))
    return any(code.co_name in names and code.co_filename.endswith("checkpoint.py") for code in codes)


def _certain(node: fx.Node) -> bool | None:
    """Return how a number drawn from [0, 1) compares where that is certain: layers with layerdrop=0.0 never drop."""
    source: Any = node.args[0] if node.target is torch.ops.aten._local_scalar_dense.default else None
    if source is None or source.target not in _COMPARISONS or source.args[0].target is not torch.ops.aten.rand.default:
        return None
    compare, bound = _COMPARISONS[source.target], source.args[1]
    least, most = compare(0.0, bound), compare(math.nextafter(1.0, 0.0), bound)
    return bool(least) if least == most else None


def _origin(node: fx.Node) -> str:
    """Name the operator of a tensor that a number was read from."""
    while node.all_input_nodes and not isinstance(node.target, torch._ops.OpOverload):
        node = node.all_input_nodes[0]
    source = node.all_input_nodes[0] if node.all_input_nodes else node
    return str(source.target)


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """Replace functions that read values inside of torch or C by traceable ones while a step is traced."""
    replaced: list[tuple[Any, str, Any]] = [(SymNode, "expect_true", _expect_true(SymNode.expect_true))]
    for name in ("isfinite", "isnan", "isinf"):
        replaced.append((math, name, _of_number(getattr(math, name), getattr(torch, name))))
    for owner, name, function in (
        (torch, "equal", _equal),
        (torch.Tensor, "equal", _equal),
        (torch, "allclose", _allclose),
        (torch.Tensor, "allclose", _allclose),
        (torch.Tensor, "__contains__", _contains),
        (torch.nn.functional, "one_hot", _one_hot),
        (torch, "ctc_loss", ctc_loss),
        (constraints._Symmetric, "check", _symmetric),
        (constraints._PositiveSemidefinite, "check", _positive_semidefinite),
        (constraints._PositiveDefinite, "check", _positive_definite),
    ):
        replaced.append((owner, name, _original(owner, name, function)))
    name = "_all_true_or_runtime_assert"
    if hasattr(distribution, name):  # since torch 2.15; before, the caller itself asks for the truth of the tensor
        replaced.append((distribution, name, _original(distribution, name, _all_true)))
    with contextlib.ExitStack() as stack:
        for owner, name, function in replaced:
            restore = (setattr, owner, name, vars(owner)[name]) if name in vars(owner) else (delattr, owner, name)
            stack.callback(*restore)
            setattr(owner, name, function)
        yield


def _original(owner: Any, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for steps under trace that leaves the original to everything else."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def choose(*args: Any, **kwargs: Any) -> Any:
        return (original if get_proxy_mode() is None else function)(*args, **kwargs)

    return choose


def _equal(first: torch.Tensor, second: torch.Tensor) -> Any:
    return first.shape == second.shape and (first == second).all().item()


def _allclose(first: torch.Tensor, second: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return torch.isclose(first, second, *args, **kwargs).all().item()


def _contains(tensor: torch.Tensor, item: Any) -> Any:
    return (tensor == item).any().item()


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    if num_classes >= 0 and tensor.device.type == "cpu":
        require: Any = torch._check
        require((tensor >= 0).all().item(), lambda: "Class values must be non-negative.")
        require((tensor < num_classes).all().item(), lambda: "Class values must be smaller than num_classes.")
    elif num_classes >= 0:
        torch._assert_async(((tensor >= 0) & (tensor < num_classes)).all(), "Class values must be in [0, num_classes).")
    result: torch.Tensor = torch._C._nn.one_hot(tensor, num_classes)
    return result


def _all_true(valid: torch.Tensor, error_message: str) -> torch.Tensor:
    return torch._is_all_true(valid)  # the caller asks for its truth, and raises: here nothing shows what it leads to


def _of_number(original: Callable[[Any], bool], function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a function of math that takes numbers read from tensors, too."""

    def follow(number: Any) -> Any:
        if not isinstance(number, torch.SymFloat | torch.SymInt):
            return original(number)
        read: Any = number
        return function(torch.scalar_tensor(read, dtype=torch.float64)).item()

    return follow


def _expect_true(original: Callable[..., bool]) -> Callable[..., bool]:
    def expect_true(node: SymNode, file: str, line: int) -> bool:
        outcome = node.shape_env.expect(node) if isinstance(node.shape_env, Shapes) else None
        return original(node, file, line) if outcome is None else outcome

    return expect_true


# torch's own checks return early for values that fail; these go on, and fail for the same values.
def _symmetric(self: Any, value: Any) -> Any:
    if value.shape[-2] != value.shape[-1]:
        return constraints._Square.check(self, value)  # type: ignore[no-untyped-call]
    return torch.isclose(value, value.mT, atol=1e-6).all(-2).all(-1)


def _positive_semidefinite(self: Any, value: Any) -> Any:
    return _symmetric(self, value) & torch.linalg.eigvalsh(value).ge(0).all(-1)


def _positive_definite(self: Any, value: Any) -> Any:
    return _symmetric(self, value) & torch.linalg.cholesky_ex(value).info.eq(0)
