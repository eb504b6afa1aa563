"""Training steps compiled for real, run, and compared with each other: losses, gradients and buffers."""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from olla.inductor.simulate.split import Split, recorded
from tests.support.pytorch.models import Example

Tensors = list[torch.Tensor]
Configured = Callable[[], contextlib.AbstractContextManager[Any]]


class Tolerance(NamedTuple):
    """|found - expected| may be absolute + relative * |expected|, element by element."""

    relative: float
    absolute: float

    def share(self, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
        """Return the largest difference as a share of what is allowed: up to 1 they are equal."""
        most = 0.0
        for a, b in zip(found, expected, strict=True):
            if not b.is_floating_point():
                most = max(most, 0.0 if torch.equal(a, b) else float("inf"))
                continue
            a, b = a.detach().double(), b.detach().double()
            share = ((a - b).abs() / (self.absolute + self.relative * b.abs())).nan_to_num(nan=float("inf"))
            most = max(most, float(share.max()) if share.numel() else 0.0)
        return most


# What torch's tests of its partitioners compare with. `assertEqual` of float32 where a checkpointed or partitioned
# function stands beside the original (test/dynamo/test_activation_checkpointing.py), and 1e-3 where results and
# gradients of the minimum cut do (TestPartitioning in test/functorch/test_aotdispatch.py).
ONE_STEP = Tolerance(1.3e-6, 1e-5)
MANY_STEPS = Tolerance(1e-3, 1e-3)


class Compiled:
    """A training step of a copy of a model, compiled at its first run.

    Args:
        example: the model, and its loss; every model compiled gets a code object of its own.
        configured: a block in which it is compiled.
        recompiles: whether it may be compiled again, for other sizes, and then outside of that block.
        compiling: of torch.compile.

    Attributes:
        splits: what became of its graphs, where Inductor compiled it.
    """

    def __init__(
        self,
        example: Example,
        configured: Configured = contextlib.nullcontext,
        *,
        recompiles: bool = False,
        **compiling: Any,
    ) -> None:
        self.model = copy.deepcopy(example.model)
        self.loss = example.loss
        self.configured = configured
        self.splits: list[Split] = []
        self.recompiles = recompiles
        self._step = torch.compile(_own(_forward), **compiling)
        self.is_compiled = False

    def run(self, batch: Any) -> Tensors:
        """Run forward and backward; the loss, and the gradients of all parameters that have one."""
        self.compile(batch)
        with torch.compiler.set_stance("default" if self.recompiles else "fail_on_recompile"):
            return self._run(batch)

    def compile(self, batch: Any) -> None:
        """Compile the step, unless it is compiled; the model stays as it is."""
        if self.is_compiled:
            return
        state = self.state()
        self.loss(self.model, batch)  # what a first step changes in a model would have it compiled twice
        with self.configured(), recorded(self.splits), uncached():
            self._run(batch)
        self.load(state)
        self.is_compiled = True

    def _run(self, batch: Any) -> Tensors:
        self.model.zero_grad(set_to_none=True)
        loss = self._step(self.loss, self.model, batch)
        loss.backward()
        return [loss.detach(), *(p.grad for p in self.model.parameters() if p.grad is not None)]

    def state(self) -> Tensors:
        """Return copies of all parameters and buffers."""
        return [t.detach().clone() for t in (*self.model.parameters(), *self.model.buffers())]

    def load(self, state: Tensors) -> None:
        """Give parameters and buffers these values."""
        with torch.no_grad():
            for tensor, value in zip((*self.model.parameters(), *self.model.buffers()), state, strict=True):
                tensor.copy_(value)


def _forward(loss: Any, model: Any, batch: Any) -> torch.Tensor:
    result: torch.Tensor = loss(model, batch)
    return result


def _own(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy with code of its own: dynamo keeps what it compiles, and its limits, by code object."""
    assert isinstance(function, types.FunctionType)
    return types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Divide and generate anew in a block; kernels may come out of their cache."""
    off = {"fx_graph_cache": False}
    with torch._inductor.config.patch(off), torch._functorch.config.patch(enable_autograd_cache=False):
        yield


@dataclass(frozen=True)
class Comparison:
    """Two compiled steps of one model, trained beside each other.

    Attributes:
        one_step: largest difference of loss, gradients and buffers after a step from the same state, as a share of
            ONE_STEP.
        many_steps: the same of loss and gradients where each trains its own model, as a share of MANY_STEPS.
        losses: of the steps of the first.
    """

    one_step: float
    many_steps: float
    losses: list[float]

    @property
    def equal(self) -> bool:
        """Whether all differences are within what is allowed."""
        return self.one_step <= 1 and self.many_steps <= 1


def compare(
    expected: Compiled,
    found: Compiled,
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
    batches: Sequence[Any],
) -> Comparison:
    """Train two models of the same parameters side by side.

    In every step both run from where their own training has led them, and the second once more from the state of the
    first: rounding adds up in the one comparison, and does not in the other. Random numbers are the same.

    Args:
        expected, found: compiled steps of the same model.
        optimizer: makes an optimizer for each.
        batches: one per step.
    """
    optimizers = optimizer(expected.model), optimizer(found.model)
    one_step = many_steps = 0.0
    losses = []
    for seed, batch in enumerate(batches):
        before = expected.state()
        wanted = _seeded(expected, batch, seed)
        own = _seeded(found, batch, seed)
        many_steps = max(many_steps, MANY_STEPS.share(own, wanted))
        state, own = found.state(), [t.clone() for t in own]
        found.load(before)
        again = _seeded(found, batch, seed)
        num_parameters = len(list(found.model.parameters()))
        after = [*again, *found.state()[num_parameters:]]
        one_step = max(one_step, ONE_STEP.share(after, [*wanted, *expected.state()[num_parameters:]]))
        found.load(state)
        trained = [p for p in found.model.parameters() if p.grad is not None]
        for parameter, gradient in zip(trained, own[1:], strict=True):
            parameter.grad = gradient
        for each in optimizers:
            each.step()
        losses.append(float(wanted[0]))
    return Comparison(one_step, many_steps, losses)


def spread(
    example: Example, optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer], batches: Sequence[Any]
) -> float:
    """Return how far one ulp of all parameters takes a model's training, as a share of MANY_STEPS; eager kernels.

    Where that is much, no two ways to compute the model train alike, and a comparison says nothing.
    """
    runs = [Compiled(example, backend="eager") for _ in range(2)]
    with torch.no_grad():
        for p in runs[1].model.parameters():
            p.copy_(torch.nextafter(p, torch.full_like(p, torch.inf)))
    return compare(*runs, optimizer, batches).many_steps


def _seeded(step: Compiled, batch: Any, seed: int) -> Tensors:
    """Run a step whose random numbers follow from a seed."""
    step.compile(batch)  # draws some
    torch.manual_seed(seed)
    return step.run(batch)


def fresh_batches(batch: Any, number: int) -> Iterator[Any]:
    """Yield batches like one: normal where it holds numbers, up to its largest where it holds integers."""
    generator = torch.Generator().manual_seed(0)

    def fresh(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        return torch.randint(int(tensor.max()) + 1, tensor.shape, generator=generator, dtype=tensor.dtype)

    for _ in range(number):
        yield pytree.tree_map(fresh, batch)
