"""A branch on a value is a check if one outcome only raises; what else it may be is never taken for a check.

PYTEST_DONT_REWRITE: what Python makes of ``assert`` is what is tested.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import pytest

from olla.pytorch.checks.branches import Check, find_check


class Undecided(Exception):
    """The value decides more than whether an error is raised."""


class Value:
    """Stands for a tensor: the branch that asks for its truth is looked at, and takes the outcome that goes on."""

    def __init__(self) -> None:
        self.checks: list[Check] = []
        self.undecided = self.asking = False

    def __bool__(self) -> bool:
        if self.asking:
            raise Undecided  # a message that needs the value
        self.asking = True
        check = find_check(sys._getframe(1), False, outcome.__code__)
        self.asking = False
        if check is None:
            self.undecided = True  # a function may keep the error to itself
            raise Undecided
        self.checks.append(check)
        return not check.fails_on


def outcome(function: Callable[[Value], Any]) -> list[tuple[bool, str, str]]:
    """What each branch of a function fails on, with type and message of what it raises then."""
    value = Value()
    function(value)
    if value.undecided:
        raise Undecided
    return [(c.fails_on, type(c.error).__name__, str(c.error)) for c in value.checks]


def raises(x: Value, name: str = "scale") -> None:
    if not x:
        raise ValueError(f"{name} of {type(x).__name__} is wrong")


def asserts(x: Value) -> None:
    assert x, "out of range"


def asserts_two(x: Value) -> None:
    assert x and 3 > 2 and x, "both"  # noqa: PT018


def raises_in_else(x: Value) -> int:
    if x:
        return 1
    else:
        raise KeyError("gone")


def raises_by_either(x: Value) -> None:
    if x or x:
        raise IndexError("one of them")


def raises_a_made_message(x: Value) -> None:
    for number in range(2):
        if x:
            print("stopping")
            text = f"number {number}"
            if number:
                text += ", the last"
            raise RuntimeError(text)


def stores_first(x: Value) -> None:
    good = bool(x)
    if not good:
        raise OverflowError


def asks_all(x: Value) -> None:
    assert all(v for v in (x, x)), "all of them"


def asks_any(x: Value) -> None:
    if any([x, x]):
        raise ValueError("any of them")


def inside_contexts(x: Value) -> None:
    with contextlib.nullcontext(), contextlib.ExitStack():
        try:
            raises(x)
        finally:
            len("")


def handled_for_others(x: Value) -> None:
    try:
        raises(x)
    except (TypeError, KeyError):
        return
    except ImportError:
        return


def raised_again(x: Value) -> None:
    try:
        raises(x)
    except Exception:
        len("")
        raise


def needs_the_value(x: Value) -> None:
    if x:
        raise ValueError(f"the least is {x.least:.2f}")  # type: ignore[attr-defined]


def with_a_flag(x: Value, strict: bool = True) -> int:
    if x and strict:
        raise ValueError("strict")
    return 1


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (raises, [(False, "ValueError", "scale of Value is wrong")]),
        (asserts, [(False, "AssertionError", "out of range")]),
        (asserts_two, [(False, "AssertionError", "both")] * 2),
        (raises_in_else, [(False, "KeyError", "'gone'")]),
        (raises_by_either, [(True, "IndexError", "one of them")] * 2),
        (
            raises_a_made_message,
            [(True, "RuntimeError", "number 0"), (True, "RuntimeError", "number 1, the last")],
        ),
        (stores_first, [(False, "OverflowError", "")]),
        (asks_all, [(False, "AssertionError", "all of them")] * 2),
        (asks_any, [(True, "ValueError", "any of them")] * 2),
        (inside_contexts, [(False, "ValueError", "scale of Value is wrong")]),
        (raised_again, [(False, "ValueError", "scale of Value is wrong")]),
        (with_a_flag, [(True, "ValueError", "strict")]),
    ],
)
def test_a_branch_with_one_outcome_that_only_raises_is_a_check(function: Any, expected: Any) -> None:
    assert outcome(function) == expected


def test_a_message_that_needs_the_value_is_replaced_by_its_line() -> None:
    [(fails_on, kind, message)] = outcome(needs_the_value)
    assert (fails_on, kind) == (True, "ValueError")
    assert "the least is" in message


def test_handlers_of_other_exceptions_are_passed() -> None:
    def one_type(x: Value) -> None:
        try:
            raises(x)
        except ImportError:
            return

    assert outcome(one_type) == [(False, "ValueError", "scale of Value is wrong")]


def computes(x: Value) -> int:
    return 2 if x else 1


def swallows(x: Value) -> None:
    try:
        raises(x)
    except ValueError:
        return


def swallows_everything(x: Value) -> None:
    try:
        raises(x)
    except:  # noqa: E722
        return


def suppresses(x: Value) -> None:
    with contextlib.suppress(ValueError):
        raises(x)


def swallows_in_a_loop(x: Value) -> None:
    for _ in range(2):
        try:
            raises(x)
        except Exception:
            continue


def replaces(x: Value) -> None:
    try:
        raises(x)
    except ValueError as error:
        raise TypeError from error


def raises_sometimes(x: Value) -> int:
    if x and len(sys.argv) > 1000:
        raise ValueError("never mind")
    return 1


def loops(x: Value) -> None:
    while x:
        len("")


def returns_it(x: Value) -> bool:
    return bool(x)


def converts(x: Value) -> None:
    if str(bool(x)) == "True":
        raise ValueError("not seen")


@pytest.mark.parametrize(
    "function",
    [
        computes,
        swallows,
        swallows_everything,
        suppresses,
        swallows_in_a_loop,
        replaces,
        raises_sometimes,
        loops,
        returns_it,
        converts,
        handled_for_others,
    ],
)
def test_a_branch_of_which_no_outcome_surely_leaves_with_its_error_is_no_check(function: Any) -> None:
    with pytest.raises(Undecided):
        outcome(function)


def test_builtins_of_other_meaning_are_not_taken_for_them() -> None:
    def shadowed(x: Value, all: Any = lambda values: not [bool(v) for v in values]) -> None:
        assert all([x]), "never"

    with pytest.raises(Undecided):
        outcome(shadowed)
