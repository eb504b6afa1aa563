"""Buffers and plain tensors changed between steps; parametrizations, norms and pruning."""

from __future__ import annotations

import copy
from typing import Any

from torch.nn.utils import parametrizations, parametrize, prune

from tests.odd.loops import Loop, adam, at, mlp, must, odd, steady, train
from tests.support.pytorch.steps import nn, square, torch

from .parameters import Pair


@must
def buffer_values_changed() -> Loop:
    model = Pair()
    return train(model, change=lambda i: model.scale.fill_(0.1 * i))


@must
def buffer_replaced_by_another_tensor() -> Loop:
    model = Pair()
    return train(model, change=lambda i: setattr(model, "scale", torch.full((6,), 0.1 * i)))


@odd
def buffer_of_another_shape() -> Loop:
    model = Pair()
    return train(model, change=at(2, lambda: setattr(model, "scale", torch.full((4, 1), 0.3))))


@odd
def buffer_of_another_type() -> Loop:
    model = Pair()
    return train(model, change=at(2, lambda: setattr(model, "scale", torch.full((6,), 2))))


class Masked(nn.Module):
    """A buffer that decides by being there, by its shape or by its value."""

    def __init__(self, mask: Any = None) -> None:
        super().__init__()
        self.body = mlp()
        self.register_buffer("mask", mask)

    def forward(self, x: Any) -> Any:
        y = self.body(x)
        if self.mask is None:
            return y
        return y * self.mask if self.mask.dim() == 1 else y @ self.mask


@odd
def buffer_that_was_none() -> Loop:
    model = Masked()
    return train(model, change=at(2, lambda: setattr(model, "mask", torch.tensor([1.0, 0.0, 2.0]))))


@odd
def buffer_made_none() -> Loop:
    model = Masked(torch.tensor([1.0, 0.0, 2.0]))
    return train(model, change=at(2, lambda: setattr(model, "mask", None)))


@odd
def buffer_whose_dimensions_choose_the_branch() -> Loop:
    model = Masked(torch.tensor([1.0, 0.0, 2.0]))
    return train(model, change=at(2, lambda: setattr(model, "mask", torch.eye(3) * 2)))


@odd
def buffer_registered_late() -> Loop:
    model = mlp()
    loss = lambda m, x: (m(x) * getattr(m, "late", 1.0)).square().mean()  # noqa: E731
    return train(model, loss, at(2, lambda: model.register_buffer("late", torch.full((3,), 2.0))))


@odd
def buffer_read_for_control_flow() -> Loop:
    model = Pair()
    model.register_buffer("phase", torch.tensor(0))
    loss = lambda m, x: square(m, x) * (2 if m.phase.item() > 0 else 1)  # noqa: E731
    return train(model, loss, at(2, lambda: model.phase.fill_(1)))


@odd
def buffer_made_to_share_memory_with_a_parameter() -> Loop:
    model = Pair()
    return train(model, change=at(2, lambda: setattr(model, "scale", model.first.bias.detach())))


@odd
def two_buffers_made_one() -> Loop:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6))
    return train(model, change=at(2, lambda: setattr(model[3], "running_mean", model[1].running_mean)))


@must
def plain_tensor_in_an_attribute_replaced() -> Loop:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.weights = mlp(), torch.ones(3)

        def forward(self, x: Any) -> Any:
            return self.body(x) * self.weights

    model = Net()
    return train(model, change=lambda i: setattr(model, "weights", torch.full((3,), 0.2 * i)))


@odd
def plain_tensor_in_an_attribute_of_another_shape() -> Loop:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.weights = mlp(), torch.ones(3)

        def forward(self, x: Any) -> Any:
            return self.body(x) * self.weights

    model = Net()
    return train(model, change=at(2, lambda: setattr(model, "weights", torch.full((1,), 0.2))))


def reparametrized(make: Any, number: int, change: Any, name: str) -> None:
    """Register a loop around Pair that starts as make leaves it."""

    def build() -> Loop:
        model = Pair()
        make(model)
        return train(model, change=at(number, lambda: change(model)))

    odd(build, name)


class Halved(nn.Module):
    factor = 0.5

    def forward(self, x: Any) -> Any:
        return x * self.factor


def nothing(model: Any) -> None:
    pass


def weight_norm(model: Any) -> None:
    parametrizations.weight_norm(model.first)


def weight_norm_of_hooks(model: Any) -> None:
    nn.utils.weight_norm(model.first)


def halve(model: Any) -> None:
    parametrize.register_parametrization(model.first, "weight", Halved())


def cut(model: Any) -> None:
    prune.l1_unstructured(model.first, "weight", amount=0.5)


reparametrized(nothing, 2, weight_norm, "weight_norm_added")
reparametrized(weight_norm, 2, lambda m: parametrize.remove_parametrizations(m.first, "weight"), "weight_norm_removed")
reparametrized(weight_norm_of_hooks, 2, lambda m: nn.utils.remove_weight_norm(m.first), "old_weight_norm_removed")
reparametrized(nothing, 2, lambda m: parametrizations.spectral_norm(m.first), "spectral_norm_added")
reparametrized(nothing, 2, lambda m: parametrizations.orthogonal(m.first), "orthogonal_added")
reparametrized(nothing, 2, halve, "parametrization_added")
reparametrized(
    halve, 2, lambda m: setattr(m.first.parametrizations.weight[0], "factor", 2.0), "parametrization_changed"
)
reparametrized(halve, 2, halve, "second_parametrization_added")
reparametrized(nothing, 2, cut, "pruned_at_step_2")
reparametrized(cut, 2, cut, "pruned_further")
reparametrized(cut, 2, lambda m: prune.remove(m.first, "weight"), "pruning_made_permanent")
reparametrized(cut, 2, lambda m: m.first.weight_mask.fill_(1), "mask_of_pruning_changed_in_place")


@steady
def parameters_read_and_logged_between_steps() -> Loop:
    model = mlp()
    norms: list[float] = []
    change = lambda i: norms.append(sum(p.norm().item() for p in model.parameters()))  # noqa: E731
    return train(model, change=change, seen=lambda: norms)


@must
def ema_updated_between_steps() -> Loop:
    model = mlp()
    average = copy.deepcopy(model)

    def change(i: int) -> None:
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters(), strict=True):
                a.lerp_(p, 0.1)

    return train(model, change=change, seen=lambda: list(average.parameters()))


@must
def ema_weights_swapped_in_and_out_by_data() -> Loop:
    model = mlp()
    average = [p.detach().clone() for p in model.parameters()]

    def change(i: int) -> None:
        if i in (2, 3):
            for k, p in enumerate(model.parameters()):
                p.data, average[k] = average[k], p.data

    return train(model, change=change, optimizer=adam)
