"""A number that the loss computes with, changed between steps, behind what Python can do with attributes."""

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import ctypes
import decimal
import enum
import functools
import itertools
import logging
import mmap
import multiprocessing
import operator
import queue
import sys
import threading
import time
import types
import weakref
from typing import Any

from tests.odd.loops import number_at, of_process, patch

from . import settings as helper
from .places_exotic import either
from .places_usual import Place

VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)


@either
def in_a_context_variable() -> Place:
    return VARIABLE.set, VARIABLE.get


@either
def in_a_local_of_the_thread() -> Place:
    local = threading.local()
    return lambda value: setattr(local, "scale", value), lambda: local.scale


@either
def behind_getattr_of_a_configuration() -> Place:
    class Config:
        def __init__(self) -> None:
            self.values = {"scale": 1.0}

        def __getattr__(self, name: str) -> Any:
            try:
                return self.__dict__["values"][name]
            except KeyError:
                raise AttributeError(name) from None

    config = Config()
    return lambda value: config.values.update(scale=value), lambda: config.scale


@either
def behind_getattribute() -> Place:
    values = {"scale": 1.0}

    class Config:
        def __getattribute__(self, name: str) -> Any:
            return values[name] if name in values else object.__getattribute__(self, name)

    config = Config()
    return lambda value: values.update(scale=value), lambda: config.scale  # type: ignore[attr-defined]


@either
def behind_a_descriptor() -> Place:
    class Field:
        def __get__(self, owner: Any, kind: Any) -> Any:
            return owner.store["scale"]

    class Config:
        scale = Field()

        def __init__(self) -> None:
            self.store = {"scale": 1.0}

    config = Config()
    return lambda value: config.store.update(scale=value), lambda: config.scale


@either
def behind_an_attribute_of_a_metaclass() -> Place:
    class Meta(type):
        scale = 1.0

    class Config(metaclass=Meta):
        pass

    return lambda value: setattr(Meta, "scale", value), lambda: Config.scale


@either
def behind_a_function_with_a_cache() -> Place:
    holder = [1.0]

    @functools.lru_cache
    def read() -> float:
        return holder[0]

    def write(value: float) -> None:
        holder[0] = value
        read.cache_clear()

    return write, read


@either
def in_a_cached_property() -> Place:
    class Config:
        base = 1.0

        @functools.cached_property
        def scale(self) -> float:
            return self.base * 1

    config = Config()

    def write(value: float) -> None:
        config.base = value
        vars(config).pop("scale", None)

    return write, lambda: config.scale


@either
def behind_an_attrgetter() -> Place:
    config = types.SimpleNamespace(loss=types.SimpleNamespace(scale=1.0))
    read = operator.attrgetter("loss.scale")
    return lambda value: setattr(config.loss, "scale", value), lambda: read(config)


@either
def behind_an_itemgetter_and_map() -> Place:
    rows = [{"scale": 1.0}, {"scale": 0.5}]
    return lambda value: rows[0].update(scale=value), lambda: sum(map(operator.itemgetter("scale"), rows))


@either
def in_the_dict_of_an_object() -> Place:
    config = types.SimpleNamespace(scale=1.0)
    return lambda value: setattr(config, "scale", value), lambda: config.__dict__["scale"]


@either
def behind_a_weak_reference() -> Place:
    class Config:
        scale = 1.0

    config = Config()
    reference = weakref.ref(config)
    return lambda value: setattr(config, "scale", value), lambda: reference().scale  # type: ignore[union-attr]


@either
def behind_a_weak_dict() -> Place:
    class Key:
        pass

    key = Key()
    scales: Any = weakref.WeakKeyDictionary({key: 1.0})
    return lambda value: scales.__setitem__(key, value), lambda: scales[key]


@either
def in_a_mapping_proxy() -> Place:
    values = {"scale": 1.0}
    config = types.MappingProxyType(values)
    return lambda value: values.update(scale=value), lambda: config["scale"]


@either
def in_a_subclass_of_dict_with_attributes() -> Place:
    class Config(dict[str, Any]):
        __getattr__ = dict.__getitem__

    config = Config(scale=1.0)
    return lambda value: config.update(scale=value), lambda: config.scale


@either
def in_a_subclass_of_float() -> Place:
    class Weight(float):
        factor = 1.0

    weight = Weight(1.0)
    return lambda value: setattr(weight, "factor", value), lambda: weight * weight.factor


@either
def in_bytes() -> Place:
    buffer = bytearray(1)
    return lambda value: buffer.__setitem__(0, int(value * 4)), lambda: buffer[0] / 4


@either
def in_a_plain_loop_over_a_generator() -> Place:
    holder = [1.0]

    def numbers() -> Any:
        while True:
            yield holder[0]

    source = numbers()
    return lambda value: holder.__setitem__(0, value), lambda: next(source)


@either
def counted_by_itertools() -> Place:
    counter = itertools.count(of_process(1, 4))
    return lambda value: None, lambda: next(counter) / 4


@either
def taken_from_an_iterator() -> Place:
    numbers = iter([1.0, 1.0, 1.5, 1.0, 0.5, 2.0, 3.0, 4.0, 5.0])
    return lambda value: None, lambda: next(numbers)


@either
def read_from_a_clock() -> Place:
    now = [1.0]
    patch(time, "time", lambda: now[0])
    return lambda value: now.__setitem__(0, value), lambda: time.time()


@either
def in_a_default_of_a_module_function_that_is_replaced() -> Place:
    patch(helper, "read", helper.read)
    return lambda value: setattr(helper, "read", lambda: value), lambda: helper.read()


@either
def in_an_equal_object_that_is_another() -> Place:
    class Weight:
        def __init__(self, value: float) -> None:
            self.value = value

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    holder = [Weight(1.0)]
    return lambda value: holder.__setitem__(0, Weight(value)), lambda: holder[0].value


@either
def a_millionth_apart() -> Place:
    holder = [1.0]
    return (
        lambda value: holder.__setitem__(0, 1.0 if value == number_at(0) else 1.0 + 2**-20),
        lambda: holder[0],
    )


@either
def whose_sign_of_zero_changes() -> Place:
    holder = [0.0]
    return (
        lambda value: holder.__setitem__(0, 0.0 if value == number_at(0) else -0.0),
        lambda: 1.0 if str(holder[0]) == "0.0" else 2.0,
    )


@either
def in_a_queue_that_c_keeps() -> Place:
    waiting: queue.SimpleQueue[float] = queue.SimpleQueue()
    return waiting.put, lambda: waiting.get()


@either
def in_memory_that_a_view_looks_at() -> Place:
    numbers = array.array("d", [1.0])
    view = memoryview(numbers)
    return lambda value: view.__setitem__(0, value), lambda: view[0]


@either
def in_a_mapped_file() -> Place:
    mapped = mmap.mmap(-1, 8)
    return lambda value: mapped.__setitem__(0, int(100 * value)), lambda: mapped[0] / 100


@either
def in_a_structure_of_c() -> Place:
    class Numbers(ctypes.Structure):
        _fields_ = (("scale", ctypes.c_double),)

    numbers = Numbers(1.0)
    return lambda value: setattr(numbers, "scale", value), lambda: numbers.scale


@either
def behind_a_pointer_of_c() -> Place:
    number = ctypes.c_double(1.0)
    pointer = ctypes.pointer(number)
    return lambda value: setattr(number, "value", value), lambda: pointer.contents.value


@either
def in_a_value_shared_between_processes() -> Place:
    number = multiprocessing.Value("d", 1.0)
    return lambda value: setattr(number, "value", value), lambda: number.value


@either
def in_an_attribute_of_an_enumeration_member() -> Place:
    class Mode(enum.Enum):
        FAST = 1

    return lambda value: setattr(Mode.FAST, "scale", value), lambda: Mode.FAST.scale  # type: ignore[attr-defined]


@either
def in_an_attribute_of_a_text_of_ones_own() -> Place:
    class Text(str):
        scale = 1.0

    text = Text("a")
    return lambda value: setattr(text, "scale", value), lambda: text.scale


@either
def in_an_attribute_of_a_decimal_of_ones_own() -> Place:
    class Number(decimal.Decimal):
        scale = 1.0

    number = Number(1)
    return lambda value: setattr(number, "scale", value), lambda: number.scale


@either
def in_the_dict_of_an_object_that_is_replaced() -> Place:
    config = argparse.Namespace(scale=1.0)
    return lambda value: setattr(config, "__dict__", {"scale": value}), lambda: config.scale


@either
def in_the_order_of_an_ordered_dict() -> Place:
    weights = collections.OrderedDict.fromkeys([1.0, 1.25, 1.5, 0.75])
    return lambda value: weights.move_to_end(value, last=False), lambda: next(iter(weights))


@either
def in_an_attribute_of_the_loss_function_itself() -> Place:
    def function() -> float:
        return getattr(function, "scale", 3.0)

    return lambda value: setattr(function, "scale", value), function


@either
def in_the_level_of_a_logger() -> Place:
    logger = logging.getLogger("odd")
    patch(logger, "level", logging.NOTSET)
    return lambda value: logger.setLevel(int(10 * value)), lambda: 2.0 if logger.isEnabledFor(13) else 1.0


@either
def in_a_local_of_the_caller() -> Place:
    held = {"scale": 1.0}

    def write(value: float) -> None:
        held["scale"] = value

    def read() -> float:
        return float(sys._getframe(0).f_locals["held"]["scale"] if held else 1.0)

    return write, read
