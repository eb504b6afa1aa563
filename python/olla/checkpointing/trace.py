"""One step of an ordinary loop on fake tensors: what it makes, what it saves for backward, and which modules ran."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import SAC_IGNORED_OPS

from olla.checkpointing.memory import Memory
from olla.checkpointing.python_state import PythonState
from olla.checkpointing.regions import ModuleRegion, apply, remove, without_caches
from olla.checkpointing.unchanged import unchanged
from olla.errors import CaptureError
from olla.graph import DeviceProfile
from olla.pytorch.capture.costs import storage_of
from olla.pytorch.capture.generator import undrawn
from olla.pytorch.ordinary.loop import first_of, inference
from olla.pytorch.sharded.fully import idle_hooks, is_sharded

Loss = Callable[[Any, Any], Any]
GIVEN = -1  # made before the step


@dataclass(eq=False)
class Storage:
    """A piece of memory that the forward pass makes or uses.

    Attributes:
        num_bytes: of it.
        made_at: the position of the operator that made it; GIVEN: it was there before.
        used_at: positions of operators of the forward pass that use it.
        changed_at: positions of those that change it in place.
        packed_at: positions of operators that save it for backward.
        freed_at: the position of the first operator after it is freed; None: it outlives the step.
        name: of the buffer or parameter that it is; empty: none.
    """

    num_bytes: int
    made_at: int
    used_at: list[int] = field(default_factory=list)
    changed_at: list[int] = field(default_factory=list)
    packed_at: list[int] = field(default_factory=list)
    freed_at: int | None = None
    name: str = ""

    def is_kept(self, num_forward: int) -> bool:
        """Whether it was made in a forward pass of so many operators and is alive when that ends."""
        return self.made_at != GIVEN and (self.freed_at is None or self.freed_at > num_forward)


@dataclass(eq=False)
class ModuleCall:
    """One call of a module: operators from `begin` to `end`, the latter not included."""

    module: str
    begin: int
    end: int


@dataclass(eq=False)
class StepTrace:
    """What one step does.

    Attributes:
        operators: of the forward pass, in order: name, seconds, and whether torch's selective checkpoint asks for it.
        made: of every operator of the forward pass, the storages that it makes.
        storages: all of the forward pass.
        calls: of modules, in the order in which they end.
        unpacked_at: for every position that saved something, when backward first asked for it.
        other_bytes: int per operator of the step, forward and backward: bytes that are alive behind it and are none of
            the storages of the forward pass; gradients, above all.
        live_bytes: int per operator of the step: all bytes that are alive while it runs.
        noting: names of modules whose forward changes their Python attributes.
    """

    operators: list[tuple[str, float, bool]] = field(default_factory=list)
    made: list[list[Storage]] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    unpacked_at: dict[int, int] = field(default_factory=dict)
    other_bytes: list[int] = field(default_factory=list)
    live_bytes: list[int] = field(default_factory=list)
    noting: set[str] = field(default_factory=set)


class _Trace(Memory):  # type: ignore[no-untyped-call]
    """Records the forward pass operator by operator, and when backward lets go of what that made."""

    def __init__(self, device: DeviceProfile) -> None:
        super().__init__(device)
        self.found = StepTrace()
        self._storages: dict[int, Storage] = {}  # those that are alive, by key
        self._forward_bytes = 0  # of storages of the forward pass that are alive
        self.is_forward = True

    def given(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Take note of what is there before the step."""
        for name, tensor in tensors:
            for key in self.add([tensor]):
                self._note(key, GIVEN, name)

    def _note(self, key: int, position: int, name: str = "") -> Storage:
        storage = self._storages[key] = Storage(self._alive[key][1], position, name=name)
        self.found.storages.append(storage)
        self._forward_bytes += storage.num_bytes
        return storage

    def ended(self, key: int) -> None:
        storage = self._storages.pop(key, None)
        if storage is not None:
            storage.freed_at = self.num_ops
            self._forward_bytes -= storage.num_bytes

    def ran(self, function: Any, used: list[int], made: list[int], changed: list[int], seconds: float) -> None:
        if self.is_forward:
            self.found.operators.append(
                (str(function), seconds, function is not None and function not in SAC_IGNORED_OPS)
            )
            for key in used:
                if key in self._storages:
                    self._storages[key].used_at.append(self.num_ops)
            for key in changed:
                if key in self._storages:
                    self._storages[key].changed_at.append(self.num_ops)
            self.found.made.append([self._note(key, self.num_ops) for key in made])
        self.found.other_bytes.append(self.live_bytes - self._forward_bytes)
        self.found.live_bytes.append(self.live_bytes)

    def mark(self) -> None:
        """Append a no-op at the end of a module's call, so that what its last operator saves lies within the call."""
        self.ran(None, [], [], [], 0.0)
        self.num_ops += 1

    def pack(self, tensor: torch.Tensor) -> Any:
        """Take note of a tensor that an operator saves for backward."""
        storage = self._storages.get(storage_of(tensor))
        if storage is not None:
            storage.packed_at.append(self.num_ops)
        return self.num_ops, tensor

    def unpack(self, packed: Any) -> torch.Tensor:
        """Take note of a tensor that backward asks for."""
        position, tensor = packed
        self.found.unpacked_at.setdefault(position, self.num_ops)
        return tensor  # type: ignore[no-any-return]


class TrainingStep:
    """A forward and backward pass of a model, on fake tensors or on real ones; the model stays as it is.

    So do attributes of its modules that their Python code changes, and lists and the like in these.

    Args:
        model: of the step.
        batch: see `olla.checkpoint`.
        loss: see there.
        device: what seconds are estimated for.
        is_real: whether it runs on the model's own parameters, since the forward pass asks for values. Gradients and
            changes of buffers are its own all the same.
    """

    def __init__(
        self, model: torch.nn.Module, batch: Any, loss: Loss | None, device: DeviceProfile, is_real: bool = False
    ) -> None:
        self._model, self._loss, self._device = model, loss, device
        self.is_real = is_real
        self._fake: Any = contextlib.nullcontext() if is_real else FakeTensorMode(allow_non_fake_inputs=True)
        make = _alias if is_real else self._made
        self._batch = batch if is_real else pytree.tree_map_only(torch.Tensor, make, batch)
        known: dict[int, torch.Tensor] = {}
        parameters = model.named_parameters(remove_duplicate=False)
        self._tensors = {
            name: known.setdefault(id(t), make(t))
            for name, t in (*parameters, *model.named_buffers(remove_duplicate=False))
        }

    def _made(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor for one; for a shard of a parameter, one of the whole parameter."""
        if not (is_sharded(self._model) and hasattr(tensor, "placements")):
            return self._fake.from_tensor(tensor)  # type: ignore[no-any-return]
        with self._fake:
            local: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
            return torch.empty(tensor.shape, dtype=local.dtype, device=local.device, requires_grad=tensor.requires_grad)

    def trace(self) -> StepTrace:
        """Run it as it is, and return what it does."""
        memory = _Trace(self._device)
        calls: list[ModuleCall] = []
        modules = dict(self._model.named_modules())

        def recorded(forward: Any, name: str, *args: Any, **kwargs: Any) -> Any:
            begin = memory.num_ops
            if name:
                args, kwargs = without_caches(args, kwargs)
            before = PythonState([modules[name]])
            result = forward(*args, **kwargs)
            if before.has_changed():
                memory.found.noting.add(name)
            memory.mark()
            if torch.is_grad_enabled():
                calls.append(ModuleCall(name, begin, memory.num_ops))
            return result

        def forward() -> list[torch.Tensor]:
            hooks = torch.autograd.graph.saved_tensors_hooks(memory.pack, memory.unpack)
            with hooks, _replaced_forwards(self._model, recorded):
                loss = self._forward()
            memory.is_forward = False
            return loss

        self._run(memory, forward)
        memory.found.calls = calls
        return memory.found

    def measure(self, regions: dict[str, ModuleRegion]) -> Memory:
        """Run it with modules checkpointed; return the peak and the seconds that it takes."""
        modules = [(self._model.get_submodule(name), region) for name, region in regions.items()]
        memory = Memory(self._device)
        try:
            for module, region in modules:
                apply(module, region)
            self._run(memory, self._forward)
        finally:
            for module, _ in modules:
                remove(module)
        return memory

    def _forward(self) -> list[torch.Tensor]:
        result = inference(self._model, self._batch) if self._loss is None else self._loss(self._model, self._batch)
        is_loss = self._loss is not None and isinstance(result, torch.Tensor | tuple | list)
        return [first_of(result)] if is_loss else loss_of(result)

    def _run(self, memory: Memory, forward: Callable[[], list[torch.Tensor]]) -> None:
        def forward_backward() -> None:
            losses = forward()
            if not losses:
                kind = type(self._model).__name__
                raise CaptureError(
                    f"nothing that {kind} returns needs a gradient, so backward saves nothing that checkpoints could "
                    "free: leave a model out that is not trained, or call requires_grad_() on what is"
                )
            gradients = [None if loss.numel() == 1 else torch.ones_like(loss) for loss in losses]
            torch.autograd.backward(losses, gradients)

        for tensor in self._tensors.values():
            tensor.grad = None
        leaves = [("", leaf) for leaf in pytree.tree_leaves(self._batch) if isinstance(leaf, torch.Tensor)]
        kept = unchanged(self._model, [leaf for _, leaf in leaves], self._loss)
        with kept, undrawn(), torch.enable_grad(), idle_hooks(self._model), self._fake, memory:
            memory.given([*self._tensors.items(), *leaves])
            whole = _Whole(self._model, forward_backward)
            torch.func.functional_call(whole, {f"model.{name}": t for name, t in self._tensors.items()}, ())
        torch.clear_autocast_cache()  # of an autocast around this call: it would keep what was cast here
        for tensor in self._tensors.values():
            tensor.grad = None


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a parameter that shares memory with another one, and has gradients of its own; of a buffer, a copy."""
    if isinstance(tensor, torch.nn.Parameter):
        alias: torch.Tensor = tensor.detach().requires_grad_(tensor.requires_grad)
        return alias
    return tensor.detach().clone()


class _Whole(torch.nn.Module):
    """A step as the call of a module, so that `functional_call` can lend the model other tensors while it runs."""

    def __init__(self, model: torch.nn.Module, run: Callable[[], None]) -> None:
        super().__init__()
        self.model, self._run = model, run

    def forward(self) -> None:
        self._run()


def loss_of(result: Any) -> list[torch.Tensor]:
    """Return what ``backward()`` is called on, of what a model returns: its loss, or all that has gradients."""
    found = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    if isinstance(found, torch.Tensor) and found.requires_grad:
        return [found]
    return [t for t in _tensors_in(result) if t.requires_grad and not isinstance(t, torch.nn.Parameter)]


def _tensors_in(result: Any) -> list[torch.Tensor]:
    """Return the tensors in containers, and in the attributes of objects such as dataclasses and distributions."""
    found: list[torch.Tensor] = []
    waiting: list[Any] = [result]
    met: dict[int, Any] = {}
    while waiting:
        for leaf in pytree.tree_leaves(waiting.pop()):
            if isinstance(leaf, torch.Tensor):
                found.append(leaf)
            elif id(leaf) not in met and not isinstance(leaf, torch.nn.Module | type):
                met[id(leaf)] = leaf  # holding references keeps ids unique
                waiting.append(dict(getattr(leaf, "__dict__", {})))
    return found


@contextlib.contextmanager
def _replaced_forwards(model: torch.nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """Have a function called in place of the forward of every part of a model, with that and the part's name."""
    changed = []
    try:
        for name, module in model.named_modules():
            before = vars(module).get("forward")
            forward = before or functools.partial(type(module).forward, module)
            module.forward = functools.partial(call, forward, name)
            changed.append((module, before))
        yield
    finally:
        for module, before in changed:
            del module.forward
            if before is not None:
                module.forward = before
