"""Which attributes to guard: those named in code that ran, except those that the step assigns before it reads them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

INNER_TABLES = ("_parameters", "_buffers", "_modules")  # of a module
# Tables of hooks of a module or an optimizer, whose keys differ at every registration.
HOOK_TABLES = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks",
)  # fmt: skip
# Of a module: what is read only when its state is saved or loaded, and what changes with the tables of hooks.
_NEVER = {
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
    "_non_persistent_buffers_set", "_is_full_backward_hook", "_flat_weights", "_flat_weight_refs",
}  # fmt: skip
# Attributes that torch reads in C, or before this module could see it.
_ALWAYS = frozenset({"training", "forward", "step", "loss", *INNER_TABLES, *HOOK_TABLES})


class AttributeNames:
    """The names that code has mentioned so far, and attributes that are guarded once code mentions their name.

    Attributes:
        known: the names.
        is_open: whether attributes of every name are guarded, because some code computes names.
    """

    def __init__(self) -> None:
        self.known: set[str] = set(_ALWAYS)
        self.is_open = False
        self._waiting: dict[str, list[tuple[Callable[[], Any], str]]] = {}

    def counts(self, name: str) -> bool:
        """Whether an attribute of this name may have been read."""
        return (self.is_open or name in self.known) and name not in _NEVER

    def wait(self, name: str, read: Callable[[], Any], path: str) -> None:
        """Defer an attribute, which ``read`` returns, until code mentions its name; path: of its object, for people."""
        if name not in _NEVER:
            self._waiting.setdefault(name, []).append((read, f"{path}.{name}"))

    def learn(self, names: Iterable[str]) -> Iterator[tuple[Callable[[], Any], str]]:
        """Mark names as mentioned, and yield the reader and the path of each attribute that waited for one.

        Args:
            names: one with dots is marked as a whole, as of a module, and part by part, as attrgetter takes it.
        """
        for name in names:
            if name not in self.known:
                for part in (name, *name.split(".")):
                    self.known.add(part)
                    yield from self._waiting.pop(part, ())
        if self.is_open:
            for waiting in list(self._waiting.values()):
                yield from waiting
            self._waiting.clear()

    def forget(self) -> None:
        """Let go of what only the capture itself needed."""
        self._waiting.clear()


class FirstUse:
    """Whether a step sets an attribute of a module before reading it: then it reads no state of earlier steps.

    An attribute is known by the id of the dict that holds it, and by its name.
    """

    def __init__(self) -> None:
        self._is_set: dict[tuple[int, str], bool] = {}  # whether the first use was to set it

    def is_set_first(self, attributes: dict[str, Any], name: str) -> bool:
        """Whether an attribute of a module was set before anything read it."""
        return self._is_set.get((id(attributes), name), False)

    @contextlib.contextmanager
    def watching(self, is_here: Callable[[], bool]) -> Iterator[None]:
        """Watch the attributes of all modules, where ``is_here`` says that their user is captured."""
        kind: Any = torch.nn.Module
        set_before, get_before = kind.__setattr__, vars(kind).get("__getattribute__")
        attributes_of = object.__getattribute__

        def read(module: torch.nn.Module, name: str) -> Any:
            if is_here():
                self._is_set.setdefault((id(attributes_of(module, "__dict__")), name), False)
            return attributes_of(module, name)

        def write(module: torch.nn.Module, name: str, value: Any) -> None:
            if is_here():
                self._is_set.setdefault((id(attributes_of(module, "__dict__")), name), True)
            set_before(module, name, value)

        kind.__setattr__, kind.__getattribute__ = write, read
        try:
            yield
        finally:
            kind.__setattr__ = set_before
            if get_before is None:
                del kind.__getattribute__
            else:
                kind.__getattribute__ = get_before
