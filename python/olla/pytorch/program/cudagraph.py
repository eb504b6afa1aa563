"""A step as one CUDA graph: captured once, replayed with other inputs. Built, not measured."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from olla.errors import ReplayError
from olla.pytorch.capture import Captured
from olla.pytorch.capture.inputs import Input
from olla.pytorch.memory.copies import Copies
from olla.pytorch.memory.extension import load_module
from olla.pytorch.memory.replay import Int64
from olla.pytorch.program.program import READ, Program

Run = Callable[[], list[torch.Tensor]]


def capture(run: Run, device: torch.device) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """Capture what a function does on the device, without doing it.

    Returns:
        A function that does it, and the tensors it leaves the results in.

    Raises:
        ReplayError: it does what no CUDA graph can hold, such as reading a value back to the CPU.
    """
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(torch.cuda.default_generators[device.index or 0])
    current = torch.cuda.current_stream()
    try:
        # Other threads, such as those of a data loader, may go on using the device meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = run()
    except RuntimeError as error:
        cause = error.__context__ or error  # what interrupts a capture lets its end fail, too
        if not isinstance(cause, RuntimeError):
            raise cause from None
        [reason, *_] = str(cause).splitlines() or [type(cause).__name__]
        raise ReplayError(f"the step cannot be captured in a CUDA graph: {reason}. Leave cuda_graph out.") from error
    finally:
        torch.cuda.set_stream(current)  # torch stays on that of the capture where the capture fails
    return graph.replay, results


def rates_can_move(module: fx.GraphModule, inputs: Sequence[Input]) -> bool:
    """Return whether a step computes with its rates as with tensors, as capturable optimizers do.

    Then they can lie on the device. Others take them as numbers, in arguments such as ``alpha``.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    found = [node for entry, node in zip(inputs, placeholders, strict=True) if entry.kind == "rate"]
    numbers = set(found)
    while found:
        for user in found.pop().users:
            target: Any = user.target
            if target is READ or getattr(target, "__module__", "") == "_operator":
                found += [] if user in numbers else [user]
                numbers.add(user)
                continue
            types = {a.name: str(a.type) for a in target._schema.arguments} if hasattr(target, "_schema") else {}
            given = dict(zip(types, user.args, strict=False)) | user.kwargs
            if any(types.get(name) != "Tensor" for name, value in given.items() if value in numbers):
                return False
    return True


class Addresses:
    """Addresses that a graph reads and writes, to check before every replay that its tensors are still there.

    C++ does that where it can be compiled: Python takes 25 microseconds for 500 tensors, at every step.

    Args:
        values: the tensors, and others.
        positions: which of them are looked at.
    """

    def __init__(self, values: Sequence[torch.Tensor], positions: Sequence[int]) -> None:
        self._positions = np.array(positions, dtype=np.int64)
        self._addresses = np.array([values[position].data_ptr() for position in positions], dtype=np.int64)
        self._are_at = _are_at
        if any(values[position].is_cuda for position in positions):
            with contextlib.suppress(ReplayError):  # no compiler
                self._are_at = load_module("addresses").are_at

    def are_those_of(self, values: list[torch.Tensor]) -> bool:
        """Return whether the tensors at the positions still have the recorded addresses."""
        return self._are_at(values, self._positions, self._addresses)


def _are_at(values: list[torch.Tensor], positions: Int64, addresses: Int64) -> bool:
    found = zip(positions.tolist(), addresses.tolist(), strict=True)
    return all(values[position].data_ptr() == address for position, address in found)


class Graphed:
    """A program behind a CUDA graph. Batches are copied into the graph's own tensors, and results out of it.

    The user's parameters, buffers and optimizer state are used where they are. When one has been replaced by another
    tensor the graph is captured again; so it is where the copies of a step that swaps go to other host memory. They run
    on streams of their own inside the graph, which fork from that of the capture, and join it again because the step
    waits for every copy. A learning rate on the CPU is a constant of the graph, until it changes: then it moves into a
    tensor on the device, if the step can compute with it as a tensor.

    `program` is captured, and has run before; `moving` compiles the one that takes rates on the device; `copies` are
    those of a step that swaps.
    """

    def __init__(
        self,
        program: Program,
        captured: Captured,
        copies: Copies | None,
        moving: Callable[[], Program],
    ) -> None:
        self._program = program
        self._inputs = captured.inputs
        self._copies = copies
        self._moving = moving if rates_can_move(captured.module, captured.inputs) else None
        self._rates_move = self._has_warned = False
        self._replay: Callable[[], None] | None = None
        self._results: list[torch.Tensor] = []
        self._own: list[tuple[int, torch.Tensor]] = []  # position of an input, and the graph's tensor for it
        self._rates: list[tuple[int, torch.Tensor]] = []  # the same of rates that have moved
        self._fixed = Addresses([], [])  # the others
        self._numbers: list[tuple[int, float]] = []  # position and value of the rates that are constants
        self._num_taken = 0

    def __call__(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the program; see compile_program."""
        if self._replay is not None and self._has_other_rates(values):
            self._let_rates_move()
        taken = self._copies.host.num_taken if self._copies is not None else 0
        if self._replay is None or taken != self._num_taken or not self._fixed.are_those_of(values):
            self._capture(values)
            self._num_taken = self._copies.host.num_taken if self._copies is not None else 0
        assert self._replay is not None
        for position, tensor in self._own:
            tensor.copy_(values[position])
        for position, tensor in self._rates:
            tensor.fill_(float(values[position]))
        self._replay()
        return [result.clone() for result in self._results]

    def _has_other_rates(self, values: Sequence[torch.Tensor]) -> bool:
        return any(float(values[position]) != value for position, value in self._numbers)

    def _let_rates_move(self) -> None:
        """Have the graph captured again, for the last time if it can take rates from the device."""
        self._replay = None
        if self._moving is not None:
            self._program, self._rates_move, self._moving = self._moving(), True, None
        elif not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "the CUDA graph is captured anew for every change of a learning rate, which is a constant of it: give "
                "the optimizer lr=torch.tensor(..., device='cuda'), or capturable=True where it has that",
                stacklevel=3,
            )

    def _capture(self, values: Sequence[torch.Tensor]) -> None:
        device = next(v.device for e, v in zip(self._inputs, values, strict=True) if e.kind == "parameter")
        self._replay = None
        self._results = []  # with the old graph, before the new one takes its memory
        self._own, self._rates, self._numbers = [], [], []
        own, fixed = list(values), []
        for position, (entry, value) in enumerate(zip(self._inputs, values, strict=True)):
            if value.device != device and entry.kind != "rate":
                raise ReplayError(
                    f"{entry.name} is on {value.device}, and a CUDA graph needs it on {device}: move batches there, "
                    "and make Adam and AdamW with capturable=True"
                )
            on_cpu = entry.kind == "rate" and value.device.type == "cpu"
            if on_cpu and self._rates_move:
                own[position] = torch.empty((), dtype=torch.float32, device=device)  # as torch's own rates in tensors
                self._rates.append((position, own[position]))
            elif entry.kind == "input":
                own[position] = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=device
                ).requires_grad_(value.requires_grad)
                self._own.append((position, own[position]))
            elif on_cpu:
                self._numbers.append((position, float(value)))
            else:
                fixed.append(position)
        self._fixed = Addresses(values, fixed)
        self._replay, self._results = capture(lambda: self._program(own), device)
