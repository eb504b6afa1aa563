"""Branches on tensor values that are checks: one outcome does nothing but raise.

Consequences of an outcome are read from the bytecode of the function that asks for it, path by path, and from the
exception handlers of its callers. Where that is inconclusive, the value is taken to decide what is computed.
"""

from __future__ import annotations

import dis
import functools
import itertools
import traceback
import types
from typing import Any, NamedTuple

from olla.pytorch.checks.raised import called, raised_error, swallows

_UNKNOWN: Any = type("_Unknown", (), {"__repr__": lambda _: "?"})()
_PLAIN = (bool, int, str, type(None), type, types.ModuleType, tuple)  # values that a path may be decided by
_NOTHING = {"NOP", "CACHE", "EXTENDED_ARG", "RESUME", "NOT_TAKEN", "TO_BOOL"}  # leave the stack as it is
_TESTS = ("POP_JUMP", "JUMP_IF", "UNARY_NOT", "TO_BOOL")  # take the truth of what is on top of the stack
_LEAVES = ("RETURN", "YIELD")
_MOST_STATES = 2000

_Stack = tuple[Any, ...]  # the top is last; what is below its end is unknown


class Check(NamedTuple):
    """A branch of which one outcome only raises."""

    fails_on: bool  # that outcome
    error: BaseException  # what it raises


class _State(NamedTuple):
    """A point of a function: the next instruction, and what is known of the stack and of plain local variables."""

    index: int  # type: ignore[assignment]  # hides tuple.index
    stack: _Stack
    names: frozenset[tuple[str, Any]]


class _Code:
    """The instructions of a function, and who handles what they raise."""

    def __init__(self, code: types.CodeType) -> None:
        self.instructions = list(dis.get_instructions(code))
        self.index_of = {i.offset: n for n, i in enumerate(self.instructions)}
        self._entries = list(dis.Bytecode(code).exception_entries)  # type: ignore[attr-defined]

    def at(self, offset: int) -> int:
        """Return the instruction that runs at an offset, which may be that of one of its caches."""
        while offset not in self.index_of:
            offset -= 2
        return self.index_of[offset]

    def handler(self, index: int) -> int | None:
        """Return where an exception of an instruction goes; None: out of the function."""
        offset = self.instructions[index].offset
        # The innermost entry is the deepest; entries do not overlap, but their order is not promised.
        found = [e for e in self._entries if e.start <= offset < e.end]
        return self.index_of[max(found, key=lambda e: int(e.depth)).target] if found else None


_code = functools.lru_cache(maxsize=4096)(_Code)


def find_check(frame: types.FrameType, returned: bool, last: types.CodeType) -> Check | None:
    """Return the check that a function makes where it asks for the truth of a value, or None if it decides more.

    Args:
        frame: of the function.
        returned: whether the truth is the result of the call it makes, and not what an operator of Python asks for.
        last: code of the function at which the walk up the callers ends: what is raised there ends the step.

    Complexity: O(instructions of the function and of the handlers around it).
    """
    found = [(outcome, walk) for outcome in (True, False) if (walk := _only_raises(frame, outcome, returned))]
    if len(found) != 1:
        return None
    outcome, walk = found[0]
    error = raised_error(frame, walk.begin, walk.raises[-1])
    kind = type(error) if len(walk.raises) == 1 else None
    callers = itertools.takewhile(lambda f: f.f_code is not last, (f for f, _ in traceback.walk_stack(frame)))
    return Check(outcome, error) if all(_passes(f, kind, f is frame and walk) for f in callers) else None


class _Raising(NamedTuple):
    """The paths from an outcome: the instruction they begin with, and those that raise, all in one function."""

    begin: dis.Instruction
    raises: list[dis.Instruction]


def _only_raises(frame: types.FrameType, outcome: bool, returned: bool) -> _Raising | None:
    """Return the paths from an outcome if each of them raises."""
    walk = _Walk(frame, None)
    if (begin := _after(frame, outcome, returned)) is None or not (ends := walk.ends(begin, follow=False)):
        return None
    instructions = walk.code.instructions
    return _Raising(instructions[walk.first_line], [instructions[i] for i in sorted(ends)])


def _after(frame: types.FrameType, outcome: bool, returned: bool) -> _State | None:
    """Return the point of a function at which the outcome is known; None if it tells nothing there."""
    code = _code(frame.f_code)
    index = code.at(frame.f_lasti)
    names = frozenset((k, v) for k, v in frame.f_locals.items() if _is_plain(v))
    name = code.instructions[index].opname
    if name.startswith(_TESTS):
        return _State(index, (outcome,), names)
    if name == "CONTAINS_OP":
        return _State(index + 1, (outcome is not bool(code.instructions[index].arg),), names)
    is_call = name in ("PRECALL", "CALL", "CALL_FUNCTION_EX", "CALL_KW")
    # What a function that asks for the truth returns then, where that is sure: any() goes on after a value that is not.
    sure = ("bool", "any" if outcome else "all")
    if not is_call or not (returned or called(frame, code.instructions[index]) in sure):
        return None
    return _State(index + 2 if name == "PRECALL" else index + 1, (outcome,), names)


def _passes(frame: types.FrameType, kind: type | None, raising: Any) -> bool:
    """Whether an exception raised in a function, or in one that it calls, leaves the function unchanged."""
    walk = _Walk(frame, kind)
    points = [walk.code.index_of[i.offset] for i in raising.raises] if raising else [walk.code.at(frame.f_lasti)]
    names = frozenset[tuple[str, Any]]()
    handlers = {h for p in points if (h := walk.code.handler(p)) is not None}
    return all(walk.ends(_State(handler, (), names), follow=True) for handler in handlers)


class _Walk:
    """All paths from a point of a function; kind: of the exception that its handlers see, None if that is not known."""

    def __init__(self, frame: types.FrameType, kind: type | None) -> None:
        self.code = _code(frame.f_code)
        self.first_line = 0  # the instruction after the branches that the outcome settles
        self._frame = frame
        self._kind = kind

    def ends(self, begin: _State, follow: bool) -> set[int] | None:
        """Return the instructions at which the paths raise; None if one of them does not.

        Args:
            begin: where they begin.
            follow: whether handlers in the function see the exception, which then must not be replaced by another.
        """
        todo, seen, found = [begin], set[_State](), set[int]()
        settled = False
        while todo:
            state = todo.pop()
            if state in seen:
                continue
            seen.add(state)
            instruction = self.code.instructions[state.index]
            name = instruction.opname
            if name.startswith(("RAISE_VARARGS", "RERAISE")):
                if follow and name == "RAISE_VARARGS" and instruction.arg:
                    return None  # another exception
                handler = self.code.handler(state.index) if follow else None
                if handler is None:
                    found.add(state.index)
                else:
                    todo.append(_State(handler, (), state.names))
                continue
            if name.startswith(_LEAVES) or len(seen) > _MOST_STATES:
                return None
            todo += self._next(state, instruction)
            if not settled and not name.startswith(_TESTS) and name not in _NOTHING:
                self.first_line, settled = state.index, True
        return found

    def _next(self, state: _State, instruction: dis.Instruction) -> list[_State]:
        """Return the points that may come after one."""
        index, stack, names = state
        name = instruction.opname
        top, below = (stack[-1], stack[:-1]) if stack else (_UNKNOWN, ())
        if name in _NOTHING:
            return [_State(index + 1, stack, names)]
        if name.startswith("POP_JUMP") or name.startswith("JUMP_IF"):
            jumps = _jumps(name, top)
            kept = stack if name.startswith("JUMP_IF") else below
            target = _State(self.code.index_of[int(instruction.argval)], kept, names)
            through = _State(index + 1, below, names)
            return [target] if jumps is True else [through] if jumps is False else [target, through]
        if name.startswith("JUMP"):
            return [_State(self.code.index_of[int(instruction.argval)], stack, names)]
        if name in ("FOR_ITER", "SEND"):
            return [_State(index + 1, (), names), _State(self.code.index_of[int(instruction.argval)], (), names)]
        if "STORE_FAST" in name or "DELETE_FAST" in name:
            gone = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
            names = frozenset(item for item in names if item[0] not in gone)
            if name == "STORE_FAST" and _is_plain(top):
                names |= {(instruction.argval, top)}
        return [_State(index + 1, self._stack_after(stack, names, instruction), names)]

    def _stack_after(self, stack: _Stack, names: frozenset[tuple[str, Any]], instruction: dis.Instruction) -> _Stack:
        name, arg = instruction.opname, instruction.arg
        if name == "COPY" and arg is not None:
            return (*stack, stack[-arg] if arg <= len(stack) else _UNKNOWN)
        if name == "SWAP" and arg is not None:
            full = [*[_UNKNOWN] * (arg - len(stack)), *stack]
            full[-1], full[-arg] = full[-arg], full[-1]
            return tuple(full)
        effect = dis.stack_effect(
            instruction.opcode, arg if instruction.opcode >= dis.HAVE_ARGUMENT else None, jump=False
        )
        if name in ("POP_TOP", "STORE_FAST"):
            return stack[:-1]
        kept = stack[:effect] if effect < 0 else (*stack, *[_UNKNOWN] * effect)
        return (*kept[:-1], self._value(stack, names, instruction) if abs(effect) < 2 else _UNKNOWN)

    def _value(self, stack: _Stack, names: frozenset[tuple[str, Any]], instruction: dis.Instruction) -> Any:
        """Return what an instruction leaves on top of the stack, where that is plain and sure."""
        name, top = instruction.opname, stack[-1] if stack else _UNKNOWN
        value: Any = _UNKNOWN
        if name == "UNARY_NOT" and isinstance(top, _TRUTH):
            value = not top
        elif name.startswith("LOAD_FAST"):
            value = dict(names).get(instruction.argval, _UNKNOWN)
        elif name.startswith("LOAD_CONST"):
            value = instruction.argval
        elif name in ("LOAD_GLOBAL", "LOAD_NAME"):
            builtin = self._frame.f_builtins.get(instruction.argval, _UNKNOWN)
            value = self._frame.f_globals.get(instruction.argval, builtin)
        elif name == "LOAD_ATTR" and isinstance(top, types.ModuleType):
            value = vars(top).get(instruction.argval, _UNKNOWN)
        elif name == "WITH_EXCEPT_START":
            value = _UNKNOWN if swallows(self._frame, instruction) else False
        elif name == "CHECK_EXC_MATCH" and self._kind is not None and isinstance(top, type):
            value = issubclass(self._kind, top)
        return value if _is_plain(value) else _UNKNOWN


_TRUTH = (bool, int, str, type(None))


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(item, type) for item in value)
    return isinstance(value, _PLAIN) and value is not _UNKNOWN


def _jumps(name: str, top: Any) -> bool | None:
    """Return whether a conditional jump is taken with a value on top of the stack; None if that is not known."""
    if name.endswith("NONE"):
        return None if top is _UNKNOWN else (top is None) is not name.endswith("NOT_NONE")
    return bool(top) is ("IF_TRUE" in name) if isinstance(top, _TRUTH) else None
