"""A step as one CUDA graph: captured once, replayed with other inputs. Built, not measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from olla.errors import ReplayError
from olla.pytorch.capture.inputs import Input
from olla.pytorch.memory.copies import Copies
from olla.pytorch.program.program import Program

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


class Graphed:
    """A program behind a CUDA graph. Batches are copied into the graph's own tensors, and results out of it.

    The user's parameters, buffers and optimizer state are used where they are. When one has been replaced by another
    tensor, or a learning rate on the CPU has changed, which is a constant of the graph, the graph is captured again; so
    it is where the copies of a step that swaps go to other host memory. They run on streams of their own inside the
    graph, which fork from that of the capture, and join it again because the step waits for every copy.

    What is captured, `program`, has run before; `copies` are those beside its ops, where it swaps.
    """

    def __init__(self, program: Program, inputs: Sequence[Input], copies: Copies | None = None) -> None:
        self._program = program
        self._inputs = inputs
        self._copies = copies
        self._replay: Callable[[], None] | None = None
        self._results: list[torch.Tensor] = []
        self._own: list[tuple[int, torch.Tensor]] = []  # position of an input, and the graph's tensor for it
        self._constants: list[float | int] = []

    def __call__(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the program; see compile_program."""
        constants = [
            float(value) if entry.kind == "rate" and value.device.type == "cpu" else value.data_ptr()
            for entry, value in zip(self._inputs, values, strict=True)
            if entry.kind != "input"
        ]
        if self._copies is not None:
            constants.append(self._copies.host.num_taken)
        if self._replay is None or constants != self._constants:
            self._capture(values, constants)
        assert self._replay is not None
        for position, tensor in self._own:
            tensor.copy_(values[position])
        self._replay()
        return [result.clone() for result in self._results]

    def _capture(self, values: Sequence[torch.Tensor], constants: list[float | int]) -> None:
        device = next(v.device for e, v in zip(self._inputs, values, strict=True) if e.kind == "parameter")
        self._replay = None
        self._results = []  # with the old graph, before the new one takes its memory
        self._own = []
        own = list(values)
        for position, (entry, value) in enumerate(zip(self._inputs, values, strict=True)):
            if value.device != device and entry.kind != "rate":
                raise ReplayError(
                    f"{entry.name} is on {value.device}, and a CUDA graph needs it on {device}: move batches there, "
                    "and make Adam and AdamW with capturable=True"
                )
            if entry.kind == "input":
                own[position] = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=device
                ).requires_grad_(value.requires_grad)
                self._own.append((position, own[position]))
        self._replay, self._results = capture(lambda: self._program(own), device)
        self._constants = constants
