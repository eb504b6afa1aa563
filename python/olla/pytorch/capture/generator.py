"""The state of random number generators as values of a captured step.

Activation checkpointing draws the numbers of the forward pass a second time: it reads the generator's state, and sets
it again while it recomputes. Importing this module registers the two operators that do so in a captured step.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import fx

from olla.errors import CaptureError
from olla.pytorch.capture.exclusive import ExclusiveCapture

Source = str | torch.Generator  # of random numbers: a device, whose default generator it is, or the user's own
_TAGS = (torch.Tag.nondeterministic_seeded,)  # they keep their place among the operators that draw numbers
_library: Any = torch.library.Library("olla", "DEF")  # type: ignore[no-untyped-call]
_library.define("rng_state(str device, int num_bytes) -> Tensor", tags=_TAGS)
_library.define("set_rng_state(Tensor state, str device) -> ()", tags=_TAGS)


def state_of(source: Source, num_bytes: int = 0) -> torch.Tensor:
    """Return the state of a generator; num_bytes is for the fake kernel of the operator alone."""
    if not isinstance(source, str):
        return source.get_state()
    state: torch.Tensor = torch.get_rng_state() if source == "cpu" else torch.cuda.get_rng_state(source)
    return state


def set_state(state: torch.Tensor, source: Source) -> None:
    """Set the state of a generator."""
    if not isinstance(source, str):
        source.set_state(state)
    elif source == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, source)


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """Put the states of generators back that code of a model may draw from: torch's, Python's and numpy's."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


# A state is bytes on the CPU, whatever the device of its generator.
_library.impl("rng_state", state_of, "CompositeExplicitAutograd")
_library.impl("set_rng_state", set_state, "CompositeExplicitAutograd")
_library._register_fake("rng_state", lambda device, num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
_library._register_fake("set_rng_state", lambda state, device: None)
_OPERATORS = (torch.ops.olla.rng_state.default, torch.ops.olla.set_rng_state.default)
for _operator in _OPERATORS:
    fx.node.has_side_effect(_operator)


@contextlib.contextmanager
def traced(capture: ExclusiveCapture) -> Iterator[None]:
    """Let a step under trace read and set the state of torch's generators, and refuse what could not be repeated.

    Raises:
        CaptureError: the step seeds a generator, or draws random numbers of Python or numpy.
    """
    num_bytes = {"cpu": torch.get_rng_state().numel()}
    read_cuda = torch.cuda.get_rng_state

    def read(device: str) -> torch.Tensor:
        if device not in num_bytes:
            num_bytes[device] = read_cuda(device).numel()
        state: torch.Tensor = torch.ops.olla.rng_state(device, num_bytes[device])
        return state

    write = torch.ops.olla.set_rng_state
    stand_ins: list[tuple[Any, str, Any]] = [
        (torch.cuda, "get_rng_state", lambda device="cuda": read(_name(device))),
        (torch.cuda, "set_rng_state", lambda new_state, device="cuda": write(new_state, _name(device))),
    ]
    for module in (torch, torch.random):
        stand_ins += [
            (module, "get_rng_state", lambda: read("cpu")),
            (module, "set_rng_state", lambda new_state: write(new_state, "cpu")),
            (module, "manual_seed", _refuse_seed),
            (module, "seed", _refuse_seed),
        ]
    for module, own in ((random, random._inst), (np.random, np.random.mtrand._rand)):
        stand_ins += [(module, k, _refuse_foreign) for k, f in vars(module).items() if _is_method(f, own)]
    with contextlib.ExitStack() as stack:
        for module, name, function in stand_ins:
            stack.enter_context(capture.replaced(module, name, function))
        yield


def _refuse_seed(*_: Any, **__: Any) -> None:
    raise CaptureError("the step seeds a random number generator: seed it before the step is called")


def _refuse_foreign(*_: Any, **__: Any) -> None:
    raise CaptureError(
        "the step draws random numbers from Python's random or from numpy: they would be the same in every step. "
        "Draw them with torch, or pass them in with the batch."
    )


def _is_method(function: Any, owner: Any) -> bool:
    reads = ("getstate", "get_state")
    return getattr(function, "__self__", None) is owner and function.__name__ not in reads


def can_rewind(source: Source) -> bool:
    """Whether the state of a generator can be read and set."""
    if isinstance(source, str):
        return source.split(":")[0] in ("cpu", "cuda")
    try:
        copy = source.clone_state()  # another thread may be drawing from the generator itself
        copy.set_state(copy.get_state())
    except (RuntimeError, NotImplementedError):
        return False
    return True


class Draws:
    """Saved states of generators, from which a recomputed op draws the same random numbers again.

    A state is memory outside of the plan: 16 bytes of the host for a CUDA generator, 5 kB for that of the CPU.
    """

    def __init__(self) -> None:
        self._states: dict[int, torch.Tensor] = {}
        self._present: tuple[torch.Tensor, Source] | None = None

    def save(self, op: int, source: Source) -> None:
        """Remember the state of the generator that an op is about to draw from."""
        self._states[op] = state_of(source)

    def rewind(self, op: int, source: Source) -> None:
        """Let the generator draw once more what the op drew."""
        self._present = state_of(source), source
        set_state(self._states[op], source)

    def resume(self) -> None:
        """Let the generator go on from where it was before it was rewound."""
        if self._present is not None:
            set_state(*self._present)
            self._present = None

    def guarded(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that leaves no generator rewound and no state behind, whatever stops it."""

        def run(*args: Any) -> Any:
            try:
                return program(*args)
            finally:
                self.resume()
                self._states.clear()

        return run


def drop_unneeded(module: fx.GraphModule, is_random: Callable[[fx.Node], bool]) -> None:
    """Remove reads and writes of generator states from a step that draws no numbers."""
    if any(is_random(n) for n in module.graph.nodes if n.target not in _OPERATORS):
        return
    for node in reversed(list(module.graph.nodes)):
        if node.target in _OPERATORS and not node.users:
            module.graph.erase_node(node)


def _name(device: Any) -> str:
    return f"cuda:{device}" if isinstance(device, int) else str(device)
