"""What the nodes and buffers of Inductor's scheduler are, as olla sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from olla.inductor.compat import codegen, compat

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
    graph = compat.virtualized.graph
    here = graph.scheduler
    inputs, outputs = compat.OrderedSet(graph.graph_inputs), compat.OrderedSet(graph.get_output_names())
    compat.prepare_planning_info(list(nodes), here.name_to_buf, here.name_to_fused_node, inputs, outputs)


def torchs_order(nodes: list[Any]) -> list[Any]:
    """Return kernels in the order that Inductor would put them in, which its settings leave to olla."""
    graph = compat.virtualized.graph
    here = graph.scheduler
    inputs, outputs = compat.OrderedSet(graph.graph_inputs), compat.OrderedSet(graph.get_output_names())
    reorder = compat.private("torch._inductor.memory", "reorder_for_peak_memory")
    return list(reorder(nodes, here.name_to_buf, here.name_to_fused_node, inputs, outputs))


def graph_name() -> str:
    """Return the name of the graph that is being compiled: "forward 0" and the like."""
    graph = compat.virtualized.graph
    phase = "inference" if graph.is_inference else "backward" if graph.is_backward else "forward"
    return f"{compat.graph_being_compiled()}: {phase}{' ' + graph.name if graph.name else ''}"


def uses_streams() -> bool:
    """Return whether kernels run on several streams at once (torch 2.13 on)."""
    return bool(getattr(scheduler(), "_multi_stream_nodes", False))


def dependencies(node: Any) -> Iterator[str]:
    """Yield the buffers, under their present names, that must have been written before a node runs."""
    return (dep.name for dep in node.unmet_dependencies)


def used_names(node: Any) -> Iterator[str]:
    """Yield the buffers and inputs whose storages must be alive while a node runs."""
    return iter(node.used_or_aliased_buffer_names())


def output_names() -> Iterator[str]:
    """Yield the buffers the graph returns, and those whose storages they lie in."""
    graph = compat.virtualized.graph
    waiting = list(graph.get_output_names())
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        yield name
        if name in graph.name_to_buffer:
            waiting += graph.name_to_buffer[name].get_inputs_that_alias_output()


def mutated() -> dict[str, str]:
    """Return, for the name of every mutation's result, the buffer or input that holds it."""
    return dict(scheduler().mutation_real_name)


def planned_device(buffers: Iterable[Any]) -> torch.device | None:
    """Return the device whose memory counts: the first that is no CPU, if there is one."""
    devices = [device for buffer in buffers if (device := buffer.node.get_device()) is not None]
    return next((device for device in devices if device.type != "cpu"), devices[0] if devices else None)


def freed_inputs() -> Iterator[tuple[str, Any]]:
    """Yield the inputs whose storages are freed when the code is done with them.

    Where AOTAutograd has told Inductor which saved tensors nobody else holds, these; a view of a parameter is not
    among them. Otherwise what Inductor takes for such.
    """
    graph = compat.virtualized.graph
    if not graph.is_backward:
        return
    donated = scheduler().name_to_donated_buffer
    for name, value in graph.graph_inputs_original.items():
        free = name in donated if donated else not compat.is_nonfreeable_buffers(_Named(name))
        if free and isinstance(value, ir.Buffer):
            yield name, value


class _Named:
    """Stands for a dependency on an input."""

    def __init__(self, name: str) -> None:
        self.name = name


def input_bytes(buffer: Any, device: torch.device | None) -> int:
    """Return the bytes of an input if it lies on the device, else 0."""
    if buffer.get_device() != device:
        return 0
    return compat.size_hint(compat.virtualized.graph, buffer.get_numel()) * int(buffer.get_dtype().itemsize)


def has_storage(buffer: Any) -> bool:
    """Return whether a buffer of the scheduler has memory of its own."""
    node = buffer.node
    if isinstance(node.get_output_spec(), _NO_STORAGE):
        return False
    return bool(node.should_allocate()) or not buffer.get_aliases()


def buffer_bytes(buffer: Any, device: torch.device | None) -> int:
    """Return the bytes that are freed with a buffer if it lies on the device, else 0; `prepare` has noted them."""
    return int(buffer.mpi_buffer.size_free) if buffer.node.get_device() == device else 0


def set_bytes(buffer: Any, *, alloc: int | None = None, free: int | None = None) -> None:
    """Change the bytes that Inductor takes to be allocated, or freed, with a buffer; `prepare` notes them anew."""
    if alloc is not None:
        buffer.mpi_buffer.size_alloc = alloc
    if free is not None:
        buffer.mpi_buffer.size_free = free


def move_alloc(buffer: Any, later: Any) -> None:
    """Let Inductor take what is allocated with a buffer to be allocated with a later one."""
    later.mpi_buffer.size_alloc += buffer.mpi_buffer.size_alloc
    buffer.mpi_buffer.size_alloc = 0


def whole_of(buffer: Any) -> str | None:
    """Return the buffer that a part of a concatenation is written into; None for any other."""
    layout = buffer.node.get_output_spec()
    if not isinstance(layout, ir.NonOwningLayout):
        return None
    return str(layout.view.get_name())


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
    """Return the nodes that a kernel was fused from, such that any of them could be a kernel; else the node alone.

    Where others have to wait for a kernel without reading what it makes, Inductor may have noted that for all of it.
    """
    weak = any(user.is_weak for buffer in node.get_outputs() for user in buffer.users)
    waited_for = weak and not counts_readers_only()
    if waited_for or keeps_order(node) or not codegen.is_plain_fusion(node):
        return [node]
    return list(node.get_nodes())


def mutable_names() -> set[str]:
    """Return the buffers and inputs that some kernel changes, under all names they have."""
    here = scheduler()
    return {
        name
        for renamed in (here.mutation_real_name, here.mutation_renames)
        for pair in renamed.items()
        for name in pair
    }


def is_rigid(part: Any, mutable: set[str]) -> bool:
    """Return whether a part of a kernel stays in it because it has to do with memory that is changed.

    In a whole step all parameters are: there what reads them may move, ahead of the update that waits for its result.
    """
    if counts_readers_only():
        return any(buffer.get_mutations() for buffer in part.get_outputs())
    return not mutable.isdisjoint(touched_names(part))


def touched_names(node: Any) -> set[str]:
    """Return the buffers and inputs that a node reads or writes."""
    return {dep.name for dep in node.read_writes.reads_and_writes()}


def fuse(parts: Sequence[Any], whole: Any) -> Any:
    """Return one kernel of some parts of a fused node, which stay in their order; None where that is no kernel."""
    if len(parts) == 1:
        return parts[0]
    device = whole.get_device()
    return codegen.fused_again(scheduler().get_backend(device), list(parts), whole)


def name_kernels(nodes: Iterable[Any]) -> None:
    """Let the scheduler know which kernel every node before fusion is in."""
    here = scheduler()
    for node in nodes:
        for inner in node.get_nodes():
            here.name_to_fused_node[inner.get_name()] = node


def shares_function(node: Any) -> bool:
    """Return whether a kernel's code is put into one function with that of its neighbours."""
    if node.is_extern() or node.is_template():
        return False
    device = node.get_device()
    return device is None or (device.type == "cpu" and codegen.groups_kernels(scheduler().get_backend(device)))


def has_code(node: Any) -> bool:
    """Return whether a node is more than a name for memory that others write."""
    return not isinstance(node, compat.scheduler_classes().NopKernelSchedulerNode)


def end_functions(nodes: Iterable[Any], behind: set[str]) -> None:
    """Let functions end behind some kernels."""
    device = next((node.get_device() for node in nodes if node.get_name() in behind), None)
    if device is not None:
        codegen.end_groups(scheduler(), device, behind)


def keeps_order(node: Any) -> bool:
    """Return whether a node may not change places with others of its kind: effects, random numbers, communication."""
    if is_collective(node) or is_wait(node):
        return True
    for inner in node.get_nodes():
        if inner.has_side_effects():
            return True
        target = getattr(inner.node, "op_overload", None)
        if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
            return True
    return False


def count_readers_only() -> None:
    """Take only what reads a buffer for its user, in the graph being compiled; see `codegen.drop_weak_users`."""
    scheduler().olla_readers_only = True


def counts_readers_only() -> bool:
    """Return whether what merely has to run later keeps no buffer from being overwritten."""
    return bool(getattr(scheduler(), "olla_readers_only", False))


def is_collective(node: Any) -> bool:
    """Return whether a node starts a communication between processes."""
    return bool(compat.is_collective(node))


def is_wait(node: Any) -> bool:
    """Return whether a node waits for one."""
    return bool(compat.is_wait(node))


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
        if not isinstance(inner, classes.SchedulerNode) or not compat.overwrites(graph, inner.get_device()):
            continue
        for buffer in inner.get_outputs():
            if not _may_take_over(buffer) or is_inside(node, buffer):
                continue
            for read in inner.read_writes.reads:
                old = here.name_to_donated_buffer.get(read.name) or here.name_to_buf.get(read.name)
                if old is not None and _may_be_taken(old, inner, node, precedes) and _fits(old, buffer):
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


def _fits(old: Any, new: Any) -> bool:
    return bool(compat.can_match_buffer_size(old.node, new.node))
