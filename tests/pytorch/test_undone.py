"""What a capture that is given up has moved in Python is put back, or not touched at all, before the ordinary step."""

from __future__ import annotations

import collections
import contextlib
import functools
import io
import itertools
import queue
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

import olla
from tests.pytorch.ordinary import net, ordinary, same, state_of, step_of
from tests.support.pytorch.steps import square, torch

pytestmark = [
    pytest.mark.torch,
    # Torch says it once per process, in whichever test comes first.
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar:UserWarning"),
]
NUM_STEPS = 5


@functools.lru_cache
def causal(n: int) -> Any:
    return torch.tril(torch.ones(n, n))


@functools.cache
def tables(n: int) -> Any:
    return {"rows": [torch.arange(n)], "n": n}


@functools.cache
def names(n: int) -> Any:
    return str(n)


@pytest.mark.parametrize(("stance", "num_cached"), [("default", 0), ("force_eager", 1)])
def test_caches_that_a_capture_fills_hold_no_fake_tensors(stance: str, num_cached: int) -> None:
    """Dynamo follows a cached function and leaves its cache alone; else the loss is traced by running it."""

    def loss(model: Any, x: Any) -> Any:
        return (causal(6) * x).square().mean() * model(x).mean() + tables(3)["rows"][0].sum() + len(names(6))

    for cached in (causal, tables, names):
        cached.cache_clear()
    model = net()
    step = olla.compile(model, optimizer=torch.optim.SGD(model.parameters()), loss=loss, disk_cache=False)
    with torch.compiler.set_stance(stance):
        step(torch.ones(6, 6))
    assert names.cache_info().currsize == num_cached
    assert type(causal(6)) is type(tables(3)["rows"][0]) is torch.Tensor
    assert loss(model, torch.ones(6, 6)).isfinite()


def drawn_from(numbers: Any) -> Any:
    return lambda model, x: square(model, x) * float(next(numbers))


def drawn_by(make: Any) -> Any:
    source = make()
    return lambda model, x: square(model, x) * source.random()


def remembering(place: Any, add: Any) -> Any:
    def loss(model: Any, x: Any) -> Any:
        add(place)
        return square(model, x) * len(place)

    return loss


def of_an_array() -> Any:
    counts = numpy.ones(3)

    def loss(model: Any, x: Any) -> Any:
        counts[0] += 1
        return square(model, x) * float(counts[0])

    return loss


@pytest.mark.parametrize(
    "make",
    [
        lambda: drawn_from(iter([1.0, 2.0, 3.0, 4.0, 5.0])),
        lambda: drawn_by(lambda: random.Random(3)),
        lambda: drawn_by(lambda: numpy.random.RandomState(3)),
        lambda: drawn_by(lambda: numpy.random.default_rng(3)),
        lambda: remembering(set(), lambda s: s.add(len(s))),
        lambda: remembering(collections.deque(maxlen=3), lambda d: d.append(1)),
        lambda: remembering([], lambda held: held.append(1)),
        lambda: remembering({}, lambda d: d.update({len(d): 1})),
        of_an_array,
    ],
)
def test_python_state_that_a_capture_has_moved_is_put_back_before_the_ordinary_step(make: Any) -> None:
    seen: list[list[Any]] = [[], []]
    for planned in (0, 1):
        model, loss = net(), make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        step = step_of(planned, model, optimizer, loss=loss)
        torch.manual_seed(7)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seen[planned] = [step(torch.ones(2, 6)).detach().clone() for _ in range(4)]
    assert same(*seen)


def test_a_body_with_a_scaler_of_gradients_is_followed_from_the_first_step_on() -> None:
    seen: list[list[Any]] = [[], []]
    for planned in (0, 1):
        model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def body(model: Any, optimizer: Any, x: Any, scaler: Any = scaler) -> Any:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = square(model, x).float()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        step = step_of(planned, model, optimizer, step=body)
        torch.manual_seed(7)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(NUM_STEPS):
                seen[planned] += [
                    step(torch.randn(4, 6)),
                    *state_of(model, optimizer),
                    torch.tensor(scaler.get_scale()),
                ]
    assert same(*seen)


LINES = "1\n2\n3\n4\n5\n6\n7\n"
SOURCES: dict[str, Callable[[Path], Any]] = {
    "generator": lambda _: (float(i) for i in range(1, 9)),
    "count": lambda _: itertools.count(1),
    "cycle": lambda _: itertools.cycle([1, 2, 3]),
    "map": lambda _: map(float, range(1, 9)),
    "filter": lambda _: filter(None, range(9)),
    "zip": lambda _: zip(range(1, 9), range(9), strict=False),
    "enumerate": lambda _: enumerate(range(8), 1),
    "loader": lambda _: iter(torch.utils.data.DataLoader(range(1, 9))),
    "text in memory": lambda _: io.StringIO(LINES),
    "file": lambda path: path.open(),
    "file of bytes": lambda path: path.open("rb"),
}


def number_of(taken: Any) -> float:
    return float(taken[0] if isinstance(taken, tuple) else taken)


@pytest.mark.parametrize("what", ["loss", "step"])
@pytest.mark.parametrize("kind", SOURCES)
def test_a_capture_takes_nothing_from_an_iterator(kind: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_text(LINES)
    seen: list[list[Any]] = [[], []]
    for planned in (0, 1):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        with (
            contextlib.closing(SOURCES[kind](path))
            if "file" in kind
            else contextlib.nullcontext(SOURCES[kind](path)) as source
        ):

            def loss(model: Any, x: Any, source: Any = source) -> Any:
                return square(model, x) * number_of(next(source))

            def body(model: Any, optimizer: Any, x: Any, loss: Any = loss) -> Any:
                return ordinary(model, optimizer, loss, x)

            step = step_of(planned, model, optimizer, **{what: loss if what == "loss" else body})
            torch.manual_seed(7)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                seen[planned] = [step(torch.ones(2, 6)).detach().clone() for _ in range(4)]
            seen[planned].append(number_of(next(source)))
    assert same(*seen)


def test_nor_where_the_step_catches_the_error_that_would_say_so() -> None:
    seen: list[list[Any]] = [[], []]
    for planned in (0, 1):
        model, numbers, scale = net(), map(float, range(1, 99)), [1.0]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

        def taken(numbers: Any = numbers) -> float:
            return float(next(numbers))

        def body(model: Any, optimizer: Any, x: Any, taken: Any = taken, scale: Any = scale) -> Any:
            try:
                number = taken()
            except Exception:
                number = 7.0
            return ordinary(model, optimizer, lambda model, x: square(model, x) * number * scale[0], x)

        step = step_of(planned, model, optimizer, step=body)
        torch.manual_seed(7)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for i in range(4):
                scale[0] = 1.0 + i
                seen[planned].append(step(torch.ones(2, 6)).detach().clone())
        seen[planned].append(next(numbers))
    assert same(*seen)


def test_where_it_cannot_be_put_back_the_step_is_refused_and_says_so() -> None:
    numbers: queue.SimpleQueue[float] = queue.SimpleQueue()
    for i in range(9):
        numbers.put(float(i))
    model = net()
    body = lambda m, optimizer, x: ordinary(m, optimizer, square, x * numbers.get())  # noqa: E731
    step = olla.compile(model, optimizer=torch.optim.SGD(model.parameters()), step=body, disk_cache=False)
    with pytest.raises(olla.CaptureError, match=r"The ordinary step does not run in its place.*cannot be put back"):
        step(torch.ones(2, 6))
