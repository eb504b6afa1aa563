"""Views of the nodes and buffers of Inductor's scheduler."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from olla.graph import draws_numbers
from olla.inductor.compat import codegen, compat
from olla.inductor.compat.host import is_copy

ir = compat.inductor_ir
_NO_STORAGE = (ir.NoneLayout, ir.MultiOutputLayout, ir.MutationLayoutSHOULDREMOVE)


def scheduler() -> Any:
    """Return the scheduler of the graph that is being compiled."""
    return compat.virtualized.graph.scheduler


def wrapper() -> Any:
    """Return what writes the Python around the kernels of the graph that is being compiled."""
    return compat.virtualized.graph.wrapper_code


def prepare(nodes: Sequence[Any]) -> None:
    """Let Inductor note the sizes and users of all buffers; it asks for them again when it reuses buffers."""
    compat.prepare_planning_info(list(nodes), *_known())


def torchs_order(nodes: list[Any]) -> list[Any]:
    """Return kernels in the order that Inductor would put them in, which its settings leave to olla."""
    reorder = compat.private("torch._inductor.memory", "reorder_for_peak_memory")
    return list(reorder(nodes, *_known()))


def _known() -> tuple[Any, Any, Any, Any]:
    """Return what Inductor wants to know for either: buffers and kernels by name, inputs, results."""
    graph, here = compat.virtualized.graph, scheduler()
    inputs, outputs = compat.OrderedSet(graph.graph_inputs), compat.OrderedSet(graph.get_output_names())
    return here.name_to_buf, here.name_to_fused_node, inputs, outputs


def graph_name() -> str:
    """Return the name of the graph that is being compiled: "forward 0" and the like."""
    graph = compat.virtualized.graph
    phase = "inference" if graph.is_inference else "backward" if graph.is_backward else "forward"
    return f"{compat.graph_being_compiled()}: {phase}{' ' + graph.name if graph.name else ''}"


def uses_streams() -> bool:
    """Return whether kernels run on several streams at once (torch 2.13 on)."""
    return bool(getattr(scheduler(), "_multi_stream_nodes", False))


def output_names() -> set[str]:
    """Return the buffers the graph returns, and those whose storages they lie in."""
    graph = compat.virtualized.graph
    waiting = list(graph.get_output_names())
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in found and name in graph.name_to_buffer:
            waiting += graph.name_to_buffer[name].get_inputs_that_alias_output()
        found.add(name)
    return found


def planned_device(buffers: Iterable[Any]) -> torch.device | None:
    """Return the device whose memory counts: the first that is no CPU, if there is one."""
    devices = [device for buffer in buffers if (device := buffer.node.get_device()) is not None]
    return next((device for device in devices if device.type != "cpu"), devices[0] if devices else None)


def freed_inputs(device: torch.device | None) -> Iterator[tuple[str, int]]:
    """Yield the inputs whose storages are freed when the code is done with them, and their bytes on a device.

    These are the donated buffers that AOTAutograd reports, views of parameters excluded; if it reports none, those that
    Inductor takes to be freeable.
    """
    graph = compat.virtualized.graph
    if not graph.is_backward:
        return
    donated = scheduler().name_to_donated_buffer
    for name, value in graph.graph_inputs_original.items():
        free = name in donated if donated else not compat.is_nonfreeable_buffers(types.SimpleNamespace(name=name))
        if free and isinstance(value, ir.Buffer):
            counts = value.get_device() == device
            yield name, codegen.size_hint(graph, value.get_numel()) * value.get_dtype().itemsize if counts else 0


def has_storage(buffer: Any) -> bool:
    """Return whether a buffer of the scheduler has memory of its own."""
    node = buffer.node
    if isinstance(node.get_output_spec(), _NO_STORAGE):
        return False
    return bool(node.should_allocate()) or not buffer.get_aliases()


def whole_of(buffer: Any) -> str | None:
    """Return the buffer that a part of a concatenation is written into; None for any other."""
    layout = buffer.node.get_output_spec()
    return str(layout.view.get_name()) if isinstance(layout, ir.NonOwningLayout) else None


def parent_name(buffer: Any) -> str | None:
    """Return the buffer that stands for all results of a kernel, for one of these results."""
    node = buffer.node
    return str(node.inputs[0].get_name()) if isinstance(node, ir.MultiOutput) else None


def user_nodes(buffer: Any) -> Iterator[Any]:
    """Yield the nodes before fusion that use a buffer."""
    output = compat.scheduler_classes().OutputNode
    return (user.node for user in buffer.users if not isinstance(user.node, output))


def is_inside(node: Any, buffer: Any) -> bool:
    """Return whether a buffer lives in registers or caches of one kernel only, and is never allocated."""
    classes = compat.scheduler_classes()
    if isinstance(node, classes.ExternKernelSchedulerNode | classes.NopKernelSchedulerNode):
        return False
    fused = compat.OrderedSet(inner.get_name() for inner in node.get_nodes())
    return bool(scheduler().can_buffer_be_removed_through_fusion(buffer.get_name(), fused))


def parts_of(node: Any) -> list[Any]:
    """Return the nodes that a kernel was fused from, if it may be split; else the node alone.

    It is not split if others wait for it without reading its results, since Inductor may have recorded that for the
    kernel as a whole.
    """
    weak = any(user.is_weak for buffer in node.get_outputs() for user in buffer.users)
    waited_for = weak and not counts_readers_only()
    if waited_for or keeps_order(node) or not codegen.is_plain_fusion(node):
        return [node]
    return list(node.get_nodes())


def mutable_names() -> set[str]:
    """Return the buffers and inputs that some kernel changes, under all names they have."""
    renamed = (*scheduler().mutation_real_name.items(), *scheduler().mutation_renames.items())
    return {name for pair in renamed for name in pair}


def is_rigid(part: Any, mutable: set[str]) -> bool:
    """Return whether a part must stay in its kernel because it touches mutated memory.

    In a whole step all parameters are mutated: there only parts that mutate are rigid, and readers may move ahead of
    the update.
    """
    if counts_readers_only():
        return any(buffer.get_mutations() for buffer in part.get_outputs())
    return not mutable.isdisjoint(dep.name for dep in part.read_writes.reads_and_writes())


def name_kernels(nodes: Iterable[Any]) -> None:
    """Let the scheduler know which kernel every node before fusion is in."""
    scheduler().name_to_fused_node.update({inner.get_name(): node for node in nodes for inner in node.get_nodes()})


def shares_function(node: Any) -> bool:
    """Return whether a kernel's code is put into one function with that of its neighbours."""
    if node.is_extern() or node.is_template():
        return False
    device = node.get_device()
    return device is None or (device.type == "cpu" and codegen.groups_kernels(scheduler().get_backend(device)))


def end_functions(nodes: Iterable[Any], behind: set[str]) -> None:
    """Let functions of the graph being compiled end behind the kernels of these names."""
    device = next((node.get_device() for node in nodes if node.get_name() in behind), None)
    if device is None:
        return
    here = scheduler()
    backend = here.get_backend(device)
    usual = backend.ready_to_flush

    def ready() -> bool:  # asked after every node
        node = getattr(here, "current_node", None)
        return bool(usual() or (node is not None and node.get_name() in behind))

    backend.ready_to_flush = ready


def keeps_order(node: Any) -> bool:
    """Return whether a node may not change places with others of its kind: effects, random numbers, communication."""
    if compat.is_collective(node) or compat.is_wait(node):
        return True
    return any(inner.has_side_effects() or _draws(inner.node) for inner in node.get_nodes())


def copies_to_host(node: Any) -> bool:
    """Return whether a node starts a copy to or from host memory on a stream of its own, or waits for one."""
    return is_copy(getattr(node.node, "op_overload", None))


def _draws(node: Any) -> bool:
    """Return whether an operator that Inductor calls as it is draws from a generator."""
    called, origin = getattr(node, "op_overload", None), getattr(node, "origin_node", None)
    if origin is not None and origin.target is called:
        return draws_numbers(called, origin.args, origin.kwargs)
    return torch.Tag.nondeterministic_seeded in getattr(called, "tags", ())


def count_readers_only() -> None:
    """Count only readers as users of a buffer, in the graph being compiled; see `whole.drop_weak_users`."""
    scheduler().olla_readers_only = True


def counts_readers_only() -> bool:
    """Return whether only readers count as users of a buffer; see `count_readers_only`."""
    return bool(getattr(scheduler(), "olla_readers_only", False))


def overwritten(node: Any, precedes: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    """Yield (old, new): in every order the node's kernel writes the new buffer in place of the old one, its input.

    Inductor decides that when it generates the code, by the rules repeated here, wherever the node is the only user
    left. It always is where all other users precede it.

    Args:
        node: a fused node.
        precedes: whether the kernel with a node before fusion, by name, runs before this one in every order.
    """
    classes = compat.scheduler_classes()
    graph, here = compat.virtualized.graph, scheduler()
    for inner in node.get_nodes():
        if not isinstance(inner, classes.SchedulerNode) or not codegen.overwrites(graph, inner.get_device()):
            continue
        for buffer in inner.get_outputs():
            if not _may_take_over(buffer) or is_inside(node, buffer):
                continue
            for read in inner.read_writes.reads:
                old = here.name_to_donated_buffer.get(read.name) or here.name_to_buf.get(read.name)
                taken = old is not None and _may_be_taken(old, inner, node, precedes)
                if taken and compat.can_match_buffer_size(old.node, buffer.node):
                    yield read.name, buffer.get_name()


def _may_take_over(buffer: Any) -> bool:
    node = buffer.node
    return bool(node.should_allocate() and not node.get_inputs_that_alias_output() and not node.get_mutation_names())


def _may_be_taken(old: Any, inner: Any, node: Any, precedes: Callable[[str], bool]) -> bool:
    """Return whether the inner node is the last user of a buffer, and reads it where it writes."""
    classes, graph = compat.scheduler_classes(), compat.virtualized.graph
    if isinstance(old.defining_op, classes.NopKernelSchedulerNode) or isinstance(
        old.node.get_output_spec(), _NO_STORAGE
    ):
        return False
    gone = inner.ancestors | graph.removed_operations
    real = [user for user in old.users if not (user.is_weak and counts_readers_only())]
    left = [user for user in real if user.node.get_name() not in gone and not precedes(user.node.get_name())]
    if len(left) != 1 or not left[0].can_inplace or left[0].node is not inner:
        return False
    within = {
        access
        for user in user_nodes(old)
        if user in node.get_nodes()
        for access in user.read_writes.reads_and_writes()
        if access.name == old.get_name()
    }
    return len(within) <= 1
