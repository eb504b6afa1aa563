"""Every name of torch that is private or a prototype and that olla uses inside torch.compile.

Supported: torch 2.11 to 2.15. Where a name is gone, the error says which, and in which torch.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import importlib
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from olla.errors import CaptureError
from olla.inductor.compat import fallback

OLDEST = (2, 11)
NEWEST_TESTED = (2, 15)


def private(module: str, name: str) -> Any:
    """Return a name of a torch module.

    Raises:
        CaptureError: rule "torch_version"; this torch has it no more, or not yet.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST_TESTED))
        raise CaptureError(
            f"olla.inductor needs {module}.{name}, which torch {torch.__version__} does not have; it works with torch "
            f"{oldest} to {newest}: install one of those, or compile with backend='inductor'",
            rule="torch_version",
        ) from error


CustomGraphPass: Any = private("torch._inductor.custom_graph_pass", "CustomGraphPass")
CustomPartitionerFn: Any = private("torch._inductor.custom_graph_pass", "CustomPartitionerFn")
CustomSchedulerPass: Any = (  # 2.13; a plain callable does before, but bypasses the cache of compiled graphs
    private("torch._inductor.custom_graph_pass", "CustomSchedulerPass")
    if hasattr(importlib.import_module("torch._inductor.custom_graph_pass"), "CustomSchedulerPass")
    else object
)
config: Any = private("torch._inductor", "config")
functorch_config: Any = private("torch._functorch", "config")
_partitioners = "torch._functorch.partitioners"
min_cut_partition: Any = private(_partitioners, "min_cut_rematerialization_partition")
fx_graph_cse: Any = private(_partitioners, "fx_graph_cse")
must_recompute: Any = private(_partitioners, "must_recompute")
size_of: Any = private(_partitioners, "_size_of")
is_tangent: Any = private("torch._functorch._aot_autograd.utils", "_is_tangent")
is_symbolic: Any = private("torch.fx.experimental.proxy_tensor", "is_sym_node")
uncacheable: Any = private("torch._inductor.codecache", "BypassFxGraphCache")
clone = torch.ops.aten.clone.default


def is_tensor_node(node: torch.fx.Node) -> bool:
    """Whether a node's value is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def is_getitem(node: torch.fx.Node) -> bool:
    """Whether a node takes an element of a tuple."""
    return node.target is operator.getitem


def is_flex_attention(node: torch.fx.Node) -> bool:
    """Whether a node is FlexAttention's forward: an operator that holds a graph of its own, and has no effects."""
    return node.target is torch.ops.higher_order.flex_attention


def runs_kernels(node: torch.fx.Node) -> bool:
    """Whether a node runs an operator on tensors, rather than Python arithmetic on sizes."""
    return isinstance(node.target, torch._ops.OpOverload | torch._ops.HigherOrderOperator) and not is_symbolic(node)


def must_save(node: torch.fx.Node) -> bool:
    """Whether the user, or torch on behalf of what has effects, wants a node's result saved."""
    return bool(node.meta.get("recompute") == torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE)


def hint(value: Any) -> Any:
    """Return a size as a plain number, without making a guard of it."""
    if not isinstance(value, torch.SymInt):
        return value
    module = "torch.fx.experimental.symbolic_shapes"
    new = hasattr(importlib.import_module(module), "optimization_hint")  # its name since torch 2.13
    return private(module, "optimization_hint" if new else "size_hint")(value, fallback=4096)


def hinted(value: Any) -> Any:
    """Return what a flop formula takes for a value: plain numbers, the sizes of a tensor for the tensor."""
    if isinstance(value, torch.Tensor):
        return torch.Size(hint(size) for size in value.shape)
    if isinstance(value, tuple | list):
        return type(value)(hinted(item) for item in value)
    return hint(value)


def devices(module: torch.fx.GraphModule) -> set[torch.device]:
    """Return the devices of a graph's tensors."""
    return {node.meta["val"].device for node in module.graph.nodes if is_tensor_node(node)}


def on_cpu(module: torch.fx.GraphModule) -> bool:
    """Return whether all tensors of a graph are in host memory."""
    return all(device.type in ("cpu", "meta") for device in devices(module))


def obstacle(module: torch.fx.GraphModule, *, holds_graphs: bool = True) -> str:
    """Return why a joint graph is left to torch's partitioner; empty where olla can take it.

    Args:
        module: the joint graph.
        holds_graphs: whether the caller can have operators that hold graphs of their own.
    """
    primal = private("torch._functorch._aot_autograd.utils", "_is_primal")
    for node in module.graph.nodes:
        if node.op == "placeholder" and not (primal(node) or is_tangent(node)):
            return f"its input {node.name} is neither an argument nor a gradient"
        if node.op != "call_function":
            continue
        if node.target is torch.ops.higher_order.with_effects:
            return f"it calls {node.target}, which has effects"
        if not holds_graphs and isinstance(node.target, torch._ops.HigherOrderOperator):
            return f"it calls {node.target}, which holds a graph of its own or has effects"
        if is_symbolic(node) and not all(is_symbolic(n) or n.op == "placeholder" for n in node.all_input_nodes):
            return f"the size {node.name} depends on data"
    return ""


def copied(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return a graph module whose nodes, their order and their notes can be changed without changing those given."""
    graph = torch.fx.Graph()
    copied_output: Any = graph.graph_copy(module.graph, {}, return_output_node=True)
    results, output = copied_output
    graph.output(results).meta.update(output.meta)
    new = torch.fx.GraphModule(module, graph)
    new.meta.update(module.meta)
    return new


def changes_inputs(node: torch.fx.Node) -> bool:
    """Whether an operator writes into what it is given."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def changed_inputs(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Return the inputs of a joint graph that forward changes: inside, or right behind it."""
    descriptions = graph.output_node().meta.get("desc") or ()
    behind = {described.mutated_input for described in descriptions if hasattr(described, "mutated_input")}
    inside = {node.args[0] for node in graph.nodes if changes_inputs(node) and node.args}
    given = graph.find_nodes(op="placeholder")
    return {node for node in given if node in inside or node.meta.get("desc") in behind}


def communicates(node: torch.fx.Node) -> bool:
    """Return whether a node of a joint graph starts or awaits a communication between processes."""
    return getattr(node.target, "namespace", "").startswith("_c10d_functional")


def keep_in(node: torch.fx.Node, *, backward: bool) -> None:
    """Pin a node to one of the two graphs: torch would keep an impure or random one wherever it could run."""
    node.meta["partitioner_tag"] = "must_be_in_backward" if backward else "must_be_in_forward"


def settle_recompute_tags(module: torch.fx.GraphModule) -> None:
    """Have what lies between two checkpointed regions saved, as it is in eager training."""
    if private(_partitioners, "has_recomputable_ops")(module):
        private(_partitioners, "cleanup_recompute_tags")(module, is_default_partition=False)


def prepare(module: torch.fx.GraphModule, static_indices: list[int] | None, num_forward_outputs: int) -> Any:
    """Do with a joint graph what torch's partitioner does before it decides; returns how it classifies the nodes.

    None where nothing in the graph belongs to backward.
    """
    module.graph.eliminate_dead_code()
    module.recompile()
    if functorch_config.cse:
        module.graph = fx_graph_cse(module.graph)
    settle_recompute_tags(module)
    if not functorch_config.unsafe_allow_optimization_of_collectives:
        private(_partitioners, "force_save_collectives")(module)
    private(_partitioners, "force_save_effectful_ops")(module)
    private(_partitioners, "force_save_bw_mutation_src")(module)
    info = private(_partitioners, "classify_nodes")(module, static_indices or [], num_forward_outputs)
    return info if info.required_bw_nodes else None


def split(
    module: torch.fx.GraphModule, saved: list[Any], saved_sizes: list[Any], static: Any, num_forward_outputs: int
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Return forward and backward of a joint graph that hands the saved nodes from one to the other.

    The list of saved sizes is updated in place to those that are handed over.
    """
    extract = private(_partitioners, "_extract_fwd_bwd_modules")
    forward, backward = extract(
        module,
        saved,
        saved_sym_nodes=saved_sizes,
        num_fwd_outputs=num_forward_outputs,
        static_lifetime_input_nodes=OrderedSet(static),
    )
    raise_getitems = private(_partitioners, "raise_getitems")
    return raise_getitems(forward), raise_getitems(backward)


def drawn_alike(
    module: torch.fx.GraphModule,
    forward: torch.fx.GraphModule,
    backward: torch.fx.GraphModule,
    again: Mapping[str, str],
    num_sizes: int,
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Make random nodes of backward draw the same numbers as nodes of forward, from the saved generator state.

    Args:
        module: the joint graph that was divided.
        forward, backward: its halves; they are changed.
        again: the name of a node in backward -> that of the one in forward.
        num_sizes: how many sizes forward hands to backward.
    """
    for node in backward.graph.nodes:
        if node.name in again:
            node._rename(again[node.name])  # torch knows what belongs together by the name
    functionalize = private(_partitioners, "functionalize_rng_ops")
    return functionalize(module, forward, backward, num_sizes)  # type: ignore[no-any-return]


# --- Inductor's scheduler: order.py, fused.py, scheduler.py -----------------------------------------------------------
inductor_ir: Any = importlib.import_module("torch._inductor.ir")
virtualized: Any = private("torch._inductor.virtualized", "V")
prepare_planning_info: Any = private("torch._inductor.memory", "prepare_planning_info")
can_match_buffer_size: Any = private("torch._inductor.codegen.wrapper", "can_match_buffer_size")
is_nonfreeable_buffers: Any = private("torch._inductor.utils", "is_nonfreeable_buffers")
is_collective: Any = private("torch._inductor.utils", "contains_collective")
is_wait: Any = private("torch._inductor.utils", "contains_wait")
graph_being_compiled: Any = private("torch._functorch._aot_autograd.logging_utils", "get_aot_graph_name")
OrderedSet: Any = private("torch.utils._ordered_set", "OrderedSet")
_SCHEDULER_MEMBERS = {
    "BaseSchedulerNode": "get_outputs get_nodes get_name get_device used_or_aliased_buffer_names",
    "SchedulerBuffer": "get_name get_aliases",
    "Scheduler": "can_buffer_be_removed_through_fusion compute_last_usage get_backend",
    **dict.fromkeys(("SchedulerNode", "FusedSchedulerNode", "OutputNode"), ""),
    **dict.fromkeys(("ExternKernelSchedulerNode", "NopKernelSchedulerNode"), ""),
}


@functools.cache
def scheduler_classes() -> Any:
    """Return the module of Inductor's scheduler, its classes checked for the members that olla uses."""
    for owner, members in _SCHEDULER_MEMBERS.items():
        found = private("torch._inductor.scheduler", owner)
        for member in members.split():
            if not hasattr(found, member):
                private("torch._inductor.scheduler", f"{owner}.{member}")
    return importlib.import_module("torch._inductor.scheduler")


# ----------------------------------------------------------------------------------------------------------------------


def variable_like_config(name: str, value: Any) -> Any:
    """Return a variable that is a thread's own where Inductor's configuration is (torch 2.13), else everybody's."""
    entry = config._config.get("custom_partitioner_fn")
    if isinstance(getattr(entry, "user_override", None), contextvars.ContextVar):
        return contextvars.ContextVar(name, default=value)
    shared = {name: value}
    return types.SimpleNamespace(get=lambda: shared[name], set=lambda new: shared.update({name: new}))


def keep_strides_of_results(graph: torch.fx.Graph) -> None:
    """Have Inductor return inputs that are results of forward with the strides they have, as it does for users'."""
    output: Any = graph.output_node()
    visible = output.meta.get("user_visible_output_idxs")
    if not visible or len(output.meta.get("original_output_strides", ())) != len(output.args[0]):
        return
    also = [i for i, result in enumerate(output.args[0]) if getattr(result, "op", "") == "placeholder"]
    output.meta["user_visible_output_idxs"] = sorted({*visible, *also})


def compile_graph(
    module: Any, inputs: Any, *, mode: str | None, options: Mapping[str, Any], patches: Mapping[str, Any]
) -> Any:
    """Compile with Inductor under a mode, options by name, and patches of its configuration."""
    inductor = private("torch", "_TorchCompileInductorWrapper")(mode, dict(options), None)
    inductor.config.update(patches)  # its own argument for patches exists since torch 2.13 only
    return inductor(module, inputs)


@functools.cache
def code_digest() -> str:
    """Return a digest of the package's Python code and compiled core: decisions may change with either."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted((*root.rglob("*.py"), *root.glob("_core*"))):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


_PATCHABLE = {  # what is replaced for a while: module, path in it
    "AsyncCompile": ("torch._inductor.async_compile", "AsyncCompile"),
    "align_inputs": ("torch._inductor.output_code", "align_inputs_from_check_idxs"),
    "cudagraphify": ("torch._inductor.compile_fx", "cudagraphify"),
    "load_wrapper": ("torch._inductor.codecache", "PyCodeCache.load_by_key_path"),
    "partition_fn": ("torch._inductor.compile_fx", "partition_fn"),
}


@contextlib.contextmanager
def patched(name: str, value: Any) -> Iterator[Any]:
    """Replace one of the names of _PATCHABLE in a block; yields what it was."""
    module, path = _PATCHABLE[name]
    owner, _, attribute = path.rpartition(".")
    holder = private(module, owner) if owner else importlib.import_module(module)
    private(module, path.partition(".")[0])
    before = vars(holder)[attribute]
    setattr(holder, attribute, value)
    try:
        yield before
    finally:
        setattr(holder, attribute, before)


def uncached() -> contextlib.AbstractContextManager[None]:
    """Compile everything anew in a block, in this process: nothing is read from or written to caches.

    Kernels for the CPU are generated without vector instructions, which takes half as long and no compiler.
    """
    settings = {"force_disable_caches": True, "compile_threads": 1, "benchmark_harness": False, "cpp.simdlen": 1}
    return config.patch(settings)  # type: ignore[no-any-return]


def multiplies_in_short(*, is_convolution: bool) -> bool:
    """Whether numbers of 32 bits are multiplied in TF32 on CUDA, by the settings in force."""
    backends: Any = torch.backends
    settings = backends.cudnn.conv if is_convolution else backends.cuda.matmul
    return bool(settings.fp32_precision == "tf32")


def flop_formula(target: Any) -> Callable[..., int] | None:
    """Return what counts the flops of an operator, or None where it is no product of matrices and no convolution."""
    registry = private("torch.utils.flop_counter", "flop_registry")
    packet = getattr(target, "overloadpacket", target)
    name = str(packet)
    if name.startswith("aten.") and "_for_cpu" in name:  # attention: same arguments first, but no entry of its own
        packet = getattr(torch.ops.aten, name.removeprefix("aten.").replace("_for_cpu", ""))
    formula: Callable[..., int] | None = registry.get(packet)
    return formula


def node_flops(node: torch.fx.Node, value: Callable[[Any], Any] = hinted) -> int:
    """Return the flops of a node, 0 for what is no matrix product, convolution or attention.

    Args:
        node: of a graph.
        value: tensor or size -> what the formula takes for it.
    """
    target: Any = node.target
    arguments = node.args
    if isinstance(target, torch._ops.HigherOrderOperator):  # one that runs an operator with a state of random numbers?
        place = next((i for i, a in enumerate(arguments) if isinstance(a, torch._ops.OpOverload)), None)
        if place is not None:
            target, arguments = arguments[place], arguments[place + 1 :]
    formula = flop_formula(target)
    if formula is None:
        return 0
    with fallback.tried(f"the flops of {node.target} are left out"):  # an estimate, or a figure in a report
        args, kwargs = torch.fx.node.map_arg((arguments, node.kwargs), lambda n: value(n.meta.get("val")))
        return int(hint(formula(*args, **kwargs, out_val=value(node.meta.get("val")))))
    return 0


@contextlib.contextmanager
def memory_budget(share: float) -> Iterator[None]:
    """Let torch's own partitioner, and no other, divide graphs in a block, with ``activation_memory_budget=share``."""
    with config.patch(custom_partitioner_fn=None), functorch_config.patch(activation_memory_budget=share):
        yield
