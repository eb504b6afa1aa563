"""Forward, backward and update in one graph of Inductor: the same numbers as separate ones, and less memory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

import olla
from olla.errors import CaptureError, ReplayError
from olla.inductor.kernels import order
from olla.inductor.simulate.step import replay
from olla.inductor.whole.compile import compile_step
from olla.inductor.whole.flat import flatten
from olla.inductor.whole.joined import Asked
from olla.pytorch import inductor_step
from olla.pytorch.step import Step
from tests.support.pytorch import compile_cases
from tests.support.pytorch.compiled import MANY_STEPS, fresh_batches
from tests.support.pytorch.compiling import NUM_STEPS, blocks, fresh, inputs, square  # noqa: F401
from tests.support.pytorch.models import Example
from tests.support.pytorch.steps import nn, torch

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_graph")]
CASES = ("gpt2 b8, 1024 tokens", "bert b32", "resnet50 b32", "llama 1B b4")


@pytest.fixture
def one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile whole steps as one graph, whatever separate ones need."""
    monkeypatch.setattr(inductor_step, "separate_step", lambda *_: None)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def compiled(model: nn.Module, optimizer: Any, loss: Any = square, **options: Any) -> Step:
    return olla.compile(model, optimizer=optimizer, loss=loss, kernels="inductor", **options)


def value(result: Any) -> torch.Tensor:
    first: torch.Tensor = result[0] if isinstance(result, tuple | list) else result
    return first.detach().clone()


def trained(example: Example, make: Any, batches: list[Any], *, whole: bool, **options: Any) -> list[torch.Tensor]:
    """Return the losses of a training with torch.compile or as one graph, then parameters, buffers and state."""
    model = copy.deepcopy(example.model)
    optimizer = make(model)
    step: Any = compiled(model, optimizer, example.loss, **options) if whole else None
    forward = torch.compile(example.loss)
    found = []
    for seed, batch in enumerate(batches):
        torch.manual_seed(seed)
        if whole:
            found.append(value(step(batch)))
        else:
            result = forward(model, batch)
            found.append(value(result))
            (result[0] if isinstance(result, tuple) else result).backward()
            optimizer.step()
            optimizer.zero_grad()
    if whole:
        assert step._captures.latest.runner.separate is None  # it is one graph
    state = [t for p in model.parameters() for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]
    return [*found, *(t.detach() for t in (*model.parameters(), *model.buffers())), *state]


@pytest.mark.parametrize("make", [pytest.param(sgd, marks=pytest.mark.slow), adamw])
def test_a_trained_model_is_that_of_torch_compile_and_the_same_optimizer(make: Any) -> None:
    example = Example(blocks(), inputs(1)[0], square)
    batches = inputs(NUM_STEPS)
    expected = trained(example, make, batches, whole=False)
    found = trained(example, make, batches, whole=True)
    assert MANY_STEPS.share(found, expected) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_models_with_dropout_train_as_with_torch_compile(case: str) -> None:
    torch.manual_seed(0)
    example, _ = compile_cases.build(case, "tiny")
    batches = list(fresh_batches(example.batch, NUM_STEPS))

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return compile_cases.optimizer(case, model)

    expected = trained(example, make, batches, whole=False)[:NUM_STEPS]
    assert MANY_STEPS.share(trained(example, make, batches, whole=True)[:NUM_STEPS], expected) <= 1


def wide(depth: int = 6, width: int = 256) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))


def test_gradients_are_never_all_alive() -> None:
    model, batch = wide(), torch.randn(4, 256)
    num_bytes = sum(p.nbytes for p in model.parameters())
    captured = olla.capture(model, batch, optimizer=adamw(model), loss=square)
    whole = compile_step(captured, Asked(), kernels=False)
    separate = replay(model, batch, square, backend="olla", state_bytes=2 * num_bytes)
    assert separate.peak_bytes >= 4 * num_bytes  # parameters, two of state, gradients
    assert whole.peak_bytes < 3.5 * num_bytes


def test_the_peak_is_told_alike_with_and_without_kernels() -> None:
    model, batch = blocks(), inputs(1)[0]
    captured = olla.capture(model, batch, optimizer=adamw(model), loss=square)
    without = compile_step(captured, Asked(), kernels=False)
    assert compile_step(captured, Asked()).peak_bytes == without.peak_bytes


def test_parameters_and_state_stay_the_users_own_tensors() -> None:
    model = blocks()
    optimizer = adamw(model)
    step = compiled(model, optimizer)
    step(inputs(1)[0])
    before = [p.data_ptr() for p in model.parameters()]
    values = [p.detach().clone() for p in model.parameters()]
    step(inputs(1)[0])
    assert [p.data_ptr() for p in model.parameters()] == before
    assert not any(torch.equal(p, v) for p, v in zip(model.parameters(), values, strict=True))
    assert all(float(optimizer.state[p]["step"]) == 2 for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_a_learning_rate_that_changes_needs_no_second_compilation() -> None:
    model = blocks(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step: Any = compiled(model, optimizer)
    step(inputs(1)[0])
    optimizer.param_groups[0]["lr"] = 0.0
    values = [p.detach().clone() for p in model.parameters()]
    step(inputs(1)[0])
    assert all(torch.equal(p, v) for p, v in zip(model.parameters(), values, strict=True))
    assert len(step._captures) == 1


@pytest.mark.slow
def test_another_size_of_batch_is_compiled_anew() -> None:
    model = blocks(dropout=0.0)
    step: Any = compiled(model, sgd(model))
    for size in (16, 8, 16):
        batch = inputs(1, size)[0]
        expected = float(square(model, batch).detach())
        assert float(step(batch)) == pytest.approx(expected, rel=1e-4)
    assert len(step._captures) == 2


def test_clipped_gradients_are_those_of_the_loop() -> None:
    def body(model: Any, optimizer: Any, batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = square(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        return loss

    model = blocks(dropout=0.0)
    other = copy.deepcopy(model)
    step = olla.compile(model, optimizer=sgd(model), step=body, kernels="inductor")
    optimizer = sgd(other)
    for batch in inputs(3):
        step(batch)
        body(other, optimizer, batch)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs)


def test_a_budget_below_what_is_possible_is_warned_of() -> None:
    model = blocks()
    step = compiled(model, sgd(model), budget=1000)
    with pytest.warns(UserWarning, match=r"budget=1000 bytes: the least found is \d+ bytes"):
        step(inputs(1)[0])


def test_two_backward_passes_are_refused_by_name() -> None:
    def body(model: Any, optimizer: Any, batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        for part in batch.chunk(2):
            square(model, part).backward()
        optimizer.step()
        return batch.sum()

    model = blocks()
    step = olla.compile(model, optimizer=sgd(model), step=body, kernels="inductor", on_unsupported="raise")
    with pytest.raises(CaptureError, match="one backward pass from one number"):
        step(inputs(1)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernels": "triton"}, "kernels is 'triton', expected 'torch' or 'inductor'"),
        ({"optimizer": None}, "pass optimizer="),
        ({"arena": True}, 'arena=True is for kernels="torch"'),
        ({"swap": True}, 'swap=True is for kernels="torch"'),
        ({"max_recomputed": -1}, "max_recomputed is -1"),
        ({"max_recomputed": 0.1, "minimise": "nonsense"}, "nonsense"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_value(options: dict[str, Any], message: str) -> None:
    model = blocks(1)
    given = {"optimizer": sgd(model), "loss": square, "kernels": "inductor"} | options
    with pytest.raises(ValueError, match=message):
        olla.compile(model, **given)


def test_lbfgs_is_refused() -> None:
    model = blocks(1)
    with pytest.raises(CaptureError):
        compiled(model, torch.optim.LBFGS(model.parameters()), on_unsupported="raise")(inputs(1)[0])


def test_most_flops_are_for_inductors_kernels() -> None:
    with pytest.raises(ValueError, match='is for kernels="inductor"'):
        olla.compile(blocks(1), loss=square, max_recomputed=0.1)


def test_such_a_step_has_a_report_and_no_plan() -> None:
    model = blocks()
    step = compiled(model, sgd(model))
    step(inputs(1)[0])
    report = step.report()
    assert report.num_steps == 1
    assert report.planned_peak_bytes > report.resident_bytes
    assert "one graph" in report.note
    with pytest.raises(ReplayError, match="has no plan"):
        _ = step.plan


def test_numbers_of_updates_are_inputs() -> None:
    model = blocks(1)
    captured = olla.capture(model, inputs(1)[0], optimizer=adamw(model), loss=square)
    flat = flatten(captured)
    numbers = [fake for fake, kind in zip(flat.fakes, flat.kinds, strict=True) if kind == "number"]
    assert numbers
    assert all(fake.shape == () for fake in numbers)
    reads = torch.ops.aten._local_scalar_dense.default
    assert not flat.module.graph.find_nodes(op="call_function", target=reads)


@pytest.mark.slow
def test_equal_layers_share_their_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def num_kernels(num_layers: int) -> int:
        layers = [layer for _ in range(num_layers) for layer in (nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh())]
        model = nn.Sequential(*layers)
        compile_step(olla.capture(model, torch.ones(4, 8), optimizer=adamw(model), loss=square), Asked())
        return len(list(tmp_path.rglob("*.so")))

    first = num_kernels(6)
    assert first > 0
    assert num_kernels(12) < first + 3  # what is recomputed may differ from layer to layer


def test_one_graph_is_ordered() -> None:
    model = blocks()
    captured = olla.capture(model, inputs(1)[0], optimizer=sgd(model), loss=square)
    compile_step(captured, Asked(), kernels=False)
    (record,) = order.records()
    assert record.peak_bytes <= record.given_peak_bytes
