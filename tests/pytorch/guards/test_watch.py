"""What the core compares at every call: containers by the identity of what they hold, however they are changed."""

from __future__ import annotations

import collections
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from olla._core import first_changed, first_other, same_kinds, same_objects
from olla.pytorch.guards.guard import counts_changes
from olla.pytorch.guards.values import MISSING
from tests.support.pytorch.steps import torch

pytestmark = pytest.mark.torch

ONE, TWO = object(), object()


def ids(*items: Any) -> Any:
    return np.array([id(item) for item in items], dtype=np.uint64)


class Watch:
    """Dicts and lists with what they hold now, counted where this Python counts, or not."""

    def __init__(self, dicts: list[dict[Any, Any]], lists: list[list[Any]], is_counted: bool) -> None:
        self.containers = [*dicts, *lists]
        self.expected = [[part for item in dict.items(d) for part in item] for d in dicts] + [list(x) for x in lists]
        self.ends = np.cumsum([len(e) for e in self.expected], dtype=np.uint32)
        self.versions = np.zeros(len(dicts), dtype=np.uint64) if is_counted and counts_changes() else None

    def __call__(self, start: int = 0) -> int:
        held = ids(*(item for expected in self.expected for item in expected))
        return first_changed(self.containers, len(self.containers), self.ends, held, start, self.versions)


class Thing:
    """An object with attributes."""

    scale = 1.0

    def __init__(self) -> None:
        self.a, self.b = ONE, TWO


def many_times(thing: Thing, value: object) -> None:
    """Set an attribute in code that Python specialises after some rounds."""
    for _ in range(64):
        thing.a = ONE
    thing.a = value


def set_class_attribute(namespace: dict[str, Any]) -> None:
    Thing.scale = 2.0


def delete_attribute(namespace: dict[str, Any]) -> None:
    del THING.b


THING = Thing()
CHANGES: list[Callable[[dict[Any, Any]], Any]] = [
    lambda d: d.__setitem__("a", TWO), lambda d: d.__setitem__("c", ONE), lambda d: d.__delitem__("a"), dict.clear,
    lambda d: d.update(a=TWO), lambda d: d.setdefault("c", ONE), lambda d: d.pop("b"), lambda d: d.popitem(),
    lambda d: d.__ior__({"a": TWO}), lambda d: d.update({"a": d.pop("a")}),
]  # fmt: skip
ATTRIBUTE_CHANGES: list[Callable[[dict[Any, Any]], Any]] = [
    lambda d: setattr(THING, "a", TWO), lambda d: setattr(THING, "c", ONE), delete_attribute,
    lambda d: many_times(THING, TWO), lambda d: object.__setattr__(THING, "a", TWO),
]  # fmt: skip
KINDS: dict[str, Callable[[], dict[Any, Any]]] = {
    "dict": lambda: {"a": ONE, "b": TWO},
    "ordered": lambda: collections.OrderedDict(a=ONE, b=TWO),
    "default": lambda: collections.defaultdict(list, {"a": ONE, "b": TWO}),
    "attributes": lambda: vars(THING),
}


def class_namespace() -> dict[str, Any]:
    return next(d for d in gc.get_referents(vars(Thing)) if isinstance(d, dict))


@pytest.mark.parametrize("is_counted", [True, False])
def test_every_way_to_change_a_dict_is_seen(is_counted: bool) -> None:
    global THING
    cases = [(KINDS[kind], change) for kind in KINDS for change in CHANGES]
    cases += [(KINDS["attributes"], change) for change in ATTRIBUTE_CHANGES]
    cases += [(class_namespace, set_class_attribute)]
    for make, change in cases:
        THING, Thing.scale = Thing(), 1.0
        container = make()
        watch = Watch([{}, container, {}], [], is_counted)
        assert (watch(), watch()) == (-1, -1)
        change(container)
        assert (watch(), watch(), watch(2)) == (1, 1, -1)


def test_lists_are_compared_item_by_item() -> None:
    items = [ONE, TWO]
    held = ids(ONE, TWO, "a", ONE)
    containers: list[Any] = [items, {"a": ONE}]
    ends = np.array([2, 4], dtype=np.uint32)
    with pytest.raises(SystemError):  # the first one is no dict
        first_changed(containers, 2, ends, held, 0, None)
    containers.reverse()
    held = ids("a", ONE, ONE, TWO)
    assert first_changed(containers, 1, ends, held, 0, None) == -1
    items[0] = TWO
    assert first_changed(containers, 1, ends, held, 0, None) == 1
    items.append(ONE)
    assert first_changed(containers, 1, ends, held, 1, None) == 1
    with pytest.raises(ValueError, match="without its items"):
        first_changed(containers, 1, ends[:1], held, 0, None)
    with pytest.raises(ValueError, match="more items than ids"):
        first_changed(containers, 1, ends, held[:3], 0, None)


def test_of_some_dicts_a_few_keys_count() -> None:
    table = {"a": ONE, "b": TWO}
    expected = [{"a": ONE, "c": MISSING}]
    assert first_other([table], expected, MISSING, 0) == -1
    table["b"] = ONE
    assert first_other([table], expected, MISSING, 0) == -1
    table["c"] = ONE
    assert first_other([table], expected, MISSING, 0) == 0
    assert first_other([table], expected, MISSING, 1) == -1
    with pytest.raises(ValueError, match="without its keys"):
        first_other([table], [], MISSING, 0)


def test_objects_of_a_list_are_compared_where_an_id_is_given() -> None:
    held = ids(ONE, TWO)
    assert same_objects([ONE, TWO], held)
    assert not same_objects([TWO, TWO], held)
    assert not same_objects([ONE], held)
    held[0] = 0
    assert same_objects([TWO, TWO], held)


def test_another_class_or_another_dict_of_attributes_is_seen() -> None:
    class Other(Thing):
        pass

    thing, size = Thing(), torch.Size([1])
    types, dicts = (Thing, torch.Size), (vars(thing), None)
    assert same_kinds([thing, size], types, dicts)
    thing.__class__ = Other
    assert not same_kinds([thing, size], types, dicts)
    thing.__class__ = Thing
    thing.__dict__ = dict(vars(thing))
    assert not same_kinds([thing, size], types, dicts)
    with pytest.raises(ValueError, match="one type and one dict for each"):
        same_kinds([thing], types, dicts)
