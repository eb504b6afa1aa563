"""A captured step in planned order as one flat Python function: what runs at every step of training."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from olla.pytorch.capture import Captured
from olla.pytorch.capture.generator import Draws
from olla.pytorch.checks.checks import CHECK, check
from olla.pytorch.memory.copies import Copies, Outline
from olla.pytorch.memory.replay import Replay
from olla.pytorch.memory.requests import Recorder, last_steps
from olla.pytorch.program.communication import CollectiveLines
from olla.pytorch.program.compact import compact, may_be_loose
from olla.pytorch.program.schedule import OpSchedule, ScheduledOp
from olla.pytorch.program.source import PythonSource
from olla.pytorch.program.swapped import Transfers
from olla.pytorch.program.variants import drawn_from, dropout_again, is_dropout, mask_of, norm_again, overwriting
from olla.pytorch.ranks.end_of_collectives import use_counts, wait_now, wait_until_released

Program = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
_Key = tuple[Any, ...]  # a node, and the tensors its value lives in
READ = torch.ops.aten._local_scalar_dense.default  # a tensor as a number
_NAME = "olla_step"  # of the generated function, as tracebacks show it


def compile_program(
    captured: Captured,
    order: Sequence[int],
    *,
    schedule: OpSchedule | None = None,
    allocator: Recorder | Replay | None = None,
    windows: Collection[int] = (),
    note: Callable[[int, torch.Tensor], None] | None = None,
    copies: Copies | None = None,
    reads_rates: bool = True,
) -> Program:
    """Write the step as a Python function and compile it: no dictionary, no dispatch of ours between two operators.

    A value is deleted right after the step in which the plan lets its tensor die.

    Args:
        captured: the step.
        order: int[num_ops], ops of the schedule in the order to run them.
        schedule: what runs; the captured ops themselves if not given.
        allocator: its ``begin`` and ``end`` are called around kernels, and ``live`` tells how many blocks are in use.
        windows: the ops to call begin and end for.
        note: called with each tensor that an op writes, and a value that lives in it.
        copies: of a schedule that swaps.
        reads_rates: whether rates are read as numbers, as they were captured; else they are used as tensors.

    Returns:
        A function of the values of ``captured.inputs`` that returns those of ``captured.outputs``. To be called without
        gradients being recorded.

    Complexity: O(nodes + edges).

    Example:
        >>> import olla
        >>> from olla.pytorch.capture.inputs import gather
        >>> model, batch = torch.nn.Linear(2, 1), torch.ones(3, 2)
        >>> captured = olla.capture(model, batch)
        >>> program = compile_program(captured, range(captured.graph.num_ops))
        >>> with torch.no_grad():
        ...     [output] = program(gather(captured.inputs, model, batch, None))
        >>> bool((output == model(batch)).all())
        True
    """
    if schedule is None:
        schedule = OpSchedule(captured.graph, [ScheduledOp(nodes) for nodes in captured.nodes])
    writer = _StepWriter(captured, schedule, order)
    writer.source.constants |= {"note": note, "compact": compact}
    writer.source.constants |= {f.__name__: f for f in (use_counts, wait_now, wait_until_released)}
    writer.source.constants |= {name: getattr(allocator, name, None) for name in ("begin", "end", "live")}
    if copies is not None:
        writer.source.constants |= {"out": copies.out, "back": copies.back, "wait": copies.wait, "outline": Outline.of}
    writer.write_inputs()
    writer.write_prologue(reads_rates)
    for step, op in enumerate(order):
        writer.write_op(int(op), int(op) in windows, note is not None)
        writer.delete(writer.freed[step])
    writer.write_return()
    return writer.compile()


class _StepWriter:
    """The lines of the function, and the operators and constants they name.

    A value is identified by its node and the tensors it lives in: a node whose op is recomputed has several values.
    """

    def __init__(self, captured: Captured, schedule: OpSchedule, order: Sequence[int]) -> None:
        self.captured = captured
        self.schedule = schedule
        self.lines = [f"def {_NAME}(values):"]
        self.source = PythonSource(lambda node: self._names[self._key(node)])
        self._names: dict[_Key, str] = {}
        self._in_tensor: dict[int, list[_Key]] = {}  # values that live in one tensor alone
        self._outlines: dict[int, list[tuple[fx.Node, str]]] = {}  # swap -> values that are in host memory
        self._collectives = CollectiveLines()
        self._place: Mapping[int, int] | None = None  # of the op that is written
        self._last: list[int] = last_steps(schedule.graph, order).tolist()  # -1: beyond the step
        self.freed: list[list[_Key]] = [[] for _ in order]  # the values that die in each step of the order
        self._lasts = [kind != "temporary" for kind in captured.graph.tensor_kinds]  # beyond the step

    def write_inputs(self) -> None:
        module, inputs = self.captured.module, []
        for node in module.graph.nodes:
            if node.op == "placeholder":
                inputs.append(f"v{len(self._names)}")
                self._names[self._key(node)] = inputs[-1]
            elif node.op == "get_attr":
                self._names[self._key(node)] = self.source.constant(attrgetter(str(node.target))(module))
        self._line(f"[{', '.join(inputs)}] = values")

    def write_prologue(self, reads_rates: bool) -> None:
        module = self.captured.module
        inputs = zip(self.captured.inputs, module.graph.find_nodes(op="placeholder"), strict=True)
        rates = set() if reads_rates else {node for entry, node in inputs if entry.kind == "rate"}
        for node in self.captured.prologue:
            if node.target is READ and node.args[0] in rates:
                self._write(node, _as_it_is, node.args, {})
            else:
                self.write_all([node])

    def write_op(self, op: int, window: bool, note: bool) -> None:
        call = self.schedule.calls[op]
        if (transfers := self.schedule.transfers) is not None:
            for swap in transfers.starts.get(op, ()):
                living = self._living(transfers.tensor[swap])
                self._line(f"out({swap}, {self._names[living[0]]})")
            for swap in transfers.waits.get(op, ()):
                self._line(f"wait({swap})")
            if not call.nodes:
                self._write_transfer(op, transfers, window, note)
                return
        kernel, *followers = call.nodes
        self._place = call.place
        if call.draw >= 0:
            action = "rewind" if call.replay else "save"
            source = self.source.text(drawn_from(self.captured.module, kernel))
            self._line(f"draws.{action}({call.draw}, {source})")
        for line in self._collectives.before(op, kernel, self._alive):
            self._line(line)
        if window:
            self._line(f"begin({op})")
        self._write_kernel(call)
        if window:
            self._line("end()")
        if call.replay:
            self._line("draws.resume()")
        for line in self._collectives.behind(kernel, self._alive):
            self._line(line)
        self.write_all(followers)
        if note:
            self._note(op, call)
        if isinstance(kernel.meta.get("val"), tuple | list) and (
            call.again or all(user in followers for user in kernel.users)
        ):
            self.delete([self._key(kernel)])  # it would keep all its tensors alive as long as the last of them

    def _write_transfer(self, op: int, transfers: Transfers, window: bool, note: bool) -> None:
        """Write a swap-out: the end of its copy; or a swap-in: new memory, and the tensors in it."""
        if (swap := transfers.outs.get(op, -1)) >= 0:
            self._line(f"wait({swap})")
            self._outlines[swap] = [(key[0], self._names[key]) for key in self._living(transfers.tensor[swap])]
            for _, name in self._outlines[swap]:
                self._line(f"o{swap}_{name} = outline({name})")
            return
        swap, tensor = transfers.backs[op], int(self.schedule.graph.writes.of(op)[0])
        if window:
            self._line(f"begin({op})")
        self._line(f"m{swap} = back({swap})")
        if window:
            self._line("end()")
        if note:
            self._line(f"note({tensor}, m{swap})")
        outlines = self._outlines.pop(swap)
        for node, name in outlines:
            key = (node, tensor)
            self._names[key] = f"v{tensor}_{node.name}"
            self._in_tensor.setdefault(tensor, []).append(key)
            self._line(f"{self._names[key]} = o{swap}_{name}.within(m{swap})")
            if self._last[tensor] >= 0:
                self.freed[self._last[tensor]].append(key)
        self._line(f"del {', '.join([f'm{swap}', *(f'o{swap}_{name}' for _, name in outlines)])}")

    def _living(self, tensor: int) -> list[_Key]:
        """Return the values that live in a tensor: only tensors do so beyond their op."""
        keys = self._in_tensor.get(tensor, ())
        return [key for key in keys if key in self._names and isinstance(key[0].meta.get("val"), torch.Tensor)]

    def _note(self, op: int, call: ScheduledOp) -> None:
        written = set(self.schedule.graph.writes.of(op).tolist())
        for node in call.nodes:
            lives_in = self._tensors(node)
            single = len(lives_in) == 1 and isinstance(node.meta.get("val"), torch.Tensor)
            if single and self._key(node) in self._names and lives_in[0] in written:
                written.remove(lives_in[0])
                self._line(f"note({lives_in[0]}, {self._names[self._key(node)]})")

    def write_all(self, nodes: Sequence[fx.Node]) -> None:
        for node in nodes:
            self._write(node, _kernel(node.target), node.args, node.kwargs)

    def _write_kernel(self, call: ScheduledOp) -> None:
        kernel = call.nodes[0]
        if call.over >= 0:
            self._write_over(kernel, call.over)
        elif call.again and is_dropout(kernel):
            self._write(kernel, dropout_again, (kernel.args[0], mask_of(kernel), kernel.args[1]), {})
        elif call.again:
            self._write(kernel, _kernel(kernel.target), *norm_again(kernel))
        else:
            self.write_all([kernel])
        if call.over < 0 and may_be_loose(kernel) and self._key(kernel) in self._names:
            name = self._names[self._key(kernel)]
            self._line(f"{name} = compact({name})")

    def _write_over(self, kernel: fx.Node, over: int) -> None:
        """Write an op whose result takes over the memory of the argument that lives in a tensor."""
        taken = next(n for n in kernel.all_input_nodes if over in self.captured.tensors[n])
        variant = overwriting(kernel.target, kernel.meta["val"].device.type)
        assert variant is not None
        result = {variant.keyword: taken} if variant.keyword else {}
        self._write(kernel, _kernel(variant.target), kernel.args, {**kernel.kwargs, **result})

    def delete(self, keys: Sequence[_Key]) -> None:
        names = [self._names.pop(key) for key in keys if key in self._names]
        if names:
            self._line(f"del {', '.join(names)}")

    def write_return(self) -> None:
        output: Any = self.captured.module.graph.output_node()
        self._place = self.schedule.outputs
        self._line(f"return {self.source.text(list(output.args[0]))}")

    def compile(self) -> Program:
        code = compile("\n".join(self.lines), f"<{self.captured.graph.name}>", "exec")
        draws = self.source.constants["draws"] = Draws() if any(call.replay for call in self.schedule.calls) else None
        exec(code, self.source.constants)
        program: Program = self.source.constants[_NAME]
        return draws.guarded(program) if draws else program

    def _line(self, text: str) -> None:
        self.lines.append(f"  {text}")

    def _tensors(self, node: fx.Node) -> Sequence[int]:
        """Return the tensors of the running graph that hold a node's value, without those that outlive the step."""
        tensors = [t for t in self.captured.tensors[node] if not self._lasts[t]]
        return tensors if self._place is None else [self._place[t] for t in tensors]

    def _key(self, node: fx.Node) -> _Key:
        return (node, *self._tensors(node))

    def _write(self, node: fx.Node, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Write a call whose result is the value of a node."""
        arguments = [self.source.text(a) for a in args]
        named = {k: self.source.text(a) for k, a in kwargs.items()}
        arguments += [f"{k}={text}" for k, text in named.items() if not keyword.iskeyword(k)]
        arguments += [f"**{{{k!r}: {text}}}" for k, text in named.items() if keyword.iskeyword(k)]
        call = f"{self.source.constant(target)}({', '.join(arguments)})"
        if node.users:
            tensors, key = self._tensors(node), self._key(node)
            copy = "" if self._place is None else "_".join(map(str, tensors))
            self._names[key] = f"v{copy}_{node.name}"
            if len(tensors) == 1 and self.schedule.transfers is not None:
                self._in_tensor.setdefault(tensors[0], []).append(key)
            call = f"{self._names[key]} = {call}"
            if ends := [self._last[t] for t in tensors if self._last[t] >= 0]:
                self.freed[min(ends)].append(key)
        self._line(call)

    def _alive(self, node: fx.Node) -> str:
        """Return the name of a tensor of this step that is there; empty where there is none."""
        return self._names.get(self._key(node), "") if self._tensors(node) else ""


def _as_it_is(value: torch.Tensor) -> torch.Tensor:
    return value


def _kernel(target: Any) -> Any:
    """Return what to call: a torch operator without the Python method around it, a check without the operator."""
    if target is CHECK:
        return check
    return target._op if isinstance(target, torch._ops.OpOverload) else target
