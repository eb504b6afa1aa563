"""Inductor's lowering: of an operator as it is, of one half of a divided graph outside of a compilation's course."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from olla.inductor.compat.compat import private


def call_itself(operator: Any) -> None:
    """Have Inductor call an operator that it would decompose; one it meets unprepared is an error where CI is set."""
    if operator not in importlib.import_module("torch._inductor.lowering").lowerings:
        private("torch._inductor.lowering", "make_fallback")(operator, warn=False)


def lower(half: torch.fx.GraphModule, donated: Sequence[int] | None = None) -> Callable[[list[Any]], Any]:
    """Compile forward or backward with Inductor by itself; the function empties the list of inputs it is given.

    Args:
        donated: of backward, which inputs are nobody else's: it may write into them.
    """
    given = [node.meta["val"] for node in half.graph.find_nodes(op="placeholder")]
    context = private("torch._guards", "TracingContext").get()
    lowering = private("torch._inductor.compile_fx", "compile_fx_inner")
    before = context.fw_metadata, context.output_strides
    context.output_strides = None
    context.fw_metadata = types.SimpleNamespace(bw_donated_idxs=donated, static_input_indices=[])
    try:
        return lowering(half, given, is_backward=donated is not None)  # type: ignore[no-any-return]
    finally:
        context.fw_metadata, context.output_strides = before
