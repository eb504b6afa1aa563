"""The peak of a divided graph before it is compiled: Inductor's code for both halves, run on fake tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from olla.inductor.compat import compat
from olla.inductor.compat.codegen import lower
from olla.inductor.simulate.wrappers import LiveBytes, storage_of, watched_wrappers


def peak_bytes(forward: fx.GraphModule, backward: fx.GraphModule, num_results: int) -> int | None:
    """Return the most bytes alive at once while the code that Inductor generates for forward and backward runs.

    Forward's inputs live throughout, its results and the tangents until the end; saved tensors live until backward
    frees them, gradients from when they are computed.

    Args:
        forward, backward: as a partitioner returns them, with fake tensors in ``meta["val"]``. They stay as they are.
        num_results: of forward's outputs, those it does not save for backward.

    Returns:
        Bytes; None where sizes are symbols.

    Complexity:
        A compilation without its kernels.
    """
    values: list[Any] = [node.meta.get("val") for half in (forward, backward) for node in _inputs(half)]
    if not all(isinstance(value, torch.Tensor) and all(type(n) is int for n in value.shape) for value in values):
        return None
    mode = values[0].fake_mode
    live = LiveBytes(on_host=all(value.device.type == "cpu" for value in values))
    with compat.uncached(), watched_wrappers([]):
        with mode:
            lasting = {node.name: _twin(node.meta["val"]) for node in _inputs(forward)}
        for tensor in lasting.values():
            live.add(tensor)
        run = _lowered_forward(forward, num_results)
        with mode, live:
            made = run(list(lasting.values()))
        names = [getattr(result, "name", "") for result in _results(forward)[num_results:]]
        results, saved = made[:num_results], dict(zip(names, made[num_results:], strict=True))
        with mode:
            given = {name: _twin(tensor) for name, tensor in saved.items()}
        run = _lowered_backward(backward, given, _donated(forward, backward, num_results))
        del made
        with mode, live:
            arriving = {n.name: _twin(n.meta["val"]) for n in _inputs(backward) if n.name not in saved.keys() | lasting}
            taken = [(saved | lasting | arriving)[node.name] for node in _inputs(backward)]
            saved.clear()
            gradients = run(taken)
    del results, arriving, gradients
    return live.peak_bytes


def _lowered_forward(forward: fx.GraphModule, num_results: int) -> Any:
    half = compat.copied(forward)
    seen = [i for i, result in enumerate(_results(half)[:num_results]) if isinstance(result, fx.Node)]
    half.graph.output_node().meta["user_visible_output_idxs"] = seen
    return lower(half)


def _lowered_backward(backward: fx.GraphModule, given: dict[str, torch.Tensor], donated: set[str]) -> Any:
    """Compile backward for saved tensors in the layout that forward's code gives them."""
    half = compat.copied(backward)
    for node in _inputs(half):
        node.meta["val"] = given.get(node.name, node.meta["val"])
    return lower(half, [i for i, node in enumerate(_inputs(half)) if node.name in donated])


def _donated(forward: fx.GraphModule, backward: fx.GraphModule, num_results: int) -> set[str]:
    """Return the saved tensors that backward may overwrite: their storage is neither an input nor a result."""
    others = {storage_of(n) for n in (*_inputs(forward), *_results(forward)[:num_results], *_results(backward))}
    return {node.name for node in _results(forward)[num_results:] if storage_of(node) not in others}


def _inputs(half: fx.GraphModule) -> list[fx.Node]:
    return list(half.graph.find_nodes(op="placeholder"))


def _results(half: fx.GraphModule) -> Any:
    return half.graph.output_node().args[0]


def _twin(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
