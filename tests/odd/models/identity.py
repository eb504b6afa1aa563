"""What a step asks of parameters and batches beside their numbers: which one it is, its class, its attributes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.odd.loops import Loop, adam, at, mlp, must, odd, rows, train
from tests.support.pytorch.steps import nn, square, torch


def decayed(is_meant: Callable[[Any], bool]) -> Any:
    """A loss with a penalty on some of the parameters."""

    def loss(model: nn.Module, x: Any) -> Any:
        return square(model, x) + sum(p.square().sum() for p in model.parameters() if is_meant(p))

    return loss


@must
def parameters_chosen_by_their_class() -> Loop:
    return train(loss=decayed(lambda p: isinstance(p, nn.Parameter)))


@must
def parameters_chosen_by_their_exact_class() -> Loop:
    return train(loss=decayed(lambda p: type(p) is nn.Parameter))


@must
def parameters_chosen_by_an_attribute() -> Loop:
    model = mlp()
    model[0].weight.decay = True
    return train(model, decayed(lambda p: getattr(p, "decay", False)))


@must
def a_parameter_that_is_given_an_attribute_later() -> Loop:
    model = mlp()
    change = at(2, lambda: setattr(model[0].weight, "decay", True))
    return train(model, decayed(lambda p: getattr(p, "decay", False)), change)


@must
def a_parameter_whose_attribute_changes() -> Loop:
    model = mlp()
    model[0].weight.scale = 1.0

    def loss(model: Any, x: Any) -> Any:
        return square(model, x) * model[0].weight.scale

    return train(model, loss, lambda i: setattr(model[0].weight, "scale", 1.0 + (i > 2)))


@must
def a_parameter_replaced_by_one_with_an_attribute() -> Loop:
    model = mlp()

    def replace() -> None:
        model[0].weight = nn.Parameter(model[0].weight.detach().clone())
        model[0].weight.decay = True

    loss = decayed(lambda p: getattr(p, "decay", False))
    return train(model, loss, at(2, replace), optimizer=lambda p: torch.optim.SGD(model[2].parameters(), lr=0.1))


@must
def parameters_chosen_by_identity() -> Loop:
    model = mlp()
    weight = model[0].weight
    return train(model, decayed(lambda p: p is weight))


@must
def parameters_chosen_by_a_list_of_them() -> Loop:
    model = mlp()
    wanted = [model[0].weight, model[2].bias]
    return train(model, decayed(lambda p: any(p is other for other in wanted)))


@must
def parameters_chosen_by_a_set_of_them() -> Loop:
    model = mlp()
    wanted = {model[0].weight}
    return train(model, decayed(lambda p: p in wanted))


@must
def parameters_chosen_by_a_set_that_grows() -> Loop:
    model = mlp()
    wanted = {model[0].weight}
    return train(model, decayed(lambda p: p in wanted), at(2, lambda: wanted.add(model[2].weight)))


@must
def parameters_chosen_by_a_set_of_their_ids() -> Loop:
    model = mlp()
    wanted = {id(model[0].weight)}
    return train(model, decayed(lambda p: id(p) in wanted))


@must
def weights_in_a_dict_by_parameter() -> Loop:
    model = mlp()
    weights = {model[0].weight: 0.5}

    def loss(model: nn.Module, x: Any) -> Any:
        return square(model, x) + sum(weights.get(p, 0.1) * p.square().sum() for p in model.parameters())

    return train(model, loss)


@must
def parameters_seen_once_by_a_set_made_in_the_step() -> Loop:
    def loss(model: nn.Module, x: Any) -> Any:
        seen: set[Any] = set()
        total = square(model, x)
        for p in [*model.parameters(), *model[0].parameters()]:
            if p not in seen:
                total = total + p.square().sum()
                seen.add(p)
        return total

    return train(loss=loss)


@must
def settings_of_groups_taken_by_parameter() -> Loop:
    model = mlp()
    groups = [{"params": [model[0].weight], "decay": 0.5}, {"params": [model[0].bias, *model[2].parameters()]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    optimizer.param_groups[1]["decay"] = 0.1

    def loss(model: nn.Module, x: Any) -> Any:
        return square(model, x) + sum(
            g["decay"] * p.square().sum() for g in optimizer.param_groups for p in g["params"]
        )

    return train(model, loss, optimizer=optimizer)


@must
def parameters_of_the_lent_optimizer_are_those_of_the_model() -> Loop:
    model = mlp()

    def body(model: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad()
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        loss = square(model, x) * sum(id(p) in held for p in model.parameters())
        loss.backward()
        optimizer.step()
        return loss

    return train(model, body=body, optimizer=adam)


@must
def a_batch_asked_for_its_class() -> Loop:
    return train(loss=lambda model, x: square(model, x) * (2.0 if type(x) is torch.Tensor else 1.0))


@odd
def a_batch_with_an_attribute_that_changes() -> Loop:
    def batch(i: int) -> Any:
        x = rows(i)
        x.scale = 1.0 + (i > 2)
        return x

    return train(loss=lambda model, x: square(model, x) * x.scale, batch=batch)


@odd
def a_parameter_asked_how_often_it_was_changed() -> Loop:
    return train(loss=lambda model, x: square(model, x) * (2.0 if model[0].weight._version > 1 else 1.0))


@must
def a_batch_that_the_model_returns_as_it_is() -> Loop:
    def loss(model: nn.Module, x: Any) -> Any:
        return square(model, x), x, model[0].weight

    return train(loss=loss)


class Remembers(nn.Module):
    """Keeps its first batch, or the parameter of a layer, in an attribute."""

    def __init__(self, keeps_batch: bool) -> None:
        super().__init__()
        self.layer, self.kept, self.keeps_batch = nn.Linear(6, 6), None, keeps_batch

    def forward(self, x: Any) -> Any:
        if self.kept is None:
            self.kept = x if self.keeps_batch else self.layer.weight
        return self.layer(x) + self.kept.mean()


@odd
def a_model_that_keeps_its_first_batch() -> Loop:
    return train(Remembers(True))


@odd
def a_model_that_keeps_a_parameter_at_first_use() -> Loop:
    return train(Remembers(False))


class Scaled(torch.autograd.Function):
    """Multiplies by a parameter."""

    @staticmethod
    def forward(ctx: Any, x: Any, scale: Any) -> Any:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).sum(0)


@must
def a_function_of_the_users_own_on_parameter_and_batch() -> Loop:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(6, 3), nn.Parameter(torch.ones(6))

        def forward(self, x: Any) -> Any:
            return self.layer(Scaled.apply(x, self.scale))

    return train(Model())


@must
def the_optimizer_of_each_parameter_in_its_hook() -> Loop:
    model = mlp()
    scales = {p: 0.5 + i for i, p in enumerate(model.parameters())}

    def shrink(p: Any) -> None:
        p.grad.mul_(scales[p])

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(shrink)
    return train(model)


@odd
def a_transform_of_torch_func_over_parameters() -> Loop:
    def loss(model: nn.Module, x: Any) -> Any:
        def of(parameters: Any, row: Any) -> Any:
            return torch.func.functional_call(model, parameters, (row,)).square().mean()

        each = torch.func.vmap(torch.func.grad(of), (None, 0))(dict(model.named_parameters()), x)
        return square(model, x) + sum(g.square().sum() for g in each.values())

    return train(loss=loss)


@odd
def a_hook_that_the_step_leaves_on_a_parameter() -> Loop:
    def loss(model: Any, x: Any) -> Any:
        model[0].weight.register_hook(lambda gradient: gradient * 0.5)
        return square(model, x)

    return train(loss=loss)


@must
def a_hook_that_the_step_removes_again() -> Loop:
    model = mlp()

    def body(model: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad()
        handle = model[0].weight.register_hook(lambda gradient: gradient * 0.5)
        loss = square(model, x)
        loss.backward()
        handle.remove()
        optimizer.step()
        return loss

    return train(model, body=body)


@odd
def a_parameter_replaced_in_the_step() -> Loop:
    def loss(model: Any, x: Any) -> Any:
        model[0].weight = nn.Parameter(model[0].weight.detach() * 0.5)
        return square(model, x)

    return train(loss=loss)


@odd
def a_parameter_whose_data_is_replaced_in_the_step() -> Loop:
    def loss(model: Any, x: Any) -> Any:
        model[0].weight.data = model[0].weight.data * 0.9
        return square(model, x)

    return train(loss=loss)


@must
def a_parameter_whose_data_is_changed_in_the_step() -> Loop:
    def loss(model: Any, x: Any) -> Any:
        model[0].weight.data.mul_(0.9)
        return square(model, x)

    return train(loss=loss)


@odd
def a_buffer_registered_in_the_step() -> Loop:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: Any) -> Any:
            self.register_buffer("mean", x.mean(0))
            return self.layer(x) + self.mean.sum()

    return train(Model())


@odd
def a_batch_handed_to_numpy_without_a_copy() -> Loop:
    return train(loss=lambda model, x: square(model, x) * float(np.from_dlpack(x).sum()))


@odd
def a_batch_that_goes_through_dlpack() -> Loop:
    to, back = torch.utils.dlpack.to_dlpack, torch.utils.dlpack.from_dlpack
    return train(loss=lambda model, x: square(model, back(to(x)) * 2))


@odd
def a_batch_that_is_given_an_attribute_in_the_step() -> Loop:
    held = rows(0)

    def loss(model: Any, x: Any) -> Any:
        x.mine = x * 0.5
        return square(model, x.mine)

    return train(loss=loss, batch=lambda i: held, seen=lambda: "Fake" in type(getattr(held, "mine", held)).__name__)


@must
def a_scripted_function_of_a_parameter() -> Loop:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")

        @torch.jit.script
        def penalty(weight: torch.Tensor) -> torch.Tensor:
            return (weight * weight).sum()

    return train(loss=lambda model, x: square(model, x) + penalty(model[0].weight) + penalty(x))


@odd(may_round=True)
def dropout_between_the_layers_of_an_lstm() -> Loop:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.LSTM(6, 4, 3, dropout=0.4, batch_first=True, bidirectional=True, proj_size=2)

        def forward(self, x: Any) -> Any:
            return self.layers(x[None])[0]

    return train(Model())


@must
def a_penalty_on_the_gradient_by_the_batch() -> Loop:
    def loss(model: Any, x: Any) -> Any:
        x.requires_grad_(True)
        out = model(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.square().mean() + gradient.square().sum()

    return train(loss=loss)
