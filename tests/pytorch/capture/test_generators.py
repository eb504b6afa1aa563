"""Random numbers: of generators of the user's own, drawn again by a plan or not, and what a capture leaves of them."""

from __future__ import annotations

from typing import Any

import pytest

from olla.graph import Rerun
from olla.pytorch.capture import generator
from olla.pytorch.program import variants
from tests.support.pytorch.steps import World, knows_generators, nn, same, square, torch

pytestmark = pytest.mark.torch

NUM_STEPS = 5
GOALS = [{}, {"minimise": "peak"}, {"max_slowdown": 0.5}]


class Noisy(nn.Module):
    """Noise from generators of its own, from the default one by either name, and dropout, between large layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.own = torch.Generator().manual_seed(1)
        self.others = [torch.Generator().manual_seed(2), torch.default_generator]

    def forward(self, x: Any) -> Any:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) * torch.randn(x.shape, generator=self.own)
            x = x + torch.rand(x.shape, generator=self.others[i % 2])
            kept = torch.empty_like(x).bernoulli_(0.7, generator=(self.own, *self.others)[i % 3])
            x = nn.functional.dropout(torch.tanh(x) * kept, 0.2)
        return x

    def states(self) -> list[Any]:
        return [g.get_state() for g in (self.own, *self.others)]


def noisy() -> World:
    model = Noisy()
    x = torch.randn(256, 32, generator=torch.Generator().manual_seed(3))
    return World(model, torch.optim.SGD(model.parameters(), lr=0.1), x, square)


@knows_generators
@pytest.mark.parametrize("arena", [True, False])
@pytest.mark.parametrize("goal", GOALS, ids=["no goal", "least peak", "slowdown"])
def test_draws_of_own_generators_are_those_of_the_ordinary_loop_within_any_goal(
    goal: dict[str, Any], arena: bool
) -> None:
    eager, planned = noisy(), noisy()
    wanted = [*eager.eager(NUM_STEPS), *eager.values(), *eager.model.states()]
    step = planned.compiled(arena=arena, disk_cache=False, **goal)
    found = [*planned.planned(step, NUM_STEPS), *planned.values(), *planned.model.states()]
    assert same(found, wanted)
    if goal:
        again = {step.graph.targets[i] for i in (step.plan.recomputed.rerun == Rerun.REPLAY).nonzero()[0]}
        assert {"aten.randn.generator", "aten.rand.generator"} <= again


@knows_generators
def test_a_generator_whose_state_cannot_be_set_is_never_drawn_from_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fixed(torch.Generator):
        def clone_state(self) -> Any:
            raise NotImplementedError

    assert generator.can_rewind(torch.Generator())
    assert not generator.can_rewind(Fixed())
    monkeypatch.setattr(variants, "can_rewind", lambda source: isinstance(source, str))
    eager, planned = noisy(), noisy()
    wanted = [*eager.eager(), *eager.values(), *eager.model.states()]
    step = planned.compiled(minimise="peak", disk_cache=False)
    assert same([*planned.planned(step), *planned.values(), *planned.model.states()], wanted)
    again = {step.graph.targets[i] for i in (step.plan.recomputed.rerun == Rerun.REPLAY).nonzero()[0]}
    assert not {target for target in again if target.endswith(".generator")}
