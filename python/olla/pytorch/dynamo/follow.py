"""Has Dynamo follow a loss function: its graphs go to a step, and its guards say at every call which of them holds.

Dynamo interprets Python. It knows all that was read, and does to the user's objects what the code did to them, so that
what runs around a planned graph is what the code says. Where it makes no single graph, nothing has run yet.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import re
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._C._dynamo.eval_frame import (
    _debug_get_cache_entry_list,
    _FrameAction,
    _FrameExecStrategy,
    reset_code,
    set_code_exec_strategy,
)
from torch._dynamo import config
from torch._dynamo.eval_frame import cached_backends
from torch._dynamo.utils import get_metrics_context
from torch.nn.modules.module import _has_any_global_hook

from olla.pytorch.capture.exclusive import Silence, bound_memos, last_memo
from olla.pytorch.dynamo.graph import LossGraph, NotFollowed, readable, require_plain, signature, the_loss
from olla.pytorch.dynamo.unseen import Environment, Probes, has_function_modes, require_known

_SETTINGS = {
    "skip_nnmodule_hook_guards": True,  # `Environment` compares hooks in a tenth of the time
    "recompile_limit": 1 << 20,  # ours is another one, and says nothing
    "accumulated_recompile_limit": 1 << 20,
    "rewrite_assert_with_torch_assert": False,  # what is asserted of values is a check, which raises as Python does
    "trace_autograd_ops": True,
    "allow_rnn": True,
    "optimize_ddp": False,
    "suppress_errors": False,
    "trace_numpy": False,  # torch's operators do not round as numpy's
    # What only tells a person something runs behind the graph, at every call.
    "reorderable_logging_functions": {print, warnings.warn},
}

_NUMBER = re.compile(r"^[\d/]+: ")  # of a graph, ahead of its guard
_OUTSIDE = re.compile(
    r"builtin (?:operator )?`((?:time|posix|nt|_?io|_datetime)\.\w+|open|input)\b|method `(now|today|utcnow)` of class"
)
# Torch 2.11 prints a traceback wherever Dynamo compiles anew, since it cannot sort the functions among our settings.
_WHERE_KNOWN = Silence() if torch.__version__ < "2.12" else contextlib.nullcontext()
_is_compiling = torch.compiler.is_compiling
_COLLECTS = "transformers.utils.output_capturing"
_lock = threading.Lock()
_lock_of_begin = threading.RLock()
_num_calls = 0  # of steps that are followed just now, on all threads
_answers: list[tuple[Any, str, Any]] = []  # functions that are replaced meanwhile: owner, name, the function
_Function = Callable[[Any, Any], Any]
_Run = Callable[[LossGraph, Sequence[Any]], Sequence[Any]]


class Followed:
    """A loss function, or inference, that calls a step in place of its operators.

    Args:
        model: the first argument of the function.
        function: of a model and a batch; returns a loss, or a tuple that starts with one. Inference: anything.
        trains: whether it is a loss function.
        run: is given a graph and its inputs, and returns the outputs of the step. It is called by code that Dynamo
            keeps for as long as this object: a strong reference to that would keep both for ever.
        most_graphs: that are kept; once there are more, all are forgotten.
    """

    def __init__(self, model: torch.nn.Module, function: _Function, trains: bool, run: _Run, most_graphs: int) -> None:
        begin()
        self._model: Any = weakref.proxy(model)
        self._function = function
        self._trains = trains
        self._backend = _Backend(run, trains, most_graphs)
        self._most_graphs = most_graphs
        self._release: weakref.finalize[[types.CodeType, _Backend], Followed] | None = None
        settings = {**_SETTINGS, "ignore_logging_functions": _loggers()}
        known = {name: value for name, value in settings.items() if hasattr(config, name)}
        self._change_settings = config._make_closure_patcher(**known)
        self.forget()

    def forget(self) -> None:
        """Let go of all graphs and their guards."""
        function, trains = self._function, self._trains
        if self._release is not None:
            self._release()

        def entry(model: Any, batch: Any) -> Any:
            if not _is_compiling():
                raise NotFollowed("torch.compile is switched off")
            result = function(model, batch)
            parts = result if isinstance(result, tuple | list) else (result,)
            for part in parts:
                if isinstance(part, types.GeneratorType):
                    raise NotFollowed("it returns a generator")
            return result, the_loss(parts[0]) if trains else None

        # Code of its own, since Dynamo keeps graphs by code.
        own = types.FunctionType(entry.__code__.replace(), entry.__globals__, closure=entry.__closure__)
        self._compiled = torch.compile(own, backend=self._backend, fullgraph=True, dynamic=False)
        self._release = weakref.finalize(self, _release, own.__code__, self._backend)
        self._release.atexit = False
        self._environment = Environment(self._model)
        self._backend.num_kept = 0

    def __call__(self, model: torch.nn.Module, batch: Any, is_new: bool) -> Any:
        """Call the function, with the step in place of its operators; return what it returns.

        Args:
            model, batch: arguments of the function.
            is_new: whether the batch is of a kind that was not seen before, so that Dynamo will follow the function.

        Raises:
            NotFollowed: Dynamo makes no single graph of it.

        Complexity: that of Dynamo's guards, O(what the function reads); of a new graph, its tracing.
        """
        if _has_any_global_hook():  # type: ignore[no-untyped-call]
            raise NotFollowed("hooks on all modules are registered")
        if has_function_modes():
            raise NotFollowed("a TorchFunctionMode is active, of whose attributes nothing is known")
        if self._environment.has_changed():
            self.forget()
            self._backend.known.clear()  # a graph names methods that may be others now
        self._backend.is_running = False
        num_before = self._backend.num_kept
        memo = last_memo()
        self._backend.scope = {"L": {"model": model, "batch": batch, "function": self._function}, "G": globals()}
        change_back = self._change_settings()
        say_eager(1)
        try:
            with _quiet() if is_new else _WHERE_KNOWN:
                return self._called(model, batch)
        except Exception as error:
            if self._backend.is_running or isinstance(error, NotFollowed):
                raise
            text = str(error).strip()
            reason = NotFollowed(f"{type(error).__name__}: {text.partition(chr(10))[0]}")
            if outside := _OUTSIDE.search(text):
                reason.reads = outside[1] or outside[2]
            raise reason from error
        finally:
            say_eager(-1)
            change_back()
            self._backend.scope = {}
            if self._backend.num_kept > num_before:  # while it compiles, Dynamo changes classes of torch's
                self._environment = Environment(model)
                bound_memos(memo)
            if self._backend.num_kept > self._most_graphs:
                self.forget()

    def _called(self, model: torch.nn.Module, batch: Any) -> Any:
        with contextlib.nullcontext() if self._trains else torch.no_grad():
            try:
                return self._compiled(model, batch)[0]
            except _Stale:
                self.forget()
                return self._compiled(model, batch)[0]


def _no() -> bool:
    return False


def _yes() -> bool:
    return True


@functools.cache
def _captures(asked: Callable[[], bool]) -> Callable[[], bool]:
    """Return a function that has an answer for Dynamo, too, which runs others of torch's on fake tensors."""

    def answer() -> bool:
        return not torch.compiler.is_dynamo_compiling() and asked()

    return answer


def begin() -> None:
    """Let Dynamo make its tables and change torch's classes now, as it does when something is compiled first.

    Where torch.compile is switched off just now, too: tables made while `say_eager` answers lack torch's own functions.
    So no thread goes on before the first one is through.
    """
    with _lock_of_begin:
        _begin()


@functools.cache
def _begin() -> None:
    torch.compiler.allow_in_graph(the_loss)  # type: ignore[no-untyped-call]

    def asks(x: torch.Tensor) -> torch.Tensor:
        return x.neg() if torch.compiler.is_compiling() else x

    with torch.compiler.set_stance("default"):
        torch.compile(asks, backend="eager")(torch.ones(()))


@functools.cache
def leave_alone(function: Any) -> None:
    """Let Dynamo follow neither a function nor what it calls: as torch.compiler.disable, without a frame around it."""
    function._torchdynamo_disable = True
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


def say_eager(more: int) -> None:
    """Let models that ask whether they are compiled hear that they are not, while a step is followed.

    They go other ways otherwise, which round in another way than eager training does.

    Args:
        more: 1 where a step begins, -1 where it ends.
    """
    global _num_calls
    with _lock:
        _num_calls += more
        if more > 0 and _num_calls == 1:
            for owner, name, answer in list(_replacements()):
                _answers.append((owner, name, getattr(owner, name)))
                setattr(owner, name, answer)
        elif not _num_calls:
            while _answers:
                setattr(*_answers.pop())


def _replacements() -> Iterator[tuple[Any, str, Callable[[], bool]]]:
    """Yield what is asked of torch and transformers while a step is followed, and what the answer is."""
    yield torch.compiler, "is_compiling", _no
    yield torch._dynamo, "is_compiling", _no
    yield torch.compiler, "is_exporting", _no  # Dynamo of torch 2.11 says yes
    for device in (torch.cuda, torch.xpu):
        yield device, "is_current_stream_capturing", _captures(device.is_current_stream_capturing)
    if (collects := sys.modules.get(_COLLECTS)) is not None and hasattr(collects, "is_torchdynamo_compiling"):
        yield collects, "is_torchdynamo_compiling", _yes  # a variable in place of a ContextVar, for the same values


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what Dynamo has to say of code that it cannot follow: the report says it."""
    with warnings.catch_warnings(), Silence():
        warnings.filterwarnings("ignore", module=r"torch\._dynamo")
        yield


class _Stale(Exception):
    """What a graph has read is another value, though Dynamo takes it for the same. Nothing was run."""


class _Backend:
    """Puts a step in place of the graphs that Dynamo makes.

    Args:
        run, trains: see `Followed`.
        most_known: graphs that may be told to be the same as a new one.

    Attributes:
        is_running: whether a graph has been entered since this was last set to False.
        scope: of the call that is under way, see `Probes`.
        num_kept: graphs that were made since this was last set to 0.
        known: what tells the latest graphs apart, each with its number.
    """

    def __init__(self, run: _Run, trains: bool, most_known: int) -> None:
        self.is_running = False
        self.scope: dict[str, Any] = {}
        self.num_kept = 0
        self._run = run
        self._trains = trains
        self._num_graphs = 0
        self.known: collections.deque[tuple[Any, int]] = collections.deque(maxlen=most_known)

    def __call__(self, module: Any, inputs: Any) -> Callable[..., Any]:
        """Return what runs in place of a graph.

        One of the same operators, made since Python objects changed that decide nothing, has the number of the first.
        """
        require_plain(module)
        require_known()
        probes = Probes(self.scope)
        found = signature(module)
        number = next((number for known, number in self.known if known == found), None)
        if number is None:
            number = self._num_graphs
            self.known.append((found, number))
            self._num_graphs += 1
        self.num_kept += 1
        graph = LossGraph(module, number, _change())
        assert graph.trains == self._trains

        def call(*inputs: Any) -> tuple[Any, ...]:
            if probes.have_changed(self.scope):
                raise _Stale
            self.is_running = True
            return graph.handed(inputs, self._run(graph, inputs))

        return torch.compiler.disable(call)  # type: ignore[no-any-return,no-untyped-call]


def _release(code: types.CodeType, backend: _Backend) -> None:
    """Let go of what Dynamo has compiled of some code, and of the backend, which it notes for ever.

    Finalizers of the objects whose identity it has guarded keep guards, and these the compiled code, for as long as
    such an object lives.
    """
    for key, known in list(cached_backends.items()):
        if getattr(known, "compiler_fn", known) is backend:
            del cached_backends[key]
    managers = {id(entry.guard_manager) for entry in _debug_get_cache_entry_list(code)}
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        _, function, _, _ = finalizer.peek() or (None,) * 4
        holder = getattr(getattr(function, "func", None), "__self__", None)
        if id(getattr(holder, "guard_manager", None)) in managers:
            finalizer.detach()
    reset_code(code)


def _change() -> str:
    """Return which guard of the graphs so far does not hold, as far as Dynamo says; called by a backend."""
    reasons = getattr(get_metrics_context(), "_metrics", {}).get("recompile_reason") or ""
    guard = _NUMBER.sub("", reasons.partition("\n")[0]).partition("#")[0].strip()
    return f"of Dynamo's guards, {readable(guard)}" if guard else ""


def _loggers() -> set[Any]:
    """Return the functions of loggers, those that packages have given to them among them."""
    names = ("debug", "info", "warn", "error", "exception", "critical", "log")
    return {f for name, f in vars(logging.Logger).items() if name.startswith(names)}
