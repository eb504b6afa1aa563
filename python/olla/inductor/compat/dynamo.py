"""Names of torch that planned graphs on torch's own kernels need: of Dynamo, and of what AOTAutograd makes."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from olla.inductor.compat import compat

has_global_hooks: Any = compat.private("torch.nn.modules.module", "_has_any_global_hook")
config: Any = compat.private("torch._dynamo", "config")
skip_frame: Any = compat.private("torch._dynamo.exc", "SkipFrame")  # Dynamo runs the Python it has captured as it is
restarts: Any = compat.private("torch._dynamo.exc", "TensorifyScalarRestartAnalysis")  # no failure: Dynamo begins again
graph_compile: Any = compat.private("torch._functorch._aot_autograd", "graph_compile")
_CONTEXT = re.compile(r"Developer debug context: (.+)")  # of what Dynamo says that it cannot follow

# Of these torch has versions in Python, which AOTAutograd takes even where nothing is to be decomposed.
_WRITTEN_IN_PYTHON = (
    "upsample_",
    "_upsample_",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "hardshrink",
    "softshrink",
)


def compiled_function(node: Any) -> Any:
    """Return AOTAutograd's node in the graph of autograd, from one a view or two behind it, if there is one."""
    for _ in range(3):
        if node is None or hasattr(getattr(type(node), "_forward_cls", None), "compiled_fw"):
            return node
        node = next((before for before, _ in node.next_functions), None)
    return None


def differentiate(node_class: Any, double_backward: Callable[..., Any]) -> None:
    """Have backward of a compiled function that is to be differentiated itself call ours, where its graph allows that.

    Args:
        node_class: of what `compiled_function` returned.
        double_backward: is given the node, gradients of results and the positions of these; it returns gradients of
            inputs, or None where torch's own way, which raises an error, is to be taken.
    """
    function = node_class._forward_cls
    before = getattr(function, "_double_backward", None)
    if before is None or getattr(function, "olla_second", False):
        return
    kinds = compat.private("torch._functorch._aot_autograd.schemas", "OutputType")
    own = (kinds.non_alias, kinds.unsafe_view_alias, kinds.custom_function_view)
    outputs = function.metadata.output_info
    # torch 2.11 has one attribute for both.
    has_gradient = [getattr(o, "requires_grad_for_backward", o.requires_grad) for o in outputs]
    results = [i for i, o in enumerate(outputs) if o.output_type in own and has_gradient[i]]
    plain = not function.metadata.num_intermediate_bases and not any(
        given.mutates_data and given.requires_grad for given in function.metadata.input_info
    )

    def called(ctx: Any, run: Any, args: list[Any]) -> Any:
        tangents = args[len(args) - len(results) :]
        found = double_backward(ctx, tangents, results) if plain else None
        return before(ctx, run, args) if found is None else found

    function._double_backward, function.olla_second = staticmethod(called), True


def settings(values: dict[str, Any]) -> Callable[[], Callable[[], None]]:
    """Return a function that gives Dynamo settings, and returns one that takes them back; a context takes ten times as
    long."""
    change: Callable[[], Callable[[], None]] = config._make_closure_patcher(**values)
    return change


def frame() -> tuple[types.CodeType, dict[str, Any]]:
    """Return the code that Dynamo captures just now, and what ``L`` and ``G`` stand for in the names of its guards."""
    output = compat.private("torch._dynamo.symbolic_convert", "InstructionTranslator").current_tx().output
    return output.root_tx.f_code, {"L": output.local_scope, "G": output.global_scope}


@contextlib.contextmanager
def native_kernels() -> Iterator[None]:
    """Make AOTAutograd trace the operators that eager training runs, where torch also has Python versions of them.

    The Python versions round differently, and save tensors that the operators do not.
    """
    keys = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
    ours: dict[Any, dict[Any, Callable[..., Any]]] = {
        torch.ops.aten.dropout.default: dict.fromkeys(keys, _dropout),
        torch.ops.aten.bernoulli_.float: {keys[0]: _bernoulli},
        torch.ops.aten.gru_cell.default: {keys[1]: _gru_cell},
    }
    before = {}
    for op in [*_written_in_python(), *ours]:
        before[op] = {key: op.py_kernels.pop(key) for key in keys if key in op.py_kernels}
        op.py_kernels.update(ours.get(op, {}))
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, found in before.items():
            for key in ours.get(op, {}):
                del op.py_kernels[key]
            op.py_kernels.update(found)
            op._dispatch_cache.clear()


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Drop as eager training does: by an operator that keeps a mask, but for half precision on a CPU.

    There it multiplies by numbers that are rounded to that precision; in full precision the two are the same.
    """
    if x.device.type == "cpu" and x.dtype in (torch.float16, torch.bfloat16):
        key = torch._C.DispatchKey.CompositeImplicitAutograd
        return torch.ops.aten.dropout.default._op_dk(key, x, p, train)  # type: ignore[no-any-return]
    return torch.native_dropout(x, p, train)[0] if train and p else x.clone()


def _bernoulli(x: torch.Tensor, p: float = 0.5, generator: torch.Generator | None = None) -> torch.Tensor:
    """Draw in memory order, as in-place `bernoulli_` does.

    The operator that functionalization puts in its place draws in the order of the dimensions.
    """
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda i: -strides[i])
    if order == list(range(x.dim())):
        key = getattr(torch._C.DispatchKey, f"Autograd{x.device.type.upper()}")
        return torch.ops.aten.bernoulli_.float._op_dk(key, x, p, generator=generator)  # type: ignore[no-any-return]
    torch.ops.aten.bernoulli_.float(x.permute(order), p, generator=generator)
    return x


def _gru_cell(x: torch.Tensor, state: torch.Tensor, *weights: torch.Tensor | None) -> torch.Tensor:
    """Compute as the operator does on a CPU: gates row by row, as they lie in one tensor of all three.

    It adds in place; of what functionalization makes of that, sigmoid would go through a tensor of one gate alone, and
    round in another way at the ends of rows.
    """
    if x.device.type != "cpu":
        key = torch._C.DispatchKey.CompositeImplicitAutograd
        return torch.ops.aten.gru_cell.default._op_dk(key, x, state, *weights)  # type: ignore[no-any-return]
    of_x, of_state, bias, bias_of_state = (*weights, None, None)[:4]
    of_input = torch.nn.functional.linear(x, of_x, bias)  # type: ignore[arg-type]
    of_hidden = torch.nn.functional.linear(state, of_state, bias_of_state)  # type: ignore[arg-type]
    gates = (of_hidden + of_input).unsafe_chunk(3, 1)
    reset, update = gates[0].sigmoid(), gates[1].sigmoid()
    new = (of_input.unsafe_chunk(3, 1)[2] + of_hidden.unsafe_chunk(3, 1)[2] * reset).tanh()
    return (state - new) * update + new


@functools.cache
def _written_in_python() -> list[Any]:
    compat.private("torch", "_decomp")
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if name.startswith(_WRITTEN_IN_PYTHON)]
    return [getattr(packet, name) for packet in packets for name in packet.overloads()]


class Suppressed(logging.Filter):
    """Takes Dynamo's errors that are suppressed, which it would print with hundreds of lines of its own traceback.

    A context, for what is called.

    Args:
        note: is given each of them in one line.
    """

    _logger = logging.getLogger("torch._dynamo.convert_frame")

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __enter__(self) -> None:
        self._logger.addFilter(self)

    def __exit__(self, *_: object) -> None:
        self._logger.removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is to be printed."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None or record.levelno < logging.WARNING:
            return True
        stack = getattr(error, "real_stack", None)
        place = f"{stack[-1].filename}:{stack[-1].lineno}: " if stack else ""
        self._note(f"{place}{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        return False


def reasons() -> dict[str, int]:
    """Return why Dynamo has not followed code so far, in its own words, and how often.

    From torch 2.15 on recurrent layers are graph breaks alone, without a graph before or behind them.
    """
    counters = compat.private("torch._dynamo.utils", "counters")
    return {**counters["graph_break"], **counters["unimplemented"]}


def in_one_line(reason: str) -> str:
    """Return one of these reasons as a line.

    Example:
        >>> in_one_line("Dynamic shape operator\\n  Hint: ...\\n  Developer debug context: aten.nonzero.default")
        'Dynamic shape operator: aten.nonzero.default'
    """
    what, context = reason.partition("\n")[0], _CONTEXT.search(reason)
    return f"{what}: {context[1]}" if context else what


def skips(function: Any) -> bool:
    """Whether Dynamo leaves the frames of a function alone where they are not called from others."""
    return bool(compat.private("torch._dynamo.trace_rules", "check")(function))


def compile_aten(
    module: Any,
    inputs: Any,
    partition: Callable[..., Any],
    *compilers: Callable[[torch.fx.GraphModule], Any],
) -> Any:
    """Compile with AOTAutograd alone: nothing is decomposed.

    Args:
        module, inputs: a graph of Dynamo's and its example inputs.
        partition: divides joint graphs.
        compilers: of forward, of backward, and of what needs no backward. Their functions take a list and empty it.
    """
    aot_autograd = compat.private("torch._dynamo.backends.common", "aot_autograd")

    def boxed(compiler: Callable[[torch.fx.GraphModule], Any]) -> Callable[..., Any]:
        def compiled(graph: Any, _: Any) -> Any:
            program = compiler(graph)
            program._boxed_call = True
            return program

        return compiled

    forward, backward, inference = map(boxed, compilers)
    compile_with = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        decompositions={},
    )
    is_symbolic = any(isinstance(value, torch.SymInt) for value in inputs)  # native kernels would fix the sizes
    patches: dict[str, Any] = {"donated_buffer": True}
    if hasattr(compat.functorch_config, "backward_pass_autocast"):
        patches["backward_pass_autocast"] = "off"  # backward() is to be called outside of it, as torch says
    # What is donated may not be kept for a second backward; olla's programs copy what they write over. With the setting
    # that donates nothing, torch does not know what was, and refuses to keep a graph once a backward has not kept it.
    nothing_donated = mock.patch.object(graph_compile, "collect_bw_donated_buffer_idxs", return_value=[])
    with (
        nothing_donated,
        compat.functorch_config.patch(patches),
        contextlib.nullcontext() if is_symbolic else native_kernels(),
    ):
        return compile_with(module, inputs)
