"""A captured step in planned order as one flat Python function: what runs at every step of training."""

from __future__ import annotations

import keyword
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from olla.pytorch.capture import Captured
from olla.pytorch.run import attribute, freed_after

Program = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
Window = Callable[[int], None]
Note = Callable[[int, torch.Tensor], None]
_NAME = "olla_step"  # of the generated function, as tracebacks show it
_LITERALS = (bool, int, str, type(None))


def compile_program(
    captured: Captured,
    order: Sequence[int],
    *,
    begin: Window | None = None,
    end: Callable[[], None] | None = None,
    windows: Collection[int] = (),
    note: Note | None = None,
) -> Program:
    """Write the step as a Python function and compile it: no dictionary, no dispatch of ours between two operators.

    A value is deleted right after the step in which the plan lets its tensor die.

    Args:
        captured: the step.
        order: int[num_ops], ops in the order to run them.
        begin: called with the op before its kernel.
        end: called after its kernel.
        windows: the ops to call begin and end for.
        note: called with each tensor that an op writes, and a value that lives in it.

    Returns:
        A function of the values of ``captured.inputs`` that returns those of ``captured.outputs``. To be called without
        gradients being recorded.

    Complexity: O(nodes + edges).

    Example:
        >>> import olla
        >>> from olla.pytorch.inputs import gather
        >>> model, batch = torch.nn.Linear(2, 1), torch.ones(3, 2)
        >>> captured = olla.capture(model, batch)
        >>> program = compile_program(captured, range(captured.graph.num_ops))
        >>> with torch.no_grad():
        ...     [output] = program(gather(captured.inputs, model, batch, None))
        >>> bool((output == model(batch)).all())
        True
    """
    writer = _Writer(captured)
    writer.constants |= {"begin": begin, "end": end, "note": note}
    writer.write_inputs()
    writer.write_all(captured.prologue)
    freed = freed_after(captured, order)
    opened = frozenset(windows)
    for step, op in enumerate(order):
        writer.write_op(int(op), int(op) in opened, note is not None)
        writer.delete(freed[step])
    writer.write_return()
    return writer.compile()


class _Writer:
    """The lines of the function, and the operators and constants they name."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.lines = [f"def {_NAME}(values):"]
        self.constants: dict[str, Any] = {}
        self._names: dict[fx.Node, str] = {}
        self._known: dict[Any, str] = {}

    def write_inputs(self) -> None:
        inputs = []
        for node in self.captured.module.graph.nodes:
            if node.op == "placeholder":
                self._names[node] = f"v{len(self._names)}"
                inputs.append(self._names[node])
            elif node.op == "get_attr":
                self._names[node] = self._constant(attribute(self.captured.module, str(node.target)))
        self._line(f"[{', '.join(inputs)}] = values")

    def write_op(self, op: int, window: bool, note: bool) -> None:
        kernel, *followers = self.captured.nodes[op]
        if window:
            self._line(f"begin({op})")
        self._write(kernel)
        if window:
            self._line("end()")
        self.write_all(followers)
        if note:
            self._note(op)
        if isinstance(kernel.meta.get("val"), tuple | list) and all(user in followers for user in kernel.users):
            self.delete([kernel])  # it would keep all its tensors alive as long as the last of them

    def _note(self, op: int) -> None:
        written = set(self.captured.graph.writes.of(op).tolist())
        for node in self.captured.nodes[op]:
            lives_in = self.captured.tensors[node]
            single = len(lives_in) == 1 and isinstance(node.meta.get("val"), torch.Tensor)
            if single and node in self._names and lives_in[0] in written:
                written.remove(lives_in[0])
                self._line(f"note({lives_in[0]}, {self._names[node]})")

    def write_all(self, nodes: Sequence[fx.Node]) -> None:
        for node in nodes:
            self._write(node)

    def delete(self, nodes: Sequence[fx.Node]) -> None:
        names = [self._names.pop(n) for n in nodes if n in self._names]
        if names:
            self._line(f"del {', '.join(names)}")

    def write_return(self) -> None:
        output = next(n for n in reversed(self.captured.module.graph.nodes) if n.op == "output")
        self._line(f"return {self._text(list(output.args[0]))}")

    def compile(self) -> Program:
        code = compile("\n".join(self.lines), f"<{self.captured.graph.name}>", "exec")
        exec(code, self.constants)
        program: Program = self.constants[_NAME]
        return program

    def _line(self, text: str) -> None:
        self.lines.append(f"  {text}")

    def _write(self, node: fx.Node) -> None:
        arguments = [self._text(a) for a in node.args]
        named = {k: self._text(a) for k, a in node.kwargs.items()}
        arguments += [f"{k}={text}" for k, text in named.items() if not keyword.iskeyword(k)]
        arguments += [f"**{{{k!r}: {text}}}" for k, text in named.items() if keyword.iskeyword(k)]
        call = f"{self._constant(_kernel(node.target))}({', '.join(arguments)})"
        if node.users:
            self._names[node] = f"v_{node.name}"
            call = f"{self._names[node]} = {call}"
        self._line(call)

    def _text(self, value: Any) -> str:
        """Return an argument of an operator as Python source."""
        if isinstance(value, fx.Node):
            return self._names[value]
        if type(value) in _LITERALS or (type(value) is float and math.isfinite(value)):
            return repr(value)
        if type(value) is tuple or isinstance(value, list):  # an fx list is a kind of list
            items = "".join(f"{self._text(item)}, " for item in value)
            return f"({items})" if type(value) is tuple else f"[{items}]"
        if isinstance(value, slice):
            return f"slice({', '.join(self._text(p) for p in (value.start, value.stop, value.step))})"
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        """Return the name the function knows a value by; the value stays alive with it, and so does its id."""
        name = self._known.get(id(value))
        if name is None:
            name = self._known[id(value)] = f"c{len(self._known)}"
            self.constants[name] = value
        return name


def _kernel(target: Any) -> Any:
    """Return what to call: a torch operator without the Python method around it."""
    return target._op if isinstance(target, torch._ops.OpOverload) else target
