"""Guard of a captured step: all it read from Python is compared at every call, and must be the same."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from olla._core import first_changed, first_other, same_kinds
from olla.pytorch.guards.containers import Holds, WatchedContainer
from olla.pytorch.guards.object_parts import hooks_of
from olla.pytorch.guards.reads import Reads
from olla.pytorch.guards.values import MISSING


class Guard:
    """The Python state that one capture depends on beside its inputs.

    Most of it is dicts and lists whose entries are compared by identity, in C++. An entry that differs is compared
    again, and passes if it is equal or was never read.

    Args:
        reads: what the step read while it was captured.
        inputs: parameters and buffers of the step, in an order that ``tensors`` of later calls has, too.
    """

    def __init__(self, reads: Reads, inputs: Sequence[torch.Tensor]) -> None:
        self._counts = reads.names.counts
        self._places = (Wholes(reads.places.watched), WatchedDicts(reads.places.watched))
        self._probes = reads.places.probes
        self._ties = self._tied()
        self._objects = [thing for thing, _ in reads.objects]
        self._types = tuple(map(type, self._objects))
        self._dicts = tuple(attributes for _, attributes in reads.objects)
        self._constants = reads.constants
        self._num_inputs = len(inputs)
        self._tensors = TensorFacts([*inputs, *reads.constants])

    def change(self) -> str:
        """Return which Python value has changed since the capture, in words; empty where all are as they were.

        Complexity: O(what was read).
        """
        for places in self._places:
            at = -1
            while (at := places.first_changed(at + 1)) >= 0:
                watched = places.watched[at]
                if changed := watched.change(self._counts):
                    return changed
                if watched.holds is Holds.INPUTS and self._tied() != self._ties:
                    return "parameters or buffers are tied in another way"
                watched.renew()
                places.renew(at)
        if not same_kinds(self._objects, self._types, self._dicts):
            return "the class of an object or a layer, or the dict of its attributes, was replaced"
        for probe in self._probes:
            if what := probe.change():
                return what
        return ""

    def tensor_change(self, inputs: Sequence[torch.Tensor]) -> str:
        """Return which parameter or buffer is of another kind, or shares memory in another way; empty: none."""
        if len(inputs) != self._num_inputs:
            return f"the model has {len(inputs)} parameters and buffers, and had {self._num_inputs}"
        return self._tensors.change([*inputs, *self._constants] if self._constants else inputs)

    def _tied(self) -> list[int]:
        """Return, for each place of a parameter or buffer, the first that holds the same one."""
        first: dict[int, int] = {}
        inputs = (w.container for w in self._places[0].watched if w.holds is Holds.INPUTS)
        places = (t for container in inputs for t in dict.values(container))  # type: ignore[arg-type]
        return [first.setdefault(id(t), i) for i, t in enumerate(places)]

    def shared_with(self, leaves: Sequence[Any]) -> list[int]:
        """Return, for each tensor of a batch, the first parameter or buffer in the same storage; -1: none."""
        tensors = (t for t in leaves if isinstance(t, torch.Tensor) and t.layout == torch.strided)
        return [self._tensors.storages.get(t.untyped_storage()._cdata, -1) for t in tensors]


@functools.cache
def counts_changes() -> bool:
    """Whether this Python counts all changes of a dict: CPython 3.13 leaves those of attributes out."""
    return sys.implementation.name == "cpython" and sys.version_info < (3, 13)


class Wholes:
    """The containers of which every entry is compared.

    Attributes:
        watched: dicts first; each keeps the objects whose ids are compared.
    """

    def __init__(self, watched: Sequence[WatchedContainer]) -> None:
        wholes = [w for w in watched if isinstance(w.expected, tuple)]
        self.watched = sorted(wholes, key=lambda w: isinstance(w.container, list))
        self._containers = [w.container for w in self.watched]
        self._num_dicts = sum(isinstance(c, dict) for c in self._containers)
        self._versions = np.zeros(self._num_dicts, dtype=np.uint64) if counts_changes() else None
        self._number()

    def _number(self) -> None:
        self._ends = np.cumsum([len(w.expected) for w in self.watched], dtype=np.uint32)
        items = map(id, itertools.chain.from_iterable(w.expected for w in self.watched))
        self._ids = np.fromiter(items, dtype=np.uint64)

    def first_changed(self, start: int) -> int:
        """Return the first container from a start on that holds other objects; -1: none."""
        return first_changed(self._containers, self._num_dicts, self._ends, self._ids, start, self._versions)

    def renew(self, at: int) -> None:
        """Take over the new expected entries of one container."""
        begin, end = int(self._ends[at - 1]) if at > 0 else 0, int(self._ends[at])
        expected = self.watched[at].expected
        if len(expected) == end - begin:
            self._ids[begin:end] = [id(item) for item in expected]
        else:
            self._number()


class WatchedDicts:
    """The dicts of which some entries are compared, such as the globals of a module."""

    def __init__(self, watched: Sequence[WatchedContainer]) -> None:
        self.watched = [w for w in watched if isinstance(w.expected, dict)]
        self._dicts = [w.container for w in self.watched]
        self._expected = [w.expected for w in self.watched]

    def first_changed(self, start: int) -> int:
        """Return the first dict from a start on that holds other objects; -1: none."""
        return first_other(self._dicts, self._expected, MISSING, start)

    def renew(self, at: int) -> None:
        """Take over the new expected entries of one dict."""
        self._expected[at] = self.watched[at].expected


class TensorFacts:
    """Guarded properties of tensors beside their values: type, shape, strides, device, gradient, shared memory.

    Attributes:
        storages: of each storage, the first tensor in it.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._facts = [_facts(t) for t in tensors]
        self._sharing, self.storages = _sharing(tensors)
        self._addresses = [t.data_ptr() for t in tensors]
        self._hooked = any(facts[-1] for facts in self._facts)
        self._num_hooks = RemovableHandle.next_id  # counts every hook that anyone registers
        self._quick = _quick_guards(tensors)

    def change(self, tensors: Sequence[torch.Tensor]) -> str:
        """Return which tensor is of another kind than it was, in words; empty where all are as they were."""
        num_hooks = RemovableHandle.next_id
        if self._hooked or num_hooks != self._num_hooks or self._quick is None or not self._quick.check(*tensors):
            for old, tensor in zip(self._facts, tensors, strict=True):
                if old != (new := _facts(tensor)):
                    return f"a tensor was {_shown(old)} and is {_shown(new)}"
            self._quick, self._num_hooks = _quick_guards(tensors), num_hooks
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        if addresses != self._addresses:
            sharing, storages = _sharing(tensors)
            if sharing != self._sharing:
                return "tensors of the model share memory in another way"
            self._addresses, self.storages = addresses, storages
        return ""


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    functions = tuple(id(function) for _, function in hooks_of(tensor))
    return (
        type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad,
        tensor.is_leaf, functions,
    )  # fmt: skip


def _shown(facts: tuple[Any, ...]) -> str:
    kind, shape, strides, dtype, device, requires_grad, _, hooks = facts
    return (
        f"a {kind.__name__} of shape {shape}, strides {strides}, {dtype} on {device}, "
        f"requires_grad={requires_grad}, {len(hooks)} hooks"
    )


def _sharing(tensors: Sequence[torch.Tensor]) -> tuple[list[tuple[int, int]], dict[int, int]]:
    """Return, for each tensor, the first of the same object and the first in the same storage; and these storages."""
    objects: dict[int, int] = {}
    storages: dict[int, int] = {}
    places = [(id(t), t.untyped_storage()._cdata) for t in tensors]
    return [(objects.setdefault(o, i), storages.setdefault(s, i)) for i, (o, s) in enumerate(places)], storages


def _quick_guards(tensors: Sequence[torch.Tensor]) -> Any:
    """Return torch's own check of many tensors, which is much faster than ours; None where this torch has none.

    It is private, looks at more than needed (modes of the thread), and at no hooks.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    except Exception:
        return None
