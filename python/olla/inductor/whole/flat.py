"""Turn a captured step into one graph of tensors for Inductor, with its scalars computed on the host before it.

Updates take numbers that are read from tensors: learning rates, Adam's bias corrections. Each becomes an input of its
own, computed on the host: nothing in the graph waits for a value, and updates that differ only in their numbers share a
kernel, which they could not if each read its number from another place of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from olla.errors import CaptureError
from olla.inductor.compat.compat import changes_inputs
from olla.pytorch.capture import Captured

aten = torch.ops.aten
_READ = aten._local_scalar_dense.default
_KIND = "olla_kind"
_ALIGNMENT = 16  # in bytes; what Inductor's kernels take of a GPU that is aligned otherwise is copied first
_VIEWS = (aten.view.default, aten._unsafe_view.default)
# How an operator takes a number as a tensor; those with a tensor in its place already are called with it.
_OF_TWO = (aten.mul_, aten.mul, aten.div_, aten.div, aten.add_, aten.add, aten.sub_, aten.sub)
_BY_TENSOR: dict[Any, Any] = {
    **{op.Scalar: op.Tensor for op in (*_OF_TWO, aten.lerp_, aten.lerp)},
    **{op.Tensor: op.Tensor for op in _OF_TWO},
    aten.pow.Tensor_Scalar: aten.pow.Tensor_Tensor,
}
# What is added times a number by an operator: how it is made of two tensors.
_PRODUCTS: dict[Any, Any] = {
    **dict.fromkeys((aten.addcdiv_.default, aten.addcdiv.default), aten.div.Tensor),
    **dict.fromkeys((aten.addcmul_.default, aten.addcmul.default), aten.mul.Tensor),
}


@dataclass(frozen=True)
class Flat:
    """A captured step as Inductor is to see it.

    Attributes:
        module: takes `kinds` tensors, returns the outputs of the captured step, and changes inputs in place.
        kinds: of its inputs: those of `olla.pytorch.capture.inputs.Input`, ``constant``, ``number``, ``tangent``.
        arguments: values of the captured inputs -> arguments of the module; the numbers are computed anew.
        fakes: stand-ins for its inputs.
    """

    module: fx.GraphModule
    kinds: list[str]
    arguments: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
    fakes: list[torch.Tensor]


def flatten(captured: Captured) -> Flat:
    """Return a captured step as one graph of tensors.

    Raises:
        CaptureError: the step has no one backward pass, checks values, or computes with numbers read inside of it.

    Complexity:
        O(nodes + edges).
    """
    return _Flattening(captured).run()


class _Flattening:
    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.old = captured.module.graph
        self.new = fx.Graph()
        self.map: dict[fx.Node, Any] = {}
        self.kinds: list[str] = []
        self.fakes: list[torch.Tensor] = []
        self.sources: list[int | torch.Tensor] = []  # of an input: which captured one it is, or its constant value
        self.written = self._written()
        self.seed = self._seed()
        self.host = self._host()

    def run(self) -> Flat:
        given = [node for node in self.old.nodes if node.op == "placeholder"]
        for i, (node, entry) in enumerate(zip(given, self.captured.inputs, strict=True)):
            if any(user not in self.host for user in node.users):
                self.map[node] = self._input(entry.kind, node.meta["val"], i)
        for node in self.old.nodes:
            if node.op == "get_attr":
                value = getattr(self.captured.module, str(node.target))
                self.map[node] = self._input("constant", value, value)
        self.numbers = self._numbers()
        self.map[self.seed] = self._input("tangent", self.seed.meta["val"], torch.ones(()))
        for node in self.old.nodes:
            if node.op == "call_function" and node not in self.host and node is not self.seed:
                self.map[node] = self._put(node)
        (output,) = self.old.find_nodes(op="output")
        self.new.output([self.map[node] for node in output.args[0]])
        module = fx.GraphModule(torch.nn.Module(), self.new)
        return Flat(module, self.kinds, self._arguments(), self.fakes)

    def _input(self, kind: str, fake: torch.Tensor, source: int | torch.Tensor) -> fx.Node:
        self.kinds.append(kind)
        self.fakes.append(fake)
        self.sources.append(source)
        node = self.new.placeholder(f"{kind}_{len(self.kinds)}")
        node.meta["val"] = fake
        return node

    def _written(self) -> set[fx.Node]:
        """Return the views through which something is changed in place."""
        found: set[fx.Node] = set()
        for node in self.old.nodes:
            target: Any = node.args[0] if node.op == "call_function" and changes_inputs(node) else None
            while isinstance(target, fx.Node) and target.op == "call_function":
                found.add(target)
                target = target.args[0] if target.args else None
        return found

    def _seed(self) -> fx.Node:
        """Return the node that begins backward: the gradient of the loss with respect to itself."""
        backward = [node for node in self.old.nodes if node.meta.get(_KIND) == "backward"]
        seeds = [n for n in backward if n.target is aten.ones_like.default and n.args[0].meta.get(_KIND) == "forward"]
        seeds = [n for n in seeds if n.meta["val"].numel() == 1]
        if len(seeds) != 1 or backward[0] is not seeds[0]:
            raise CaptureError(
                f'kernels="inductor" needs a step with one backward pass from one number, this one has {len(seeds)}: '
                'call backward() once, on the loss, or compile with kernels="torch"',
                rule="inductor_graph",
            )
        seed: fx.Node = seeds[0]
        return seed

    def _host(self) -> set[fx.Node]:
        """Return the nodes that run on the host: those that compute numbers, and what these are read from."""
        numbers: set[fx.Node] = set()
        for node in self.old.nodes:
            if node.op != "call_function":
                continue
            if node.target is _READ or (not numbers.isdisjoint(node.all_input_nodes) and not _is_tensor(node)):
                numbers.add(node)
            elif not isinstance(node.target, torch._ops.OpOverload) and not _is_tensor(node):
                self._refuse(node, "is no operator of torch on tensors")
            elif str(node.target).startswith("olla."):
                self._refuse(node, 'checks a value of the step; leave these out with checks="skip"')
        host, left = set(numbers), list(numbers)
        while left:
            node = left.pop()
            for source in node.all_input_nodes:
                if source.op == "call_function" and source not in host:
                    if source.meta["val"].numel() != 1 or source.meta.get(_KIND) == "backward":
                        self._refuse(source, "computes what the step reads a number from, before it could be known")
                    host.add(source)
                    left.append(source)
        for node in filter(changes_inputs, host):
            changed: Any = node.args[0]
            if any(_is_tensor(user) and user not in host for user in (*node.users, *changed.users)):
                self._refuse(node, "changes a number that operators on tensors read as well")
        return host

    def _numbers(self) -> list[fx.Node]:
        """Make inputs of the numbers that operators on tensors take."""
        numbers = [n for n in self.old.nodes if n in self.host and not _is_tensor(n)]
        taken = [n for n in numbers if not self.host.issuperset(n.users)]
        if not taken:
            return []
        vals = [node.meta["val"] for node in self.old.nodes if node.op == "placeholder"]
        double = any(v.dtype == torch.float64 and v.dim() > 0 for v in vals)
        self.number_type = torch.float64 if double else torch.float32
        devices = {v.device for v in vals if v.dim() > 0}
        self.number_device = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
        for i, node in enumerate(taken):
            with vals[0].fake_mode:
                fake = torch.empty((), dtype=self.number_type, device=self.number_device)
            self.map[node] = self._input("number", fake, -1 - i)
        return taken

    def _put(self, node: Any) -> fx.Node:
        numbers = [n for n in node.all_input_nodes if n in self.host]
        if (mask := _mask_of(node)) is not None:
            return self._drawn(mask) if node is mask else self._dropped(node, mask)
        if not numbers and "alpha" in node.kwargs and node.target in _BY_TENSOR:
            # Inductor (torch 2.13) loses alpha where it makes addmm of a product and a sum: grad + alpha * parameter
            args = fx.node.map_arg(node.args, self.map.__getitem__)
            scaled = self.new.call_function(aten.mul.Scalar, (args[1], node.kwargs["alpha"]))
            return self.new.call_function(node.target, (args[0], scaled))
        if not numbers:
            new = self.new.node_copy(node, self.map.__getitem__)
            if node.target in _VIEWS and node not in self.written:
                new.target = aten.reshape.default  # Inductor's operators have strides of their own
            return new
        args, named = fx.node.map_arg((node.args, node.kwargs), self.map.__getitem__)
        call = self.new.call_function
        if node.target in _PRODUCTS:
            product = call(aten.mul.Tensor, (call(_PRODUCTS[node.target], tuple(args[1:3])), named["value"]))
            return call(aten.add_.Tensor if changes_inputs(node) else aten.add.Tensor, (args[0], product))
        other: Any = _BY_TENSOR.get(node.target)
        if other is None:
            self._refuse(node, "takes a number that changes from step to step")
        if "alpha" in named:
            args = (args[0], call(aten.mul.Tensor, (args[1], named["alpha"])))
            named = {}
        return call(other, tuple(args), dict(named))

    def _drawn(self, node: Any) -> fx.Node:
        """Draw a mask of dropout as torch.compile does: as truth values, which may be drawn again from their seed."""
        call, share = self.new.call_function, node.args[1]
        return call(aten.gt.Scalar, (call(aten.rand_like.default, (self.map[node.args[0]],)), 1 - share))

    def _dropped(self, node: fx.Node, mask: Any) -> fx.Node:
        """Apply a mask as torch.compile does: to what forward makes, or to its gradient."""
        call, scale = self.new.call_function, 1 / mask.args[1]
        kept: fx.Node = self.map[mask]
        if node.target is aten.div_.Scalar:
            return kept
        (other,) = [self.map[n] for n in node.all_input_nodes if _mask_of(n) is not mask]
        if node.meta.get(_KIND) == "backward":
            return call(aten.native_dropout_backward.default, (other, kept, scale))
        return call(aten.mul.Tensor, (call(aten.mul.Tensor, (kept, other)), scale))

    def _arguments(self) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
        sources = self.sources
        compute = self._host_program()

        def arguments(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            numbers = compute(values)
            return [s if isinstance(s, torch.Tensor) else values[s] if s >= 0 else numbers[-1 - s] for s in sources]

        return arguments

    def _host_program(self) -> Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
        """Return a generated function of the captured inputs that returns the numbers, and counts steps."""
        known: dict[str, Any] = {"tensor": torch.tensor}
        lines = ["def numbers(values):"]
        for i, node in enumerate(self.old.find_nodes(op="placeholder")):
            if any(user in self.host for user in node.users):
                lines.append(f"  {node.name} = values[{i}]")
        for i, node in enumerate(n for n in self.old.nodes if n in self.host):
            target: Any = node.target
            known[f"f{i}"] = torch.Tensor.item if target is _READ else getattr(target, "_op", target)
            texts = [_text(a, known, f"a{i}_{k}") for k, a in enumerate(node.args)]
            texts += [f"{k}={_text(a, known, f'k{i}_{k}')}" for k, a in node.kwargs.items()]
            lines.append(f"  {node.name} = f{i}({', '.join(texts)})")
        if not self.numbers:
            lines.append("  return ()")
        else:
            wide = _ALIGNMENT // self.number_type.itemsize
            table = torch.zeros((len(self.numbers), wide), dtype=self.number_type, device=self.number_device)
            known |= {"dtype": self.number_type, "column": table[:, 0], "views": table[:, 0].unbind()}
            names = ", ".join(n.name for n in self.numbers)
            lines.append(f"  column.copy_(tensor([{names}], dtype=dtype), non_blocking=True)")
            lines.append("  return views")
        exec("\n".join(lines), known)
        compute: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]] = known["numbers"]
        return compute

    def _refuse(self, node: fx.Node, why: str) -> None:
        raise CaptureError(
            f'kernels="inductor" cannot take this step: {node.target} {why}. Compile it with kernels="torch"',
            rule="inductor_graph",
        )


def _text(value: Any, known: dict[str, Any], name: str) -> str:
    if isinstance(value, fx.Node):
        return value.name
    known[name] = value
    return name


def _is_tensor(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor | tuple | list)


def _mask_of(node: Any) -> Any:
    """Return where the mask of a dropout is drawn, for that node, the one that scales it, and those that apply it."""
    scaled = node
    if node.target is aten.mul.Tensor:
        scaled = next((n for n in node.all_input_nodes if n.target is aten.div_.Scalar), node)
    elif node.target is aten.bernoulli_.float:
        scaled = next(iter(node.users), node)
    if scaled.target is not aten.div_.Scalar or not isinstance(scaled.args[0], fx.Node):
        return None
    mask, share = scaled.args
    if mask.target is not aten.bernoulli_.float or mask.args[1:] != (share,) or share == 0 or len(mask.users) != 1:
        return None
    empty: Any = mask.args[0]
    is_new = empty.target in (aten.empty.memory_format, aten.empty_like.default) and len(empty.users) == 1
    applied = all(u.target is aten.mul.Tensor and len(u.all_input_nodes) == 2 for u in scaled.users)
    return mask if is_new and applied else None
