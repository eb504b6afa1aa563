"""A number that the loss computes with, changed between steps, in functions, modules and tensors."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tests.odd.loops import number_at, patch
from tests.support.pytorch.steps import nn, torch

from . import settings as helper
from .places_usual import Place, place


@place
def in_the_defaults_of_a_function() -> Place:
    def read(scale: float = 1.0) -> float:
        return scale

    return lambda value: setattr(read, "__defaults__", (value,)), read


@place(num_captures=5)  # what is replaced may change later: each is captured anew
def in_keyword_defaults_of_a_function() -> Place:
    def read(*, scale: float = 1.0) -> float:
        return scale

    return lambda value: setattr(read, "__kwdefaults__", {"scale": value}), read


@place
def in_an_attribute_of_a_function() -> Place:
    def read() -> Any:
        return read.scale  # type: ignore[attr-defined]

    return lambda value: setattr(read, "scale", value), read


@place
def in_a_partial_that_is_replaced() -> Place:
    def identity(scale: float) -> float:
        return scale

    holder = [functools.partial(identity, 1.0)]
    return lambda value: holder.__setitem__(0, functools.partial(identity, scale=value)), lambda: holder[0]()


@place
def in_keywords_of_a_partial() -> Place:
    read = functools.partial(lambda scale: scale, scale=1.0)
    return lambda value: read.keywords.update(scale=value), read


@place(num_captures=5)  # what is replaced may change later: each is captured anew
def in_a_lambda_that_is_replaced() -> Place:
    holder: dict[str, Any] = {}
    return lambda value: holder.update(read=lambda: value), lambda: holder["read"]()


@place
def in_a_module_that_the_loss_imports() -> Place:
    patch(helper, "scale", 1.0)
    return lambda value: setattr(helper, "scale", value), lambda: helper.scale


@place
def in_a_global_of_a_function_of_another_module() -> Place:
    patch(helper, "scale", 1.0)
    return lambda value: setattr(helper, "scale", value), helper.read


@place
def in_a_module_by_getattr_with_a_name() -> Place:
    patch(helper, "scale", 1.0)
    name = "scale"
    return lambda value: setattr(helper, name, value), lambda: getattr(helper, name)


@place
def imported_inside_the_loss() -> Place:
    patch(helper, "scale", 1.0)

    def read() -> Any:
        from .settings import scale

        return scale

    return lambda value: setattr(helper, "scale", value), read


@place
def in_a_numpy_scalar() -> Place:
    holder = [np.float32(1.0)]
    return lambda value: holder.__setitem__(0, np.float32(value)), lambda: float(holder[0])


@place(must_be_equal=False)
def in_a_numpy_array_changed_in_place() -> Place:
    scales = np.ones(3)
    return lambda value: scales.__setitem__(1, value), lambda: float(scales[1])


@place(must_be_equal=False)
def in_a_plain_tensor_read_by_item() -> Place:
    scale = torch.ones(())
    return scale.fill_, lambda: scale.item()


@place
def in_a_plain_tensor_changed_in_place() -> Place:
    scale = torch.ones(())
    return scale.fill_, lambda: scale


@place(num_captures=5)  # what is replaced may change later: each is captured anew
def in_a_plain_tensor_that_is_replaced() -> Place:
    holder = {"scale": torch.ones(())}
    return lambda value: holder.update(scale=torch.tensor(value)), lambda: holder["scale"]


@place
def as_a_count_of_repetitions() -> Place:
    holder = [1]
    return lambda value: holder.__setitem__(0, int(4 * value)), lambda: sum(0.5**k for k in range(holder[0]))


@place
def as_text_that_chooses_a_branch() -> Place:
    holder = {"mode": "plain"}
    return (
        lambda value: holder.update(mode="plain" if value == number_at(0) else "strong"),
        lambda: {"plain": 1.0, "strong": 2.0}[holder["mode"]],
    )


@place
def that_is_none_at_first() -> Place:
    holder: list[float | None] = [None]
    return (
        lambda value: holder.__setitem__(0, None if value == number_at(0) else value),
        lambda: 1.0 if holder[0] is None else holder[0],
    )


@place
def whose_type_changes_alone() -> Place:
    holder: list[Any] = [1]
    return (
        lambda value: holder.__setitem__(0, 2 if value == number_at(0) else 2.0),
        lambda: 0.5 if isinstance(holder[0], float) else 1.0,
    )


@place
def in_an_attribute_of_a_layer() -> Place:
    layer = nn.Identity()
    return lambda value: setattr(layer, "scale", value), lambda: layer.scale
