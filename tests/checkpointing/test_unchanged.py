"""Trying a step leaves nothing behind: no notes in modules, no numbers drawn; and takes gradients that are sparse."""

from __future__ import annotations

import collections
import functools
import random
from typing import Any

import numpy as np
import pytest

import olla
from olla.checkpointing.python_state import PythonState
from olla.checkpointing.regions import ModuleRegion, apply, checkpointed
from tests.support.pytorch.steps import nn, torch

pytestmark = pytest.mark.torch


class Notes(nn.Module):
    """Blocks that count their calls, keep a history and a cache, and compute with all of them."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))
        self.asks = asks  # for a value, so that the step is tried on real tensors
        self.num_calls, self.scale = 0, 1.0
        self.history: list[Any] = []
        self.seen: dict[str, Any] = {"sizes": [], "latest": collections.deque(maxlen=2)}
        self.kinds: set[Any] = set()
        self.counts: collections.Counter[str] = collections.Counter()
        self.cache: Any = None
        self.latest: list[Any] = []

    def forward(self, x: Any) -> Any:
        self.num_calls += 1
        if self.num_calls % 2 == 0:
            self.scale *= 0.9
        if self.cache is None:
            self.cache = torch.linspace(0.5, 1.5, 16)
        for block in self.blocks:
            x = x + block(x * self.cache) * self.scale
        norm = x.detach().norm()
        if self.asks and norm > 0:
            x = x * 1.5
        self.history.append(norm)
        self.seen["sizes"].append(tuple(x.shape))
        self.seen["latest"].append(norm)
        self.kinds.add(len(self.history))
        self.counts["calls"] += 1
        self.latest = [norm]
        return x


def noted(model: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(model).items() if not name.startswith("_")}


@pytest.mark.parametrize("asks", [False, True])
def test_a_step_that_is_tried_notes_nothing(asks: bool) -> None:
    torch.manual_seed(0)
    model, x = Notes(asks), torch.randn(8, 16)
    model(x)
    before = repr(noted(model))
    history = model.history
    olla.checkpoint(model, x, minimise="peak")
    assert repr(noted(model)) == before
    assert model.history is history
    assert all(type(norm) is torch.Tensor for norm in [*model.history, *model.seen["latest"], *model.latest])


@pytest.mark.parametrize("asks", [False, True])
def test_a_model_that_counts_trains_as_it_is(asks: bool) -> None:
    losses = []
    for plans in (False, True):
        torch.manual_seed(0)
        model = Notes(asks)
        optimizer = torch.optim.AdamW(model.parameters())
        if plans:
            olla.checkpoint(model, torch.randn(8, 16, generator=torch.Generator().manual_seed(1)), minimise="peak")
        losses.append([])
        for _ in range(5):
            loss = model(torch.randn(8, 16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
        losses[-1] += [float(norm) for norm in model.history] + [model.scale, *model.counts.values()]
    assert losses[0] == losses[1]


def test_notes_of_the_first_and_the_last_of_many_modules_are_undone() -> None:
    class Noting(nn.Linear):
        def forward(self, x: Any) -> Any:
            self.seen.append(x.detach())
            return super().forward(x)

    torch.manual_seed(0)
    first, last = Noting(4, 4), Noting(4, 4)
    first.seen, last.seen = [], []
    olla.checkpoint(
        nn.Sequential(first, *(nn.Identity() for _ in range(1500)), last), torch.randn(2, 4), minimise="peak"
    )
    assert (first.seen, last.seen) == ([], [])


class Recorder:
    """An object of the user's own, with a hook."""

    def __init__(self) -> None:
        self.calls, self.results = 0, {}

    def note(self, module: Any, args: Any, result: Any) -> None:
        self.calls += 1
        self.results.setdefault(type(module).__name__, []).append(result.detach())


LATEST: list[Any] = []
num_losses = 0


def keep(value: Any) -> None:
    LATEST.append(value)


def counted_loss(model: Any, x: Any) -> Any:
    global num_losses
    num_losses += 1
    loss = model(x).square().mean()
    keep(loss.detach())
    return loss


def test_what_hooks_and_losses_note_elsewhere_is_undone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    recorder, inside, count = Recorder(), [], 0

    def hook(module: Any, args: Any) -> None:
        nonlocal count
        count += 1
        inside.append(args[0])

    model[0].register_forward_hook(recorder.note)
    model[2].register_forward_hook(functools.partial(Recorder.note, recorder))
    model[2].register_forward_pre_hook(hook)
    olla.checkpoint(model, torch.randn(2, 4), minimise="peak", loss=counted_loss)
    assert (recorder.calls, recorder.results, inside, count, LATEST, num_losses) == (0, {}, [], 0, [], 0)
    counted_loss(model, torch.randn(2, 4)).backward()
    assert (recorder.calls, len(inside), count, len(LATEST), num_losses) == (2, 1, 1, 1, 1)


class Annealed(nn.Module):
    """Scales by what it has counted, and keeps a history that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)
        self.num_calls, self.history = 0, [0.0]

    def forward(self, x: Any) -> Any:
        self.num_calls += 1
        self.history.append(float(x.detach().mean()))
        hidden = nn.functional.dropout(nn.functional.gelu(self.first(x)), 0.1)
        return x + self.second(hidden) / self.num_calls + self.history[-2]


@pytest.mark.parametrize("saved", [frozenset(), frozenset(("aten.addmm.default", i) for i in range(20))])
def test_what_python_notes_in_checkpointed_modules_is_noted_once(saved: frozenset[tuple[str, int]]) -> None:
    def trained(checkpointed: bool) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Annealed() for _ in range(4)))
        recorder, inside, noted = Recorder(), [], 0

        def hook(module: Any, args: Any, result: Any) -> Any:
            nonlocal noted
            noted += 1
            inside.append(result.detach())
            return result * noted

        model[1].first.register_forward_hook(recorder.note)
        model[2].second.register_forward_hook(hook)
        if checkpointed:
            regions = {name: ModuleRegion(saved, noting=("",)) for name in ("0", "1", "2")}
            for name, region in regions.items():
                apply(model.get_submodule(name), region)
        optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
        for i in range(3):
            loss = model(torch.randn(8, 16, generator=torch.Generator().manual_seed(i))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        notes = [recorder.calls, len(recorder.results["Linear"]), len(inside), noted]
        return [losses, notes, [(m.num_calls, m.history) for m in model]]

    assert trained(True) == trained(False)


def test_what_a_hook_does_not_name_of_its_object_is_left_alone() -> None:
    """A trainer that has a hook may have a queue, too, which another thread fills."""
    recorder = Recorder()
    recorder.waiting = collections.deque([1])
    state = PythonState([], [recorder.note])
    recorder.note(nn.Identity(), (), torch.ones(1))
    recorder.waiting.append(2)
    recorder.name = "later"
    state.put_back()
    assert vars(recorder) == {"calls": 0, "results": {}, "waiting": collections.deque([1, 2]), "name": "later"}


def test_modules_that_note_something_are_found() -> None:
    model = nn.Sequential(*(Annealed() for _ in range(4)), nn.Linear(16, 16))
    found = olla.checkpoint(model, torch.randn(64, 16), minimise="peak")
    regions = {name: checkpointed(model.get_submodule(name)) for name in found.modules}
    assert regions
    assert all(region.noting == ("",) for region in regions.values()), regions
    assert [m.num_calls for m in model[:4]] == [0] * 4


class Sampled(nn.Module):
    """A decoder that feeds itself at random, by three generators."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell, self.out = nn.Embedding(12, 16), nn.LSTMCell(16, 16), nn.Linear(16, 12)

    def forward(self, tokens: Any) -> Any:
        token, state, found = tokens[:, 0], None, []
        for i in range(1, tokens.shape[1]):
            state = self.cell(self.table(token), state)
            found.append(self.out(state[0]))
            is_given = random.random() < 0.5 or np.random.rand() < 0.2  # noqa: NPY002
            token = tokens[:, i] if is_given else torch.multinomial(found[-1].softmax(1), 1)[:, 0]
        return torch.stack(found, 1)


def test_a_step_that_is_tried_draws_no_numbers_of_the_loop() -> None:
    def draws() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002

    found = []
    for plans in (False, True):
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
        model = Sampled()
        if plans:
            olla.checkpoint(model, torch.zeros(3, 6, dtype=torch.long), minimise="peak")
            olla.explain(model, torch.zeros(3, 6, dtype=torch.long), time_limit=0.1)
        found.append(draws())
    assert found[0] == found[1]


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_sparse_gradients_of_embeddings_are_counted(mode: str) -> None:
    torch.manual_seed(0)
    table = nn.EmbeddingBag(5000, 16, mode=mode, sparse=True)
    model = nn.Sequential(table, nn.Linear(16, 4))
    chosen = olla.checkpoint(model, torch.randint(5000, (64, 4)), minimise="peak")
    resident = sum(p.nbytes for p in model.parameters())
    assert resident < chosen.eager_peak_bytes < resident + table.weight.nbytes // 2  # a dense gradient would be larger
    model(torch.randint(5000, (64, 4))).sum().backward()
    assert table.weight.grad.is_sparse
