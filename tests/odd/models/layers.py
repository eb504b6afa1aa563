"""Attributes of layers, and which layers there are, changed between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from tests.odd.loops import Loop, at, conv, labelled, mlp, must, number_at, odd, patch, pictures, rows, steady, train
from tests.support.pytorch.steps import nn, square, torch

functional = nn.functional


def layer(
    make: Callable[[], nn.Module], change: Callable[[nn.Module, int], Any], name: str, must_be_equal: bool = True
) -> None:
    """Register a loop around a model whose item 1 is a layer that changes."""

    def build() -> Loop:
        middle = make()
        return train(mlp(middle), change=lambda i: change(middle, i))

    odd(build, name, must_be_equal=must_be_equal)


def sets(attribute: str, first: Any, second: Any) -> Callable[[nn.Module, int], None]:
    return lambda module, i: setattr(module, attribute, second if i in (2, 3) else first)


def spectrum() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Softmax(dim=1), nn.Flatten())


layer(lambda: nn.Dropout(0.1), lambda m, i: setattr(m, "p", 0.1 * i), "dropout_annealed")
layer(lambda: nn.Dropout(0.5), sets("p", 0.5, 0.0), "dropout_switched_off_by_p")
layer(lambda: nn.Dropout(0.5), lambda m, i: m.train(i not in (2, 3)), "dropout_alone_in_eval_mode")
layer(lambda: nn.Dropout(0.5), sets("inplace", False, True), "dropout_made_in_place")
layer(lambda: nn.AlphaDropout(0.2), sets("p", 0.2, 0.4), "alpha_dropout_annealed")
layer(lambda: nn.LayerNorm(8), sets("eps", 1e-5, 1e-1), "layer_norm_with_another_eps")
layer(lambda: nn.GroupNorm(2, 8), sets("num_groups", 2, 4), "group_norm_with_other_groups")
layer(lambda: nn.BatchNorm1d(8), sets("momentum", 0.1, 0.5), "batch_norm_with_another_momentum")
layer(lambda: nn.BatchNorm1d(8), sets("eps", 1e-5, 1e-1), "batch_norm_with_another_eps")
layer(lambda: nn.BatchNorm1d(8), sets("track_running_stats", True, False), "batch_norm_that_stops_tracking")
layer(lambda: nn.BatchNorm1d(8), sets("momentum", 0.1, None), "batch_norm_with_a_cumulative_average", False)
layer(lambda: nn.BatchNorm1d(8), lambda m, i: m.train(i % 2 == 0), "batch_norm_in_alternating_modes")
layer(lambda: nn.BatchNorm1d(8), lambda m, i: i == 3 and m.reset_running_stats(), "batch_norm_with_statistics_reset")
layer(lambda: nn.LeakyReLU(0.1), sets("negative_slope", 0.1, 0.4), "leaky_relu_with_another_slope")
layer(lambda: nn.ELU(1.0), sets("alpha", 1.0, 0.3), "elu_with_another_alpha")
layer(lambda: nn.Softplus(), sets("beta", 1.0, 2.0), "softplus_with_another_beta")
layer(lambda: nn.Hardtanh(-1.0, 1.0), sets("max_val", 1.0, 0.2), "hardtanh_with_another_limit")
layer(lambda: nn.Threshold(0.1, 0.0), sets("threshold", 0.1, 0.3), "threshold_raised")
layer(lambda: nn.GELU(), sets("approximate", "none", "tanh"), "gelu_approximated")
layer(lambda: nn.Softmax(dim=1), sets("dim", 1, 0), "softmax_over_another_dimension")
layer(
    spectrum, lambda m, i: setattr(m[1], "dim", 2 if i in (2, 3) else 1), "softmax_deep_inside_over_another_dimension"
)
layer(lambda: nn.Linear(8, 8), sets("forward", torch.tanh, torch.relu), "forward_of_a_layer_replaced")
layer(lambda: nn.ReLU(), sets("inplace", False, True), "relu_made_in_place")


def embedded(change: Callable[[Any, int], Any], **settings: Any) -> Loop:
    model = nn.Sequential(nn.Embedding(10, 6, **settings), nn.Flatten(), nn.Linear(24, 3))
    return train(model, change=lambda i: change(model[0], i), batch=lambda i: rows(i, 3, 4).mul(9).long().remainder(10))


@must
def embedding_with_another_padding() -> Loop:
    return embedded(lambda m, i: setattr(m, "padding_idx", 3 if i in (2, 3) else None))


@odd
def embedding_with_a_norm_from_step_2() -> Loop:
    return embedded(lambda m, i: setattr(m, "max_norm", 1.0 if i >= 2 else None))


@odd
def embedding_scaled_by_frequency() -> Loop:
    return embedded(lambda m, i: setattr(m, "scale_grad_by_freq", i >= 2))


@must
def convolution_with_another_padding_and_dilation() -> Loop:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))

    def change(i: int) -> None:
        model[0].padding, model[0].dilation = ((2, 2), (2, 2)) if i in (2, 3) else ((1, 1), (1, 1))

    return train(model, change=change, batch=pictures)


@must
def pooling_of_another_size() -> Loop:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AvgPool2d(2), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(16, 3))
    return train(model, change=lambda i: setattr(model[1], "kernel_size", 3 if i >= 2 else 2), batch=pictures)


@must
def interpolation_of_another_mode() -> Loop:
    resize: Any = nn.Upsample(size=8, mode="nearest")
    model = conv(nn.Sequential(resize, nn.AvgPool2d(2)))
    return train(model, change=lambda i: setattr(resize, "mode", "bicubic" if i >= 2 else "nearest"), batch=pictures)


def criterion(make: Callable[[], nn.Module], change: Callable[[Any, int], Any], name: str) -> None:
    """Register a loop whose loss is a module that changes."""

    def build() -> Loop:
        found = make()
        return train(
            loss=lambda model, b: found(model(b["x"]), b["y"]), change=lambda i: change(found, i), batch=labelled
        )

    odd(build, name, must_be_equal=True)


criterion(
    nn.CrossEntropyLoss,
    lambda m, i: setattr(m, "label_smoothing", 0.1 * i),
    "label_smoothing_annealed_in_a_loss_module",
)
criterion(nn.CrossEntropyLoss, sets("reduction", "mean", "sum"), "reduction_of_a_loss_module_changed")
criterion(nn.CrossEntropyLoss, sets("ignore_index", -100, 1), "ignored_index_of_a_loss_module_changed")
criterion(
    lambda: nn.CrossEntropyLoss(torch.ones(3)),
    lambda m, i: i == 2 and m.weight.copy_(torch.tensor([0.5, 1.0, 2.0])),
    "class_weights_changed_in_place",
)
criterion(
    lambda: nn.CrossEntropyLoss(torch.ones(3)),
    lambda m, i: i == 2 and setattr(m, "weight", torch.tensor([0.5, 1.0, 2.0])),
    "class_weights_replaced",
)
criterion(
    nn.CrossEntropyLoss,
    lambda m, i: setattr(m, "weight", torch.tensor([0.5, 1.0, 2.0]) if i >= 2 else None),
    "class_weights_from_step_2",
)
criterion(lambda: nn.MultiMarginLoss(margin=1.0), sets("margin", 1.0, 0.5), "margin_of_a_loss_module_changed")


@must
def loss_module_itself_is_the_loss() -> Loop:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.smooth = 0.0

        def forward(self, model: nn.Module, batch: Any) -> Any:
            return functional.cross_entropy(model(batch["x"]), batch["y"], label_smoothing=self.smooth)

    loss = Weighted()
    return train(loss=loss, change=lambda i: setattr(loss, "smooth", 0.1 * (i // 2)), batch=labelled)


@must
def activation_module_replaced_in_a_sequential() -> Loop:
    model = mlp()
    return train(model, change=at(2, lambda: model.__setitem__(1, nn.Tanh())))


@must
def activation_held_as_a_function() -> Loop:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.act = nn.Linear(6, 8), nn.Linear(8, 3), functional.relu

        def forward(self, x: Any) -> Any:
            return self.second(self.act(self.first(x)))

    model = Net()
    return train(model, change=lambda i: setattr(model, "act", torch.tanh if i in (2, 3) else functional.relu))


@odd
def linear_layer_replaced_by_another() -> Loop:
    model = mlp()
    other = nn.Linear(6, 8)
    return train(model, change=at(2, lambda: model.__setitem__(0, other)))


@odd
def linear_layer_replaced_that_the_optimizer_knows() -> Loop:
    model, other = mlp(), nn.Linear(6, 8)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    return train(model, optimizer=optimizer, change=at(2, lambda: model.__setitem__(0, other)))


@odd
def layer_replaced_by_identity() -> Loop:
    model = mlp(nn.Linear(8, 8))
    return train(model, change=at(2, lambda: model.__setitem__(1, nn.Identity())))


@odd
def optional_layer_set_to_none() -> Loop:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.norm = mlp(), nn.LayerNorm(3)

        def forward(self, x: Any) -> Any:
            y = self.body(x)
            return y if self.norm is None else self.norm(y).exp()

    model = Net()
    return train(model, change=at(3, lambda: setattr(model, "norm", None)))


@odd
def layer_appended_to_a_sequential() -> Loop:
    model = mlp()
    return train(model, change=at(2, lambda: model.append(nn.Tanh())))


@odd
def layer_with_parameters_appended_and_given_to_the_optimizer() -> Loop:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def grow() -> None:
        model.append(nn.Linear(3, 3))
        optimizer.add_param_group({"params": list(model[3].parameters()), "foreach": False})

    return train(model, optimizer=optimizer, change=at(2, grow))


@odd
def layer_deleted_from_a_sequential() -> Loop:
    model = mlp(nn.Linear(8, 8), nn.Tanh())
    return train(model, change=at(2, lambda: model.__delitem__(1)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.depth, self.reverse = 3, False

    def forward(self, x: Any) -> Any:
        blocks = list(self.blocks)[: self.depth]
        for block in reversed(blocks) if self.reverse else blocks:
            x = block(x).tanh()
        return x


@odd
def module_list_reordered() -> Loop:
    model = Stack()
    return train(model, change=at(2, lambda: setattr(model, "blocks", nn.ModuleList(reversed(list(model.blocks))))))


@odd
def module_list_popped() -> Loop:
    model = Stack()
    return train(model, change=at(3, lambda: model.blocks.pop(-1)))


@odd
def module_list_with_one_block_twice() -> Loop:
    model = Stack()
    return train(model, change=at(2, lambda: model.blocks.__setitem__(1, model.blocks[0])))


@must
def depth_of_a_stack_by_an_attribute() -> Loop:
    model = Stack()
    return train(model, change=lambda i: setattr(model, "depth", 2 if i in (2, 3) else 3))


@must
def order_of_a_stack_by_an_attribute() -> Loop:
    model = Stack()
    return train(model, change=lambda i: setattr(model, "reverse", i in (2, 3)))


@must
def module_dict_chosen_by_a_name() -> Loop:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleDict({"a": nn.Linear(6, 3), "b": nn.Linear(6, 3)})
            self.task = "a"

        def forward(self, x: Any) -> Any:
            return self.heads[self.task](x)

    model = Net()
    return train(model, change=lambda i: setattr(model, "task", "ab"[i % 2]))


@odd
def module_added_by_name_and_deleted_again() -> Loop:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: Any) -> Any:
            y = self.body(x)
            return self.extra(y) if hasattr(self, "extra") else y

    model = Net()

    def change(i: int) -> None:
        if i == 2:
            model.add_module("extra", nn.Softmax(dim=1))
        if i == 4:
            del model.extra

    return train(model, change=change)


@must
def model_in_eval_mode_every_second_step() -> Loop:
    model = conv()
    return train(model, change=lambda i: model.train(i % 2 == 0), batch=pictures)


@must
def evaluation_between_steps() -> Loop:
    model = mlp(nn.BatchNorm1d(8), nn.Dropout(0.3))
    seen: list[Any] = []

    def change(i: int) -> None:
        model.eval()
        with torch.no_grad():
            seen.append(model(rows(50 + i)))
        model.train()

    return train(model, change=change, seen=lambda: seen)


@must
def training_flag_read_by_the_loss() -> Loop:
    model = mlp()
    loss = lambda model, x: model(x).square().mean() * (2 if model.training else 1)  # noqa: E731
    return train(model, loss, lambda i: setattr(model, "training", i < 2))


@odd
def forward_of_the_model_replaced_on_the_instance() -> Loop:
    model = mlp()
    return train(model, change=at(2, lambda: setattr(model, "forward", lambda x: model[2](model[0](x)).tanh())))


@odd
def forward_of_the_class_replaced() -> Loop:
    class Net(nn.Linear):
        pass

    def forward(self: Any, x: Any) -> Any:
        return functional.linear(x, self.weight, self.bias).tanh()

    return train(Net(6, 3), change=at(2, lambda: setattr(Net, "forward", forward)))


@odd
def class_of_a_layer_replaced() -> Loop:
    model = mlp()
    return train(model, change=at(2, lambda: setattr(model[1], "__class__", nn.Tanh)))


@odd
def function_of_torch_patched() -> Loop:
    patch(functional, "relu", functional.relu)
    return train(change=at(2, lambda: setattr(functional, "relu", lambda x, inplace=False: torch.tanh(x))))


@odd
def method_of_tensor_patched() -> Loop:
    patch(torch.Tensor, "odd_scale", lambda self: self)
    return train(
        loss=lambda model, x: square(model, x).odd_scale(),
        change=lambda i: setattr(torch.Tensor, "odd_scale", lambda self: self * number_at(i)),
    )


@steady
def model_copied_between_steps() -> Loop:
    model = mlp(nn.BatchNorm1d(8))
    copies: list[Any] = []
    return train(
        model, change=lambda i: copies.append(copy.deepcopy(model)), seen=lambda: [c[0].weight for c in copies]
    )


@steady
def attributes_that_nobody_reads_change() -> Loop:
    model: Any = mlp()

    def change(i: int) -> None:
        model.global_step, model[0].note = i, f"step {i}"

    return train(model, change=change)
