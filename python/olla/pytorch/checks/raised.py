"""The exception that a function would raise, made from its source without raising it."""

from __future__ import annotations

import ast
import dis
import inspect
import linecache
import re
import textwrap
import types
from typing import Any

_FAKE = re.compile(r"FakeTensor\(\.\.\.,[^()]*size=(\([^)]*\))[^()]*\)")
_SWALLOWING = frozenset({"suppress", "raises", "assertRaises"})


class _Raised(Exception):
    """Carries, as its argument, the exception that a piece of source would have raised."""


class _Carried(ast.NodeTransformer):
    """Rewrites ``raise error`` to raise a carrier of the error, and removes expression statements, such as prints."""

    def visit_Raise(self, node: ast.Raise) -> ast.Raise:
        carrier = ast.Call(ast.Name("__olla_raised__", ast.Load()), [node.exc or ast.Constant(None)], [])
        return ast.Raise(carrier, None)

    def visit_Assert(self, node: ast.Assert) -> ast.Raise:
        error = ast.Call(ast.Name("AssertionError", ast.Load()), [node.msg] if node.msg else [], [])
        return self.visit_Raise(ast.Raise(error, None))

    def visit_Expr(self, node: ast.Expr) -> ast.Pass:
        return ast.Pass()


def raised_error(frame: types.FrameType, begin: dis.Instruction, end: dis.Instruction) -> BaseException:
    """Return the exception that a function raises, with its message as far as it is known while a step is traced.

    From the instruction ``begin`` on it does nothing but raise; ``end`` raises.
    """
    statement = _statement(frame, end)
    first, last = begin.positions and begin.positions.lineno, end.positions and end.positions.end_lineno
    pieces = [statement]
    if first is not None and last is not None and end.positions and first < (end.positions.lineno or 0):
        lines = [linecache.getline(frame.f_code.co_filename, n) for n in range(first, last + 1)]
        pieces.insert(0, textwrap.dedent("".join(lines)))
    for piece in pieces:
        if (error := _made(frame, piece)) is not None:
            return error
    return _described(frame, statement)


def _made(frame: types.FrameType, source: str) -> BaseException | None:
    """Return what a piece of a function raises when it runs among the function's variables; None if it does not."""
    space = {**frame.f_globals, **frame.f_locals, "__olla_raised__": _Raised}
    try:
        tree = ast.fix_missing_locations(_Carried().visit(ast.parse(source)))
        exec(compile(tree, frame.f_code.co_filename, "exec"), space)
    except _Raised as raised:
        return _instance(raised.args[0])
    except Exception:  # its message needs values
        pass
    return None


def _instance(value: Any) -> BaseException | None:
    if isinstance(value, type) and issubclass(value, BaseException):
        return value()
    return value if isinstance(value, BaseException) else None


def _described(frame: types.FrameType, statement: str) -> BaseException:
    """Return an exception of the type that a statement raises, with the statement for a message."""
    text = f"a check of values failed: {' '.join(statement.split())}"
    try:
        [node] = ast.parse(statement).body
        if isinstance(node, ast.Assert):
            return AssertionError(text)
        call: Any = node.exc  # type: ignore[attr-defined]
        kind = eval(ast.unparse(call.func), {**frame.f_globals, **frame.f_locals})
        error = _instance(kind(text))
    except Exception:
        error = None
    return error or RuntimeError(text)


def message_of(error: BaseException) -> str:
    """Return the message of an exception made while a step was traced: tensors in it have a shape, and no values."""
    text = error.args[0] if len(error.args) == 1 and isinstance(error.args[0], str) else str(error)
    return _FAKE.sub(r"<a tensor of shape \1>", text).replace("FakeTensor", "Tensor")


def called(frame: types.FrameType, call: dis.Instruction) -> str:
    """Return the name of the builtin function that an instruction calls; empty if it is another."""
    try:
        node = ast.parse(_segment(frame, call), mode="eval").body
    except SyntaxError:
        return ""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return ""
    name = node.func.id
    hidden = name in frame.f_locals or name in frame.f_globals or name not in frame.f_builtins
    return "" if hidden else name


def swallows(frame: types.FrameType, instruction: dis.Instruction) -> bool:
    """Whether a ``with`` statement, by the names of its contexts, keeps exceptions to itself."""
    try:
        [node] = ast.parse(_segment(frame, instruction)).body
    except (SyntaxError, ValueError):
        return False
    calls: list[Any] = [node.value] if isinstance(node, ast.Expr) else []  # as Python 3.13 places it
    if isinstance(node, ast.With | ast.AsyncWith):
        calls = [item.context_expr for item in node.items]
    names = [ast.unparse(call.func).rpartition(".")[2] for call in calls if isinstance(call, ast.Call)]
    return not _SWALLOWING.isdisjoint(names)


def _statement(frame: types.FrameType, instruction: dis.Instruction) -> str:
    """Return the statement that raises; some versions of Python place what ``assert`` raises at a part of its test."""
    source, line = _segment(frame, instruction), instruction.positions and instruction.positions.lineno
    if line is None or source.startswith(("raise", "assert")):
        return source
    try:
        lines, first = inspect.getsourcelines(frame.f_code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, TypeError):
        return source
    line -= max(first, 1) - 1  # code of a module begins with line 0
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Assert) and n.lineno <= line <= (n.end_lineno or 0)]
    return ast.unparse(found[-1]) if found else source


def _segment(frame: types.FrameType, instruction: dis.Instruction) -> str:
    """Return the source that an instruction was made of."""
    p = instruction.positions
    if p is None or p.lineno is None or p.end_lineno is None or p.col_offset is None or p.end_col_offset is None:
        return ""
    lines = [linecache.getline(frame.f_code.co_filename, n).encode() for n in range(p.lineno, p.end_lineno + 1)]
    lines[-1] = lines[-1][: p.end_col_offset]
    lines[0] = lines[0][p.col_offset :]
    return b"".join(lines).decode(errors="replace")
