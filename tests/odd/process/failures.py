"""Errors raised in a step, steps in threads and inside each other, and objects that are hard to look at."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import threading
from typing import Any

from tests.odd.loops import (
    Loop,
    at,
    cleanup,
    entropy,
    labelled,
    mlp,
    must,
    number_at,
    odd,
    remedied,
    rows,
    steady,
    train,
)
from tests.support.pytorch.steps import nn, square, torch


class Failing:
    """A loss that raises an error at one step."""

    def __init__(self, error: BaseException, number: int = 2) -> None:
        self.error, self.number, self.step = error, number, 0

    def __call__(self, model: Any, batch: Any) -> Any:
        if self.step == self.number:
            raise self.error
        return square(model, batch)


class Interrupt(KeyboardInterrupt):
    pass


def failing(error: BaseException, number: int) -> Loop:
    loss = Failing(error, number)
    return train(loss=loss, change=lambda i: setattr(loss, "step", i))


for _error in (
    ValueError("bad"),
    StopIteration(3),
    KeyError("gone"),
    Interrupt(),
    GeneratorExit(),
    AssertionError("no"),
):
    for _number in (0, 2):
        odd(
            functools.partial(failing, _error, _number),
            name=f"{type(_error).__name__}_raised_by_the_loss_at_step_{_number}",
        )


@odd
def next_of_an_iterator_that_ends() -> Loop:
    numbers = iter([1.0, 2.0, 3.0])
    return train(loss=lambda model, x: square(model, x) * next(numbers))


@odd
def getattr_of_the_model_that_raises_another_error() -> Loop:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def __getattr__(self, name: str) -> Any:
            if name.startswith("odd") or name.startswith("_olla"):
                raise RuntimeError(f"do not ask for {name}")
            return super().__getattr__(name)

        def forward(self, x: Any) -> Any:
            return self.body(x)

    return train(Net())


@odd
def configuration_whose_attributes_and_comparison_raise() -> Loop:
    class Config:
        scale = 1.0

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"no setting {name}")

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("not comparable")

        __hash__ = object.__hash__

    config = Config()
    loss = lambda model, x: square(model, x) * config.scale  # noqa: E731
    return train(loss=loss, change=lambda i: setattr(config, "scale", number_at(i)))


@odd
def step_called_in_a_thread() -> Loop:
    def call(step: Any, batch: Any) -> Any:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(step(batch)))
        thread.start()
        thread.join()
        return found[0]

    return train(mlp(nn.Dropout(0.2)), call=call)


@odd
def step_called_in_a_thread_with_a_number_of_its_own() -> Loop:
    local = threading.local()
    number = [0]

    def call(step: Any, batch: Any) -> Any:
        number[0] += 1
        found: list[Any] = []

        def run() -> None:
            local.scale = float(number[0])
            found.append(step(batch))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return found[0]

    return train(loss=lambda model, x: square(model, x) * local.scale, call=call)


@must
def memory_released_between_steps() -> Loop:
    world = train()
    world.change = lambda i: world.step and world.step.release()
    return world


@must
def two_steps_of_one_model() -> Loop:
    import olla

    world = train()
    other = lambda model, x: model(x).abs().mean()  # noqa: E731
    second: list[Any] = []

    def after(i: int, result: Any) -> None:
        x = rows(50 + i)
        if world.step is None:
            world.optimizer.zero_grad()
            other(world.model, x).backward()
            world.optimizer.step()
            return
        if not second:
            second.append(olla.compile(world.model, optimizer=world.optimizer, loss=other, time_limit=0.05))
        second[0](x)

    world.after = after
    return world


@odd
def step_called_from_its_own_loss() -> Loop:
    world = train()
    is_nested = [False]

    def loss(model: Any, x: Any) -> Any:
        if is_nested[0]:
            is_nested[0] = False
            (world.plain if world.step is None else world.step)(x)
        return square(model, x)

    world.loss = loss
    world.change = lambda i: is_nested.__setitem__(0, i == 2)
    return world


@odd
def compiled_step_copied_and_pickled() -> Loop:
    import olla

    world = train()

    def change(i: int) -> None:
        if i == 2 and world.step is not None:
            for attempt in (copy.deepcopy, pickle.dumps):
                with contextlib.suppress(olla.OllaError):  # or it works, or is a TypeError that names what it is of
                    try:
                        attempt(world.step)
                    except TypeError as error:
                        if "olla" not in str(error):
                            raise

    world.change = change
    return world


@odd
def model_used_by_the_loss_through_a_closure() -> Loop:
    model, other = mlp(), mlp()
    held = [model]
    optimizer = torch.optim.SGD([*model.parameters()], lr=0.1)
    loss = lambda _, x: square(held[0], x) + 0 * square(model, x)  # noqa: E731
    return train(model, loss, at(2, lambda: held.__setitem__(0, other)), optimizer=optimizer)


@steady
def nothing_changes() -> Loop:
    return train(mlp(nn.BatchNorm1d(8), nn.Dropout(0.1)))


@steady
def nothing_changes_with_labels() -> Loop:
    return train(loss=entropy, batch=labelled)


@odd
def recursion_limit_of_deep_settings() -> Loop:
    deep: Any = 1.0
    for _ in range(2000):
        deep = [deep]
    state = {"deep": deep, "scale": 1.0}
    state["itself"] = state
    loss = lambda model, x: square(model, x) * state["scale"]  # noqa: E731
    return train(loss=loss, change=lambda i: state.update(scale=number_at(i)))


@odd
def loss_attribute_deleted_between_steps() -> Loop:
    class Loss:
        scale = 1.0

        def __init__(self) -> None:
            self.scale = 2.0

        def __call__(self, model: Any, x: Any) -> Any:
            return square(model, x) * self.scale

    loss = Loss()
    return train(loss=loss, change=at(2, lambda: delattr(loss, "scale")))


@odd
def global_deleted_between_steps() -> Loop:
    known = globals()
    known["FACTOR"] = 2.0
    cleanup.callback(known.pop, "FACTOR", None)
    return train(
        loss=lambda model, x: square(model, x) * FACTOR,  # type: ignore[name-defined]  # noqa: F821
        change=at(2, lambda: known.pop("FACTOR")),
    )


@odd
def attribute_of_the_step_set_by_the_user() -> Loop:
    world = train()

    def tag() -> None:
        if world.step is not None:
            with remedied("a compiled step has no attributes of the user's; keep them beside it"):
                world.step.tag = 1

    world.change = at(2, tag)
    return world
