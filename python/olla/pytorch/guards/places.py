"""The places that hold what a step read, each with what it held then: to compare, to undo what the step did there."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

import torch

from olla.errors import CaptureError
from olla.pytorch.guards.code import module_origin
from olla.pytorch.guards.inside import no_modes
from olla.pytorch.guards.names import FirstUse, Names
from olla.pytorch.guards.values import MISSING, same
from olla.pytorch.guards.watched import Holds, Probe, Watched


class Places:
    """Containers, values and tensors as they were before the step could change them.

    Args:
        names: says which attributes count.

    Attributes:
        watched: dicts and lists.
        probes: values that are read by a function.
    """

    def __init__(self, names: Names) -> None:
        self.watched: list[Watched] = []
        self.probes: list[Probe] = []
        self._names = names
        self._keys: dict[int, Watched] = {}  # of scopes and classes
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # tensors, with what they held

    def watch(self, container: dict[Any, Any] | list[Any], holds: Holds, path: str, owner: str = "user") -> None:
        """Note what a container holds; for the arguments see `Watched`."""
        self.watched.append(Watched.of(container, holds, path, owner))

    def watch_data(self, container: dict[Any, Any] | list[Any], holds: Holds, path: str) -> None:
        """Note what a container of the user holds, and in which order."""
        self.watch(container, holds, path)
        if isinstance(container, collections.OrderedDict) and container:  # has an order beside that of a dict
            self.probe(functools.partial(tuple, container), f"the order of {path}")

    def watch_class(self, attributes: dict[str, Any], path: str, owner: str) -> bool:
        """Note the attributes of a class; return False where they already are."""
        if id(attributes) in self._keys:
            return False
        self.watch(attributes, Holds.ATTRIBUTES, path, owner)
        self._keys[id(attributes)] = self.watched[-1]
        return True

    def watch_key(self, scope: dict[str, Any], name: str, path: str) -> None:
        """Note one global of a scope, or that there is none of this name."""
        watched = self._keys.get(id(scope))
        if watched is None:
            owner = module_origin(str(scope.get("__name__", scope.get("__module__", ""))))
            watched = self._keys[id(scope)] = Watched(scope, {}, Holds.NAMES, path, owner)
            self.watched.append(watched)
        assert isinstance(watched.expected, dict)
        watched.expected.setdefault(name, scope.get(name, MISSING))

    def probe(self, read: Callable[[], Any], path: str, write: Callable[[Any], None] | None = None) -> None:
        """Note a value that is read by a function; for the arguments see `Probe`."""
        self.probes.append(Probe(read, read(), path, write))

    def save(self, tensor: torch.Tensor) -> None:
        """Note what a tensor holds that a trace may change for real: it computes with constants."""
        if id(tensor) not in self._saved and tensor.layout == torch.strided:
            with no_modes():
                self._saved[id(tensor)] = (tensor, tensor.detach().clone())

    def check(self, first_use: FirstUse, is_constant: Callable[[Any], bool]) -> None:
        """Raise a CaptureError if the step has changed what it read.

        Args:
            first_use: which attributes of modules were set before they were read.
            is_constant: whether a value that the step made is the same in every step.
        """
        for watched in self.watched:
            self._check(watched, first_use, is_constant)
        for probe in self.probes:
            if (what := probe.change()) and not is_constant(probe.read()):
                raise _changed_itself(what)

    def _check(self, watched: Watched, first_use: FirstUse, is_constant: Callable[[Any], bool]) -> None:
        # A trace replaces functions of torch.
        if watched.owner in ("torch", "stdlib", "library") or watched.holds is Holds.INPUTS:
            return
        if not (what := watched.change(self._names.counts)):
            return
        if watched.holds in (Holds.ATTRIBUTES, Holds.NAMES):
            assert isinstance(watched.container, dict)
            is_lazy = watched.owner != "user"  # a library fills its caches at first use
            if not any(
                (watched.holds is not Holds.ATTRIBUTES or self._names.counts(key))
                and not same(before, now)
                and not first_use.is_set_first(watched.container, key)
                and not ((before is None or before is MISSING) and (is_lazy or is_constant(now)))
                for key, before, now in watched.changes()
            ):
                return
        raise _changed_itself(what)

    def undo(self) -> None:
        """Put back what lists, dicts, objects, variables and tensors held."""
        for watched in self.watched:
            if watched.owner in ("installed", "class", "library"):
                watched.renew()  # a library has filled its caches
            elif watched.owner == "user" and watched.holds is not Holds.INPUTS:
                watched.undo()
        for probe in self.probes:
            probe.undo()
        with no_modes(), torch.no_grad():
            for tensor, before in self._saved.values():
                if not torch.equal(tensor, before):
                    tensor.copy_(before)

    def forget(self) -> None:
        """Let go of what only the capture itself needed."""
        self._keys.clear()
        self._saved.clear()


def _changed_itself(what: str) -> CaptureError:
    return CaptureError(
        f"the step itself changes what it reads from Python: {what}. A planned step runs operators, not Python code, "
        "and would not change it again: keep it in a tensor (a buffer of the model), or change it outside the step."
    )
