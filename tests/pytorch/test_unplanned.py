"""What cannot be captured runs as the ordinary step, or its update does: said once, counted, and nothing is touched."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import warnings
from typing import Any

import pytest

import olla
from tests.pytorch.ordinary import net, ordinary, same, state_of, step_of
from tests.support.pytorch.steps import nn, square, torch

pytestmark = [
    pytest.mark.torch,
    # Torch says it once per process, in whichever test comes first.
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar:UserWarning"),
]
NUM_STEPS = 5


class Counting(torch.optim.Optimizer):
    """Keeps its steps as a Python number."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["m"] = 0, torch.zeros_like(p)
                state["step"] += 1
                state["m"].lerp_(p.grad, 0.1)
                p.add_(state["m"] / (1 - 0.9 ** state["step"]), alpha=-group["lr"])


class Orthogonal(torch.optim.Optimizer):
    """Keeps state of matrices alone, and orthogonalises it, as Muon does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if p.dim() < 2:
                p.sub_(p.grad.sign(), alpha=0.05)
                continue
            buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
            buffer.mul_(0.9).add_(p.grad)
            u = buffer / (buffer.norm() + 1e-7)
            for _ in range(3):
                u = 1.5 * u - 0.5 * u @ u.T @ u
            p.sub_(u, alpha=0.05)


class Replacing(torch.optim.Optimizer):
    """Puts new tensors into its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            state["m"] = p.grad.clone() if "m" not in state else 0.9 * state["m"] + p.grad
            p.sub_(state["m"], alpha=0.05)


class Branching(torch.optim.Optimizer):
    """Skips updates by the value of a gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.state[p].setdefault("n", torch.zeros(())).add_(1)
            if p.grad.norm() > 0.01:
                p.sub_(p.grad, alpha=0.05)


def with_hooks(parameters: Any) -> Any:
    def clip(optimizer: Any, *_: Any) -> None:
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)

    optimizer = torch.optim.SGD(parameters, lr=0.1, foreach=False)
    optimizer.register_step_pre_hook(clip)
    return optimizer


def with_dampening(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5, foreach=False)


def lbfgs(parameters: Any) -> Any:
    return torch.optim.LBFGS(parameters, lr=0.5, max_iter=4)


def two(parameters: Any) -> Any:
    first, *rest = parameters
    return [torch.optim.AdamW([first], lr=0.01, foreach=False), Counting(rest)]


OPTIMIZERS = [
    Counting, Orthogonal, Replacing, Branching, with_hooks, with_dampening, lbfgs, two, torch.optim.ASGD,
    torch.optim.RAdam, torch.optim.Adafactor,
]  # fmt: skip


@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda make: make.__name__)
def test_any_optimizer_steps_as_in_the_ordinary_loop_behind_planned_gradients(make: Any) -> None:
    seen: list[list[Any]] = [[], []]
    for planned in (0, 1):
        model = net()
        optimizer = make(model.parameters())
        step = functools.partial(ordinary, model, optimizer, square)
        if planned:
            step = olla.compile(model, optimizer=optimizer, loss=square, disk_cache=False)
        torch.manual_seed(7)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for i in range(NUM_STEPS):
                loss = step(torch.full((4, 6), 0.1 * i) + torch.arange(6) + torch.arange(4)[:, None])
                seen[planned] += [loss.detach().clone(), *state_of(model, optimizer), torch.get_rng_state()]
        of_olla = [w for w in caught if "planned" in str(w.message)]
    assert same(*seen)
    report = step.report()
    assert len(of_olla) <= 1
    assert report.num_captures == 1
    assert report.num_ordinary_steps <= 1  # the first one, where the optimizer makes its state in it
    assert "without its update" in str(of_olla[0].message) if of_olla else report.note == ""


def number_in_the_batch(model: Any, batch: Any) -> Any:
    return square(model, batch["x"]) * batch["weight"]


def branch(model: Any, batch: Any) -> Any:
    y = model(batch["x"])
    return y.square().mean() if float(y.sum()) > 0 else y.abs().mean()


def mask(model: Any, batch: Any) -> Any:
    y = model(batch["x"])
    return y[y > 0].sum() + 0 * y.sum()


def drawn_with_python(model: Any, batch: Any) -> Any:
    return square(model, batch["x"]) * random.random()


class Node:
    def __init__(self, x: Any) -> None:
        self.x = x


torch.utils._pytree.register_pytree_node(Node, lambda n: ([n.x], None), lambda children, _: Node(*children))


@pytest.mark.parametrize("loss", [branch, mask, drawn_with_python], ids=lambda loss: loss.__name__)
def test_a_loss_that_cannot_be_captured_is_followed_to_the_bit(loss: Any) -> None:
    seen: list[list[Any]] = [[], []]
    for planned in (0, 1):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
        step = step_of(planned, model, optimizer, loss=loss)
        torch.manual_seed(7)
        random.seed(7)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for i in range(NUM_STEPS):
                batch = {"x": torch.randn(4, 6), "weight": 1.0 + i}
                seen[planned] += [step(batch).detach().clone(), *state_of(model, optimizer), torch.get_rng_state()]
    assert same(*seen)
    assert len([w for w in caught if "runs as the ordinary one" in str(w.message)]) == 1
    report = step.report()
    assert (report.num_ordinary_steps, report.num_captures) == (NUM_STEPS, 0)
    assert "could not be captured" in report.note
    assert f"{NUM_STEPS} ordinary steps" in str(report)


def test_a_batch_that_torch_takes_apart_without_names_is_planned() -> None:
    model = net()
    loss = lambda m, node: square(m, node.x)  # noqa: E731
    step = olla.compile(model, loss=loss, disk_cache=False, on_unsupported="raise")
    other = copy.deepcopy(model)
    torch.manual_seed(3)
    found = step(Node(torch.ones(2, 6)))
    torch.manual_seed(3)
    assert torch.equal(found, square(other, torch.ones(2, 6)))
    assert step.report().num_captures == 1


def test_a_body_with_two_optimizers_runs_as_written() -> None:
    bce = nn.functional.binary_cross_entropy_with_logits

    def body(models: Any, optimizers: Any, real: Any) -> Any:
        generator, judge = models
        fake = generator(torch.randn(8, 6))
        optimizers[1].zero_grad()
        (bce(judge(real), torch.ones(8, 1)) + bce(judge(fake.detach()), torch.zeros(8, 1))).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        loss = bce(judge(fake), torch.ones(8, 1))
        loss.backward()
        optimizers[0].step()
        return loss

    seen: list[list[Any]] = [[], []]
    for planned in (0, 1):
        models = nn.ModuleList([net(), nn.Linear(3, 1)])
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.01, foreach=False) for m in models]
        step = step_of(planned, models, optimizers, step=body)
        torch.manual_seed(7)
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            for _ in range(NUM_STEPS):
                loss = step(torch.rand(8, 3)).detach().clone()
                seen[planned] += [loss, *state_of(models, optimizers), torch.get_rng_state()]
    assert same(*seen)


def test_what_was_tried_first_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def loss(model: Any, x: Any) -> Any:
        calls.append(1)
        model.seen = getattr(model, "seen", 0) + 1
        return square(model, x) * (2 if float(x.sum()) > 0 else 1)

    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step = olla.compile(model, optimizer=optimizer, loss=loss, disk_cache=False, on_unsupported="raise")
    square(model, torch.ones(2, 6)).backward()
    before, rng = state_of(model, optimizer), torch.get_rng_state()
    grads = [p.grad for p in model.parameters()]
    with pytest.raises(olla.CaptureError):
        step(torch.ones(2, 6))
    assert same(state_of(model, optimizer), before)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert (calls, hasattr(model, "seen"), dict(optimizer.state)) == ([], False, {})


def test_state_that_a_failing_plan_has_made_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    from olla.pytorch import captures

    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step = olla.compile(model, optimizer=optimizer, loss=square, disk_cache=False, on_unsupported="raise")

    def fail(*_: Any) -> None:
        raise AttributeError("injected")

    monkeypatch.setattr(captures, "Guard", fail)
    with pytest.raises(olla.CaptureError, match="capturing the step failed: AttributeError: injected"):
        step(torch.ones(2, 6))
    assert not optimizer.state


def test_an_error_of_the_ordinary_step_keeps_its_type_and_says_why_it_was_ordinary() -> None:
    def loss(model: Any, x: Any) -> Any:
        raise LookupError("no such label")

    model = net()
    step = olla.compile(model, optimizer=torch.optim.SGD(model.parameters()), loss=loss, disk_cache=False)
    with pytest.raises(LookupError, match="no such label") as caught:
        step(torch.ones(2, 6))
    assert "could not be captured" in "".join(caught.value.__notes__)
    with pytest.raises(LookupError):  # and is tried again
        step(torch.ones(2, 6))
    assert step.report().num_ordinary_steps == 2


@pytest.mark.parametrize(("width", "dtype"), [(7, torch.float32), (6, torch.int64)])
def test_a_batch_that_the_model_does_not_take_raises_what_the_model_raises_and_the_next_one_is_planned(
    width: int, dtype: Any
) -> None:
    model = net()
    step = olla.compile(model, optimizer=torch.optim.SGD(model.parameters()), loss=square, disk_cache=False)
    with pytest.raises(RuntimeError):
        step(torch.ones(2, width, dtype=dtype))
    step(torch.ones(2, 6))
    assert step.report().num_captures == 1


def test_backward_of_an_inference_says_what_to_pass() -> None:
    model = net()
    planned = olla.compile(model, disk_cache=False)
    result = planned(torch.ones(2, 6))
    with pytest.raises(RuntimeError, match=r"without a loss runs inference.*Pass loss="):
        result.sum().backward()
    with torch.no_grad():
        assert not planned(torch.ones(2, 6)).requires_grad
    model.eval()
    assert not planned(torch.ones(2, 6)).requires_grad


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, x: m(x), "Reduce it with"),
        (lambda m, x: float(x.shape[0]), "expected a scalar tensor"),
        (lambda m, x: square(m, x).detach(), "does not depend on any parameter"),
    ],
)
def test_a_loss_that_no_loop_could_use_is_an_error(loss: Any, message: str) -> None:
    model = net()
    step = olla.compile(model, optimizer=torch.optim.SGD(model.parameters()), loss=loss, disk_cache=False)
    with pytest.raises(olla.CaptureError, match=message):
        step(torch.ones(2, 6))


def test_recapture_tries_again_what_was_refused() -> None:
    how = {"branch": True}

    def loss(model: Any, x: Any) -> Any:
        y = square(model, x)
        return y * 2 if how["branch"] and float(y) > 0 else y

    model = net()
    step = olla.compile(model, optimizer=torch.optim.SGD(model.parameters()), loss=loss, disk_cache=False)
    with pytest.warns(UserWarning, match=r"step.recapture\(\) tries again"):
        step(torch.ones(2, 6))
    how["branch"] = False
    step(torch.ones(2, 6))
    assert step.report().num_captures == 0
    step.recapture()
    step(torch.ones(2, 6))
    assert (step.report().num_captures, step.report().num_ordinary_steps) == (1, 2)


def test_batches_of_many_kinds_are_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []
    original = olla.pytorch.step.capture
    monkeypatch.setattr(olla.pytorch.step, "capture", lambda *a, **k: tried.append(1) or original(*a, **k))
    model = net()
    step = olla.compile(model, loss=branch, disk_cache=False, cache_size=3)
    with pytest.warns(UserWarning, match="ordinary"):
        step({"x": torch.ones(2, 6)})
    for i in range(1, 6):  # and no word more
        step({"x": torch.ones(2 + i, 6)})
    assert len(tried) == 3


def test_a_step_may_be_called_by_the_loss_of_an_ordinary_one_and_not_by_itself() -> None:
    model, teacher = net(), net().eval()
    target = olla.compile(teacher, disk_cache=False)

    def loss(model: Any, x: Any) -> Any:
        return (model(x) - target(x)).square().mean()

    step = olla.compile(model, optimizer=torch.optim.SGD(model.parameters()), loss=loss, disk_cache=False)
    with pytest.warns(UserWarning, match="ordinary"):
        assert step(torch.ones(2, 6)).isfinite()
    again = olla.compile(model, loss=lambda m, x: again(x), disk_cache=False)
    with pytest.raises(olla.ReplayError, match="another one runs"):
        again(torch.ones(2, 6))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_torch_func_inside_the_loss_is_captured(optimizer: Any) -> None:
    def loss(model: Any, x: Any) -> Any:
        inner = torch.func.vmap(torch.func.grad(lambda y: model[0](y).square().sum()))(x)
        return square(model, x) + inner.sum()

    seen: list[list[Any]] = [[], []]
    for planned in (0, 1):
        model = net()
        made = optimizer(model.parameters(), lr=0.01, foreach=False)
        step: Any = functools.partial(ordinary, model, made, loss)
        if planned:
            step = olla.compile(model, optimizer=made, loss=loss, disk_cache=False, on_unsupported="raise")
        torch.manual_seed(7)
        for _ in range(3):
            seen[planned] += [step(torch.ones(3, 6)).detach().clone(), *state_of(model, made)]
    assert same(*seen)


def test_an_unknown_way_is_refused_with_its_value() -> None:
    with pytest.raises(ValueError, match="on_unsupported is 'ignore', expected 'warn' or 'raise'"):
        olla.compile(net(), on_unsupported="ignore")


def test_a_window_that_is_placed_by_the_offset_of_the_batch_is_followed() -> None:
    model, rows = net().eval(), torch.arange(48.0).view(8, 6)
    loss = lambda m, x: m(torch.as_strided(x, (2, 6), (6, 1), x.storage_offset())).square().mean()  # noqa: E731
    step = olla.compile(model, loss=loss, disk_cache=False)
    answers = hasattr(torch._dynamo.variables.TensorVariable, "method_storage_offset")  # since 2.15, with a guard
    with contextlib.nullcontext() if answers else pytest.warns(UserWarning, match=r"storage_offset\(\)"):
        step(rows[:2])
    assert all(
        torch.equal(step(rows[2 * i : 2 * i + 2]), loss(model, rows[2 * i : 2 * i + 2]).detach()) for i in range(3)
    )
