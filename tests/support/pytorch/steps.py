"""Small training steps, eager and captured; test modules that import this are skipped where torch is missing."""

from __future__ import annotations

import copy
import gc
import heapq
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import olla

torch = pytest.importorskip("torch", reason="capturing needs PyTorch: pip install 'olla-planner[torch]'")
pytest.importorskip("transformers", reason="the models of these tests come from transformers: pip install transformers")

from torch import fx, nn  # noqa: E402

from olla.base.folders import cache_folder  # noqa: E402
from olla.pytorch.capture import Captured  # noqa: E402
from olla.pytorch.capture.inputs import gather  # noqa: E402
from olla.pytorch.memory.requests import last_steps  # noqa: E402
from tests.support.pytorch import models  # noqa: E402

STEPS = 3
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
IS_211 = TORCH == (2, 11)
knows_generators = pytest.mark.skipif(TORCH < (2, 13), reason="torch.fx before 2.13 knows no generators as arguments")
slow = pytest.mark.skipif("OLLA_SLOW" not in os.environ, reason="takes more than a few seconds: set OLLA_SLOW=1")


def square(model: nn.Module, x: Any) -> Any:
    """A loss for models that take one tensor."""
    return model(x).square().mean()


def net() -> nn.Module:
    """A small network with batch norm buffers, an in-place activation and dropout."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(0.2), nn.Linear(144, 5)
    )


def deep(num_rows: int, device: str = "cpu") -> tuple[nn.Module, Any]:
    """A chain of layers and its batch; of 1024 rows and more, results that wait for backward are worth a copy."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())))
    return model.to(device), torch.randn(num_rows, 64).to(device)


def images() -> Any:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@dataclass
class World:
    """A model with its optimizer, batch and loss, before any step."""

    model: nn.Module
    optimizer: Any
    batch: Any
    loss: Callable[[Any, Any], Any] | None
    body: Callable[[Any, Any, Any], Any] | None = None  # of the training loop, in place of the loss

    def copy(self) -> World:
        """The same, sharing nothing; the optimizer updates one parameter at a time."""
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        for group in optimizer.param_groups:
            group["foreach"] = False
        return World(model, optimizer, self.batch, self.loss, self.body)

    def values(self) -> list[Any]:
        """Parameters, buffers and optimizer state, in a fixed order."""
        states = [self.optimizer.state.get(p, {}) for p in self.model.parameters()]
        return [*self.model.state_dict().values(), *(s[k] for s in states for k in sorted(s) if s[k] is not None)]

    def eager(self, steps: int = STEPS) -> list[Any]:
        torch.manual_seed(7)
        losses: list[Any] = []
        for _ in range(steps):
            if self.body is not None:
                losses += tensors(self.body(self.model, self.optimizer, self.batch))
                continue
            self.optimizer.zero_grad()
            assert self.loss is not None
            result = self.loss(self.model, self.batch)
            (result[0] if isinstance(result, tuple) else result).backward()
            self.optimizer.step()
            losses += tensors(result)
        return losses

    def captured(self, step: olla.pytorch.capture.Captured, order: Any = None, steps: int = STEPS) -> list[Any]:
        torch.manual_seed(7)
        values = gather(step.inputs, self.model, self.batch, self.optimizer)
        return [t.clone() for _ in range(steps) for t in run(step, values, order)]

    def compiled(self, **options: Any) -> Any:
        """The step that olla.compile makes of it."""
        settings = {"time_limit": 0.3, "on_unsupported": "raise"} | options
        return olla.compile(self.model, optimizer=self.optimizer, loss=self.loss, step=self.body, **settings)

    def planned(self, step: Any, steps: int = STEPS) -> list[Any]:
        torch.manual_seed(7)
        return [t for _ in range(steps) for t in tensors(step(self.batch))]


def tensors(value: Any) -> list[Any]:
    """The tensors in a value of any structure, without gradients."""
    return [t.detach() for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def capture(world: World) -> Any:
    return olla.capture(world.model, world.batch, optimizer=world.optimizer, loss=world.loss, step=world.body)


def agree(world: World, **options: Any) -> bool:
    """Whether the planned step does what its graph does in program order; that must hold of every model.

    Args:
        options: of olla.compile.

    Returns:
        Whether both also do what the ordinary loop does.
    """
    program, eager = world.copy(), world.copy()
    step = world.compiled(**options)
    results = world.planned(step)
    captured = step._latest._captured
    assert len(results) >= STEPS
    assert same(results, program.captured(captured))
    assert same(world.values(), program.values())
    report = step.report()
    assert (report.num_captures, report.missed_bytes, report.in_arena) == (1, 0, True)
    return same(results, eager.eager()) and same(world.values(), eager.values())


def topological(graph: olla.Graph, priority: Callable[[int], Any]) -> np.ndarray:
    """A valid order that always runs the ready op of least priority."""
    missing = [len(graph.core.preds(v)) for v in range(graph.num_ops)]
    followers: list[list[int]] = [[] for _ in missing]
    for v in range(graph.num_ops):
        for u in graph.core.preds(v):
            followers[u].append(v)
    ready = [(priority(v), v) for v, n in enumerate(missing) if n == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        v = heapq.heappop(ready)[1]
        order.append(v)
        for w in followers[v]:
            missing[w] -= 1
            if missing[w] == 0:
                heapq.heappush(ready, (priority(w), w))
    assert graph.core.is_order(np.array(order, dtype=np.int32))
    return np.array(order, dtype=np.int32)


def num_interrupted(num_times: int, seconds: float, run: Callable[[], Any], after: Callable[[], Any]) -> int:
    """Interrupt run() at num_times moments of its first seconds, call after() each time; how often it was running."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    def dropped(unraisable: Any) -> None:
        nonlocal found
        if unraisable.exc_type is KeyboardInterrupt:  # it came in a callback, say of a weak reference: run() goes on
            found += 1
        else:
            told(unraisable)

    before, left = signal.signal(signal.SIGALRM, interrupt), signal.setitimer(signal.ITIMER_REAL, 0)
    watching, gc.callbacks[:] = gc.callbacks[:], []  # hypothesis has one: what is raised in it Python drops
    told, sys.unraisablehook = sys.unraisablehook, dropped
    found = 0
    try:
        for i in range(num_times):
            try:
                signal.setitimer(signal.ITIMER_REAL, max(1e-6, seconds * i / num_times))
                run()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                found += 1
            after()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *left)  # the time limit of the test, which goes on
        gc.callbacks[:] = watching
        sys.unraisablehook = told
    return found


def printed_by_two_processes(child: str, folder: Path) -> tuple[list[str], list[str]]:
    """Run a script twice, one process after the other, on a disk cache of their own; the words that each printed."""
    (folder / "cache").mkdir()
    if (cache_folder() / "replay").is_dir():
        (folder / "cache" / "replay").symlink_to(cache_folder() / "replay")  # to compile takes longer
    environment = os.environ | {"OLLA_CACHE_DIR": str(folder / "cache"), "OLLA_DISK_CACHE": "1"}
    script = folder / "child.py"
    script.write_text(child)

    def run() -> list[str]:
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.split(maxsplit=1)

    return run(), run()


def run(
    captured: Captured,
    values: Sequence[torch.Tensor],
    order: Sequence[int] | None = None,
    observe: Callable[[int, dict[fx.Node, Any]], None] | None = None,
) -> list[torch.Tensor]:
    """Run one step: parameters, buffers and optimizer state change in place, tensors are freed after their last use.

    Args:
        captured: the step.
        values: tensor i is for ``captured.inputs[i]``; see olla.pytorch.capture.inputs.gather.
        order: int[num_ops], ops in the order to run them; program order if not given.
        observe: called as observe(step, values of all nodes alive) after each op, before anything is freed.

    Returns:
        Tensor i is ``captured.outputs[i]``.

    """
    steps = range(len(captured.nodes)) if order is None else [int(op) for op in order]
    values_of: dict[fx.Node, Any] = {}
    arguments = iter(values)
    for node in captured.module.graph.nodes:
        if node.op == "placeholder":
            values_of[node] = next(arguments)
        elif node.op == "get_attr":
            values_of[node] = attrgetter(str(node.target))(captured.module)
    output: Any = captured.module.graph.output_node()
    last = last_steps(captured.graph, steps).tolist()
    freed: list[list[fx.Node]] = [[] for _ in steps]  # after each step: the nodes whose value is not needed any more
    for node, tensors in captured.tensors.items():
        if ends := [last[t] for t in tensors if last[t] >= 0]:
            freed[min(ends)].append(node)
    with torch.no_grad():
        _call(captured.prologue, values_of)
        for step, op in enumerate(steps):
            _call(captured.nodes[op], values_of)
            if observe is not None:
                observe(step, values_of)
            for node in freed[step]:
                values_of.pop(node, None)
        results: list[torch.Tensor] = fx.node.map_arg(output.args[0], values_of.__getitem__)
    return list(results)


def _call(nodes: Sequence[fx.Node], values_of: dict[fx.Node, Any]) -> None:
    for node in nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values_of.__getitem__)
        assert callable(node.target)
        values_of[node] = node.target(*args, **kwargs)
    # A tuple would keep all its tensors alive as long as the last of them.
    if nodes and isinstance(values_of[nodes[0]], tuple | list):
        del values_of[nodes[0]]


class Loop:
    """An ordinary training loop of one of the example models."""

    def __init__(self, name: str, optimizer: str = "adamw") -> None:
        torch.manual_seed(0)
        example = models.build(name, 4, tiny=True, device="cpu")
        self.model, self.batch, self.loss = example.model, example.batch, example.loss
        self.optimizer = models.optimizer(optimizer, self.model)
        self.losses: list[float] = []

    def copy(self) -> Loop:
        return copy.deepcopy(self)

    def iterate(self, batch: Any = None) -> None:
        self.optimizer.zero_grad()
        loss = self.loss(self.model, self.batch if batch is None else batch)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def values(self) -> list[Any]:
        state = self.optimizer.state_dict()["state"]
        return [*self.model.state_dict().values(), *(v for s in state.values() for v in s.values())]


def equal(a: Loop, b: Loop) -> bool:
    return a.losses == b.losses and all(torch.equal(x, y) for x, y in zip(a.values(), b.values(), strict=True))


def halved(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor[: len(tensor) // 2] for name, tensor in batch.items()}
