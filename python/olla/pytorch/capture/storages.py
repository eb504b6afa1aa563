"""An fx graph of ATen operators -> an olla.Graph: views folded into storages, mutations and random operators marked.

Source: storage identity of node.meta["val"], and the alias annotations of the operator schemas.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from olla.errors import CaptureError
from olla.graph import Graph
from olla.pytorch.capture import costs
from olla.pytorch.capture.costs import results_of, storage_of
from olla.pytorch.capture.inputs import Input
from olla.pytorch.capture.trace import KIND
from olla.pytorch.checks.checks import CHECK, is_check
from olla.pytorch.ranks import collectives
from olla.pytorch.sites.sites import site_of


@dataclass
class Folded:
    """An olla graph and what ties it to the fx graph it was made from; see olla.pytorch.capture.Captured."""

    graph: Graph
    nodes: list[tuple[fx.Node, ...]]
    prologue: tuple[fx.Node, ...]
    tensors: dict[fx.Node, tuple[int, ...]]
    inputs: list[Input]


@dataclass
class _Op:
    """One operator with a kernel; ids are positions in _Folder.tensors."""

    node: fx.Node
    reads: list[int]
    writes: list[int]
    mutates: list[int]
    random: bool
    followers: list[fx.Node] = field(default_factory=list)  # nodes without kernel that derive from it

    @property
    def communicates(self) -> bool:
        """Whether other ranks expect it to run."""
        return collectives.is_wait(self.node) or collectives.issues(self.node)

    @property
    def checks(self) -> bool:
        """Whether it may raise an error by the values it reads."""
        return is_check(self.node) or any(map(is_check, self.followers))


@dataclass
class _StorageTensor:
    kind: str
    name: str
    value: torch.Tensor | None  # keeps the storage, and with it its identity, alive; None: a Python number


class _Folder:
    def __init__(self, module: fx.GraphModule, inputs: Iterable[Input]) -> None:
        self.module = module
        self.inputs = list(inputs)
        self.tensors: list[_StorageTensor] = []
        self.ops: list[_Op] = []
        self.prologue: list[fx.Node] = []
        self.held: dict[fx.Node, tuple[int, ...]] = {}  # tensors a node's value lives in
        self.op_of: dict[fx.Node, int] = {}  # the op a node's value comes from; absent for inputs
        self._by_storage: dict[int, int] = {}
        self._sent: dict[fx.Node | None, list[int]] = {}  # tensors that a collective works on until it is waited for
        self._of_kind: dict[str, set[fx.Node]] = {"rate": set(), "parameter": set()}  # nodes of inputs

    def read(self) -> None:
        """Sort every node into tensors, ops and followers, in program order."""
        waiting = iter(self.inputs)
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                entry = next(waiting)
                self._of_kind.setdefault(entry.kind, set()).add(node)
                kind = {"rate": "input", "gradient": "buffer"}.get(entry.kind, entry.kind)
                self._resident(node, node.meta["val"], kind, entry.name)
            elif node.op == "get_attr":
                self._constant(node)
            elif node.op == "call_function":
                self._call(node)

    def _resident(self, node: fx.Node, value: torch.Tensor, kind: str, name: str) -> None:
        if storage_of(value) not in self._by_storage:
            self._new(kind, name, value)
        self.held[node] = (self._by_storage[storage_of(value)],)

    def _constant(self, node: fx.Node) -> None:
        value = operator.attrgetter(str(node.target))(self.module)
        if isinstance(value, torch.Tensor):
            self._resident(node, value, "constant", str(node.target))
        else:
            self.held[node] = ()

    def _call(self, node: fx.Node) -> None:
        sources = node.all_input_nodes
        arguments = _unique(t for n in sources for t in self.held[n])
        outputs = results_of(node)
        self._adopt_aliases(node)
        if collectives.issues(node):
            self._sent[node] = arguments
        elif collectives.is_wait(node):
            arguments = _unique([*arguments, *self._sent.get(collectives.issue_of(node), ())])
        fresh = list({storage_of(o): o for o in outputs if storage_of(o) not in self._by_storage}.values())
        changed = _unique(t for n in costs.mutated(node) for t in self.held[n])
        kernel = bool(fresh or changed) or (costs.is_operator(node) and not outputs and node.target is not CHECK)
        if costs.reads_number(node) and sources[0] in self._of_kind["rate"]:
            kernel = False  # a learning rate is read once, before the step
        producers = _unique(self.op_of[n] for n in sources if n in self.op_of)
        if not kernel and len(producers) < 2:
            self.held[node] = tuple(_unique(self._by_storage[storage_of(o)] for o in outputs)) or tuple(arguments)
            self._follow(node, producers)
            return
        many = len(outputs) > 1
        writes = [self._new("temporary", f"{node.name}[{i}]" if many else node.name, v) for i, v in enumerate(fresh)]
        if not outputs:
            writes.append(self._new("temporary", node.name, None))
        self.op_of[node] = len(self.ops)
        self.ops.append(_Op(node, arguments, writes, changed, costs.is_random(node)))
        self.held[node] = tuple(_unique(self._by_storage[storage_of(o)] for o in outputs)) or tuple(writes)

    def _adopt_aliases(self, node: fx.Node) -> None:
        """Give outputs the tensor they alias where their fake has another storage: of constants, of collectives."""
        if collectives.is_wait(node) or collectives.issues(node):
            # What is waited for is what was changed, and so is the result of a collective in place.
            changed = [v for n in costs.mutated(node) for v in results_of(n)]
            for before, after in zip(changed, results_of(node), strict=False):
                self._by_storage[storage_of(after)] = self._by_storage[storage_of(before)]
            return
        if len(node.all_input_nodes) != 1 or node.all_input_nodes[0].op != "get_attr":
            return
        schema = getattr(node.target, "_schema", None)
        if schema is not None and any(r.alias_info is not None for r in schema.returns):
            for output in results_of(node):
                self._by_storage[storage_of(output)] = self.held[node.all_input_nodes[0]][0]

    def _follow(self, node: fx.Node, producers: list[int]) -> None:
        """Place a view, an item of a tuple or arithmetic on numbers right after the op it derives from."""
        if producers:
            self.op_of[node] = producers[0]
            self.ops[producers[0]].followers.append(node)
        else:
            self.prologue.append(node)

    def _new(self, kind: str, name: str, value: torch.Tensor | None) -> int:
        number = len(self.tensors)
        self.tensors.append(_StorageTensor(kind, name, value))
        if value is not None:
            self._by_storage[storage_of(value)] = number
        return number

    def drop_dead(self) -> None:
        """Remove ops without effect from the fx graph and from the lists, and state the optimizer would never create.

        An op has an effect if it draws random numbers, changes what outlives the step, checks values, communicates, or
        feeds an op that has one.
        """
        needed = {t for n in self.module.graph.output_node().all_input_nodes for t in self.held[n]}
        needed |= {i for i, t in enumerate(self.tensors) if t.kind != "temporary"}
        alive = set()
        for op in reversed(self.ops):
            kept = op.random or op.checks or op.communicates
            if kept or not needed.isdisjoint(op.writes) or not needed.isdisjoint(op.mutates):
                alive.add(op.node)
                needed.update(op.reads)
        kernels = {op.node for op in self.ops}
        for node in reversed(list(self.module.graph.nodes)):
            dead = node not in alive if node in kernels else not (node.users or is_check(node))
            if node.op in ("call_function", "get_attr") and dead:
                self.module.graph.erase_node(node)
                del self.held[node]
        self.ops = [op for op in self.ops if op.node in alive]
        for op in self.ops:
            op.followers = [n for n in op.followers if n in self.held]
        self.prologue = [n for n in self.prologue if n in self.held]
        self._drop_unused_state()

    def _drop_unused_state(self) -> None:
        kept = []
        for node, entry in zip(self.module.graph.find_nodes(op="placeholder"), self.inputs, strict=True):
            if entry.exists or node.users:
                kept.append(entry)
            else:
                self.module.graph.erase_node(node)
                del self.held[node]
        self.inputs = kept

    def build(self, name: str) -> Folded:
        """Make the olla graph from what is left, with ids in program order."""
        builder = Graph.builder(name)
        new_id: dict[int, int] = {}
        used = {t for held in self.held.values() for t in held} | {t for op in self.ops for t in op.writes}
        for old in sorted(used):
            tensor = self.tensors[old]
            new_id[old] = builder.tensor(_nbytes(tensor), kind=tensor.kind, name=tensor.name)
        checked = -1  # the last op that checks values: those after it, and what outlives the step, wait for it
        for number, op in enumerate(self.ops):
            waits = op.checks or any(self.tensors[t].kind != "temporary" for t in op.mutates)
            self._add_op(builder, op, new_id, [checked] if waits and checked >= 0 else [])
            checked = number if op.checks else checked
        for t in _unique(t for n in self.module.graph.output_node().all_input_nodes for t in self.held[n]):
            builder.output(new_id[t])
        self.module.recompile()
        tensors = {node: tuple(new_id[t] for t in held) for node, held in self.held.items()}
        nodes = [(op.node, *op.followers) for op in self.ops]
        return Folded(builder.build(), nodes, tuple(self.prologue), tensors, self.inputs)

    def _add_op(self, builder: Any, op: _Op, new_id: dict[int, int], after: list[int]) -> None:
        node = op.node
        changed = [v for n in costs.mutated(node) for v in results_of(n)]
        arguments = changed + [v for n in node.all_input_nodes for v in results_of(n)]
        results = [v for t in op.writes if (v := self.tensors[t].value) is not None]
        outputs = results_of(node)
        talk = self._communication(node, arguments[len(changed) :], outputs)
        builder.op(
            node.name,
            reads=[new_id[t] for t in op.reads],
            writes=[new_id[t] for t in op.writes],
            mutates=[new_id[t] for t in op.mutates],
            after=after,
            kind=node.meta.get(KIND, "other"),
            **site_of(node)._asdict(),
            flops=costs.flops(node),
            moved_bytes=0 if talk else costs.moved_bytes(node, arguments, results, len(changed)),
            launches=costs.num_launches(node),
            random=op.random,
            recomputable=not op.random
            and not op.checks
            and collectives.may_run_again(node, self._of_kind["parameter"])
            and all(self.tensors[t].kind == "temporary" for t in op.mutates),
            target=costs.target_name(node),
            shape=tuple(int(n) for n in outputs[0].shape) if outputs else (),
            **({} if talk is None else {"collective": talk.kind, **dict(zip(talk._fields[1:], talk[1:], strict=True))}),
        )

    def _communication(
        self, node: fx.Node, given: list[torch.Tensor], made: list[torch.Tensor]
    ) -> collectives.Communication | None:
        """Return what an op sends, or waits for; None where it does not communicate."""
        if collectives.issues(node):
            return collectives.communication(node, given, made)
        issue = collectives.issue_of(node) if collectives.is_wait(node) else None
        if issue is None:
            return None
        group = collectives.group_name(issue)
        return collectives.Communication("wait", group, collectives.group_size(group), 0)


def fold(module: fx.GraphModule, inputs: Iterable[Input], name: str) -> Folded:
    """Turn a traced step into an olla graph of this name, and remove dead nodes from its fx graph in place.

    ``inputs`` are those of its placeholders; optimizer state that would never be created is removed.

    Returns:
        The graph with its ties to the module, and the inputs the module still takes.

    Complexity: O(nodes + edges).
    """
    _make_views_pure(module)
    folder = _Folder(module, inputs)
    folder.read()
    folder.drop_dead()
    return folder.build(name)


def _make_views_pure(module: fx.GraphModule) -> None:
    """Replace in-place changes of shape (squeeze_, t_) by views: they move no data.

    Raises:
        CaptureError: a storage is resized or replaced.
    """
    for node in module.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.inplace_view not in node.target.tags:
            continue
        view = _view_of(node.target)
        if view is None:
            raise CaptureError(
                f"the step calls {node.target}, which gives a tensor another storage. "
                "Allocate a new tensor instead of resizing one."
            )
        node.target = view


def _view_of(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """Return the operator that does to a view what ``target`` does in place: transpose for transpose_."""
    packet = getattr(torch.ops.aten, target._schema.name.removeprefix("aten::").removesuffix("_"), None)
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments]
    for name in packet.overloads() if packet is not None else ():
        candidate: torch._ops.OpOverload = getattr(packet, name)
        schema = candidate._schema
        if [(a.name, str(a.type)) for a in schema.arguments] == wanted and schema.returns[0].alias_info is not None:
            return candidate
    return None


def _nbytes(tensor: _StorageTensor) -> int:
    size = 0 if tensor.value is None else tensor.value.untyped_storage().nbytes()
    if not isinstance(size, int):
        raise CaptureError(
            f"the size of {tensor.name} depends on the values of tensors ({size} bytes). Use shapes known in advance."
        )
    return size


def _unique(items: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(items))


def lighten(captured: Any) -> None:
    """Reduce the metadata of nodes to what a program needs: one fake shared by values of equal type, shape and strides.

    To be called once the step is folded and planned: the storages of values are no longer known.
    """
    for step in (captured, captured.original):
        if step is not None:
            _lighten(step.module.graph)


def _lighten(graph: fx.Graph) -> None:
    shared: dict[Any, torch.Tensor] = {}

    def first(value: torch.Tensor) -> torch.Tensor:
        key = (value.dtype, value.device, value.shape, value.stride(), value.storage_offset(), value.requires_grad)
        return shared.setdefault(key, value)

    for node in graph.nodes:
        value = node.meta.get("val")
        node.meta = {} if value is None else {"val": pytree.tree_map_only(torch.Tensor, first, value)}
