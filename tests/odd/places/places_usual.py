"""A number that the loss computes with, changed between steps, wherever people keep one."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import types
from collections.abc import Callable
from typing import Any

from tests.odd.loops import Loop, mlp, number_at, odd, patch, train

Place = tuple[Callable[[float], Any], Callable[[], Any]]
SCALE = 1.0
CONFIG: dict[str, Any] = {"scale": 1.0, "nested": {"scale": 1.0}}


def place(build: Callable[[], Place] | None = None, **settings: Any) -> Any:
    """Register a loop whose loss is scaled by a number; build returns how it is written and how it is read."""
    if build is None:
        return lambda function: place(function, **settings)

    def loop() -> Loop:
        write, read = build()
        write(number_at(0))
        return train(mlp(), lambda model, x: model(x).square().mean() * read(), lambda i: write(number_at(i)))

    odd(loop, f"number_{build.__name__}", **({"must_be_equal": True, "num_captures": 3} | settings))
    return build


@place
def in_a_closure() -> Place:
    scale = 1.0

    def write(value: float) -> None:
        nonlocal scale
        scale = value

    return write, lambda: scale


@place
def in_a_global() -> Place:
    def write(value: float) -> None:
        global SCALE
        SCALE = value

    return write, lambda: SCALE


@place
def in_a_dict() -> Place:
    config = {"scale": 1.0}
    return lambda value: config.update(scale=value), lambda: config["scale"]


@place
def in_a_global_dict_by_get() -> Place:
    patch(CONFIG, "scale", 1.0)
    return lambda value: CONFIG.update(scale=value), lambda: CONFIG.get("scale", 3.0)


@place
def in_a_nested_dict_by_a_name_in_a_variable() -> Place:
    config: dict[str, Any] = {"loss": {"weights": [0.0, 1.0]}}
    name = "weights"

    def write(value: float) -> None:
        config["loss"][name][1] = value

    return write, lambda: config["loss"][name][1]


@place
def missing_in_a_dict_at_first() -> Place:
    config: dict[str, float] = {}

    def write(value: float) -> None:
        if value == number_at(0):
            config.clear()
        else:
            config["scale"] = value

    return write, lambda: config.get("scale", 1.0)


@place
def in_a_defaultdict() -> Place:
    config: Any = collections.defaultdict(lambda: 1.0)
    return lambda value: config.update(scale=value), lambda: config["scale"]


@place
def in_an_ordered_dict() -> Place:
    config = collections.OrderedDict(a=1.0, b=1.0)
    return lambda value: config.update(b=value), lambda: sum(config.values())


@place
def in_a_chain_map() -> Place:
    first: dict[str, float] = {}
    config = collections.ChainMap(first, {"scale": 1.0})
    return lambda value: first.update(scale=value), lambda: config["scale"]


@place
def in_a_list() -> Place:
    scales = [1.0, 2.0]
    return lambda value: scales.__setitem__(0, value), lambda: scales[0]


@place
def as_the_length_of_a_list() -> Place:
    milestones: list[int] = []

    def write(value: float) -> None:
        milestones[:] = range(int(value * 4))

    return write, lambda: len(milestones) / 4


@place
def in_a_tuple_that_is_replaced() -> Place:
    scales = (0.0, 1.0)

    def write(value: float) -> None:
        nonlocal scales
        scales = (0.0, value)

    return write, lambda: scales[1]


@place
def in_a_namedtuple() -> Place:
    kind = collections.namedtuple("kind", "scale shift")
    config = kind(1.0, 0.0)

    def write(value: float) -> None:
        nonlocal config
        config = config._replace(scale=value)

    return write, lambda: config.scale + config.shift


@place
def in_a_set() -> Place:
    active: set[str] = set()

    def write(value: float) -> None:
        active.symmetric_difference_update({"half"} if (value == number_at(0)) == ("half" in active) else ())

    return write, lambda: 0.5 if "half" in active else 1.0


@place
def in_a_deque() -> Place:
    recent: Any = collections.deque([1.0, 1.0], maxlen=2)
    return lambda value: recent.extend((value, value)), lambda: sum(recent) / len(recent)


@place
def in_a_namespace() -> Place:
    config = types.SimpleNamespace(loss=types.SimpleNamespace(scale=1.0))
    return lambda value: setattr(config.loss, "scale", value), lambda: config.loss.scale


@place
def in_parsed_arguments() -> Place:
    arguments = argparse.Namespace(scale=1.0)
    return lambda value: setattr(arguments, "scale", value), lambda: arguments.scale


@place
def in_parsed_arguments_by_vars() -> Place:
    arguments = argparse.Namespace(scale=1.0)
    return lambda value: setattr(arguments, "scale", value), lambda: vars(arguments)["scale"]


@dataclasses.dataclass
class Settings:
    scale: float = 1.0
    deep: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float = 1.0


@dataclasses.dataclass(slots=True)
class Slots:
    scale: float = 1.0


@place
def in_a_dataclass() -> Place:
    config = Settings()
    return lambda value: setattr(config, "scale", value), lambda: config.scale


@place
def in_a_dataclass_inside_another() -> Place:
    config = Settings(deep=Settings(deep={"last": Settings()}))
    return lambda value: setattr(config.deep.deep["last"], "scale", value), lambda: config.deep.deep["last"].scale


@place
def in_a_frozen_dataclass_that_is_replaced() -> Place:
    holder = {"config": Frozen()}

    def write(value: float) -> None:
        holder["config"] = dataclasses.replace(holder["config"], scale=value)

    return write, lambda: holder["config"].scale


@place
def in_slots() -> Place:
    config = Slots()
    return lambda value: setattr(config, "scale", value), lambda: config.scale


@place
def in_an_enum() -> Place:
    class Phase(enum.Enum):
        WARM = number_at(0)
        MAIN = number_at(2)

    holder = [Phase.WARM]

    def write(value: float) -> None:
        holder[0] = Phase(value)

    return write, lambda: 1.0 if holder[0] is Phase.WARM else holder[0].value


@place
def in_a_class_attribute() -> Place:
    class Config:
        scale = 1.0

    return lambda value: setattr(Config, "scale", value), lambda: Config.scale


@place
def in_an_inherited_class_attribute() -> Place:
    class Base:
        scale = 1.0

    class Config(Base):
        pass

    config = Config()
    return lambda value: setattr(Base, "scale", value), lambda: config.scale


@place
def in_an_instance_that_hides_its_class() -> Place:
    class Config:
        scale = number_at(0)

    config = Config()

    def write(value: float) -> None:
        vars(config).pop("scale", None)
        if value != Config.scale:
            config.scale = value

    return write, lambda: config.scale


@place
def behind_a_property() -> Place:
    class Config:
        _scale = 1.0

        @property
        def scale(self) -> float:
            return self._scale

    config = Config()
    return lambda value: setattr(config, "_scale", value), lambda: config.scale


@place
def in_a_bound_method_of_a_trainer() -> Place:
    class Trainer:
        def __init__(self) -> None:
            self.weight = 1.0

        def weighted(self) -> float:
            return self.weight

    trainer = Trainer()
    return lambda value: setattr(trainer, "weight", value), trainer.weighted


@place
def in_a_callable_object() -> Place:
    class Weight:
        value = 1.0

        def __call__(self) -> float:
            return self.value

    weight = Weight()
    return lambda value: setattr(weight, "value", value), weight
