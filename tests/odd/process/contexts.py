"""Settings of torch and contexts around the step or inside it, changed between steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tests.odd.loops import Loop, cleanup, mlp, momentum, must, odd, rows, train
from tests.support.pytorch.steps import nn, square, torch

functional = nn.functional


def around(name: str, context: Callable[[], Any], build: Callable[[], Loop] = train, **settings: Any) -> None:
    """Register two loops: steps 2 and 3 are called inside a context, and the loss enters it at these steps."""

    def outside() -> Loop:
        world, number = build(), [0]

        def call(step: Any, batch: Any) -> Any:
            number[0] += 1
            with context() if number[0] in (3, 4) else contextlib.nullcontext():
                return step(batch)

        world.call = call
        return world

    def inside() -> Loop:
        world, is_on = build(), [False]
        loss: Any = world.loss

        def wrapped(model: Any, batch: Any) -> Any:
            with context() if is_on[0] else contextlib.nullcontext():
                return loss(model, batch)

        world.loss, world.change = wrapped, lambda i: is_on.__setitem__(0, i in (2, 3))
        return world

    odd(outside, f"{name}_around_the_step", **settings)
    odd(inside, f"{name}_in_the_loss", **settings)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 3)
        self.dropout = 0.0

    def forward(self, x: Any) -> Any:
        q, k, v = (t.unsqueeze(0) for t in self.qkv(x).chunk(3, dim=-1))
        return self.out(functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)[0])


def attention() -> Loop:
    return train(Attention())


around("autocast", lambda: torch.autocast("cpu", torch.bfloat16), must_be_equal=True)
around("autocast_without_cache", lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False))
around("autocast_switched_off", lambda: torch.autocast("cpu", enabled=False), must_be_equal=True)
around("anomaly_detection", torch.autograd.detect_anomaly)
around("one_kernel_of_attention", lambda: sdpa_kernel(SDPBackend.MATH), attention)
around("efficient_kernel_of_attention", lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION), attention)
around("no_grad", torch.no_grad)
around("inference_mode", torch.inference_mode)
around("enabled_gradients", torch.enable_grad, must_be_equal=True)
around("device_context", lambda: torch.device("cpu"))
around("profiler", lambda: torch.autograd.profiler.record_function("step"))


@contextlib.contextmanager
def setting(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> Any:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def deterministic() -> Any:
    return setting(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True)


def in_double() -> Any:
    return setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64)


def of_default_type() -> Loop:
    return train(loss=lambda model, x: (model(x) * torch.ones(3)).square().mean() + torch.rand(()))


around("deterministic_algorithms", deterministic)
around("another_default_type", in_double, of_default_type)
around(
    "another_precision_of_products",
    lambda: setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
)
around("more_threads", lambda: setting(torch.get_num_threads, torch.set_num_threads, 2))
around(
    "switched_off_oneDNN",
    lambda: torch.backends.mkldnn.flags(enabled=False),
    lambda: train(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 3)), batch=lambda i: rows(i, 2, 3, 6, 6)
    ),
)


@must
def autocast_of_another_type() -> Loop:
    types = [torch.bfloat16]

    def call(step: Any, batch: Any) -> Any:
        with torch.autocast("cpu", types[0]):
            return step(batch)

    return train(call=call, change=lambda i: types.__setitem__(0, torch.float16 if i == 3 else torch.bfloat16))


@odd
def autocast_entered_by_hand_and_left_on() -> Loop:
    def change(i: int) -> None:
        torch.set_autocast_enabled("cpu", i in (2, 3))
        torch.clear_autocast_cache()  # the context would do that

    return train(change=change)


@must
def type_of_a_cast_in_the_loss() -> Loop:
    kind = [torch.float32]
    loss = lambda model, x: model(x).to(kind[0]).square().mean().float()  # noqa: E731
    return train(loss=loss, change=lambda i: kind.__setitem__(0, torch.bfloat16 if i in (2, 3) else torch.float32))


@odd
def mode_of_torch_functions_around_the_step() -> Loop:
    class Doubling(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            return result * 2 if function is functional.relu else result

    number = [0]

    def call(step: Any, batch: Any) -> Any:
        number[0] += 1
        with Doubling() if number[0] > 2 else contextlib.nullcontext():
            return step(batch)

    return train(call=call)


@odd
def mode_of_operators_around_the_step() -> Loop:
    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            return result * 2 if function is torch.ops.aten.relu.default else result

    number = [0]

    def call(step: Any, batch: Any) -> Any:
        number[0] += 1
        with Counting() if number[0] > 2 else contextlib.nullcontext():
            return step(batch)

    return train(call=call)


@must
def checkpointing_switched_on() -> Loop:
    is_on = [False]

    def loss(model: Any, x: Any) -> Any:
        hidden = checkpoint(model[:2], x, use_reentrant=False) if is_on[0] else model[:2](x)
        return model[2](hidden).square().mean()

    return train(mlp(nn.Dropout(0.3)), loss, lambda i: is_on.__setitem__(0, i >= 2))


@must
def detach_switched_on() -> Loop:
    stops = [False]

    def loss(model: Any, x: Any) -> Any:
        hidden = model[:2](x)
        return model[2](hidden.detach() if stops[0] else hidden).square().mean()

    return train(loss=loss, change=lambda i: stops.__setitem__(0, i >= 2), optimizer=momentum)


@odd
def functional_call_with_other_weights() -> Loop:
    model = mlp()
    others = [{k: p.detach() * 2 for k, p in model.named_parameters()}]

    def loss(model: Any, x: Any) -> Any:
        return square(model, x) + torch.func.functional_call(model, others[0], (x,)).square().mean()

    def change(i: int) -> None:
        others[0] = {k: p.detach() * i for k, p in model.named_parameters()}

    return train(model, loss, change)


@odd
def per_sample_gradients_by_vmap() -> Loop:
    power = [1]

    def loss(model: Any, x: Any) -> Any:
        values = torch.func.vmap(lambda row: model(row).square().mean())(x)
        return (values ** power[0]).mean()

    return train(loss=loss, change=lambda i: power.__setitem__(0, 2 if i in (2, 3) else 1))


@odd
def forward_derivative_in_the_loss() -> Loop:
    scale = [1.0]

    def loss(model: Any, x: Any) -> Any:
        value, slope = torch.func.jvp(lambda t: model(t), (x,), (torch.ones_like(x) * scale[0],))
        return value.square().mean() + slope.square().mean()

    return train(mlp(nn.Tanh()), loss, lambda i: scale.__setitem__(0, 2.0 if i in (2, 3) else 1.0))


@odd
def global_gradient_mode_left_off_between_steps() -> Loop:
    def change(i: int) -> None:
        torch.set_grad_enabled(i != 2)
        cleanup.callback(torch.set_grad_enabled, True)

    return train(change=change)


@odd
def gradient_checkpointing_with_another_determinism_check() -> Loop:
    check = ["default"]

    def loss(model: Any, x: Any) -> Any:
        return checkpoint(model, x, use_reentrant=False, determinism_check=check[0]).square().mean()

    return train(loss=loss, change=lambda i: check.__setitem__(0, "none" if i >= 2 else "default"))
