"""Parameters and buffers replaced, tied, frozen, reshaped, pruned and parametrized between steps."""

from __future__ import annotations

import copy
import pickle
from typing import Any

from tests.odd.loops import Loop, adam, at, conv, mlp, momentum, must, odd, pictures, rows, train
from tests.support.pytorch.steps import nn, torch

functional = nn.functional


class Pair(nn.Module):
    """Two layers of one shape, which can be tied, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("scale", torch.full((6,), 0.5))

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x).tanh() * self.scale)


def all_of(*modules: nn.Module) -> Any:
    return torch.optim.SGD({p: None for m in modules for p in m.parameters()}, lr=0.1)


@must
def parameter_frozen_and_thawed() -> Loop:
    model = mlp()
    return train(model, change=lambda i: model[0].weight.requires_grad_(i not in (2, 3)), optimizer=adam)


@must
def all_but_the_head_frozen_at_first() -> Loop:
    model = mlp()
    return train(model, change=lambda i: model[0].requires_grad_(i >= 2), optimizer=momentum)


@must
def bias_alone_frozen() -> Loop:
    model = mlp()
    return train(model, change=at(2, lambda: model[2].bias.requires_grad_(False)))


@must
def values_of_a_parameter_set_in_place() -> Loop:
    model = mlp()
    return train(model, change=at(2, lambda: nn.init.constant_(model[0].weight, 0.1)), optimizer=adam)


@must
def data_of_a_parameter_replaced() -> Loop:
    model = mlp()
    return train(model, change=at(2, lambda: setattr(model[0].weight, "data", torch.full((8, 6), 0.1))))


@odd
def data_of_a_parameter_replaced_by_a_transposed_tensor() -> Loop:
    model = mlp()
    return train(model, change=at(2, lambda: setattr(model[0].weight, "data", torch.randn(6, 8).t())))


@odd
def data_of_a_parameter_replaced_by_a_smaller_one() -> Loop:
    model = mlp()

    def shrink() -> None:
        model[0].weight.data, model[0].bias.data = model[0].weight.data[:4].clone(), model[0].bias.data[:4].clone()
        model[2].weight.data = model[2].weight.data[:, :4].clone()

    return train(model, change=at(2, shrink))


@odd
def data_of_two_parameters_made_to_share_memory() -> Loop:
    model = Pair()
    return train(model, change=at(2, lambda: setattr(model.second.weight, "data", model.first.weight.data)))


@odd
def data_of_a_parameter_made_a_view_of_another() -> Loop:
    model = Pair()
    return train(model, change=at(2, lambda: setattr(model.second.bias, "data", model.first.weight.data[0])))


@odd
def parameters_made_views_of_one_flat_tensor() -> Loop:
    model = mlp()

    def flatten() -> None:
        flat, start = nn.utils.parameters_to_vector(model.parameters()).detach(), 0
        for p in model.parameters():
            p.data, start = flat[start : start + p.numel()].view_as(p), start + p.numel()

    return train(model, change=at(2, flatten))


@odd
def parameter_made_an_expanded_tensor() -> Loop:
    model = mlp()
    return train(
        model,
        lambda m, x: m(x).square().mean(),
        at(2, lambda: setattr(model[2].bias, "data", torch.zeros(1).expand(3))),
    )


@odd
def parameter_replaced_that_the_optimizer_does_not_know() -> Loop:
    model = mlp()
    return train(model, change=at(2, lambda: setattr(model[0], "weight", nn.Parameter(torch.full((8, 6), 0.1)))))


@odd
def parameter_replaced_in_model_and_optimizer() -> Loop:
    model = mlp()
    optimizer = adam(model.parameters())

    def replace() -> None:
        new = nn.Parameter(torch.full((8, 6), 0.1))
        optimizer.param_groups[0]["params"][0] = new
        model[0].weight = new

    return train(model, optimizer=optimizer, change=at(2, replace))


@odd
def parameters_tied() -> Loop:
    model = Pair()
    return train(
        model, optimizer=all_of(model), change=at(2, lambda: setattr(model.second, "weight", model.first.weight))
    )


@odd
def parameters_untied() -> Loop:
    model = Pair()
    model.second.weight = model.first.weight
    other = nn.Parameter(model.first.weight.detach().clone())
    optimizer = torch.optim.SGD([*model.parameters(), other], lr=0.1)
    return train(model, optimizer=optimizer, change=at(3, lambda: setattr(model.second, "weight", other)))


@odd
def two_layers_swapped() -> Loop:
    model = Pair()

    def swap() -> None:
        model.first, model.second = model.second, model.first

    return train(model, change=at(2, swap), optimizer=momentum)


@odd
def parameters_of_two_layers_swapped() -> Loop:
    model = Pair()

    def swap() -> None:
        model.first.weight, model.second.weight = model.second.weight, model.first.weight

    return train(model, change=at(2, swap), optimizer=momentum)


@odd
def bias_removed() -> Loop:
    model = mlp()
    return train(model, change=at(2, lambda: model[0].register_parameter("bias", None)))


@odd
def parameter_added_late() -> Loop:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: Any) -> Any:
            return self.body(x) * getattr(self, "scale", 1.0)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def add() -> None:
        model.scale = nn.Parameter(torch.full((3,), 0.5))
        optimizer.add_param_group({"params": [model.scale], "foreach": False})

    return train(model, optimizer=optimizer, change=at(2, add))


@odd
def parameters_made_double() -> Loop:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train(
        model,
        optimizer=optimizer,
        change=lambda i: model.double() if i >= 2 else None,
        batch=lambda i: rows(i).double() if i >= 2 else rows(i),
    )


@odd
def parameters_made_bfloat16() -> Loop:
    model = mlp()
    return train(
        model,
        change=lambda i: model.bfloat16() if i >= 2 else None,
        batch=lambda i: rows(i).bfloat16() if i >= 2 else rows(i),
    )


@odd
def one_layer_made_double_with_a_cast_in_the_loss() -> Loop:
    model = mlp()
    loss = lambda m, x: m[2](m[1](m[0](x.to(m[0].weight.dtype))).to(m[2].weight.dtype)).square().mean()  # noqa: E731
    return train(model, loss, at(2, lambda: model[0].double()))


@must
def pictures_and_weights_in_channels_last_from_step_2() -> Loop:
    model = conv()
    return train(
        model,
        change=at(2, lambda: model.to(memory_format=torch.channels_last)),
        batch=lambda i: pictures(i).to(memory_format=torch.channels_last) if i >= 2 else pictures(i),
    )


@must
def state_dict_loaded_between_steps() -> Loop:
    model = mlp(nn.BatchNorm1d(8))
    start = copy.deepcopy(model.state_dict())
    return train(model, change=at(3, lambda: model.load_state_dict(start)), optimizer=adam)


@odd
def state_dict_loaded_by_assignment() -> Loop:
    model = mlp(nn.BatchNorm1d(8))
    start = copy.deepcopy(model.state_dict())
    return train(model, change=at(3, lambda: model.load_state_dict(start, assign=True)))


@must
def checkpoint_round_trip_of_model_and_optimizer() -> Loop:
    model = mlp(nn.BatchNorm1d(8))
    optimizer = adam(model.parameters())

    def round_trip() -> None:
        states = pickle.loads(pickle.dumps((model.state_dict(), optimizer.state_dict())))
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])

    return train(model, optimizer=optimizer, change=at(3, round_trip))


@must
def parameters_reset() -> Loop:
    model = mlp()
    return train(model, change=at(3, lambda: model[0].reset_parameters()))
