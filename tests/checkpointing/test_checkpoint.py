"""olla.checkpoint: the choice reaches what was asked for, and no other choice of modules does better."""

import dataclasses
import itertools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import olla  # noqa: E402
from olla.checkpointing.first_batch import AtFirstBatch  # noqa: E402
from olla.checkpointing.regions import ModuleRegion, checkpointed  # noqa: E402
from olla.checkpointing.trace import TrainingStep  # noqa: E402
from olla.errors import BudgetError, CaptureError  # noqa: E402
from olla.graph import PROFILES  # noqa: E402
from tests.checkpointing.blocks import Residual, conv, mlp, outcome, same, square  # noqa: E402

pytestmark = pytest.mark.torch

DEVICE = PROFILES["a100"]


def blocks(number: int = 6, width: int = 32) -> tuple[nn.Module, torch.Tensor]:
    """Return a model and a batch whose activations are most of its memory."""
    return Residual(*(mlp(width) for _ in range(number))), torch.randn(512, width)


def chosen_in(model: nn.Module) -> dict[str, ModuleRegion]:
    """Return what is checkpointed in a model."""
    found = ((name, checkpointed(module)) for name, module in model.named_modules())
    return {name: region for name, region in found if region is not None}


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2, 0.35])
def test_a_slowdown_is_kept_and_measured(share: float) -> None:
    model, x = blocks()
    before = outcome(model, x)
    found = olla.checkpoint(model, x, max_slowdown=share, plan_for="a100")
    step = TrainingStep(model, x, None, DEVICE)
    regions = chosen_in(model)
    assert set(regions) == set(found.modules)
    assert found.added_seconds <= share * found.base_seconds
    assert found.bound_bytes is not None
    assert found.bound_bytes <= found.peak_bytes < found.eager_peak_bytes
    assert same(before, outcome(model, x))
    olla.checkpoint.remove(model)
    measured = step.measure(regions)
    assert (measured.peak_bytes, measured.seconds - found.base_seconds) == (found.peak_bytes, found.added_seconds)


@pytest.mark.parametrize("share", [0.1, 0.2, 0.3])
def test_no_other_choice_of_blocks_needs_less(share: float) -> None:
    model, x = blocks(5)
    step = TrainingStep(model, x, square, DEVICE)
    base = step.measure({})
    found = olla.checkpoint(model, x, loss=square, max_slowdown=share, plan_for="a100", selective=False)
    olla.checkpoint.remove(model)
    names = [f"blocks.{i}" for i in range(5)]
    for number in range(6):
        for some in itertools.combinations(names, number):
            other = step.measure(dict.fromkeys(some, ModuleRegion()))
            if other.seconds - base.seconds <= share * base.seconds:
                assert found.peak_bytes <= other.peak_bytes * 1.0001


@pytest.mark.skipif(torch.__version__ < "2.12", reason="with torch 2.11 no saved operators were found to pay here")
def test_saved_operators_need_less_than_whole_modules_in_as_much_time() -> None:
    model, x = blocks()
    whole = olla.checkpoint(model, x, max_slowdown=0.1, plan_for="a100", selective=False)
    some = olla.checkpoint(model, x, max_slowdown=0.1, plan_for="a100")
    assert not any(whole.modules.values())
    assert any(some.modules.values())
    assert some.peak_bytes < whole.peak_bytes


@pytest.mark.parametrize("optimizer", [None, "sgd", "adamw"])
def test_a_budget_is_kept_in_the_least_time(optimizer: str | None) -> None:
    model, x = blocks()
    made: Any = {
        None: lambda: None,
        "sgd": lambda: torch.optim.SGD(model.parameters()),
        "adamw": lambda: torch.optim.AdamW(model.parameters()),
    }[optimizer]()
    least = olla.checkpoint(model, x, minimise="peak", optimizer=made, plan_for="a100")
    added = []
    for budget in (least.needed_bytes, int(least.needed_bytes * 1.3), int(least.needed_bytes * 1.8)):
        found = olla.checkpoint(model, x, budget=budget, optimizer=made, plan_for="a100")
        assert found.needed_bytes <= budget
        assert found.bound_seconds is not None
        assert found.bound_seconds <= found.added_seconds * 1.02
        added.append(found.added_seconds)
    assert added == sorted(added, reverse=True)
    state = 0 if optimizer != "adamw" else 2 * sum(p.nbytes for p in model.parameters())
    assert least.needed_bytes >= least.peak_bytes + state
    with pytest.raises(BudgetError, match="the least one needs"):
        olla.checkpoint(model, x, budget=int(least.needed_bytes * 0.95), optimizer=made, plan_for="a100")


def test_an_optimizer_that_needs_more_than_the_budget_is_named() -> None:
    model, x = blocks(2)
    with pytest.raises(BudgetError, match=r"the optimizer's step needs .* raise the budget, or use another optimizer"):
        olla.checkpoint(model, x, budget=100_000, optimizer=torch.optim.AdamW(model.parameters()))


def test_a_budget_that_the_loop_fits_anyway_checkpoints_nothing() -> None:
    model, x = blocks()
    assert olla.checkpoint(model, x, budget="1GB").modules == {}
    assert chosen_in(model) == {}


def test_a_second_call_replaces_the_first() -> None:
    model, x = blocks()
    more = olla.checkpoint(model, x, minimise="peak", plan_for="a100")
    less = olla.checkpoint(model, x, max_slowdown=0.05, plan_for="a100")
    assert set(chosen_in(model)) == set(less.modules) != set(more.modules)
    assert olla.checkpoint.remove(model) == len(less.modules)
    assert chosen_in(model) == {}


def test_what_is_asked_for_is_checked() -> None:
    model, x = blocks(1)
    with pytest.raises(ValueError, match="nothing is asked for"):
        olla.checkpoint(model, x)
    with pytest.raises(ValueError, match="budget"):
        olla.checkpoint(model, x, budget=1, max_slowdown=0.1)
    with pytest.raises(BudgetError, match="is no number of bytes"):
        olla.checkpoint(model, x, budget="much")


def test_a_model_that_is_not_trained_is_refused() -> None:
    model = torch.nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(CaptureError, match="nothing that Linear returns needs a gradient"):
        olla.checkpoint(model, torch.ones(2, 4), minimise="peak")


@pytest.mark.parametrize("kind", ["dataclass", "distribution", "object in a dict"])
def test_what_needs_a_gradient_is_found_in_what_a_model_returns(kind: str) -> None:
    """A dataclass of the user's own, a distribution of a policy: no container that torch knows."""
    blocks_, x = blocks(4)

    class Returning(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks_

        def forward(self, x: Any) -> Any:
            result = self.blocks(x)
            if kind == "distribution":
                return torch.distributions.Normal(result, 1.0)
            found: Any = Result(None, [result])
            found.itself = found
            return found if kind == "dataclass" else {"result": found}

    expected = olla.checkpoint(blocks_, x, minimise="peak")
    olla.checkpoint.remove(blocks_)
    found = olla.checkpoint(Returning(), x, minimise="peak")
    assert [name.removeprefix("blocks.") for name in found.modules] == [*expected.modules]
    assert found.modules


@dataclasses.dataclass
class Result:
    """What a model returns."""

    loss: torch.Tensor | None
    logits: list[torch.Tensor]


def test_a_model_that_checkpoints_itself_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=97, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).train()
    newer = hasattr(model, "activation_checkpointing_enable")
    (model.activation_checkpointing_enable if newer else model.gradient_checkpointing_enable)()
    tokens = torch.randint(97, (2, 8))
    with pytest.raises(CaptureError, match=r"Switch that off first.*gradient_checkpointing_disable\(\)"):
        olla.checkpoint(model, {"input_ids": tokens, "labels": tokens}, max_slowdown=0.2)
    (model.activation_checkpointing_disable if newer else model.gradient_checkpointing_disable)()
    found = olla.checkpoint(model, {"input_ids": tokens, "labels": tokens}, max_slowdown=0.3)
    assert found.peak_bytes <= found.eager_peak_bytes


def test_modules_that_cannot_be_recomputed_are_left_out_with_the_reason() -> None:
    class Changing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(2).exp()  # what was saved of it before is not needed

    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2  # saves nothing of what it takes

    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Sequential(Doubled(), mlp()), nn.Sequential(Changing(), mlp())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + 1
            return self.first(x) + self.second(x)

    model, x = Later(), torch.randn(512, 32)
    before = outcome(model, x)
    found = olla.checkpoint(model, x, minimise="peak", plan_for="a100")
    reasons = {row.name: row.reason for row in found.rows}
    assert reasons["first"] == "what it takes is changed in place later on"
    assert reasons["second"] == reasons["second.0"] == "changes in place what it did not make"
    assert not {"first", "second", "second.0"} & set(found.modules)
    assert same(before, outcome(model, x))


def test_experts_that_values_choose_are_measured_on_the_model_itself() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(32, 4), nn.ModuleList(mlp() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            chosen, result = self.gate(x).argmax(-1), torch.zeros_like(x)
            for i, expert in enumerate(self.experts):
                rows = (chosen == i).nonzero().squeeze(-1)
                if len(rows):
                    result = result.index_add(0, rows, expert(x[rows]))
            return result

    model, x = Residual(*(Experts() for _ in range(3))), torch.randn(512, 32)
    before = outcome(model, x)
    found = olla.checkpoint(model, x, max_slowdown=0.3, plan_for="a100")
    assert found.is_real
    assert found.modules
    assert same(before, outcome(model, x))


def test_what_recurrent_layers_keep_is_counted() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.LSTM(16, 16) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x)[0]
            return x

    model, x = Stack(), torch.randn(32, 4, 16)
    before = outcome(model, x)
    found = olla.checkpoint(model, x, minimise="peak", plan_for="a100")
    assert found.is_real
    assert found.modules
    assert same(before, outcome(model, x))


def test_autocast_of_the_loss_holds_in_recomputations() -> None:
    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return square(model, batch)

    model, x = blocks()
    before = outcome(model, x, loss)
    assert olla.checkpoint(model, x, loss=loss, max_slowdown=0.3, plan_for="a100").modules
    assert same(before, outcome(model, x, loss))


def test_a_table_says_what_is_checkpointed_and_why() -> None:
    model, x = blocks()
    text = str(olla.checkpoint(model, x, minimise="peak", plan_for="a100", selective=False))
    assert "Residual: " in text
    assert "% slower as estimated for a100" in text
    assert "blocks.0-" in text
    assert "bound: no choice within that time is estimated to need less than" in text


def test_a_training_chooses_at_its_first_batch_and_at_larger_ones() -> None:
    model, _ = blocks(4)
    told: list[Any] = []
    waiting = AtFirstBatch(model, {"max_slowdown": 0.2, "plan_for": "a100"}, told.append)
    model.eval()
    model(torch.randn(512, 32))
    model.train()
    with torch.no_grad():
        model(torch.randn(512, 32))
    assert not told
    for rows in (256, 256, 128, 512, 520):
        model(torch.randn(rows, 32)).sum().backward()
    assert [found.eager_peak_bytes for found in told] == sorted(found.eager_peak_bytes for found in told)
    assert len(told) == 2
    assert chosen_in(model)
    waiting.close()
    assert not chosen_in(model)


def test_a_training_keeps_its_budget_without_an_optimizer_that_is_not_known() -> None:
    class Unknown(torch.optim.Optimizer):
        def step(self, closure: Any) -> None:
            closure()

    model, x = blocks(4)
    optimizer = Unknown(model.parameters(), {"lr": 0.1})
    told: list[Any] = []
    waiting = AtFirstBatch(model, {"budget": "2MB", "optimizer": optimizer, "plan_for": "a100"}, told.append)
    with pytest.warns(UserWarning, match="the budget is kept without the optimizer"):
        model(x)
    assert told[0].peak_bytes <= 2_000_000
    waiting.close()


LAYERS = {"mlp": lambda: mlp(16), "linear": lambda: nn.Linear(16, 16), "norm": lambda: nn.BatchNorm1d(16)}
LAYERS |= {"in place": lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True)), "drop": lambda: nn.Dropout(0.2)}


@hypothesis.settings(max_examples=25)
@hypothesis.given(
    st.lists(st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=3), min_size=2, max_size=5),
    st.sampled_from([0.05, 0.2, 1.0]),
)
def test_any_stack_of_layers_computes_the_same(kinds: list[list[str]], share: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(*(LAYERS[kind]() for kind in part)) for part in kinds), nn.Linear(16, 16))
    x = torch.randn(64, 16)
    before = outcome(model, x)
    found = olla.checkpoint(model, x, max_slowdown=share, plan_for="a100", time_limit=2.0)
    assert found.peak_bytes <= found.eager_peak_bytes
    assert found.added_seconds <= share * found.base_seconds * 1.0001
    assert same(before, outcome(model, x))


def test_images_with_batch_norm_and_activations_in_place_compute_the_same() -> None:
    model, x = nn.Sequential(*(conv() for _ in range(5))), torch.randn(8, 8, 16, 16)
    before = outcome(model, x)
    assert olla.checkpoint(model, x, max_slowdown=0.3, plan_for="a100").modules
    assert same(before, outcome(model, x))
