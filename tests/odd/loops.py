"""What an odd loop is, the register of all of them, and the small models that most of them train."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from tests.support.pytorch.steps import World, nn, square, torch

NUM_STEPS = 5


@dataclass
class Loop(World):
    """A world, and what changes in it between steps.

    Attributes:
        batch: a batch, or a function of the step's number that makes it.
        change: called with the number of a step before that step.
        after: called with the number of a step and its result behind that step.
        seen: what else the user sees of the loop; compared after each step.
        call: calls the step, given that and the batch, in place of ``step(batch)``.
        num_steps: of the loop.
        options: further ones of olla.compile.
        step: the compiled step; None in the eager loop.
    """

    change: Callable[[int], Any] = lambda i: None
    after: Callable[[int, Any], Any] = lambda i, result: None
    seen: Callable[[], Any] = lambda: None
    call: Callable[[Any, Any], Any] = lambda step, batch: step(batch)
    num_steps: int = NUM_STEPS
    options: dict[str, Any] = field(default_factory=dict)
    step: Any = None

    def plain(self, batch: Any) -> Any:
        """One step of the ordinary loop."""
        if self.body is not None:
            return self.body(self.model, self.optimizer, batch)
        if self.loss is None:
            with torch.no_grad():
                return self.model(**batch) if isinstance(batch, dict) else self.model(batch)
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        result = self.loss(self.model, batch)
        (result[0] if isinstance(result, tuple | list) else result).backward()
        if self.optimizer is not None:
            self.optimizer.step()
        return result

    def tensors(self) -> dict[str, Any]:
        """Parameters, buffers, optimizer state, gradients where the loop leaves them, and torch's random state."""
        found: dict[str, Any] = dict(self.model.named_parameters(remove_duplicate=False))
        found |= self.model.named_buffers(remove_duplicate=False)
        if self.optimizer is None:
            found |= {f"gradient of {name}": p.grad for name, p in self.model.named_parameters()}
        else:
            held = [p for group in self.optimizer.param_groups for p in group["params"]]
            for i, p in enumerate(held):
                found[f"parameter {i} of the optimizer"] = p
                found |= {f"{k} of parameter {i}": v for k, v in self.optimizer.state.get(p, {}).items()}
        return found | {"torch's random state": torch.get_rng_state()}


@dataclass(frozen=True)
class Odd:
    """An entry of the register.

    Attributes:
        name: as a claim about what is odd.
        build: makes the loop anew.
        must_be_equal: whether an error is not good enough: people do this all the time.
        may_round: whether results may differ by rounding.
        num_captures: the most there may be; None: any number.
    """

    name: str
    build: Callable[[], Loop]
    must_be_equal: bool = False
    may_round: bool = False
    num_captures: int | None = None


REGISTER: dict[str, Odd] = {}
cleanup = contextlib.ExitStack()  # what loops change of the process; the runner closes it behind each of them
_process = 0


def odd(build: Callable[[], Loop] | None = None, name: str = "", **settings: Any) -> Any:
    """Put a function that makes a loop into the register, under its own name unless another is given."""
    if build is None:
        return lambda function: odd(function, name, **settings)
    entry = Odd(name or build.__name__, build, **settings)
    assert entry.name not in REGISTER, f"two loops are called {entry.name}"
    REGISTER[entry.name] = entry
    return build


must = odd(must_be_equal=True)
steady = odd(must_be_equal=True, num_captures=1)


def of_process(*values: Any) -> Any:
    """One of the values: the first in the first process on a disk cache (and without one), then the second."""
    return values[_process % len(values)]


def be_process(number: int) -> None:
    """Say which process on a disk cache this is."""
    global _process
    _process = number


def patch(target: Any, name: str, value: Any) -> None:
    """Set an attribute or an item until the loop ends."""
    if isinstance(target, type(__import__("os").environ) | dict):
        cleanup.enter_context(mock.patch.dict(target, {name: value}))
    else:
        cleanup.enter_context(mock.patch.object(target, name, value, create=True))


@contextlib.contextmanager
def remedied(message: str) -> Iterator[None]:
    """Count an attribute that cannot be set as the clear error it is."""
    import olla

    try:
        yield
    except AttributeError as error:
        raise olla.OllaError(f"{message}: {error}") from error


def at(number: int, function: Callable[[], Any]) -> Callable[[int], None]:
    """A change that is made once, before one step."""
    return lambda i: function() if i == number else None


def number_at(i: int) -> float:
    """A number that changes before step 2 and goes back before step 4, another one in the next process."""
    return of_process(1.5, 0.75) if i in (2, 3) else of_process(1.0, 1.25)


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1)


def adam(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.01)


def momentum(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def mlp(*middle: nn.Module) -> nn.Sequential:
    """Two linear layers around others; item 1 is the first of these, or a ReLU."""
    return nn.Sequential(nn.Linear(6, 8), *(middle or (nn.ReLU(),)), nn.Linear(8, 3))


def conv(norm: nn.Module | None = None) -> nn.Sequential:
    """A convolution, a norm (item 1) and a linear layer, for pictures()."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm or nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def rows(i: int, *shape: int) -> Any:
    """Another tensor for each step."""
    return torch.randn(shape or (4, 6), generator=torch.Generator().manual_seed(100 + i))


def pictures(i: int) -> Any:
    return rows(i, 2, 3, 6, 6)


def labelled(i: int) -> dict[str, Any]:
    """Rows with one of three classes each."""
    return {"x": rows(i), "y": torch.arange(4).add(i).remainder(3)}


def entropy(model: nn.Module, batch: Any) -> Any:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def train(
    model: nn.Module | None = None,
    loss: Any = square,
    change: Any = None,
    *,
    optimizer: Any = sgd,
    batch: Any = rows,
    **settings: Any,
) -> Loop:
    """A loop around a model, by default a small one; the optimizer is given as a function of its parameters."""
    model = mlp() if model is None else model
    made = optimizer(model.parameters()) if callable(optimizer) else optimizer
    if change is not None:
        settings["change"] = change
    return Loop(model, made, batch, None if "body" in settings else loss, **settings)
