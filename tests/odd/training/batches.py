"""What a step is given and returns: shapes, strides, shared memory, structures, and who keeps or changes them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.odd.loops import Loop, adam, labelled, mlp, must, odd, rows, steady, train
from tests.support.pytorch.steps import nn, square, torch

functional = nn.functional


def given(name: str, batch: Callable[[int], Any], loss: Any = square, **settings: Any) -> None:
    """Register a loop around batches of one kind."""
    odd(lambda: train(loss=loss, batch=batch), name, **settings)


def both(model: Any, batch: Any) -> Any:
    """A loss of two tensors of a batch, the second of which it also returns something of."""
    a, b = batch.values() if hasattr(batch, "values") else batch
    return (model(a) - model(b) * 2).square().mean(), b.sum()


def alternating(*made: Any) -> Callable[[int], Any]:
    return lambda i: made[i % len(made)](i)


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Sample:
    x: Any
    y: Any


class Tagged(torch.Tensor):
    pass


given("batches_of_alternating_sizes", lambda i: rows(i, 3 + i % 2, 6), must_be_equal=True, num_captures=2)
given("last_batch_smaller", lambda i: rows(i, 4 if i < 4 else 1, 6), must_be_equal=True, num_captures=2)
given("batch_of_no_rows", lambda i: rows(i, 4 if i != 2 else 0, 6))
given("batch_of_one_more_dimension", lambda i: rows(i, 4, 6) if i < 2 else rows(i, 2, 4, 6), must_be_equal=True)
given("batch_transposed", lambda i: rows(i, 4, 6) if i < 2 else rows(i, 6, 4).t(), must_be_equal=True)
given("batch_with_steps_in_memory", lambda i: rows(i, 4, 6) if i < 2 else rows(i, 8, 12)[::2, ::2], must_be_equal=True)
given("batch_at_an_offset", lambda i: rows(i, 5, 6)[i % 2 :][:4], must_be_equal=True)
given("batch_expanded", lambda i: rows(i, 4, 6) if i < 2 else rows(i, 1, 6).expand(4, 6), must_be_equal=True)
given("batch_with_overlapping_rows", lambda i: rows(i, 20).as_strided((4, 6), (2, 1)))
given("batch_of_doubles_cast_in_the_loss", lambda i: rows(i).to((torch.float32, torch.float64)[i // 2 % 2]),
      lambda model, x: square(model, x.float()), must_be_equal=True)  # fmt: skip
given("batch_that_requires_a_gradient", lambda i: rows(i).requires_grad_(i >= 2))
given("batch_with_a_history", lambda i: rows(i).requires_grad_() * 2 if i >= 2 else rows(i))
given("dict_in_another_order", lambda i: dict([("a", rows(i)), ("b", rows(i + 9))][:: 1 if i < 2 else -1]), both)
given("user_dict", lambda i: collections.UserDict(a=rows(i), b=rows(i + 9)), lambda m, x: both(m, dict(x)))
given("ordered_dict", lambda i: collections.OrderedDict(a=rows(i), b=rows(i + 9)), lambda m, x: both(m, dict(x)))
given("list_in_place_of_a_tuple", lambda i: (tuple, list)[i // 2 % 2]([rows(i), rows(i + 9)]), both, must_be_equal=True)
given("type_of_the_batch_read", lambda i: (tuple, list)[i // 2 % 2]([rows(i), rows(i + 9)]),
      lambda m, x: both(m, x)[0] * (2 if type(x) is list else 1), must_be_equal=True)  # fmt: skip
given("named_tuple", lambda i: Point(rows(i), rows(i + 9)), lambda m, p: (m(p.x) - m(p.y)).square().mean())
given("dataclass", lambda i: Sample(rows(i), rows(i + 9)), lambda m, p: (m(p.x) - m(p.y)).square().mean())
given("nested_batch", lambda i: {"in": [rows(i), {"deep": (rows(i + 9),)}]},
      lambda m, b: both(m, (b["in"][0], b["in"][1]["deep"][0])), must_be_equal=True)  # fmt: skip
given("none_in_the_batch", lambda i: {"x": rows(i), "w": None if i < 2 else rows(i, 4, 1)},
      lambda m, b: (m(b["x"]) * (1 if b["w"] is None else b["w"])).square().mean(), must_be_equal=True)  # fmt: skip
given("flag_in_the_batch", lambda i: {"x": rows(i), "double": i in (2, 3)},
      lambda m, b: square(m, b["x"]) * (2 if b["double"] else 1), must_be_equal=True)  # fmt: skip
given("text_in_the_batch", lambda i: {"x": rows(i), "task": "ab"[i % 2]},
      lambda m, b: square(m, b["x"]) * {"a": 1, "b": 2}[b["task"]], must_be_equal=True)  # fmt: skip
given("number_in_the_batch", lambda i: {"x": rows(i), "scale": 1.0 + i}, lambda m, b: square(m, b["x"]) * b["scale"])
given("whole_number_in_the_batch", lambda i: (rows(i), 1 + i), lambda m, b: square(m, b[0]) * b[1])
given("one_and_true_in_the_batch", lambda i: {"x": rows(i), "k": True if i < 2 else 1},
      lambda m, b: square(m, b["x"]) * (2 if b["k"] is True else 3))  # fmt: skip
given("mixup_weight_as_a_tensor", lambda i: {"x": rows(i), "w": torch.tensor(0.1 * i)},
      lambda m, b: square(m, b["x"] * b["w"] + b["x"].flip(0) * (1 - b["w"])), must_be_equal=True)  # fmt: skip
given("numpy_array_in_the_batch", lambda i: {"x": rows(i).numpy()}, lambda m, b: square(m, torch.from_numpy(b["x"])))
given("numpy_scalar_in_the_batch", lambda i: (rows(i), np.float64(i)), lambda m, b: square(m, b[0]) * b[1])
given("generator_as_the_batch", lambda i: (rows(i + k) for k in range(2)), lambda m, b: sum(square(m, x) for x in b))
given("iterator_that_is_empty", lambda i: iter(()), lambda m, b: square(m, next(b)))
given("object_as_the_batch", lambda i: object(), lambda m, b: square(m, rows(0)))
given("none_as_the_batch", lambda i: None, lambda m, b: square(m, torch.ones(4, 6)))
given("empty_tuple_as_the_batch", lambda i: (), lambda m, b: square(m, torch.ones(4, 6)))
given("set_as_the_batch", lambda i: {rows(i)}, lambda m, b: square(m, next(iter(b))))
given("subclass_of_tensor", lambda i: rows(i) if i < 2 else rows(i).as_subclass(Tagged))
given("sparse_batch", lambda i: rows(i) if i < 2 else rows(i).relu().to_sparse(), lambda m, x: square(m, x.to_dense()))
given(
    "complex_batch",
    lambda i: torch.view_as_complex(rows(i, 4, 3, 2)),
    lambda m, x: square(m, torch.view_as_real(x).flatten(1)),
)
given(
    "conjugated_batch",
    lambda i: torch.view_as_complex(rows(i, 4, 3, 2)).conj() if i >= 2 else torch.view_as_complex(rows(i, 4, 3, 2)),
    lambda m, x: square(m, torch.view_as_real(x.resolve_conj()).flatten(1)),
)
given("negated_view_as_the_batch", lambda i: torch.view_as_complex(rows(i, 4, 6, 2)).conj().imag if i >= 2 else rows(i))
given("meta_tensor_as_the_batch", lambda i: rows(i) if i != 2 else rows(i).to("meta"))
given(
    "batch_of_another_device_type_as_text",
    lambda i: {"x": rows(i), "device": "cpu"},
    lambda m, b: square(m, b["x"].to(b["device"])),
)
given("shape_read_by_the_loss", lambda i: rows(i, 2 + i, 6), lambda m, x: square(m, x) / x.shape[0], must_be_equal=True)
given("strides_read_by_the_loss", lambda i: rows(i, 4, 6) if i < 2 else rows(i, 6, 4).t(),
      lambda m, x: square(m, x) * (2 if x.is_contiguous() else 1), must_be_equal=True)  # fmt: skip
given("gradient_flag_read_by_the_loss", lambda i: rows(i).requires_grad_(i in (2, 3)),
      lambda m, x: square(m, x.detach()) * (2 if x.requires_grad else 1))  # fmt: skip
given("attribute_of_the_batch_read_by_the_loss", lambda i: tagged(rows(i), i), lambda m, x: square(m, x) * x.weight)
given("values_read_by_the_loss", rows, lambda m, x: square(m, x) * (2 if x.sum() > 0 else 1))
given("value_used_as_a_number", rows, lambda m, x: square(m, x) * x.abs().max().item())


def tagged(x: Any, i: int) -> Any:
    x.weight = 1.0 + i
    return x


def holding(name: str, make: Callable[[Any], Callable[[int], Any]], loss: Any = both, model: Any = mlp) -> None:
    """Register a loop whose batch at steps 2 and 3 holds what make takes from the world."""

    def build() -> Loop:
        world = train(model(), loss, optimizer=adam)
        odd_batch = make(world)
        world.batch = lambda i: odd_batch(i) if i in (2, 3) else (rows(i), rows(i + 9))
        return world

    odd(build, name)


def normed() -> Any:
    return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))


def scaled(model: Any, batch: Any) -> Any:
    """A loss in which weights come in the batch."""
    return (model(batch[0]) + functional.linear(batch[0], batch[1][:3])).square().mean()


def overlap(i: int) -> Any:
    both = rows(i, 6, 6)
    return both[:4], both[2:]


holding("same_tensor_twice_in_the_batch", lambda world: lambda i: (x := rows(i), x))
holding("two_views_of_one_tensor_in_the_batch", lambda world: lambda i: (x := rows(i), x.view(4, 6)))
holding("overlapping_views_in_the_batch", lambda world: overlap)
holding("parameter_in_the_batch", lambda world: lambda i: (rows(i), world.model[0].weight), scaled)
holding("detached_parameter_in_the_batch", lambda world: lambda i: (rows(i), world.model[0].weight.detach()), scaled)
holding("view_of_a_parameter_in_the_batch", lambda world: lambda i: (rows(i), world.model[0].weight.data[:4]), scaled)
holding(
    "buffer_in_the_batch", lambda world: lambda i: (rows(i), world.model[0].running_mean.expand(4, 6)), both, normed
)
holding(
    "state_of_the_optimizer_in_the_batch",
    lambda world: lambda i: (rows(i), world.optimizer.state[world.model[0].weight]["exp_avg"]),
    scaled,
)


def returned(name: str, loss: Any, **settings: Any) -> None:
    """Register a loop whose loss returns something odd."""
    model = settings.pop("model", mlp)
    odd(lambda: train(model(), loss), name, **settings)


@dataclasses.dataclass
class Output:
    loss: Any
    extra: Any


returned("tuple_of_loss_and_outputs", lambda m, x: (square(m, x), m(x), None, "text", 3), must_be_equal=True)
returned("list_of_loss_and_outputs", lambda m, x: [square(m, x), {"y": m(x)}], must_be_equal=True)
returned("dict_as_the_loss", lambda m, x: {"loss": square(m, x)})
returned("dataclass_as_the_loss", lambda m, x: Output(square(m, x), 1))
returned("parameter_returned", lambda m, x: (square(m, x), m[0].weight))
returned("view_of_a_parameter_returned", lambda m, x: (square(m, x), m[0].weight[0]))
returned("buffer_returned", lambda m, x: (square(m, x), m[0].running_mean), model=normed)
returned("batch_returned", lambda m, x: (square(m, x), x, x[0]))
returned("loss_returned_twice", lambda m, x: (lambda y: (y, y, y.view(1)))(square(m, x)))
returned("number_of_the_loss_returned", lambda m, x: (lambda y: (y, y.item()))(square(m, x)))
returned("generator_returned", lambda m, x: (square(m, x), (k for k in range(3))))
returned("none_returned", lambda m, x: None)
returned("loss_of_one_element_with_a_shape", lambda m, x: square(m, x).view(1))
returned("loss_of_double_precision", lambda m, x: square(m, x).double(), must_be_equal=True)
returned("expanded_tensor_returned", lambda m, x: (square(m, x), m(x).mean().expand(3, 2)))
returned("constant_tensor_returned", lambda m, x: (square(m, x), torch.arange(3)))


def keeper(change: Callable[[Any], Any], loss: Any) -> Loop:
    """The caller keeps all results, and changes them."""
    kept: list[Any] = []

    def after(i: int, result: Any) -> None:
        kept.append(result)
        change(result)

    return train(loss=loss, after=after, seen=lambda: kept)


@steady
def results_kept_over_steps() -> Loop:
    return keeper(lambda result: None, lambda m, x: (square(m, x), m(x)))


@steady
def results_changed_in_place_by_the_caller() -> Loop:
    return keeper(lambda result: [t.detach().zero_() for t in result], lambda m, x: (square(m, x), m(x)))


@odd
def parameters_and_views_of_them_kept_over_steps() -> Loop:
    return keeper(lambda result: None, lambda m, x: (square(m, x), m[0].weight, m[0].weight.t()[0], x[0]))


@odd
def returned_batch_changed_in_place_by_the_caller() -> Loop:
    return keeper(lambda result: result[1].mul_(2), lambda m, x: (square(m, x), x))


@odd
def returned_parameter_changed_in_place_by_the_caller() -> Loop:
    return keeper(lambda result: result[1].detach().mul_(0.9), lambda m, x: (square(m, x), m[0].weight))


@odd
def returned_constant_changed_in_place_by_the_caller() -> Loop:
    return keeper(lambda result: result[1].add_(1), lambda m, x: (square(m, x), torch.ones(3)))


@odd
def returned_dict_changed_by_the_caller() -> Loop:
    return keeper(lambda result: result[1].update(more=1), lambda m, x: (square(m, x), {"y": m(x)}))


@must
def same_batch_object_changed_in_place_by_the_caller() -> Loop:
    x = rows(0)
    return train(batch=x, change=lambda i: x.mul_(-1.5))


@odd
def batch_changed_in_place_by_the_loss() -> Loop:
    x = rows(0)
    return train(loss=lambda model, x: square(model, x.mul_(-1.5)), batch=x, seen=lambda: x)


@odd
def batch_resized_in_place_by_the_caller() -> Loop:
    x = rows(0)
    return train(batch=x, change=lambda i: i == 2 and x.resize_(3, 6))


@must
def inference_without_a_loss() -> Loop:
    model = mlp(nn.Dropout(0.5))
    return train(model, None, lambda i: model.train(i % 2 == 0), optimizer=None)


@must
def gradients_left_by_a_step_without_an_optimizer() -> Loop:
    model = mlp()
    return train(model, change=lambda i: i == 3 and model.zero_grad(), optimizer=None)


@odd
def gradients_without_an_optimizer_replaced_by_expanded_zeros() -> Loop:
    model: Any = mlp()

    def change(i: int) -> None:
        if i == 2:
            model[2].bias.grad = torch.zeros(3)

    return train(model, change=change, optimizer=None)


@must
def classification_with_labels_of_another_type() -> Loop:
    cast = lambda b, i: {**b, "y": b["y"].to(torch.int32 if i >= 2 else torch.int64)}  # noqa: E731
    return train(
        loss=lambda m, b: functional.cross_entropy(m(b["x"]), b["y"].long()), batch=lambda i: cast(labelled(i), i)
    )
