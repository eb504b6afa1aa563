"""What Python keeps from one step to the next: counters, logs, caches, random numbers, exceptions, threads."""

from __future__ import annotations

import collections
import functools
import itertools
import random
from typing import Any

import numpy as np

from tests.odd.loops import Loop, at, labelled, mlp, must, odd, rows, train
from tests.support.pytorch.steps import nn, square, torch

functional = nn.functional


@odd
def counter_in_the_loss_that_scales_it() -> Loop:
    count = 0

    def loss(model: Any, x: Any) -> Any:
        nonlocal count
        count += 1
        return square(model, x) * count

    return train(loss=loss, seen=lambda: count)


@odd
def counter_in_the_loss_that_only_the_user_reads() -> Loop:
    count = 0

    def loss(model: Any, x: Any) -> Any:
        nonlocal count
        count += 1
        return square(model, x)

    return train(loss=loss, seen=lambda: count)


@odd
def counter_in_the_model() -> Loop:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.calls = mlp(), 0

        def forward(self, x: Any) -> Any:
            self.calls += 1
            return self.body(x) / self.calls

    model = Net()
    return train(model, seen=lambda: model.calls)


@odd
def counter_that_decides_every_third_step() -> Loop:
    count = itertools.count()
    loss = lambda model, x: square(model, x) * (2 if next(count) % 3 == 2 else 1)  # noqa: E731
    return train(loss=loss)


@must
def counter_changed_between_steps() -> Loop:
    state = {"step": 0}
    loss = lambda model, x: square(model, x) * min(1.0, state["step"] / 3)  # noqa: E731
    return train(loss=loss, change=lambda i: state.update(step=i))


@odd
def log_of_losses_appended_in_the_loss() -> Loop:
    log: list[Any] = []

    def loss(model: Any, x: Any) -> Any:
        value = square(model, x)
        log.append(value.detach())
        return value

    return train(loss=loss, seen=lambda: log)


@odd
def metrics_object_updated_in_the_loss() -> Loop:
    class Accuracy:
        def __init__(self) -> None:
            self.right, self.total = torch.zeros(()), 0

        def update(self, logits: Any, y: Any) -> None:
            self.right += (logits.argmax(1) == y).sum()
            self.total += len(y)

    metric = Accuracy()

    def loss(model: Any, batch: Any) -> Any:
        logits = model(batch["x"])
        metric.update(logits.detach(), batch["y"])
        return functional.cross_entropy(logits, batch["y"])

    return train(loss=loss, batch=labelled, seen=lambda: (metric.right, metric.total))


@odd
def moving_average_of_the_loss_kept_as_a_number() -> Loop:
    average = [0.0]

    def loss(model: Any, x: Any) -> Any:
        value = square(model, x)
        average[0] = 0.9 * average[0] + 0.1 * float(value.detach())
        return value

    return train(loss=loss, seen=lambda: average[0])


@must
def moving_average_kept_between_steps() -> Loop:
    average = [1.0]
    world = train(loss=lambda model, x: square(model, x) / average[0])
    world.after = lambda i, result: average.__setitem__(0, 0.9 * average[0] + 0.1 * result.item())
    return world


@odd
def previous_output_kept_by_the_model() -> Loop:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.last = mlp(), torch.zeros(4, 3)

        def forward(self, x: Any) -> Any:
            y = self.body(x) + self.last
            self.last = y.detach()
            return y

    model = Net()
    return train(model, seen=lambda: model.last)


@odd
def cache_of_a_mask_in_the_model() -> Loop:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.masks = mlp(), {}

        def forward(self, x: Any) -> Any:
            if len(x) not in self.masks:
                self.masks[len(x)] = torch.ones(len(x), 3).tril()
            return self.body(x) * self.masks[len(x)]

    model = Net()
    return train(model, batch=lambda i: rows(i, 4 + i // 2, 6), seen=lambda: list(model.masks.values()))


@odd
def lazy_cache_that_the_user_clears() -> Loop:
    cache: dict[str, Any] = {}
    scale = [1.0]

    def loss(model: Any, x: Any) -> Any:
        if "scale" not in cache:
            cache["scale"] = scale[0]
        return square(model, x) * cache["scale"]

    def change(i: int) -> None:
        scale[0] = 1.0 + i
        if i == 2:
            cache.clear()

    return train(loss=loss, change=change)


@odd
def history_in_a_deque_of_the_loss() -> Loop:
    history: Any = collections.deque(maxlen=2)

    def loss(model: Any, x: Any) -> Any:
        y = model(x)
        history.append(y.detach())
        return sum((y - old).square().mean() for old in history) + y.square().mean()

    return train(loss=loss)


@odd
def list_of_tensors_that_grows_between_steps() -> Loop:
    held: list[Any] = []
    loss = lambda model, x: square(model, x) + sum((model(x) * t).sum() for t in held)  # noqa: E731
    return train(loss=loss, change=lambda i: held.append(torch.full((3,), 0.1 * i)))


@must
def teacher_tensor_kept_by_the_user() -> Loop:
    held = {"target": torch.zeros(4, 3)}
    loss = lambda model, x: (model(x) - held["target"]).square().mean()  # noqa: E731
    return train(loss=loss, change=lambda i: held.update(target=torch.full((4, 3), float(i))))


RANDOM: dict[str, Any] = {
    "python": lambda: random.random(),
    "python_choice": lambda: random.choice([1.0, 2.0, 3.0]),
    "numpy": lambda: float(np.random.rand()),  # noqa: NPY002
    "torch_as_a_number": lambda: torch.rand(()).item(),
    "torch": lambda: torch.rand(()),
    "system": lambda: random.SystemRandom(3).random() * 0 + 1,
}


def drawn(draw: Any) -> Loop:
    return train(loss=lambda model, x: square(model, x) * draw())


for _name, _draw in RANDOM.items():
    odd(functools.partial(drawn, _draw), f"random_numbers_of_{_name}")


@odd
def random_numbers_of_an_own_python_generator() -> Loop:
    source = random.Random(3)
    return train(loss=lambda model, x: square(model, x) * source.random(), seen=lambda: source.random())


@odd
def random_numbers_of_an_own_numpy_generator() -> Loop:
    source = np.random.default_rng(3)
    return train(loss=lambda model, x: square(model, x) * float(source.random()), seen=lambda: float(source.random()))


@odd
def random_numbers_of_an_own_generator_of_torch() -> Loop:
    source = torch.Generator().manual_seed(3)
    loss = lambda model, x: square(model, x + torch.randn(x.shape, generator=source))  # noqa: E731
    return train(loss=loss, seen=source.get_state)


@odd
def own_generator_seeded_again() -> Loop:
    source = torch.Generator().manual_seed(3)
    loss = lambda model, x: square(model, x + torch.randn(x.shape, generator=source))  # noqa: E731
    return train(loss=loss, change=at(3, lambda: source.manual_seed(3)), seen=source.get_state)


@odd
def own_generator_replaced() -> Loop:
    held = [torch.Generator().manual_seed(3)]
    loss = lambda model, x: square(model, x + torch.randn(x.shape, generator=held[0]))  # noqa: E731
    return train(loss=loss, change=at(2, lambda: held.__setitem__(0, torch.Generator().manual_seed(9))))


@must
def seeded_again_between_steps() -> Loop:
    return train(mlp(nn.Dropout(0.5)), change=lambda i: torch.manual_seed(5 + i // 2))


@must
def random_state_saved_and_restored_between_steps() -> Loop:
    state = [torch.get_rng_state()]

    def change(i: int) -> None:
        if i == 1:
            state[0] = torch.get_rng_state()
        if i == 3:
            torch.set_rng_state(state[0])

    return train(mlp(nn.Dropout(0.5)), change=change)


@odd
def seeded_inside_the_loss() -> Loop:
    def loss(model: Any, x: Any) -> Any:
        torch.manual_seed(5)
        return square(model, x)

    return train(mlp(nn.Dropout(0.5)), loss)
