"""Every private name of torch that olla uses where Inductor generates code: lowering, fusions, allocations.

The rest, and the guard, are in `compat`.
"""

from __future__ import annotations

import importlib
import os
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from olla.inductor.compat.compat import config, devices, private, scheduler_classes

_OUTER_LOOPS = "OuterLoopFusedSchedulerNode"  # of the CPU backend: kernels that share outer loops


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


def is_plain_fusion(node: Any) -> bool:
    """Whether a scheduler node is a fusion of loops, and no template, list of kernels, or mix of reductions."""
    fused = scheduler_classes().FusedSchedulerNode
    return (type(node) is fused or type(node).__name__ == _OUTER_LOOPS) and not node.is_template()


def fused_again(parts: list[Any], whole: Any) -> Any:
    """Return one kernel of some nodes of a fused node, which stay in their order; None where the backend makes none."""
    backend = whole.scheduler.get_backend(whole.get_device())
    if type(whole).__name__ != _OUTER_LOOPS:
        return _fused_loops(backend, parts)
    chosen = [[part for part in parts if part in node.get_nodes()] for node in whole.get_outer_nodes()]
    loops = [_fused_loops(backend, inner) for inner in chosen if inner]
    if len(loops) == 1 or None in loops:
        return None if None in loops else loops[0]
    return type(whole)(whole.scheduler, loops, whole.outer_loop_fusion_depth)


def _fused_loops(backend: Any, parts: list[Any]) -> Any:
    found, *others = sorted(parts, key=lambda part: not part.is_reduction())  # loops around a reduction fit to it alone
    if not others:
        return found
    make = scheduler_classes().FusedSchedulerNode
    for part in others:
        if not any(backend.can_fuse_horizontal(*pair) for pair in ((found, part), (part, found))):
            return None
        found = make(found.scheduler, [*found.get_nodes(), part])
    return make(found.scheduler, parts)


def groups_kernels(backend: Any) -> bool:
    """Whether a backend puts kernels that follow each other into one function, as that of the CPU does."""
    return isinstance(backend, private("torch._inductor.codegen.cpp", "CppScheduling"))


def before_codegen(scheduler: Any, call: Callable[[Sequence[Any]], None]) -> None:
    """Have a function called with the kernels of a graph once their order is final.

    Passes behind olla's compute the sizes of buffers anew: one that overlaps communication, and since torch 2.14
    another in every graph.
    """
    compute_last_usage = scheduler.compute_last_usage  # what comes next

    def called() -> None:
        del scheduler.compute_last_usage
        call(scheduler.nodes)
        compute_last_usage()

    scheduler.compute_last_usage = called


def size_hint(graph: Any, size: Any) -> int:
    """Return a size as a number; what stands for a symbol is the value it was traced with."""
    sizes = graph.sizevars
    hint = sizes.optimization_hint if hasattr(sizes, "optimization_hint") else sizes.size_hint  # 2.12 renamed it
    return int(hint(size, fallback=0))


def overwrites(graph: Any, device: Any) -> bool:
    """Return whether kernels on a device may write their results over their inputs."""
    features = private("torch._inductor.codegen.common", "BackendFeature")
    return bool(config.inplace_buffers and graph.has_feature(device, features.INPLACE_BUFFERS))


def call_segment(wrapper: Any, device_index: int, num_bytes: int) -> None:
    """Make the generated code call its segment: ahead of all else if that reserves memory, otherwise at the end.

    A wrapper of another kind than olla knows stays as it is.
    """
    if type(wrapper) is not private("torch._inductor.codegen.wrapper", "PythonWrapperCodegen"):
        return
    usual = wrapper.run_wrapper_ir_passes

    def passes(is_inference: bool) -> None:
        usual(is_inference)
        wrapper.add_import_once("from olla.inductor.kernels.segment import Segment")
        wrapper.header.writeline(f"{SEGMENT} = Segment({device_index}, {num_bytes})")
        wrapper.lines.insert(0 if num_bytes else len(wrapper.lines), f"{SEGMENT}()")

    wrapper.run_wrapper_ir_passes = passes


SEGMENT = "olla_segment"  # its name in generated code, and in `meta` of a graph module: index of the GPU, bytes


def note_segment(forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, num_bytes: int) -> None:
    """Record in `meta` of both halves, for a graph on one GPU, the segment its code is to reserve."""
    found = [device for device in devices(forward) | devices(backward) if device.type == "cuda"]
    if len(found) == 1:
        forward.meta[SEGMENT], backward.meta[SEGMENT] = (found[0].index, num_bytes), (found[0].index, 0)


def allocator_settings() -> str:
    """Return the settings of torch's allocator for GPUs, as its environment variable has them."""
    ask = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    return str(ask()) if ask else os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
