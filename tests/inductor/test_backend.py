"""olla inside torch.compile: the same losses and gradients, less memory, and torch's own choice where it must be."""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import pytest
from torch.utils.checkpoint import checkpoint

import olla.inductor
from olla.errors import BudgetError, CaptureError
from olla.inductor.compat import compat
from olla.inductor.saving import saving
from olla.inductor.saving.joint import Joint
from olla.inductor.settings import patches
from olla.plan import Goal
from tests.support.pytorch.compiling import LEAST, blocks, fresh, inputs, square, without_kernels  # noqa: F401
from tests.support.pytorch.steps import nn, torch

pytestmark = pytest.mark.torch

Loss = Callable[[Any, Any], torch.Tensor]


def train(model: nn.Module, batches: list[Any], loss: Loss, **compiled: Any) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of all steps, and what they made of the parameters and buffers of a copy of the model."""
    model = copy.deepcopy(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05)
    step = torch.compile(lambda m, b: loss(m, b), **compiled)
    torch.manual_seed(1)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        result = step(model, batch)
        result.backward()
        optimizer.step()
        losses.append(result.item())
    return losses, [t.detach() for t in (*model.parameters(), *model.buffers())]


def alike(model: nn.Module, batches: list[Any], loss: Loss = square, **options: Any) -> None:
    """Check that the two graphs olla makes train a model as those of torch's partitioner do; no kernels are built."""
    found = train(model, batches, loss, backend=without_kernels(patches(**(options or LEAST))["custom_partitioner_fn"]))
    torch.compiler.reset()
    same(found, train(model, batches, loss, backend=without_kernels(compat.min_cut_partition)))


def same(found: tuple[list[float], list[torch.Tensor]], expected: tuple[list[float], list[torch.Tensor]]) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-3, atol=1e-4)


def joint_of(model: nn.Module, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> Joint:
    """What the planner sees of the one graph of a model."""
    seen: list[Joint] = []
    choose = saving.Front.choose

    def watch(front: saving.Front, goal: Goal, **options: Any) -> saving.SavedChoice:
        seen.append(front.joint)
        return choose(front, goal, **options)

    monkeypatch.setattr(saving.Front, "choose", watch)
    torch.compile(model, backend=without_kernels(patches()["custom_partitioner_fn"]))(x)
    (joint,) = seen
    return joint


@pytest.mark.parametrize("options", [{"max_slowdown": 0.0}, {"budget": "2MB"}, LEAST], ids=["time", "budget", "least"])
def test_every_goal_trains_the_same_with_dropout(options: dict[str, Any]) -> None:
    alike(blocks(), inputs(), **options)


def test_enable_counts_for_what_is_compiled_until_it_ends() -> None:
    config = torch._inductor.config
    with olla.inductor.enable(minimise="peak"):
        assert isinstance(config.custom_partitioner_fn, olla.inductor.Partitioner)
        olla.inductor.enable(budget="1GB")
        assert config.custom_partitioner_fn.goal.budget_bytes == 10**9
    assert config.custom_partitioner_fn is None
    olla.inductor.disable()
    assert config.custom_partitioner_fn is None


def test_settings_of_nested_blocks_hold_inside_and_are_restored_behind() -> None:
    config = torch._inductor.config

    def budget() -> Any:
        return config.custom_partitioner_fn and config.custom_partitioner_fn.goal.budget_bytes

    before = config.get_config_copy()
    with olla.inductor.enable(budget=1000):
        with contextlib.suppress(RuntimeError), olla.inductor.enable(budget=2000, segment=False):
            assert (budget(), config.custom_partitioner_fn.segment) == (2000, False)
            olla.inductor.enable(budget=3000)
            raise RuntimeError
        assert (budget(), config.custom_partitioner_fn.segment) == (1000, True)
        with pytest.raises(ValueError, match="goal"), olla.inductor.enable(budget=1, minimise="peak"):
            pass
        assert budget() == 1000
        with olla.inductor.enable(budget=4000):
            olla.inductor.disable()
            assert budget() is None
        assert budget() is None  # off is off, also behind a block that began before
    outer, inner = olla.inductor.enable(budget=5000), olla.inductor.enable(budget=6000)
    outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    assert config.get_config_copy() == before


def test_settings_of_the_user_inside_a_block_end_with_it() -> None:
    config = torch._inductor.config
    with config.patch(reorder_for_peak_memory=False), olla.inductor.enable():
        config.custom_partitioner_fn = None
    assert config.reorder_for_peak_memory
    assert config.custom_partitioner_fn is None


def test_two_threads_turn_it_on_and_off_each_for_itself() -> None:
    both = threading.Barrier(2, timeout=60)

    def work(budget: int) -> tuple[Any, ...]:
        config = torch._inductor.config
        found = []
        both.wait()
        with olla.inductor.enable(budget=budget):
            both.wait()
            found.append(config.custom_partitioner_fn.goal.budget_bytes)
            both.wait()
        both.wait()
        return (*found, config.custom_partitioner_fn, config._post_fusion_custom_pass)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(work, (1000, 2000)))
    if isinstance(compat.variable_like_config("probe", None), ContextVar):
        assert found == [(1000, None, None), (2000, None, None)]
    assert torch._inductor.config.custom_partitioner_fn is None


def test_code_for_one_goal_is_not_taken_for_another_by_dynamo() -> None:
    """One function, compiled for two goals; the same goal again takes what is there."""
    model, x = blocks(1), inputs(1)[0]

    def function(x: torch.Tensor) -> torch.Tensor:
        return square(model, x)

    divided: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        choose = saving.Front.choose
        patch.setattr(saving.Front, "choose", lambda *args: divided.append(args[1]) or choose(*args))
        for options in ({"budget": 10**9}, {"minimise": "peak"}, {"budget": 10**9}, {"minimise": "peak"}):
            torch.compile(function, backend="olla", options=options)(x).backward()
    assert [goal.budget_bytes for goal in divided] == [10**9, None]


def test_graph_breaks_and_two_models_train_the_same() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = blocks(1), blocks(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            y: torch.Tensor = self.second(x)
            return y

    alike(Broken(), inputs(5))
    alike(blocks(1), inputs(5))


def test_batches_of_any_size_train_the_same() -> None:
    alike(blocks(1), [batch for size in (4, 7, 9, 16) for batch in inputs(2, size)])


def test_frozen_parameters_train_the_same() -> None:
    model = blocks()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    alike(model, inputs(5))


def test_checkpointed_blocks_train_the_same_and_are_not_saved() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = blocks(1, dropout=0.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return y

    alike(Checkpointed(), inputs(5), max_slowdown=0.0)


def test_what_a_checkpoint_makes_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = blocks(1, dropout=0.0)
    joint = joint_of(inner, inputs(1)[0], monkeypatch)
    assert not joint.unsaved.any()

    class Checkpointed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = checkpoint(inner, x, use_reentrant=False)
            return y

    torch.compiler.reset()
    monkeypatch.undo()
    marked = joint_of(Checkpointed(), inputs(1)[0], monkeypatch)
    goal = Goal.of(None, 0.0, None, "cpu", True, True)
    assert goal is not None
    choice = saving.choose(marked, goal)
    again = set(choice.runs.op[choice.runs.again == 1].tolist())
    products = [v for v in marked.unsaved.nonzero()[0].tolist() if marked.flops[v] > 0]
    assert marked.unsaved.any()
    assert any(v in again for v in products)


def test_autocast_trains_the_same() -> None:
    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return square(model, x)

    alike(blocks(1), inputs(3), loss, max_slowdown=1.0)


def test_less_budget_and_more_time_never_raise_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    joint = joint_of(blocks(4), torch.randn(512, 32), monkeypatch)

    def choice(**goal: Any) -> saving.SavedChoice:
        options = {"budget": None, "max_slowdown": None, "minimise": None} | goal
        asked = Goal.of(**options, device="cpu", in_place=True, recompute=True)
        assert asked is not None
        return saving.choose(joint, asked)

    least, most = choice(minimise="peak"), choice(max_slowdown=0.0)
    assert least.peak_bytes < most.peak_bytes <= most.saved_peak_bytes
    step = (most.peak_bytes - least.peak_bytes) // 9
    fitted = [choice(budget=most.peak_bytes - i * step) for i in range(10)]
    assert all(c.peak_bytes <= most.peak_bytes - i * step for i, c in enumerate(fitted))
    assert all(b.peak_bytes <= a.peak_bytes for a, b in itertools.pairwise(fitted))
    timed = [choice(max_slowdown=0.1 * i) for i in range(10)]
    assert all(b.peak_bytes <= a.peak_bytes for a, b in itertools.pairwise(timed))
    assert all(c.added_seconds <= 0.1 * i * joint.step_seconds for i, c in enumerate(timed))


def test_what_a_checkpoint_draws_from_a_generator_is_drawn_again() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = blocks(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = checkpoint(self.inner, x, use_reentrant=False)
            return x

    found = []
    for partition in (patches()["custom_partitioner_fn"], compat.min_cut_partition):
        torch.compiler.reset()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="olla")
            found.append(train(Checkpointed(), inputs(3), square, backend=without_kernels(partition)))
    torch.testing.assert_close(*found)


def test_decisions_are_known_by_code_and_goal() -> None:
    def uuid(**goal: Any) -> object:
        return patches(**goal)["custom_partitioner_fn"].uuid()

    assert uuid(budget="1GB") == uuid(budget=10**9)
    assert len({uuid(budget="1GB"), uuid(budget="2GB"), uuid(minimise="peak"), uuid(max_slowdown=0.1)}) == 4


def test_two_goals_and_unreadable_budgets_are_refused() -> None:
    with pytest.raises(ValueError, match="each is a goal of its own"):
        olla.inductor.enable(budget="1GB", minimise="peak")
    with pytest.raises(BudgetError, match="no number of bytes"):
        olla.inductor.enable(budget="a lot")
    assert torch._inductor.config.custom_partitioner_fn is None


def test_an_option_that_is_gone_is_refused_with_what_to_do() -> None:
    step = torch.compile(nn.Linear(2, 2), backend="olla", options={"arena": True})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"arena=True is no option .* leave it out"):
        step(torch.ones(1, 2))


def test_a_name_that_torch_lacks_is_said_with_its_version() -> None:
    with pytest.raises(CaptureError, match=rf"partitioners\.no_such_name, which torch {torch.__version__[:4]}"):
        compat.private("torch._functorch.partitioners", "no_such_name")
