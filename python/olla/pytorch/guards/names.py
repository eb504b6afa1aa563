"""Names of attributes that code mentions: an attribute counts once code has been entered that may read it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from olla.pytorch.guards.watched import HOOK_TABLES

INNER_TABLES = ("_parameters", "_buffers", "_modules")  # of a module
# Of a module: what is read only when its state is saved or loaded, and what changes with the tables of hooks.
_NEVER = {
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
    "_non_persistent_buffers_set", "_is_full_backward_hook", "_flat_weights", "_flat_weight_refs",
}  # fmt: skip
# Attributes that torch reads in C, or before this module could see it.
_ALWAYS = frozenset({"training", "forward", "step", "loss", *INNER_TABLES, *HOOK_TABLES})


class Names:
    """The names that code has mentioned so far, and the attributes that wait until code mentions theirs.

    Attributes:
        known: the names.
        is_open: whether attributes of every name count: some code puts names together.
    """

    def __init__(self) -> None:
        self.known: set[str] = set(_ALWAYS)
        self.is_open = False
        self._waiting: dict[str, list[tuple[Callable[[], Any], str]]] = {}

    def counts(self, name: str) -> bool:
        """Whether an attribute of this name may have been read."""
        return (self.is_open or name in self.known) and name not in _NEVER

    def wait(self, name: str, read: Callable[[], Any], path: str) -> None:
        """Let an attribute wait for its name.

        Args:
            name: of the attribute.
            read: returns its value.
            path: of its object, for people.
        """
        if name not in _NEVER:
            self._waiting.setdefault(name, []).append((read, f"{path}.{name}"))

    def learn(self, names: Iterable[str]) -> Iterator[tuple[Callable[[], Any], str]]:
        """Let attributes of these names count, and yield what waited for them: its reader and its path.

        Args:
            names: those with dots count as a whole, as names of modules do, and part by part, as getters take them.
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
