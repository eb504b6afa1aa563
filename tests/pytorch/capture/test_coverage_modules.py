"""What models do besides plain layers: hooks, parametrizations, recomputation, own state; optimizers of all kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import olla
from tests.support.pytorch.steps import (
    STEPS,
    TORCH,
    World,
    agree,
    capture,
    images,
    net,
    nn,
    same,
    square,
    tensors,
    torch,
)

pytestmark = pytest.mark.torch


def batch() -> Any:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


def linear(change: Callable[[Any], Any] = lambda model: None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    change(model)
    return model


def results(make: Callable[[], nn.Module], planned: bool, x: Any = None) -> list[Any]:
    """Losses and state of a few steps of a model made anew: copies of a model lose its hooks."""
    model = make()
    world = World(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), batch() if x is None else x, square)
    if not planned:
        return [*world.eager(), *world.values()]
    step = world.compiled()
    losses = world.planned(step)
    assert (step.report().num_captures, step.report().missed_bytes) == (1, 0)
    return [*losses, *world.values()]


def post_accumulate(model: Any) -> None:
    def halve(p: Any) -> None:
        p.grad.mul_(0.5)

    model[0].weight.register_post_accumulate_grad_hook(halve)


def forward_hooks(model: Any) -> None:
    model[0].register_forward_hook(lambda module, inputs, output: output * 2)
    model[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))


def backward_hooks(model: Any) -> None:
    model[2].register_full_backward_hook(lambda module, before, after: tuple(g * 2 for g in before))
    model[2].register_full_backward_pre_hook(lambda module, after: tuple(g * 3 for g in after))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model[0].weight.register_hook(lambda g: g * 0.5),
        post_accumulate,
        forward_hooks,
        backward_hooks,
        lambda model: parametrizations.weight_norm(model[0]),
        lambda model: parametrizations.spectral_norm(model[0]),
        lambda model: parametrizations.orthogonal(model[0]),
        lambda model: nn.utils.spectral_norm(model[0]),
        lambda model: prune.l1_unstructured(model[0], "weight", 0.5),
    ],
    ids=[
        "hook of a parameter",
        "hook after accumulation",
        "forward hooks",
        "backward hooks",
        "weight_norm",
        "spectral_norm",
        "orthogonal",
        "older spectral_norm",
        "prune",
    ],
)
def test_hooks_and_parametrizations_are_part_of_the_step(change: Callable[[Any], Any]) -> None:
    with_change = results(lambda: linear(change), True)
    assert same(with_change, results(lambda: linear(change), False))
    assert not same(with_change, results(linear, True))


def test_a_hook_added_later_is_captured_anew() -> None:
    model = linear()
    step = olla.compile(model, loss=square, time_limit=0.3)
    step(batch())
    model[0].weight.register_hook(lambda g: g * 0)
    model.zero_grad()
    step(batch())
    assert not model[0].weight.grad.any()
    assert model[0].bias.grad.any()


class Checkpointed(nn.Module):
    """Recomputes dropout, batch norm and autocast in the backward pass."""

    def __init__(self, reentrant: bool, autocast: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)) for _ in "ab")
        self.reentrant, self.autocast = reentrant, autocast

    def forward(self, x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            x = self.first(x)
            for part in self.parts:
                x = x + checkpoint(part, x, use_reentrant=self.reentrant)
            return self.last(functional.dropout(x, 0.1)).float()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_draws_the_same_random_numbers_again(reentrant: bool, autocast: bool) -> None:
    x = batch()
    planned, eager = (results(lambda: Checkpointed(reentrant, autocast), p, x) for p in (True, False))
    assert same(planned, eager)


def test_recomputation_reads_the_parameters_before_any_order_updates_them() -> None:
    model = Checkpointed(False, False)
    step = olla.capture(model, batch(), optimizer=torch.optim.SGD(model.parameters(), 0.1), loss=square)
    assert "constant" not in step.graph.tensor_kinds  # the parameters, read behind the back of the graph
    assert step.graph.targets.count("olla.set_rng_state.default") == 4


def test_states_of_generators_are_no_ops_where_nothing_is_drawn() -> None:
    class Plain(nn.Linear):
        def forward(self, x: Any) -> Any:
            return checkpoint(super().forward, x, use_reentrant=False)

    step = olla.capture(Plain(6, 3), batch(), loss=square)
    assert not [t for t in step.graph.targets if t.startswith("olla.")]


class Scale(torch.autograd.Function):
    """A function with a gradient of its own, which is not the true one."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return x * weight.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, weight = ctx.saved_tensors
        return gradient * weight.sum(), 2 * (gradient * x).sum().expand_as(weight)


class Unusual(nn.Module):
    """A function of its own, noise, a state that is no buffer, a buffer that is replaced, and complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.weight = nn.Linear(6, 6), nn.Parameter(torch.ones(3))
        self.filter = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.register_buffer("average", torch.zeros(6))
        self.seen = torch.zeros(6)

    def forward(self, x: Any) -> Any:
        y = Scale.apply(self.layer(x), self.weight)
        y = torch.fft.irfft(torch.fft.rfft(y) * self.filter) + 0.1 * torch.randn_like(y)
        self.average = 0.9 * self.average + y.detach().mean(0)
        self.seen.add_(y.detach().mean(0))
        return functional.gumbel_softmax(y + self.seen + self.average)


class Layers(nn.Module):
    """Layers that the models of the zoo do not have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags, self.convolution = nn.EmbeddingBag(10, 4, mode="mean"), nn.Conv1d(4, 6, 3, padding=1)
        self.norms = nn.Sequential(nn.GroupNorm(2, 6), nn.InstanceNorm1d(6, affine=True, track_running_stats=True))
        self.slope, self.dropout = nn.PReLU(), nn.AlphaDropout(0.1)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True, dropout=0.1)

    def forward(self, x: Any) -> Any:
        y = self.bags(x.view(-1, 2)).view(4, 3, 4).transpose(1, 2)
        y = self.dropout(self.slope(self.norms(self.convolution(y))).transpose(1, 2))
        return self.attention(y, y, y)[0]


class Pixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.dropout = nn.Conv2d(3, 4, 3, stride=2), nn.Dropout2d(0.2)

    def forward(self, x: Any) -> Any:
        y = functional.interpolate(self.dropout(self.convolution(x)), scale_factor=2, mode="bilinear")
        return functional.pixel_shuffle(functional.adaptive_avg_pool2d(y, 3), 2)


@pytest.mark.parametrize(
    ("make", "x"), [(Unusual, batch()), (Layers, torch.arange(24).view(4, 6) % 10), (Pixels, images())]
)
def test_unusual_models_are_planned_and_equal_the_ordinary_loop(make: Callable[[], nn.Module], x: Any) -> None:
    assert same(results(make, True, x), results(make, False, x))


def test_a_model_that_is_only_evaluated_is_planned_and_sees_new_parameters() -> None:
    model = net().eval()
    step = olla.compile(model, time_limit=0.3)
    for _ in range(STEPS):
        with torch.no_grad():
            assert torch.equal(step(images()), model(images()))
            model[5].weight.mul_(2)
    assert not step(images()).requires_grad


class Lion(torch.optim.Optimizer):
    """An optimizer that torch does not have, in its usual form: state made at the first step."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                update = state["average"] * first + p.grad * (1 - first)
                p.add_(update.sign_(), alpha=-group["lr"])
                state["average"].mul_(second).add_(p.grad, alpha=1 - second)


KINDS = [
    ("SGD", {"nesterov": True, "momentum": 0.9, "weight_decay": 0.01}),
    ("SGD", {"momentum": 0.9, "foreach": True}),
    ("SGD", {"momentum": 0.9, "fused": True}),
    ("Adam", {"amsgrad": True, "maximize": True}),
    ("Adam", {"foreach": True}),
    ("AdamW", {"fused": True}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Adagrad", {"initial_accumulator_value": 0.1}),
    ("NAdam", {}),
    ("Adadelta", {}),
    ("Adamax", {}),
    ("Rprop", {}),
]


def world_of(kind: str, settings: dict[str, Any]) -> World:
    model = net()
    groups = [{"params": model[:4].parameters()}, {"params": model[4:].parameters(), "lr": 2e-3}]
    return World(model, getattr(torch.optim, kind)(groups, lr=1e-2, **settings), images(), square)


@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_optimizers_of_torch_are_captured_before_their_first_step(kind: str, settings: dict[str, Any]) -> None:
    world = world_of(kind, settings)
    step = capture(world)
    eager, captured = world.copy(), world.copy()
    for group in eager.optimizer.param_groups:
        group["fused"] = False
    assert same(captured.captured(step), eager.eager())
    assert same(captured.values(), eager.values())


@pytest.mark.parametrize("optimizer", [torch.optim.RMSprop, torch.optim.AdamW])
def test_planned_steps_create_the_state_of_the_optimizer(optimizer: Any) -> None:
    world = world_of(optimizer.__name__, {})
    assert agree(world)


def test_optimizers_of_other_makers_work_once_their_state_exists() -> None:
    model = net()
    world = World(model, Lion(model.parameters()), images(), square)
    with pytest.raises(olla.CaptureError, match="Take one ordinary step"):
        capture(world)
    world.eager(1)
    assert agree(world)


def hidden_in_function(model: Any, x: Any) -> Any:
    return Scale.apply(model(x), HELD[0]).sum()


HELD: list[Any] = []


def test_what_is_read_behind_the_back_of_the_step_is_refused() -> None:
    model = linear()
    HELD[:] = [model[0].bias.detach()]
    with pytest.raises(
        olla.CaptureError, match=r"uses 0.bias in a way that cannot be followed.*Take it from the model"
    ):
        olla.capture(model, batch(), loss=hidden_in_function)
    assert all(p.grad is None for p in model.parameters())


def test_a_parameter_that_something_else_holds_is_followed_into_a_function_of_the_users_own() -> None:
    model = linear()

    def loss(model: Any, x: Any) -> Any:
        return Scale.apply(model(x), held[0]).sum()

    eager, planned = (World(m, torch.optim.SGD(m.parameters(), lr=0.1), batch(), loss) for m in (model, linear()))
    planned.model.load_state_dict(eager.model.state_dict())
    results = []
    for world, run in ((eager, lambda: eager.eager(3)), (planned, lambda: planned.planned(planned.compiled(), 3))):
        held = [world.model[0].bias]  # type: ignore[index]
        results.append(run())
    assert same(*results)
    assert same(planned.values(), eager.values())


class Shift(torch.autograd.Function):
    """A function with a context of its own setting, a default, and a gradient that is not the true one."""

    @staticmethod
    def forward(x: Any, weight: Any, scale: float = 2.0) -> Any:
        return x + scale * weight.sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (weight,) = ctx.saved_tensors
        return gradient, 3 * weight * gradient.sum(), None


class Functions(nn.Module):
    """Gives its weight, or a result, to functions of the user's own."""

    def __init__(self, function: Callable[..., Any], is_weight: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.weight, self.function = nn.Linear(6, 6), nn.Parameter(torch.ones(6)), function
        self.is_weight = is_weight

    def forward(self, x: Any) -> Any:
        y = self.layer(x) * self.weight
        return self.function(y, self.weight if self.is_weight else 2 * self.weight)


BY_CLASS = [lambda *args: Scale.apply(*args), lambda *args: Shift.apply(*args), lambda x, w: Shift.apply(w, x, 0.5)]
BY_REFERENCE = [Scale.apply, Shift.apply]  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("function", BY_CLASS)
def test_functions_of_the_users_own_follow_their_weights(function: Callable[..., Any]) -> None:
    assert same(results(lambda: Functions(function), True), results(lambda: Functions(function), False))


@pytest.mark.parametrize("function", BY_REFERENCE)
def test_functions_taken_by_reference_follow_results(function: Callable[..., Any]) -> None:
    make = lambda: Functions(function, is_weight=False)  # noqa: E731
    assert same(results(make, True), results(make, False))


@pytest.mark.parametrize("had_gradient", [False, True])
@pytest.mark.parametrize("function", BY_REFERENCE)
def test_functions_taken_by_reference_follow_weights_or_are_refused(
    function: Callable[..., Any], had_gradient: bool
) -> None:
    """Since torch 2.14 nothing stands between a reference to apply and its C++."""

    def make() -> nn.Module:
        model = Functions(function)
        if had_gradient:
            square(model, batch()).backward()
        return model

    if TORCH < (2, 14):
        assert same(results(make, True), results(make, False))
        return
    with pytest.raises(olla.CaptureError, match=r"torch\.autograd\.Function"):
        results(make, True)


def test_an_apply_of_the_users_own_is_called() -> None:
    class Twice(Scale):
        @classmethod
        def apply(cls, x: Any, weight: Any) -> Any:
            return 2 * Scale.apply(x, weight)  # type: ignore[no-untyped-call]

    by_class = lambda *args: Twice.apply(*args)  # noqa: E731
    assert same(results(lambda: Functions(by_class), True), results(lambda: Functions(by_class), False))


def test_apply_is_itself_again_behind_a_capture() -> None:
    before = Scale.apply, dict(vars(type(Scale)))
    olla.capture(Functions(BY_CLASS[0]), batch(), loss=square)
    assert (Scale.apply, dict(vars(type(Scale)))) == before


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(torch.compile(nn.Linear(6, 3))), r"0 comes from torch.compile.*_orig_mod"),
        (lambda: nn.DataParallel(linear()), r"the model is a DataParallel: one device.*model.module"),
        (lambda: nn.Sequential(torch.jit.trace(nn.Linear(6, 3), batch())), r"0 comes from torch.jit"),
        (lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None)), r"needs the values of tensors"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:`torch.jit.trace:FutureWarning")
def test_modules_that_cannot_be_captured_are_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(olla.CaptureError, match=message):
        olla.capture(make(), batch(), loss=square)


def test_gradients_that_would_leave_the_step_are_refused() -> None:
    encoder, model = nn.Linear(6, 6), linear()
    for x in (encoder(batch()), batch().requires_grad_()):
        with pytest.raises(olla.CaptureError, match=r"batch requires a gradient.*inside the loss function"):
            olla.capture(model, x, loss=square)
    assert tensors(olla.compile(model, time_limit=0.3)(batch().requires_grad_()))[0].shape == (4, 3)


def test_a_deterministic_mode_is_captured_on_its_own() -> None:
    step = olla.compile(linear(), loss=square, time_limit=0.3)
    step(batch())
    torch.use_deterministic_algorithms(True)
    try:
        step(batch())
    finally:
        torch.use_deterministic_algorithms(False)
    assert step.report().num_captures == 2


def sharing() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.detach().t())
    return model


def test_parameters_that_share_memory_are_refused_and_parts_of_one_memory_are_not() -> None:
    with pytest.raises(olla.CaptureError, match=r"0.weight and 1.weight share memory.*same Parameter"):
        olla.capture(sharing(), batch(), loss=square)

    def flat() -> nn.Module:
        model = linear()
        memory = torch.cat([p.detach().flatten() for p in model.parameters()])
        for p, part in zip(model.parameters(), memory.split([p.numel() for p in model.parameters()]), strict=True):
            p.data = part.view_as(p)
        return model

    assert same(results(flat, True), results(linear, False))


def test_batches_of_other_structures_are_refused() -> None:
    with pytest.raises(olla.CaptureError, match=r"batch\[x\] is a object: expected tensors in dicts, lists and tuples"):
        olla.capture(linear(), {"x": object()}, loss=square)
