"""What a compiled step finds in ``.grad`` and leaves there is what the ordinary loop finds and leaves there."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

import olla
from tests.support.pytorch.steps import nn, torch

pytestmark = pytest.mark.torch
NUM_STEPS = 6


@dataclass
class Loop:
    """A training loop, whose step is an ordinary one or a compiled one.

    Attributes:
        model, optimizer, loss, body: what is compiled.
        after: what the loop does behind each step.
        others: what else it trains.
        options: of olla.compile.
    """

    model: Any
    optimizer: Any = None
    loss: Any = None
    body: Any = None
    after: Callable[[int], Any] = lambda i: None
    before: Callable[[int], Any] = lambda i: None
    others: list[Any] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    batch: Callable[[int], Any] = lambda i: torch.randn(8, 6, generator=torch.Generator().manual_seed(i))

    def ordinary(self, batch: Any) -> Any:
        if self.body is not None:
            return self.body(self.model, self.optimizer, batch)
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        loss = self.loss(self.model, batch)
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        return loss

    def run(self, planned: bool) -> tuple[list[Any], Any]:
        """Return everything that is trained, and all gradients that are there, behind each step; and the step."""
        step: Any = self.ordinary
        if planned:
            options = {"disk_cache": False, "time_limit": 0.1} | self.options
            step = olla.compile(self.model, optimizer=self.optimizer, loss=self.loss, step=self.body, **options)
        own = [p for group in (self.optimizer.param_groups if self.optimizer else ()) for p in group["params"]]
        seen: list[Any] = []
        for i in range(NUM_STEPS):
            self.before(i)
            loss = step(self.batch(i))
            self.after(i)
            tensors = [*self.model.parameters(), *self.others]
            # Those of the optimizer's own may be there or not: if there are any, they are the ordinary loop's.
            grads = [t.grad for t in tensors if not any(t is p for p in own)]
            seen.append([
                loss.detach().clone(), *(t.detach().clone() for t in tensors),
                *(None if g is None else g.clone() for g in grads),
            ])  # fmt: skip
        return seen, step


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def square(model: Any, x: Any) -> Any:
    return model(x).square().mean()


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)


def none(*_: Any) -> None:
    """Return what a hook has to return."""


def second_optimizer() -> Loop:
    model = net()
    second = torch.optim.SGD(model[0].parameters(), lr=0.3)
    return Loop(model, sgd(model[2].parameters()), square, after=lambda i: (second.step(), second.zero_grad()))


def second_optimizer_that_steps_every_third_time() -> Loop:
    model = net()
    second = sgd(model[0].parameters())
    return Loop(
        model, sgd(model[2].parameters()), square, after=lambda i: i % 3 != 2 or (second.step(), second.zero_grad())
    )


def second_optimizer_that_zeroes_gradients() -> Loop:
    model = net()
    second = sgd(model[0].parameters())
    return Loop(
        model, sgd(model[2].parameters()), square, after=lambda i: (second.step(), second.zero_grad(set_to_none=False))
    )


def second_optimizer_of_a_body() -> Loop:
    def body(model: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad()
        loss = square(model, x)
        loss.backward()
        nn.utils.clip_grad_norm_(model[2].parameters(), 0.1)
        optimizer.step()
        return loss.detach()

    loop = second_optimizer()
    loop.loss, loop.body = None, body
    return loop


def second_optimizer_whose_gradients_the_body_clips() -> Loop:
    loop = second_optimizer_that_steps_every_third_time()

    def body(model: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad()
        loss = square(model, x)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss.detach()

    loop.loss, loop.body = None, body
    return loop


def leaf_in_the_closure() -> Loop:
    model, scale = net(), torch.ones((), requires_grad=True)

    def after(i: int) -> None:
        with torch.no_grad():
            scale.sub_(scale.grad)
        scale.grad = None

    return Loop(model, sgd(model.parameters()), lambda m, x: square(m, x) * scale, after=after, others=[scale])


def leaf_whose_gradient_adds_up() -> Loop:
    model, scale = net(), torch.ones(3, requires_grad=True)
    return Loop(model, sgd(model.parameters()), lambda m, x: (m(x) * scale).square().mean(), others=[scale])


def module_in_the_closure() -> Loop:
    model, head = net(), nn.Linear(3, 2)
    second = sgd(head.parameters())
    return Loop(
        model,
        sgd(model.parameters()),
        lambda m, x: head(m(x)).square().mean(),
        after=lambda i: (second.step(), second.zero_grad()),
        others=list(head.parameters()),
    )


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, model: Any, x: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(x) / self.temperature.exp(), torch.arange(8) % 3)


def leaf_in_the_loss_module() -> Loop:
    model, criterion = net(), Criterion()
    second = torch.optim.SGD(criterion.parameters(), lr=0.5)
    return Loop(
        model,
        sgd(model.parameters()),
        criterion,
        after=lambda i: (second.step(), second.zero_grad()),
        others=list(criterion.parameters()),
    )


def leaf_with_a_hook() -> Loop:
    model, scale = net(), torch.ones((), requires_grad=True)
    scale.register_hook(lambda g: g.clamp(max=0.01))
    return Loop(model, None, lambda m, x: square(m, x) * scale, others=[scale])


def leaf_without_an_optimizer() -> Loop:
    model, scale = net(), torch.ones((), requires_grad=True)
    return Loop(model, None, lambda m, x: square(m, x) * scale, others=[scale])


def hook_behind_accumulation_that_halves() -> Loop:
    model = net()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: none(p.grad.mul_(0.5)))
    return Loop(model, None, square)


def hook_behind_accumulation_that_clips_with_an_optimizer() -> Loop:
    loop = second_optimizer_that_steps_every_third_time()
    for p in loop.model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: none(p.grad.clamp_(-0.01, 0.01)))
    return loop


def hook_behind_accumulation_that_replaces() -> Loop:
    def replace(p: Any) -> None:
        p.grad = p.grad * 0.5

    model = net()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(replace)
    return Loop(model, None, square)


def hook_that_adds_what_is_there() -> Loop:
    model = net()
    weight = model[0].weight
    weight.register_hook(lambda g: g if weight.grad is None else g + 0.1 * weight.grad)
    return Loop(model, None, square)


def hook_that_keeps_a_mean() -> Loop:
    model = net()
    mean = torch.zeros(3, 8)
    model[2].weight.register_post_accumulate_grad_hook(lambda p: none(mean.mul_(0.9).add_(p.grad, alpha=0.1)))
    return Loop(model, sgd(model.parameters()), square, after=lambda i: None, others=[mean])


def accumulation_then_a_body() -> Loop:
    def body(model: Any, optimizer: Any, x: Any) -> Any:
        loss = square(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    model = net()
    loop = Loop(model, sgd(model.parameters()), body=body)
    loop.before = lambda i: square(model, loop.batch(100 + i)).backward() if i % 3 else None
    return loop


def body_that_never_drops_gradients() -> Loop:
    def body(model: Any, optimizer: Any, x: Any) -> Any:
        loss = square(model, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    model = net()
    return Loop(model, sgd(model.parameters()), body=body)


def body_that_zeroes_in_place() -> Loop:
    def body(model: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad(set_to_none=False)
        loss = square(model[:1], x)  # the last layer gets none: momentum and decay go on there
        if x.shape[0] > 4:
            loss = loss + square(model, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    model = net()
    rows = torch.randn(8, 6)
    return Loop(model, sgd(model.parameters()), body=body, batch=lambda i: rows if i % 2 == 0 else rows[:4])


def body_that_steps_first() -> Loop:
    def body(model: Any, optimizer: Any, x: Any) -> Any:
        optimizer.step()
        optimizer.zero_grad()
        loss = square(model, x)
        loss.backward()
        return loss.detach()

    model = net()
    return Loop(model, sgd(model.parameters()), body=body)


def body_that_steps_for_some_batches() -> Loop:
    def body(model: Any, optimizer: Any, batch: Any) -> Any:
        loss = square(model, batch[0])
        loss.backward()
        if batch[1]:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    model = net()
    return Loop(
        model, sgd(model.parameters()), body=body, batch=lambda i: (torch.full((4, 6), 0.1 + 0.1 * i), i % 3 == 2)
    )


def body_that_reads_the_gradient_before() -> Loop:
    def body(model: Any, optimizer: Any, x: Any) -> Any:
        old = 0.0 if model[0].weight.grad is None else model[0].weight.grad.norm()
        optimizer.zero_grad()
        loss = square(model, x)
        loss.backward()
        optimizer.step()
        return (loss + old).detach()

    model = net()
    return Loop(model, sgd(model.parameters()), body=body, options={"keep_gradients": True})


def body_with_two_losses() -> Loop:
    def body(model: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad()
        first = square(model, x)
        first.backward()
        second = model(x).abs().mean()
        second.backward()
        optimizer.step()
        return (first + second).detach()

    loop = second_optimizer()
    loop.loss, loop.body = None, body
    return loop


def frozen_then_unfrozen() -> Loop:
    model = net()
    return Loop(model, sgd(model.parameters()), square, before=lambda i: model[0].requires_grad_(i not in (1, 2)))


def frozen_with_a_gradient_then_unfrozen_in_a_body() -> Loop:
    def body(model: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad()
        loss = square(model, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    model = net()

    def before(i: int) -> None:
        if i == 1:
            square(model, torch.ones(2, 6)).backward()
        model[0].requires_grad_(i not in (1, 2))

    return Loop(model, sgd(model.parameters()), body=body, before=before)


def frozen_outside_the_optimizer() -> Loop:
    loop = second_optimizer()
    loop.model[0].bias.requires_grad_(False)
    return loop


def gradients_set_to_zeros_and_to_none_in_turn() -> Loop:
    model = net()
    return Loop(model, None, square, after=lambda i: i % 3 == 0 or model.zero_grad(set_to_none=i % 3 == 1))


def gradient_of_another_layout() -> Loop:
    model = net()

    def before(i: int) -> None:
        if i == 2:
            model[0].weight.grad = torch.ones(6, 8).t()

    return Loop(model, None, square, before=before)


def parameter_that_gets_no_gradient() -> Loop:
    model = nn.ModuleDict({"used": net(), "idle": nn.Linear(2, 2)})
    model["idle"].weight.grad = torch.ones(2, 2)
    return Loop(model, sgd(model["used"].parameters()), lambda m, x: square(m["used"], x))


def penalty_on_gradients_that_add_up() -> Loop:
    def loss(model: Any, x: Any) -> Any:
        first = square(model, x)
        (gradient,) = torch.autograd.grad(first, [model[0].weight], create_graph=True)
        return first + gradient.square().sum()

    model = net()
    second = sgd(model[2].parameters())
    return Loop(
        model, sgd(model[0].parameters()), loss, after=lambda i: i % 2 == 0 or (second.step(), second.zero_grad())
    )


LOOPS = [make for make in list(globals().values()) if getattr(make, "__annotations__", {}).get("return") == "Loop"]


@pytest.mark.parametrize("make", LOOPS, ids=lambda make: make.__name__)
def test_parameters_leaves_and_their_gradients_are_those_of_the_ordinary_loop(make: Callable[[], Loop]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "grad and param do not obey the gradient layout contract")
        expected, _ = make().run(planned=False)
        found, step = make().run(planned=True)
    for i, (before, after) in enumerate(zip(expected, found, strict=True)):
        assert [t is None for t in before] == [t is None for t in after], i
        assert all(t is None or torch.equal(t, o) for t, o in zip(before, after, strict=True)), i
    assert step.report().num_captures <= 4


@pytest.mark.parametrize("as_body", [False, True])
def test_no_gradient_of_an_earlier_step_is_left(as_body: bool) -> None:
    model = net()
    optimizer = sgd(model.parameters())
    square(model, torch.ones(2, 6)).backward()

    def body(model: Any, optimizer: Any, x: Any) -> None:
        optimizer.zero_grad()
        square(model, x).backward()
        optimizer.step()

    how: dict[str, Any] = {"step": body} if as_body else {"loss": square}
    step = olla.compile(model, optimizer=optimizer, disk_cache=False, **how)
    for _ in range(3):
        step(torch.ones(2, 6))
        assert all(p.grad is None for p in model.parameters())
    assert step.report().num_captures == 1


@pytest.mark.parametrize("as_body", [False, True])
def test_gradients_that_are_kept_are_those_of_the_ordinary_loop(as_body: bool) -> None:
    def body(model: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad()
        loss = square(model, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    grads: list[list[Any]] = [[], []]
    for planned in (0, 1):
        model = net()
        how: dict[str, Any] = {"body": body} if as_body else {"loss": square}
        loop = Loop(model, sgd(model.parameters()), options={"keep_gradients": True}, **how)
        loop.after = lambda i, model=model, into=grads[planned]: into.extend(p.grad.clone() for p in model.parameters())
        _, step = loop.run(bool(planned))
    assert len(grads[0]) == 4 * NUM_STEPS
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert step.report().num_captures == 1


def test_what_adds_up_is_added_inside_the_step_and_resident() -> None:
    model = net()
    step = olla.compile(model, loss=square, disk_cache=False)
    square(model, torch.ones(2, 6)).backward()
    step(torch.ones(2, 6))
    num_bytes = sum(p.nbytes for p in model.parameters())
    assert step.report().resident_bytes >= 2 * num_bytes
    assert step.report().output_bytes < num_bytes


def test_a_capture_leaves_the_gradients_that_are_there() -> None:
    model, scale = net(), torch.ones((), requires_grad=True)
    loss = lambda m, x: square(m, x) * scale  # noqa: E731
    loss(model, torch.ones(2, 6)).backward()
    before = [(t, t.grad, t.grad.clone()) for t in (*model.parameters(), scale)]
    captured = olla.capture(model, torch.ones(2, 6), loss=loss)
    assert captured.outputs == ["loss", "gradient of leaf 0"]
    assert all(t.grad is gradient and torch.equal(gradient, value) for t, gradient, value in before)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: [model(torch.ones(2, 6))], r"computed before it, with gradients.*\(\.detach\(\)\)"),
        (lambda model: [model[0].weight * 2], r"computed before it, with gradients"),
    ],
)
def test_a_graph_that_was_made_before_the_step_is_named_and_stays_usable(make: Any, message: str) -> None:
    model = net()
    kept = make(model)
    step = olla.compile(
        model,
        optimizer=sgd(model.parameters()),
        loss=lambda m, x: square(m, x) + kept[0].sum(),
        disk_cache=False,
        on_unsupported="raise",
    )
    with pytest.raises(olla.CaptureError, match=message):
        step(torch.ones(2, 6))
    kept[0].sum().backward()


def test_a_sparse_gradient_that_the_step_would_add_to_is_refused_with_its_name() -> None:
    model = net()
    model[0].weight.grad = torch.ones(8, 6).to_sparse()
    with pytest.raises(olla.CaptureError, match=r"0.weight.grad.*sparse.*zero_grad"):
        olla.capture(model, torch.ones(2, 6), loss=square)
