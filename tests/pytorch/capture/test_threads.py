"""Captures beside other threads: each gives what it gives alone, and nothing of the process is different afterwards."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from torch.optim import optimizer as torch_optimizer
from torch.utils import checkpoint

import olla
from olla.pytorch.capture import exclusive
from tests.support.pytorch.steps import (
    World,
    capture,
    images,
    knows_generators,
    models,
    nn,
    num_interrupted,
    same,
    slow,
    square,
    torch,
)

pytestmark = pytest.mark.torch


class Noisy(nn.Module):
    """Noise of a generator of its own, recomputed layers, a cache, and a buffer that is replaced."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = torch.tanh(checkpoint.checkpoint(layer, x, use_reentrant=False))
            x = x + torch.randn(x.shape, generator=self.own)
        self.cache = x
        self.average = 0.9 * self.average + x.detach().mean(0)
        return x + self.average


def body(model: Any, optimizer: Any, batch: Any) -> Any:
    optimizer.zero_grad()
    losses = [square(model, part) for part in batch.split(2)]
    for loss in losses:
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return losses


def layers(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), *between, nn.Linear(16, 8))


def zoo() -> list[World]:
    """Eight models that draw from no generator but their own while they run."""
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    made: list[tuple[nn.Module, Any, Any]] = [
        (layers(nn.Tanh()), x, square),
        (layers(nn.LayerNorm(16), nn.GELU()), x, None),
        (convolutions, images(), square),
        (Noisy(1), x, square),
        (Noisy(2), x, None),
        (nn.MultiheadAttention(8, 2), x, lambda model, x: model(x, x, x)[0].square().mean()),
        (nn.LSTM(8, 8), x, lambda model, x: model(x[None])[0].square().mean()),
        (nn.Embedding(9, 8), torch.arange(9), square),
    ]
    worlds = []
    for model, batch, loss in made:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        worlds.append(World(model, optimizer, batch, loss, body if loss is None else None))
    return worlds


def train(world: World) -> list[Any]:
    """Two steps captured, planned and run; without a seed, which would be every thread's."""
    step = world.compiled(arena=False, time_limit=0.05, disk_cache=False)
    found = [t.detach().clone() for _ in range(2) for t in torch.utils._pytree.tree_leaves(step(world.batch))]
    return [*found, *world.values()]


def replaceable() -> list[Any]:
    """What captures replace, or could leave behind."""
    modules = (random, np.random, torch.random, torch.cuda, torch._C, checkpoint)
    functions = [f for m in modules for _, f in sorted(vars(m).items()) if callable(f)]
    functions += [torch.get_rng_state, torch.set_rng_state, torch.manual_seed, torch.seed, torch.autograd.backward]
    functions += [torch_optimizer._global_optimizer_pre_hooks, nn.Module.__call__, nn.Module.__getattr__]
    return functions


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    torch.compile(torch.neg, backend="eager")(torch.ones(()))  # Dynamo replaces some of torch's functions for good
    before, state, settings = replaceable(), torch.get_rng_state(), health()
    yield
    assert all(a is b for a, b in zip(before, replaceable(), strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert health() == settings


def is_fx_tracing() -> Any:
    module: Any = torch.fx._symbolic_trace
    ask = getattr(module, "_get_is_fx_tracing", None)  # of this thread, since torch 2.14
    return module._is_fx_tracing_flag if ask is None else ask()


def health() -> list[Any]:
    """Settings of the process and of this thread that torch keeps."""
    return [
        torch.backends.mkldnn.enabled,
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        [
            torch._C._get_dispatch_mode(key)
            for key in (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)
        ],
        is_fx_tracing(),
        torch.fx._lazy_graph_module._use_lazy_graph_module_flag,
        len(torch_optimizer._global_optimizer_pre_hooks),
        exclusive._replaced,
    ]


def together(works: list[Callable[[], Any]]) -> list[Any]:
    """Run functions at once, each on a thread; what each returned, or raised."""
    results: list[Any] = [None] * len(works)
    start = threading.Barrier(len(works))

    def work(i: int) -> None:
        start.wait()
        try:
            results[i] = works[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@knows_generators
@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=slow)])
def test_eight_threads_that_capture_and_run_give_what_each_gives_alone(rounds: int) -> None:
    alone = [train(world) for world in zoo()]
    for _ in range(rounds):
        worlds = zoo()
        with untouched():
            found = together([lambda w=world: train(w) for world in worlds])
        assert not [r for r in found if isinstance(r, BaseException)]
        assert all(same(*pair) for pair in zip(found, alone, strict=True))


@knows_generators
def test_captures_leave_the_numbers_alone_that_another_thread_draws_meanwhile() -> None:
    torch.manual_seed(5)
    wanted = [torch.rand(3) for _ in range(500)]
    worlds = [*zoo(), *(with_dropout(name) for name in ("bert_base", "gpt2"))]
    torch.manual_seed(5)
    drawn: list[Any] = []

    def draw() -> None:
        while len(drawn) < len(wanted):
            drawn.append(torch.rand(3))
            time.sleep(1e-4)

    thread = threading.Thread(target=draw)
    thread.start()
    while thread.is_alive():
        for world in worlds:
            capture(world)
    thread.join()
    assert same(drawn, wanted)


def noisy_with_dropout() -> World:
    model = nn.Sequential(Noisy(1), nn.Dropout(0.1), nn.LSTM(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    return World(model, optimizer, torch.ones(4, 8), lambda model, x: model(x)[0].square().mean())


def with_dropout(name: str) -> World:
    example = models.build(name, 2, tiny=True, device="cpu")
    optimizer = torch.optim.AdamW(example.model.parameters())
    return World(example.model, optimizer, example.batch, example.loss)


@knows_generators
def test_a_step_that_runs_while_another_thread_captures_is_the_same_to_the_bit() -> None:
    done = threading.Event()

    def steps(world: World, enough: Callable[[int], bool]) -> list[list[Any]]:
        step = world.compiled(arena=True, time_limit=0.05, disk_cache=False)
        found: list[list[Any]] = []
        while not enough(len(found)):
            found.append([step(world.batch).clone(), *(p.detach().clone() for p in world.model.parameters())])
        return found

    results: list[list[Any]] = []
    convolutions = 2  # of the zoo: they ask whether oneDNN is on
    mine, others = zoo()[convolutions], zoo()  # both draw from one generator: not at the same time
    thread = threading.Thread(target=lambda: results.extend(steps(mine, lambda number: number > 20 and done.is_set())))
    thread.start()
    for world in others:
        capture(world)
    done.set()
    thread.join()
    alone = steps(zoo()[convolutions], lambda number: number == len(results))
    assert all(same(*pair) for pair in zip(alone, results, strict=True))


@knows_generators
def test_models_that_share_parameters_are_captured_at_once_and_stay_as_they_were() -> None:
    torch.manual_seed(0)
    shared = nn.Linear(8, 8)
    worlds = []
    for between in (nn.Tanh(), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(8)):
        twin = nn.Linear(8, 8)
        twin.weight, twin.bias = shared.weight, shared.bias
        model = nn.Sequential(shared, between, twin, nn.Linear(8, 2))
        worlds.append(World(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(4, 8), square))
    before = [dict(world.model.state_dict(keep_vars=True)) for world in worlds]
    alone = [capture(world).graph.to_dict() for world in worlds]
    with untouched():
        found = together([lambda w=world: [capture(w).graph.to_dict() for _ in range(5)] for world in worlds])
    assert all(graphs == [graph] * 5 for graphs, graph in zip(found, alone, strict=True))
    for world, state in zip(worlds, before, strict=True):
        now = world.model.state_dict(keep_vars=True)
        assert list(now) == list(state)
        assert all(now[name] is state[name] for name in state)


def test_a_capture_that_fails_lets_the_next_one_begin_and_leaves_the_process_as_it_was() -> None:
    def fail(model: Any, x: Any) -> Any:
        torch.get_rng_state()
        raise RuntimeError("injected")

    model = nn.Linear(2, 2)
    with untouched():
        for _ in range(3):
            with pytest.raises(olla.CaptureError, match="injected"):
                olla.capture(model, torch.ones(1, 2), loss=fail)
            olla.capture(model, torch.ones(1, 2), loss=square)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_forked_while_another_thread_runs_a_step_does_not_wait_for_that_thread() -> None:
    step = olla.compile(nn.Linear(4, 4), loss=square, arena=False)
    with step._lock:  # as a running step does
        child = os.fork()
        if child == 0:
            os._exit(int(step._lock.locked()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_forked_while_another_thread_captures_has_torchs_own_functions_and_can_capture() -> None:
    inside, done = threading.Lock(), threading.Lock()  # an Event has state that the step would change
    inside.acquire()
    done.acquire()

    def wait(model: Any, x: Any) -> Any:
        inside.release()
        done.acquire(timeout=60)
        return square(model, x)

    before = replaceable()
    thread = threading.Thread(target=lambda: olla.capture(nn.Linear(2, 2), torch.ones(1, 2), loss=wait))
    thread.start()
    assert inside.acquire(timeout=60)
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            mine = replaceable()
            ours = [
                a is b
                for a, b in zip(before, mine, strict=True)
                if a not in (nn.Module.__call__, nn.Module.__getattr__)
            ]
            code = 0 if all(ours[:-2]) else 2
            olla.capture(nn.Linear(2, 2), torch.ones(1, 2))
        os._exit(code)
    status = os.waitpid(child, 0)[1]
    done.release()
    thread.join()
    assert status == 0


@knows_generators
def test_a_capture_interrupted_at_any_moment_leaves_the_process_and_the_model_as_they_were() -> None:
    world = noisy_with_dropout()
    capture(world)
    tables = [t for m in world.model.modules() for t in (m.__dict__, m._parameters, m._buffers)]
    saved = [dict(t) for t in tables]
    wanted = capture(world).graph.to_dict()
    seconds = min(timeit.repeat(lambda: capture(world), number=1, repeat=3))  # the machine may be busy with others
    before, settings, state = replaceable(), health(), torch.get_rng_state()

    def check() -> None:
        assert all(a is b for a, b in zip(before, replaceable(), strict=True))
        assert health() == settings
        assert torch.equal(torch.get_rng_state(), state)
        for table, kept in zip(tables, saved, strict=True):
            assert list(table) == list(kept)
            assert all(table[key] is kept[key] for key in kept)
        assert "step" not in world.optimizer.__dict__
        assert not world.optimizer.state
        assert all(p.grad is None for p in world.model.parameters())

    assert num_interrupted(60, 1.1 * seconds, lambda: capture(world), check) > 30
    assert capture(world).graph.to_dict() == wanted


@pytest.mark.usefixtures("interruptible")
def test_a_second_interrupt_ends_a_capture_that_waits_for_something() -> None:
    model = nn.Linear(2, 2)

    began = threading.Lock()
    began.acquire()

    def stuck(model: Any, x: Any) -> Any:
        began.release()
        time.sleep(20)
        return square(model, x)

    def twice() -> None:
        began.acquire(timeout=60)
        for _ in range(2):
            time.sleep(0.3)
            os.kill(os.getpid(), 2)

    thread = threading.Thread(target=twice)
    olla.capture(model, torch.ones(1, 2), loss=square)  # torch loads parts of itself at first use
    start = time.perf_counter()
    with untouched():
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            olla.capture(model, torch.ones(1, 2), loss=stuck)
        thread.join()
    assert time.perf_counter() - start < 30
