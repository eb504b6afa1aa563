"""Checkpointed modules compute what they computed before, to the bit, and are the same modules otherwise."""

import copy
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from olla.checkpointing.regions import ModuleRegion, apply, checkpointed, remove  # noqa: E402
from tests.checkpointing.blocks import Residual, conv, mlp, outcome, same, square  # noqa: E402

pytestmark = pytest.mark.torch

SAVED = frozenset({("aten.addmm.default", 2)})


@pytest.mark.parametrize("saved", [frozenset(), SAVED])
def test_results_are_those_of_the_module_as_it_was(saved: frozenset[tuple[str, int]]) -> None:
    model, x = Residual(*(mlp() for _ in range(3))), torch.randn(16, 32)
    before = outcome(model, x)
    for block in model.blocks:
        apply(block, ModuleRegion(saved))
    assert same(before, outcome(model, x))


def test_running_statistics_are_updated_once() -> None:
    model, x = Residual(conv(), conv()), torch.randn(2, 8, 6, 6)
    before = outcome(model, x)
    for block in model.blocks:
        apply(block, ModuleRegion(buffers=("1.running_mean", "1.running_var", "1.num_batches_tracked")))
    assert same(before, outcome(model, x))


def test_a_recomputation_finds_buffers_as_they_were() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.ones(()))
            self.weight = nn.Parameter(torch.randn(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return (x * self.weight * self.count).tanh()

    model, x = Residual(Counting(), Counting()), torch.randn(4, 8)
    before = outcome(model, x)
    for block in model.blocks:
        apply(block, ModuleRegion(buffers=("count",)))
    assert same(before, outcome(model, x))


def test_backward_may_run_twice_where_nothing_is_saved() -> None:
    model, x = Residual(mlp(), mlp()), torch.randn(16, 32)
    apply(model.blocks[0], ModuleRegion())
    loss = square(model, x)
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(first, model.parameters(), strict=True) if p.grad is not None)


def test_an_unknown_batch_has_all_recomputed_and_is_right() -> None:
    class Longer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 2 if len(x) > 4 else x
            return self.linear(x).relu_().exp()

    model = Residual(Longer())
    before = outcome(model, torch.ones(8, 32))
    apply(
        model.blocks[0], ModuleRegion(frozenset({("aten.addmm.default", 1), ("aten.exp.default", 3)}))
    )  # of a short batch
    assert same(before, outcome(model, torch.ones(8, 32)))


def test_class_state_and_copies_stay_and_removing_undoes() -> None:
    model = mlp()
    keys, kind = list(model.state_dict()), type(model)
    apply(model, ModuleRegion(SAVED))
    assert type(model) is kind
    assert list(model.state_dict()) == keys
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert checkpointed(copied) == ModuleRegion(SAVED)
        assert vars(copied)["forward"].args[0] is copied
    assert remove(model)
    assert not remove(model)
    assert "forward" not in vars(model)


def test_a_forward_that_was_replaced_before_is_called_and_comes_back() -> None:
    model, calls = mlp(), []

    def own(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return kind.forward(model, x)

    kind = type(model)
    model.forward = own  # type: ignore[method-assign]
    apply(model, ModuleRegion())
    model(torch.ones(4, 32)).sum().backward()
    assert calls == [4, 4]
    remove(model)
    assert model.forward is own


def test_nothing_is_checkpointed_where_no_gradients_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    apply(model, ModuleRegion())

    def never(*_: object, **__: object) -> None:
        raise AssertionError("checkpointed")

    monkeypatch.setattr("olla.checkpointing.regions.checkpoint", never)
    with torch.no_grad():
        model(torch.ones(4, 32))
    with pytest.raises(AssertionError, match="checkpointed"):
        model(torch.ones(4, 32))


def test_arguments_may_have_the_names_of_checkpoints_own() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, *, use_reentrant: float, context_fn: torch.Tensor) -> torch.Tensor:
            return self.linear(x).tanh() * use_reentrant + context_fn

    model, x = Named(), torch.randn(4, 8)
    expected = model(x, use_reentrant=0.5, context_fn=x)
    apply(model, ModuleRegion())
    assert torch.equal(model(x, use_reentrant=0.5, context_fn=x), expected)


def test_caches_of_keys_and_values_are_left_out() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=97, bos_token_id=0, eos_token_id=0)
    model, tokens = transformers.GPT2LMHeadModel(config), torch.randint(97, (2, 8))

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=batch, labels=batch).loss
        return found

    model.config.use_cache = False
    before = outcome(model, tokens, loss)
    model.config.use_cache = True
    for block in model.transformer.h:
        apply(block, ModuleRegion(SAVED))
    assert same(before, outcome(model, tokens, loss))


@pytest.mark.parametrize("kind", [mlp, conv])
@pytest.mark.parametrize("is_selective", [False, True])
def test_a_compiled_model_computes_the_same(kind: Any, is_selective: bool) -> None:
    shape = (16, 32) if kind is mlp else (2, 8, 6, 6)
    x = torch.randn(shape)
    theirs = Residual(*(kind() for _ in range(3)))
    ours = copy.deepcopy(theirs)
    buffers = ("1.running_mean", "1.running_var", "1.num_batches_tracked") if kind is conv else ()
    saved = frozenset({("aten.addmm.default", 2), ("aten.convolution.default", 0)}) if is_selective else frozenset()
    for block in ours.blocks:
        apply(block, ModuleRegion(saved, buffers))
    found = []
    for model in (theirs, ours):
        torch.compiler.reset()
        model.compile(backend="aot_eager")
        torch.manual_seed(0)
        loss = square(model, x)
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.append([loss.detach(), *gradients, *model.buffers()])
    assert same(*found)
