"""A captured step compiled by Inductor as one graph: forward, backward and update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from olla.inductor.compat import compat
from olla.inductor.compat.whole import compile_whole
from olla.inductor.kernels import inlining, order
from olla.inductor.simulate.wrappers import LiveBytes, idle_twins, watched_wrappers
from olla.inductor.whole.flat import Flat, flatten
from olla.inductor.whole.joined import Asked, NothingGainedError, Whole
from olla.pytorch.capture import Captured


@dataclass(frozen=True)
class WholeStep:
    """A step compiled as one graph.

    Attributes:
        run: takes the values of the captured inputs, returns those of the captured outputs. None: separate graphs were
            compared and are foreseen to need hardly more, so that no code was generated.
        peak_bytes: the most bytes alive at once as the code runs, with all that lives throughout: exact but for
            workspaces of kernels; as planned, where no code was generated.
        separate_peak_bytes: what separate graphs of forward and backward are foreseen to need; None where nobody asked.
    """

    run: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None
    peak_bytes: int
    separate_peak_bytes: int | None

    @property
    def is_worse(self) -> bool:
        """Whether separate graphs need less."""
        less = self.separate_peak_bytes is not None and self.separate_peak_bytes < self.peak_bytes
        return self.run is None or less


def compile_step(captured: Captured, asked: Asked, *, kernels: bool = True) -> WholeStep:
    """Compile a captured step with Inductor as one graph.

    Args:
        captured: the step.
        asked: what is asked for.
        kernels: whether they are compiled as well; without, the step tells its peak, and does not run.

    Raises:
        CaptureError: rule "inductor_graph"; the step has not the form of one forward, one backward and updates.

    Complexity:
        A compilation; ``compares`` takes a second search for what to save.
    """
    flat = flatten(captured)
    whole = Whole(flat.kinds, asked)
    patches = {
        "joint_custom_post_pass": whole,
        "reorder_for_locality": False,
        **inlining.patches(),
        **order.patches(readers_only=True),
    }
    try:
        function, peak_bytes = _compiled(captured, flat, patches, kernels)
    except NothingGainedError:
        return WholeStep(None, whole.planned_peak_bytes, whole.separate_peak_bytes)

    def run(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(function(*flat.arguments(values)))

    return WholeStep(run, peak_bytes, whole.separate_peak_bytes)


def _compiled(
    captured: Captured, flat: Flat, patches: Mapping[str, Any], kernels: bool
) -> tuple[Callable[..., Any], int]:
    """Return a function of the inputs, and its peak in bytes."""
    if kernels:
        twins: list[Callable[[list[torch.Tensor]], Any]] = []
        with idle_twins(twins):
            function = compile_whole(flat.module, flat.fakes, patches)
        return function, _peak_bytes(captured, flat, lambda *given: twins[-1](list(given)))
    with compat.uncached(), watched_wrappers([]):
        function = compile_whole(flat.module, flat.fakes, patches)
        return function, _peak_bytes(captured, flat, function)


def _peak_bytes(captured: Captured, flat: Flat, function: Callable[..., Any]) -> int:
    """Return the peak of a compiled step whose kernels do nothing, on fake tensors."""
    given = [node.meta["val"] for node in captured.module.graph.find_nodes(op="placeholder")]
    live = LiveBytes()
    for tensor in (*given, *flat.fakes):
        live.add(tensor)
    with given[0].fake_mode, live, torch.no_grad():
        function(*flat.fakes)
    return live.peak_bytes
