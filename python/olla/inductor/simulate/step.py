"""The peak of compiled code as Inductor generates it, without the memory: its wrappers run on fake tensors."""

from __future__ import annotations

import contextlib
import copy
import time
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from olla.errors import CaptureError
from olla.inductor.compat import compat
from olla.inductor.simulate.split import Split, Splits, recorded
from olla.inductor.simulate.wrappers import LiveBytes, watched_wrappers
from olla.pytorch.capture.inputs import Fakes, step_device

Loss = Callable[[Any, Any], Any]
Watch = Callable[[Split], None]


@dataclass(frozen=True, kw_only=True)
class SimulatedStep(Splits):
    """What one training step, forward and backward, needs as it is compiled.

    Attributes:
        peak_bytes: the most bytes of storages alive at once: resident ones, saved values, gradients (all are held, as
            until an optimizer takes them), intermediate buffers; no rounding of allocators, no workspaces of kernels.
        eager_peak_bytes: the same of the step without torch.compile.
        resident_bytes: parameters, buffers, batch, and ``state_bytes``.
        num_wrappers: generated modules; a graph with gradients has two.
        compile_seconds: processor time of the compilation, without that of kernels.
        sources: the generated wrappers.
    """

    peak_bytes: int
    eager_peak_bytes: int
    resident_bytes: int
    num_wrappers: int
    compile_seconds: float
    sources: list[str] = field(repr=False)


def replay(
    model: torch.nn.Module,
    batch: Any,
    loss: Loss,
    *,
    backend: str | Callable[..., Any] = "inductor",
    options: dict[str, Any] | None = None,
    state_bytes: int = 0,
    watch: Watch | None = None,
    kernels: bool = False,
) -> SimulatedStep:
    """Compile a training step as torch.compile would now, and run the generated wrappers on fake tensors.

    All of torch.compile's own settings and those of `olla.inductor.enable` count. Kernels are generated, neither
    compiled nor run. The model, its gradients and the random state stay as they are. The process forgets what it has
    compiled so far (``torch.compiler.reset()``), and compiles it again when it is next called.

    Args:
        model: real, on the meta device, or of fake tensors; in the mode (train or eval) it shall run in.
        batch: tensors in any structure of dicts, lists and tuples.
        loss: ``loss(model, batch)`` returns the loss, or a tuple that starts with it.
        backend: of torch.compile.
        options: of torch.compile.
        state_bytes: bytes of anything else resident throughout, such as an optimizer's state.
        watch: is told of every graph as soon as it is divided.
        kernels: compile and run them too, on copies of real tensors: the same bytes, measured and not simulated.

    Returns:
        The peak and where it comes from.

    Raises:
        CaptureError: the step does not run on fake tensors.

    Complexity: one compilation without its kernels, and two runs of the wrappers.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
        >>> found = replay(model, torch.ones(1024, 64), lambda model, x: model(x).square().mean())
        >>> found.resident_bytes, len(found.splits)
        (279044, 1)
    """
    mode: contextlib.AbstractContextManager[Any]
    if kernels:
        mode, (twin, data) = contextlib.nullcontext(), copy.deepcopy((model, batch))
    else:
        mode = fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        twin, data = _fakes(fake_mode, model, batch)
    splits: list[Split] = []
    sources: list[str] = []
    given = [*twin.parameters(), *twin.buffers(), *pytree.tree_leaves(data)]
    tensors = [value for value in given if isinstance(value, torch.Tensor)]
    live = LiveBytes(on_host=all(tensor.device.type in ("cpu", "meta") for tensor in tensors))
    for tensor in tensors:
        live.add(tensor)
    resident_bytes = live.live_bytes
    step = _fresh(_train)
    with mode, live:  # already while compiling, since the code holds for the modes it was compiled under
        _run(step, loss, twin, data)  # warm-up: what a first step changes would cause a recompilation
        eager_peak_bytes = live.peak_bytes
        with _compiling(splits, sources, watch, kernels):
            step = torch.compile(step, backend=backend, options=options)
            live.paused = True
            start = time.process_time()
            _run(step, loss, twin, data)
            seconds = time.process_time() - start
            live.paused = False
            num_wrappers = len(sources)
            live.peak_bytes = live.live_bytes
            _run(step, loss, twin, data)
    if len(sources) != num_wrappers:
        raise CaptureError("the step compiles anew at its second run: what it does must not depend on the run")
    return SimulatedStep(
        peak_bytes=live.peak_bytes + state_bytes,
        eager_peak_bytes=eager_peak_bytes + state_bytes,
        resident_bytes=resident_bytes + state_bytes,
        splits=splits,
        num_wrappers=num_wrappers,
        compile_seconds=seconds,
        sources=sources,
    )


class _Known(Exception):
    """A graph was divided as it has been before: its replay is known."""


def sweep(
    model: torch.nn.Module, batch: Any, loss: Loss, shares: Iterable[float], *, state_bytes: int = 0
) -> dict[float, SimulatedStep]:
    """Replay a step under torch's own partitioner, for several values of its ``activation_memory_budget``.

    Args:
        model, batch, loss, state_bytes: as of `replay`.
        shares: of what is saved without a budget, from 0 to 1.

    Returns:
        The replay of every share; shares that partition a step's only graph alike have the same replay object.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
        >>> found = sweep(model, torch.ones(4, 8), lambda model, x: model(x).sum(), (1.0, 0.5))
        >>> sorted(found)
        [0.5, 1.0]
    """
    by_digest: dict[str, SimulatedStep] = {}
    found: dict[float, SimulatedStep] = {}
    for share in shares:
        known: list[SimulatedStep] = []

        def watch(split: Split, known: list[SimulatedStep] = known) -> None:
            if split.digest in by_digest:
                known.append(by_digest[split.digest])
                raise _Known

        try:
            with compat.memory_budget(share):
                found[share] = replay(model, batch, loss, state_bytes=state_bytes, watch=watch)
        except Exception:
            if not known:
                raise
            found[share] = known[0]
        if len(found[share].splits) == 1:
            by_digest[found[share].splits[0].digest] = found[share]
    return found


def _train(loss: Loss, model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss; the part of a step that is compiled."""
    result = loss(model, batch)
    first: torch.Tensor = result[0] if isinstance(result, tuple | list) else result
    return first


def _fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy with code of its own: dynamo keeps what it compiles, and counts it, by code object."""
    assert isinstance(function, types.FunctionType)
    return types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def _run(step: Callable[..., Any], loss: Loss, model: torch.nn.Module, batch: Any) -> None:
    """Run forward and backward; gradients are freed once all of them are computed."""
    result = step(loss, model, batch)
    if not isinstance(result, torch.Tensor) or result.numel() != 1 or not result.requires_grad:
        raise CaptureError(f"the loss function returned {type(result).__name__}: expected one number with gradients")
    torch.autograd.backward(result)
    for parameter in model.parameters():
        parameter.grad = None


def _fakes(mode: FakeTensorMode, model: torch.nn.Module, batch: Any) -> tuple[torch.nn.Module, Any]:
    """Return a copy of the model and the batch on fake tensors."""
    leaves, spec = pytree.tree_flatten(batch)
    named = [*model.named_parameters(), *model.named_buffers()]
    given = [(f"batch leaf {i}", leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    fakes = Fakes(mode, step_device([*named, *given], None))
    memo: dict[int, Any] = {}
    for _, tensor in named:
        fake = fakes.of(tensor)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(fake.detach(), tensor.requires_grad) if is_parameter else fake
    with mode:
        copied = copy.deepcopy(model, memo)
    for parameter in copied.parameters():
        parameter.grad = None
    return copied, spec.unflatten(fakes.of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)


@contextlib.contextmanager
def _compiling(splits: list[Split], sources: list[str], watch: Watch | None, kernels: bool) -> Iterator[None]:
    """Record what is divided and generated in this block; nothing of it stays in torch's caches."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".*force disabled")  # of the caches, by us
        stack.enter_context(compat.uncached())
        stack.enter_context(watched_wrappers(sources, kernels=kernels))
        stack.enter_context(recorded(splits, watch))
        torch.compiler.reset()
        stack.callback(torch.compiler.reset)
        yield
