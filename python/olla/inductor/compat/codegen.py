"""Every private name of torch that olla uses where Inductor generates code: lowering, fusions, allocations.

The rest, and the guard, are in `compat`.
"""

from __future__ import annotations

import importlib
import os
import types
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch

from olla.inductor.compat import fallback
from olla.inductor.compat.compat import config, devices, inductor_ir, private, scheduler_classes, virtualized

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

    Passes behind olla's note the sizes of buffers anew: one that overlaps communication, and since torch 2.14 another
    in every graph.
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


_wrapper_module = "torch._inductor.codegen.wrapper"
_planning_module = "torch._inductor.codegen.memory_planning"


def before_reuse(wrapper: Any, change: Callable[[list[Any]], list[Any]], consequence: str) -> None:
    """Change the lines of a wrapper once they are there, right before Inductor plans which buffers to reuse.

    Args:
        wrapper: of the graph being compiled.
        change: lines -> lines; whatever it raises, the lines stay, and a warning says so.
        consequence: of that, for the warning.
    """
    if type(wrapper) is not private(_wrapper_module, "PythonWrapperCodegen"):
        fallback.warn(f"{consequence}: a {type(wrapper).__name__} is not known")
        return
    usual = wrapper.run_wrapper_ir_passes

    def passes(is_inference: bool) -> None:
        with fallback.tried(consequence):
            nested = private(_wrapper_module, "EnterSubgraphLine")
            if any(isinstance(line, nested) for line in wrapper.lines):
                fallback.warn(f"{consequence}: a graph holds others")
            elif getattr(virtualized.graph, "partition_maps", None):  # mode="reduce-overhead"
                fallback.warn(f"{consequence}: they lie in the memory of CUDA graphs")
            else:
                wrapper.lines = change(wrapper.lines)
        with config.patch({"memory_planning": False}):  # Inductor's own, which is for inference only
            usual(is_inference)

    wrapper.run_wrapper_ir_passes = passes


def call_segment(wrapper: Any, device_index: int, num_bytes: int) -> None:
    """Let the code of the graph being compiled call its segment: ahead of all else where that takes memory.

    A wrapper of another kind than olla knows stays as it is.
    """
    if type(wrapper) is not private(_wrapper_module, "PythonWrapperCodegen"):
        return
    usual = wrapper.run_wrapper_ir_passes

    def passes(is_inference: bool) -> None:
        usual(is_inference)
        wrapper.add_import_once("from olla.inductor.kernels.segment import Segment")
        wrapper.header.writeline(f"{SEGMENT} = Segment({device_index}, {num_bytes})")
        wrapper.lines.insert(0 if num_bytes else len(wrapper.lines), f"{SEGMENT}()")

    wrapper.run_wrapper_ir_passes = passes


def memory_planner(wrapper: Any, outside: Set[str]) -> Any:
    """Return Inductor's planner of pools for a wrapper, for groups of buffers of known sizes that lie inside.

    A group is what shares memory because one kernel overwrites what another made. Those that are not freed while the
    code runs, and what is no plain buffer, are left out as well.
    """
    planner = private(_planning_module, "MemoryPlanner")(wrapper)
    find = planner.compute_buffer_groups
    free_line = private(_wrapper_module, "FreeIfNotReusedLine")

    def compute(lines: list[Any]) -> dict[str, Any]:
        by_name = find(lines)
        freed = {line.node.get_name() for line in lines if isinstance(line, free_line)}
        shared = {line.node.get_name() for line in lines if getattr(line, "comm_buffer", False)}
        left_out = {*outside, *shared, *virtualized.graph.removed_buffers}
        planner.buffer_groups = [
            group
            for group in planner.buffer_groups
            if isinstance(group.node, inductor_ir.Buffer)
            and left_out.isdisjoint(group.names)
            and not freed.isdisjoint(group.names)
            and not group.is_output
            and static_bytes(group) > 0
        ]
        chosen = {id(group) for group in planner.buffer_groups}
        return {name: group for name, group in by_name.items() if id(group) in chosen}

    planner.compute_buffer_groups = compute
    return planner


def static_bytes(group: Any) -> int:
    """Return the bytes of a group of buffers; 0 where that is no number."""
    num_bytes = group.sym_nbytes()
    return int(num_bytes) if isinstance(num_bytes, int) or num_bytes.is_number else 0


def place_groups(groups: list[Any], offsets: list[int], num_bytes: int, name: str, end: int) -> None:
    """Put groups of buffers of one device at offsets of one pool.

    Args:
        groups: of a planner's that knows when they live.
        offsets: of each, in bytes.
        num_bytes: of the pool.
        name: of the pool, in the generated code.
        end: when the last group is freed, in the planner's time.
    """
    number = private("sympy", "Integer")
    lifetime = private(_planning_module, "LiveRanges")([private(_planning_module, "LiveRange")(0, end)])
    tree = types.SimpleNamespace(  # in which Inductor's planner arranges a pool
        allocations=(), get_symbolic_size=lambda: number(num_bytes), get_live_ranges=lambda: lifetime
    )
    pool = private(_planning_module, "AllocationPool")(groups[0].node.get_device(), tree)
    pool.name = name
    pool.names_to_del.append(name)
    for group, offset in zip(groups, offsets, strict=True):
        group.make_allocation()
        group.allocation.mark_allocated()
        group.allocation.finalize(pool, number(offset))


SEGMENT = "olla_segment"  # its name in generated code, and in `meta` of a graph module: index of the GPU, bytes


def note_segment(forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, num_bytes: int) -> None:
    """Note with the halves of a graph on one GPU what its code will ask of an allocator; see `kernels.segment`."""
    found = [device for device in devices(forward) | devices(backward) if device.type == "cuda"]
    if len(found) == 1:
        forward.meta[SEGMENT], backward.meta[SEGMENT] = (found[0].index, num_bytes), (found[0].index, 0)


def allocator_settings() -> str:
    """Return the settings of torch's allocator for GPUs, as its environment variable has them."""
    ask = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    return str(ask()) if ask else os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
