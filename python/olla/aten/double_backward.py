"""Double backward: a compiled backward cannot be differentiated, so the graph that Dynamo captured runs again."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from olla.inductor.compat import dynamo
from olla.pytorch.capture.generator import set_state, state_of
from olla.pytorch.dynamo.captured import AsCaptured

_DEVICES = ("cpu", "cuda")


class CallInputs:
    """What a graph was called with: enough to run it again, as it was, when its backward is to be differentiated.

    Inputs that are no leaves of autograd are held by weak references: nothing lives longer than without this.

    Args:
        module: the graph, as Dynamo captured it.
        args: its inputs.
        others: positions of those that are no parameters.
        draws: whether it draws random numbers.
        noted: called when its gradients are differentiated.
    """

    def __init__(
        self,
        module: fx.GraphModule | AsCaptured,
        args: Sequence[Any],
        others: Sequence[int],
        draws: bool,
        noted: Callable[[], None],
    ) -> None:
        self._module = module
        self._noted = noted
        self._args = list(args)
        for i in others:
            if isinstance(args[i], torch.Tensor) and not args[i].is_leaf:
                self._args[i] = weakref.ref(args[i])
        self._states = _states(args) if draws else []
        self._casts = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES]

    def gradients(
        self, needed: Sequence[bool], results: Sequence[int], tangents: Sequence[Any]
    ) -> tuple[Any, ...] | None:
        """Return gradients of the inputs that can be differentiated themselves; None where inputs are gone.

        Args:
            needed: of which inputs.
            results: positions of the results that the tangents are for.
            tangents: gradients of these.
        """
        self._noted()
        args = [a() if isinstance(a, weakref.ref) else a for a in self._args]
        if len(needed) != len(args) or any(a is None and b is not None for a, b in zip(args, self._args, strict=True)):
            return None
        wanted = [i for i, need in enumerate(needed) if need and isinstance(args[i], torch.Tensor)]
        changed = changed_inputs(self._module)
        given: list[Any] = [a.clone() if a is not None and i in changed else a for i, a in enumerate(args)]
        with self._as_then():
            outputs = self._module(*given)
        found = torch.autograd.grad(
            [outputs[i] for i in results],
            [given[i] for i in wanted],
            list(tangents),
            create_graph=True,
            allow_unused=True,
        )
        of = dict(zip(wanted, found, strict=True))
        return tuple(of.get(i) for i in range(len(args)))

    @contextlib.contextmanager
    def _as_then(self) -> Iterator[None]:
        """Draw the same numbers as then, under the same autocast, and go on as if nothing was drawn."""
        now = [(device, state_of(device)) for device, _ in self._states]
        for device, state in self._states:
            set_state(state, device)
        try:
            with contextlib.ExitStack() as stack:
                for device, enabled, dtype in self._casts:
                    if enabled or torch.is_autocast_enabled(device):
                        stack.enter_context(torch.autocast(device, dtype, enabled))
                yield
        finally:
            for device, state in now:
                set_state(state, device)


def changed_inputs(module: fx.GraphModule | AsCaptured) -> set[int]:
    """Return the positions of inputs that are statistics of batch norms, which the graph changes."""
    given = module.graph.find_nodes(op="placeholder")
    return {i for i, node in enumerate(given) if node.users and all(map(_keeps_statistics, node.users))}


def _keeps_statistics(user: fx.Node) -> bool:
    name = getattr(user.target, "__name__", str(user.target))
    return "batch_norm" in name or (name == "add_" and not user.users)


def attach(outputs: Any, given: CallInputs) -> None:
    """Let the backward of a call of a compiled graph be differentiated.

    Args:
        outputs: what the call returned.
        given: what it was called with.
    """
    for output in outputs:
        node = output.grad_fn if isinstance(output, torch.Tensor) else None
        found = None if node is None else dynamo.compiled_function(node)
        if found is not None:
            found.olla_given = given
            dynamo.differentiate(type(found), _double_backward)
            return


def inner_results(module: fx.GraphModule) -> list[int]:
    """Return the positions of results that other results are computed from, as logits returned beside a loss."""
    results: Any = module.graph.output_node().args[0]
    return [i for i, r in enumerate(results) if isinstance(r, fx.Node) and r.op == "call_function" and len(r.users) > 1]


def watch_inner(outputs: Any, places: Sequence[int], call: Callable[[], None]) -> None:
    """Have a function called when backward begins where results have hooks, or are to keep their gradients.

    Gradients that reach them from other results stay inside of the planned backward, where autograd does not see them.

    Args:
        outputs: what the call of a compiled graph returned.
        places: see `inner_results`.
        call: the function.
    """
    inner = [weakref.ref(outputs[i]) for i in places if isinstance(outputs[i], torch.Tensor)]

    def begun() -> None:
        found = (ref() for ref in inner)
        if any(t is not None and (t.retains_grad or t._backward_hooks) for t in found):
            call()

    watch(outputs, begun)


def watch(outputs: Any, call: Callable[[], None]) -> None:
    """Call a function when backward reaches a result of a call."""
    for output in outputs:
        if isinstance(output, torch.Tensor) and output.grad_fn is not None:
            output.grad_fn.register_prehook(lambda _: call())
            return


def _double_backward(ctx: Any, tangents: Sequence[Any], results: Sequence[int]) -> tuple[Any, ...] | None:
    """Return gradients that can be differentiated; None where torch's error has to say that there are none."""
    given: CallInputs | None = getattr(ctx, "olla_given", None)
    return None if given is None else given.gradients(ctx.needs_input_grad, results, tangents)


def _states(args: Sequence[Any]) -> list[tuple[str, torch.Tensor]]:
    devices = {str(a.device) for a in args if isinstance(a, torch.Tensor)}
    return [(device, state_of(device)) for device in sorted(devices) if device.split(":")[0] in _DEVICES]
