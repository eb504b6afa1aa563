"""Hooks of modules, tensors, optimizers and of the whole process: registered, removed, replaced, with state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.modules import module as of_torch
from torch.optim import optimizer as torch_optimizer

from tests.odd.loops import Loop, at, cleanup, mlp, number_at, odd, rows, train
from tests.support.pytorch.steps import nn, square, torch

Register = Callable[[Any, Callable[[], float]], Any]  # given the model and how a number is read; returns the handle


def before(model: Any, read: Callable[[], float]) -> Any:
    return model[0].register_forward_pre_hook(lambda m, inputs: (inputs[0] * read(),))


def behind(model: Any, read: Callable[[], float]) -> Any:
    return model[0].register_forward_hook(lambda m, inputs, output: output * read())


def around_the_model(model: Any, read: Callable[[], float]) -> Any:
    return model.register_forward_hook(lambda m, inputs, output: output * read())


def with_keywords(model: Any, read: Callable[[], float]) -> Any:
    return model[0].register_forward_pre_hook(lambda m, a, k: ((a[0] * read(),), k), with_kwargs=True)


def on_gradients_of_inputs(model: Any, read: Callable[[], float]) -> Any:
    return model[2].register_full_backward_hook(lambda m, inputs, outputs: tuple(g * read() for g in inputs))


def before_backward(model: Any, read: Callable[[], float]) -> Any:
    return model[2].register_full_backward_pre_hook(lambda m, outputs: tuple(g * read() for g in outputs))


def on_a_parameter(model: Any, read: Callable[[], float]) -> Any:
    return model[0].weight.register_hook(lambda g: g * read())


def after_accumulation(model: Any, read: Callable[[], float]) -> Any:
    def scale(p: Any) -> None:
        p.grad.mul_(read())

    return model[0].weight.register_post_accumulate_grad_hook(scale)


def global_forward(model: Any, read: Callable[[], float]) -> Any:
    return of_torch.register_module_forward_hook(lambda m, i, o: o * read() if isinstance(m, nn.ReLU) else None)


def global_forward_pre(model: Any, read: Callable[[], float]) -> Any:
    return of_torch.register_module_forward_pre_hook(lambda m, i: (i[0] * read(),) if isinstance(m, nn.ReLU) else None)


REGISTERS: dict[str, Register] = {
    "forward_pre_hook": before,
    "forward_hook": behind,
    "forward_hook_of_the_model": around_the_model,
    "forward_pre_hook_with_keywords": with_keywords,
    "full_backward_hook": on_gradients_of_inputs,
    "full_backward_pre_hook": before_backward,
    "hook_of_a_parameter": on_a_parameter,
    "hook_after_accumulation": after_accumulation,
    "global_forward_hook": global_forward,
    "global_forward_pre_hook": global_forward_pre,
}


def come_and_go(name: str, register: Register) -> None:
    """Register four loops around one kind of hook."""

    def build(number: int, kind: str) -> Loop:
        model = mlp()
        scale = [2.0]
        held: list[Any] = [] if kind == "registered" else [register(model, lambda: scale[0])]
        cleanup.callback(lambda: [handle.remove() for handle in held])

        def change() -> None:
            if kind == "removed":
                held[0].remove()
            elif kind == "reading_a_number":
                scale[0] = number_at(2)
            else:
                if held:
                    held[0].remove()
                held[:] = [register(model, lambda: 3.0)]

        return train(model, change=at(number, change))

    for kind in ("registered", "removed", "replaced", "reading_a_number"):
        odd(lambda kind=kind: build(2, kind), f"{name}_{kind}")


for _name, _register in REGISTERS.items():
    come_and_go(_name, _register)


@odd
def hook_that_counts_its_calls() -> Loop:
    model, calls = mlp(), [0]

    def count(m: Any, inputs: Any, output: Any) -> None:
        calls[0] += 1

    model[0].register_forward_hook(count)
    return train(model, seen=lambda: calls[0])


@odd
def hook_that_scales_by_its_count() -> Loop:
    model, calls = mlp(), [0]

    def grow(m: Any, inputs: Any, output: Any) -> Any:
        calls[0] += 1
        return output * calls[0]

    model[0].register_forward_hook(grow)
    return train(model)


@odd
def hook_that_keeps_activations() -> Loop:
    model: Any = mlp()
    kept: dict[str, Any] = {}
    model[0].register_forward_hook(lambda m, inputs, output: kept.update(hidden=output))
    return train(model, lambda m, x: square(m, x) + kept["hidden"].square().mean())


@odd
def hook_whose_activations_the_user_reads_between_steps() -> Loop:
    model: Any = mlp()
    kept: dict[str, Any] = {}
    model[0].register_forward_hook(lambda m, inputs, output: kept.update(hidden=output.detach()))
    return train(model, seen=lambda: kept.get("hidden"))


@odd
def backward_hook_that_keeps_gradients() -> Loop:
    model, norms = mlp(), []
    model[0].weight.register_hook(lambda g: norms.append(g.norm()))
    return train(model, seen=lambda: norms)


@odd
def two_hooks_whose_order_changes() -> Loop:
    model: Any = mlp()

    def change(i: int) -> None:
        model[0]._forward_hooks.clear()
        first, second = (lambda m, x, y: y + 1), (lambda m, x, y: y * 2)
        for hook in (first, second) if i < 2 else (second, first):
            model[0].register_forward_hook(hook)

    return train(model, change=change)


@odd
def hook_registered_on_a_new_layer_each_step() -> Loop:
    model: Any = mlp(nn.Tanh(), nn.Tanh(), nn.Tanh(), nn.Tanh(), nn.Tanh())
    return train(model, change=lambda i: model[1 + i].register_forward_hook(lambda m, x, y: y * 2))


@odd
def hook_that_is_a_bound_method() -> Loop:
    class Scaler:
        factor = 1.0

        def hook(self, m: Any, inputs: Any, output: Any) -> Any:
            return output * self.factor

    model, scaler = mlp(), Scaler()
    model[0].register_forward_hook(scaler.hook)
    return train(model, change=lambda i: setattr(scaler, "factor", number_at(i)))


@odd
def hook_of_the_state_dict() -> Loop:
    model = mlp()
    return train(model, change=at(2, lambda: model.register_state_dict_post_hook(lambda *a: None)))


@odd
def hook_that_raises_at_step_3() -> Loop:
    model = mlp()

    def fail(m: Any, inputs: Any) -> None:
        raise ArithmeticError("a check of the user")

    def change(i: int) -> None:
        if i == 3:
            cleanup.callback(model[0].register_forward_pre_hook(fail).remove)
        else:
            model[0]._forward_pre_hooks.clear()

    return train(model, change=change)


def of_optimizer(name: str, register: Callable[[Any, Any], Any], act: Callable[..., None]) -> None:
    """Register two loops around hooks of an optimizer: there from the start, and from step 2 on."""

    def build(number: int) -> Loop:
        world = train()
        world.change = at(number, lambda: cleanup.callback(register(world.optimizer, act).remove))
        return world

    odd(lambda: build(0), f"{name}_from_the_start")
    odd(lambda: build(2), f"{name}_from_step_2")


def shrink(optimizer: Any, *_: Any) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.mul_(0.9)


of_optimizer("optimizer_post_hook", lambda o, f: o.register_step_post_hook(f), shrink)
of_optimizer("optimizer_pre_hook", lambda o, f: o.register_step_pre_hook(f), shrink)
of_optimizer("global_optimizer_post_hook", lambda o, f: torch_optimizer.register_optimizer_step_post_hook(f), shrink)


@odd
def hook_of_a_tensor_inside_the_loss() -> Loop:
    scale = [1.0]

    def loss(model: Any, x: Any) -> Any:
        y = model(x)
        y.register_hook(lambda g: g * scale[0])
        return y.square().mean()

    return train(loss=loss, change=lambda i: scale.__setitem__(0, number_at(i)))


@odd
def saved_tensors_hooks_around_the_step() -> Loop:
    packed: list[int] = []
    pack = lambda t: packed.append(t.numel()) or t  # noqa: E731

    def call(step: Any, batch: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            return step(batch)

    return train(call=call, seen=lambda: len(packed) > 0)


@odd
def saved_tensors_hooks_that_round_inside_the_loss() -> Loop:
    rounding = [False]

    def loss(model: Any, x: Any) -> Any:
        pack = (lambda t: t.bfloat16().float() if t.is_floating_point() else t) if rounding[0] else lambda t: t
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            return square(model, x)

    return train(loss=loss, change=lambda i: rounding.__setitem__(0, i >= 2), batch=lambda i: rows(i))
