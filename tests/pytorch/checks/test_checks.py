"""What a step checks of values, the captured step checks too: it raises what the step raises, and goes on after it.

PYTEST_DONT_REWRITE: steps of these tests use ``assert`` as it is.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
from torch import distributions as D
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import olla
from tests.support.pytorch.steps import TORCH, World, nn, printed_by_two_processes, same, tensors, torch

leaves_hooks = pytest.mark.skipif(
    TORCH < (2, 13), reason="torch leaves hooks for saved tensors active behind the error"
)
pytestmark = pytest.mark.torch
GOOD, WRONG = torch.rand(4, 3, generator=torch.Generator().manual_seed(3)) + 0.5, -torch.ones(4, 3)
NAN = torch.full((4, 3), float("nan"))


def world(loss: Any = None, body: Any = None, batch: Any = GOOD) -> World:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.2))
    return World(model, torch.optim.AdamW(model.parameters(), lr=0.01), batch, loss, body)


def num_checks(step: Any) -> int:
    return sum("olla.check" in str(n.target) for nodes in step._latest._captured.nodes for n in nodes)


def raised(run: Callable[[], Any]) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        run()
    return caught.value


def guarded(model: Any, x: Any) -> Any:
    if not (x > 0).all():
        raise ValueError(f"expected numbers above 0, got some of {x.numel()} that are not")
    return model(x).square().mean()


def asserted(model: Any, x: Any) -> Any:
    assert x.min() > 0, "out of range"
    return model(x).square().mean()


def asserted_by_torch(model: Any, x: Any) -> Any:
    torch._assert((x > 0).all(), "not above 0")
    return model(x).square().mean()


def checked_by_torch(model: Any, x: Any) -> Any:
    torch._check(x.min().item() > 0, lambda: "the least is not above 0")
    return model(x).square().mean()


def checked_later(model: Any, x: Any) -> Any:
    torch._assert_async((x > 0).all(), "found later")
    return model(x).square().mean()


def finite(model: Any, x: Any) -> Any:
    loss = model(x).square().mean() + x.log().mean()
    if not math.isfinite(loss.item()):
        raise FloatingPointError("the loss is not finite")
    return loss


def equal_to_itself(model: Any, x: Any) -> Any:
    number = x.log().sum().item()
    if number != number:  # only if it is no number
        raise ArithmeticError("not a number")
    return model(x).square().mean()


def equal(model: Any, x: Any) -> Any:
    assert torch.equal(x, x.abs()), "not equal"
    assert torch.allclose(x, x.abs()), "not close"
    return model(x).square().mean()


def contained(model: Any, x: Any) -> Any:
    if -1 in x:
        raise KeyError("minus one")
    return model(x).square().mean()


def without_gradients(model: Any, x: Any) -> Any:
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        guarded(model, x)
    return model(x).square().mean()


def checkpointed(model: Any, x: Any) -> Any:
    return checkpoint(lambda t: guarded(model, t), x, use_reentrant=False)


def classes(model: Any, x: Any) -> Any:
    return (F.one_hot(x.sign().long(), 2) * model(x)[..., None]).square().mean()


def factored(model: Any, x: Any) -> Any:
    return torch.linalg.cholesky(torch.diag(x[0])).sum() + model(x).square().mean()


def variances(model: Any, x: Any) -> Any:
    return F.gaussian_nll_loss(model(x), x, x)


def normal(model: Any, x: Any) -> Any:
    return -D.Normal(model(x), x).log_prob(x).mean()


class Guarded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        return guarded(self.linear, x)


@pytest.mark.parametrize(
    ("loss", "wrong"),
    [
        (guarded, WRONG),
        (asserted, WRONG),
        (asserted_by_torch, WRONG),
        (checked_by_torch, WRONG),
        (checked_later, WRONG),
        (finite, NAN),
        (equal_to_itself, NAN),
        (equal, WRONG),
        (contained, WRONG),
        (without_gradients, WRONG),
        pytest.param(checkpointed, WRONG, marks=leaves_hooks),
        (classes, WRONG),
        (factored, WRONG),
        (variances, WRONG),
    ],
)
@pytest.mark.parametrize("goal", [{}, {"minimise": "peak"}])
def test_a_value_that_fails_at_the_third_step_raises_what_the_step_raises(loss: Any, wrong: Any, goal: Any) -> None:
    planned, eager = world(loss), world(loss)
    step = planned.compiled(**goal)
    results = planned.planned(step, 2)
    before = [v.clone() for v in planned.values()]
    expected = raised(lambda: loss(eager.model, wrong))
    found = raised(lambda: step(wrong))
    assert (type(found), str(found)) == (type(expected), str(expected))
    assert same(planned.values(), before)  # no update came before the check
    assert same(results, eager.copy().eager(2))
    ordinary = eager.copy()
    ordinary.eager(2)
    assert same(planned.planned(step, 2), ordinary.eager(2))
    assert same(planned.values(), ordinary.values())
    assert step.report().num_captures == 1


def test_the_error_names_the_line_outside_torch() -> None:
    planned = world(normal)
    step = planned.compiled()
    planned.planned(step, 1)
    error = raised(lambda: step(WRONG))
    assert isinstance(error, ValueError)
    assert "Expected parameter scale (Tensor of shape (4, 3)) of distribution Normal" in str(error)
    assert "to satisfy the constraint GreaterThan(lower_bound=0.0)" in str(error)
    assert "test_checks.py" in error.__notes__[0]
    assert "D.Normal(model(x), x)" in error.__notes__[0]


class OwnError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")


def test_an_error_that_takes_no_message_is_named() -> None:
    def loss(model: Any, x: Any) -> Any:
        if (x < 0).any():
            raise OwnError(3)
        return model(x).mean()

    class Local(Exception):
        pass

    def own(model: Any, x: Any) -> Any:
        if (x < 0).any():
            raise Local("here")
        return model(x).mean()

    steps = [world(f).compiled() for f in (loss, own)]
    for step in steps:
        step(GOOD)
    assert str(raised(lambda: steps[0](WRONG))) == "code 3"
    assert type(raised(lambda: steps[1](WRONG))) is Local


def clipped(model: Any, optimizer: Any, x: Any) -> Any:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    norm = clip_grad_norm_(model.parameters(), 0.5, error_if_nonfinite=True)
    optimizer.step()
    return loss, norm


def test_clipping_that_raises_does_so_before_any_update() -> None:
    planned, eager = world(body=clipped), world(body=clipped)
    step = planned.compiled(minimise="peak")
    assert same(planned.planned(step), eager.eager())
    before = [v.clone() for v in planned.values()]
    found = raised(lambda: step(NAN))
    assert isinstance(found, RuntimeError)
    assert "The total norm of order 2.0 for gradients" in str(found)
    assert same(planned.values(), before)


def test_a_hook_on_gradients_checks_them_before_any_update() -> None:
    def hook(parameter: Any) -> None:
        if not torch.isfinite(parameter.grad).all():
            raise FloatingPointError("gradient is not finite")

    planned = world(lambda model, x: model(x).square().mean())
    for p in planned.model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    step = planned.compiled(minimise="peak")
    planned.planned(step)
    assert num_checks(step) == 2
    before = [v.clone() for v in planned.values()]
    assert str(raised(lambda: step(NAN))) == "gradient is not finite"
    assert same(planned.values(), before)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_check_is_made_once_although_its_module_is_computed_twice(reentrant: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), Guarded())

    def loss(model: Any, x: Any) -> Any:
        return checkpoint(model[1], model[0](x).exp(), use_reentrant=reentrant)

    planned = World(model, torch.optim.SGD(model.parameters(), 0.01), GOOD, loss)
    eager = planned.copy()
    step = planned.compiled(minimise="peak")
    assert same(planned.planned(step), eager.eager())
    assert num_checks(step) == 1
    assert isinstance(raised(lambda: step(NAN)), ValueError)


def deep(model: Any, x: Any) -> Any:
    for layer in model:
        x = layer(x)
        if not torch.isfinite(x).all():
            raise FloatingPointError("not finite")
    return x.square().mean()


@pytest.mark.parametrize("goal", [{}, {"minimise": "peak"}])
def test_checks_keep_nothing_alive(goal: Any) -> None:
    def peak(loss: Any, **options: Any) -> tuple[int, int]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)))
        planned = World(model, torch.optim.SGD(model.parameters(), 0.01), torch.randn(64, 16), loss)
        step = planned.compiled(time_limit=2.0, **goal, **options)
        planned.planned(step, 1)
        return step.plan.peak_bytes, num_checks(step)

    (with_checks, count), (skipped, none) = peak(deep), peak(deep, checks="skip")
    assert (count, none) == (6, 0)
    assert with_checks <= skipped + 64


def test_the_checks_of_a_graph_come_in_their_order_and_before_the_updates() -> None:
    planned = world(lambda model, x: guarded(model, x) + asserted(model, x))
    graph = planned.compiled(checks="run")
    planned.planned(graph, 1)
    captured = olla.capture(planned.model, GOOD, optimizer=planned.optimizer, loss=planned.loss)
    checks = [v for v, nodes in enumerate(captured.nodes) if any("olla.check" in str(n.target) for n in nodes)]
    assert len(checks) == 2
    after = captured.graph.after
    assert after.of(checks[1]).tolist() == [checks[0]]
    kinds = captured.graph.op_kinds
    writers = [v for v in range(captured.graph.num_ops) if kinds[v] == "update" and len(captured.graph.mutates.of(v))]
    lasting = [
        v
        for v in writers
        if any(captured.graph.tensor_kinds[t] != "temporary" for t in captured.graph.mutates.of(v).tolist())
    ]
    assert lasting
    assert all(after.of(v).tolist() == [checks[1]] for v in lasting)


def test_skipped_checks_are_not_made_and_the_report_says_so() -> None:
    planned, eager = world(normal), world(normal)
    step = planned.compiled(checks="skip")
    assert same(planned.planned(step), eager.eager())
    assert num_checks(step) == 0
    assert "checks='skip'" in step.report().note
    assert math.isnan(float(step(WRONG)))
    assert world(factored).compiled(checks="skip")(WRONG).shape == ()


def test_another_word_for_checks_is_refused() -> None:
    with pytest.raises(ValueError, match="checks is 'off', expected 'run' or 'skip'"):
        world(normal).compiled(checks="off")
    with pytest.raises(ValueError, match="checks is None"):
        olla.capture(nn.Linear(3, 3), GOOD, checks=None)  # type: ignore[arg-type]


def decided(model: Any, x: Any) -> Any:
    return model(x).mean() if x.sum() > 0 else model(x).sum()


def swallowed(model: Any, x: Any) -> Any:
    try:
        asserted(model, x)
    except AssertionError:
        x = -x
    return model(x).mean()


def kept_from_us(model: Any, x: Any) -> Any:
    with contextlib.suppress(Exception):
        x = x * 2 if x.sum() > 0 else x
    return model(x).mean()


def converted(model: Any, x: Any) -> Any:
    if int(x.max()) > 5:
        raise ValueError("above 5")
    return model(x).mean()


@pytest.mark.parametrize(
    ("loss", "line"),
    [
        (decided, r"if x.sum\(\) > 0 else.*the value of aten.gt.Scalar decides"),
        (swallowed, r"assert x.min\(\) > 0.*the value of aten.gt.Scalar decides"),
        (kept_from_us, r"x.sum\(\) > 0 else x.*the value of aten.gt.Scalar decides"),
        (converted, r"int\(x.max\(\)\) > 5.*the value of aten.max.default decides.*without int\(\)"),
    ],
)
def test_values_that_decide_more_are_refused_with_their_line(loss: Any, line: str) -> None:
    with pytest.raises(olla.CaptureError, match=rf"test_checks.py:\d+, .*{line}"):
        world(loss).compiled()(GOOD)


_CHILD = """
import torch, olla
def loss(model, x):
    if not (x > 0).all():
        raise ValueError("wrong numbers")
    return model(x).mean()
model = torch.nn.Linear(3, 3)
step = olla.compile(model, optimizer=torch.optim.SGD(model.parameters(), 0.1), loss=loss, time_limit=0.2)
step(torch.ones(2, 3))
try:
    step(-torch.ones(2, 3))
except ValueError as error:
    print(step.report().cached, error)
"""


def test_checks_are_kept_on_disk(tmp_path: Any) -> None:
    first, second = printed_by_two_processes(_CHILD, tmp_path)
    assert first == ["False", "wrong numbers\n"]
    assert second == ["True", "wrong numbers\n"]


def test_what_stands_for_tensors_is_no_longer_in_torch_after_a_capture() -> None:
    functions = (torch.equal, torch.allclose, torch.Tensor.equal, torch.Tensor.__contains__, math.isfinite)
    functions += (F.one_hot, torch.ctc_loss, D.constraints._PositiveDefinite.check)
    olla.capture(nn.Linear(3, 3), GOOD)
    now = (torch.equal, torch.allclose, torch.Tensor.equal, torch.Tensor.__contains__, math.isfinite)
    now += (F.one_hot, torch.ctc_loss, D.constraints._PositiveDefinite.check)
    assert functions == now
    assert "equal" not in vars(torch.Tensor)
    assert tensors([torch.equal(GOOD, GOOD)]) == []
