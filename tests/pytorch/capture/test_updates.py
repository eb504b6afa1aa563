"""Updates of parameters: one is traced for parameters of all shapes, and the others are what they would have been."""

from __future__ import annotations

import gc
import os
from typing import Any

import numpy as np
import pytest

import olla
from olla.errors import CaptureError
from olla.pytorch.capture import optimizers
from tests.support.pytorch.steps import images, net, nn, square, torch

pytestmark = pytest.mark.torch

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("Adadelta", {}),
    ("Adagrad", {}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.01}),
    ("Adam", {"fused": True}),
    ("AdamW", {}),
    ("AdamW", {"maximize": True}),
    ("Adamax", {}),
    ("NAdam", {}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
]


def facts(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device)
    if isinstance(value, list | tuple):
        return tuple(map(facts, value))
    return type(value)


def described(step: Any) -> list[Any]:
    """All that is known of each node of a step, which names the nodes before it by their numbers."""
    number = {node: i for i, node in enumerate(step.module.graph.nodes)}

    def plain(node: Any) -> Any:
        return torch.fx.node.map_arg((node.args, node.kwargs), lambda n: f"node {number[n]}")

    return [(node.op, str(node.target), repr(plain(node)), facts(node.meta.get("val"))) for node in number]


@pytest.mark.parametrize(("kind", "settings"), KINDS)
@pytest.mark.parametrize("taken", [0, 1], ids=["first step", "later step"])
def test_a_step_is_the_one_that_is_traced_for_each_shape(
    kind: str, settings: dict[str, Any], taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net().append(nn.Linear(5, 5, bias=False))
    model.scale = nn.Parameter(torch.tensor(2.0))
    model[0].to(memory_format=torch.channels_last)
    loss = lambda m, x: square(m, x) * m.scale  # noqa: E731
    made = getattr(torch.optim, kind)(model.parameters(), **settings)
    for _ in range(taken):
        loss(model, images()).backward()
        made.step()
        made.zero_grad()
    short = olla.capture(model, images(), optimizer=made, loss=loss)
    assert optimizers.updates_are_elementwise(made)
    monkeypatch.setattr(optimizers, "updates_are_elementwise", lambda _: False)
    long = olla.capture(model, images(), optimizer=made, loss=loss)
    assert described(short) == described(long)
    for what in ("tensor_bytes", "moved_bytes", "flops", "launches", "recomputable"):
        assert np.array_equal(getattr(short.graph, what), getattr(long.graph, what)), what
    assert [(i.kind, i.key, i.entry, i.exists) for i in short.inputs] == [
        (i.kind, i.key, i.entry, i.exists) for i in long.inputs
    ]


def test_parameters_of_many_shapes_share_one_traced_update(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(n, n + 1) for n in range(2, 8)))
    runs = []
    run = optimizers.run_stand_in
    monkeypatch.setattr(optimizers, "run_stand_in", lambda *args: (runs.append(args), run(*args))[1])
    olla.capture(model, torch.ones(3, 2), optimizer=torch.optim.AdamW(model.parameters()), loss=square)
    assert len(runs) == 1


@pytest.mark.parametrize("kind", ["Adafactor", "Muon"])
def test_updates_that_ask_for_shapes_are_traced_for_each(kind: str) -> None:
    assert not optimizers.updates_are_elementwise(getattr(torch.optim, kind)([nn.Parameter(torch.ones(2, 2))]))


def test_muon_is_captured_from_its_first_step_on() -> None:
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(8, 16, bias=False), nn.GELU(), nn.Linear(16, 4, bias=False)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    mine, theirs = (torch.optim.Muon(net.parameters(), lr=0.01) for net in nets)
    step = olla.compile(nets[0], optimizer=mine, loss=square, on_unsupported="raise")
    for _ in range(4):
        batch = torch.randn(3, 8)
        theirs.zero_grad()
        loss = square(nets[1], batch)
        loss.backward()
        theirs.step()
        assert torch.equal(step(batch), loss)
    assert all(torch.equal(p, q) for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True))
    assert step.report().num_ordinary_steps == 0


def test_a_subclass_may_update_as_it_likes() -> None:
    class Own(torch.optim.Adam):
        pass

    assert not optimizers.updates_are_elementwise(Own([nn.Parameter(torch.ones(2))]))


@pytest.mark.parametrize("is_on", [True, False])
def test_no_garbage_is_collected_in_a_capture_and_then_as_before(is_on: bool) -> None:
    def loss(model: Any, x: Any) -> Any:
        raise ArithmeticError(f"garbage is collected: {gc.isenabled()}")

    (gc.enable if is_on else gc.disable)()
    try:
        with pytest.raises((ArithmeticError, CaptureError), match="garbage is collected: False"):
            olla.capture(nn.Linear(3, 2), torch.ones(4, 3), loss=loss)
        assert gc.isenabled() is is_on
    finally:
        gc.enable()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_that_is_forked_behind_a_capture_collects_garbage_as_its_parent_does() -> None:
    olla.capture(nn.Linear(3, 2), torch.ones(4, 3), loss=square)
    gc.disable()
    try:
        child = os.fork()
        if child == 0:
            os._exit(int(gc.isenabled()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        gc.enable()
