"""Whether a step reads an attribute of a module before it sets it: what it sets first is no state of earlier steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


class FirstUse:
    """Attributes of modules that were set before they were read."""

    def __init__(self) -> None:
        self._read: set[tuple[int, str]] = set()
        self._set_first: set[tuple[int, str]] = set()

    def is_set_first(self, attributes: dict[str, Any], name: str) -> bool:
        """Whether an attribute was set before anything read it.

        Args:
            attributes: of the module.
            name: of the attribute.
        """
        return (id(attributes), name) in self._set_first

    @contextlib.contextmanager
    def watching(self, is_here: Callable[[], bool]) -> Iterator[None]:
        """Watch the attributes of all modules, as far as the captured step uses them.

        Args:
            is_here: whether the caller is captured.
        """
        kind: Any = torch.nn.Module
        set_before, get_before = kind.__setattr__, vars(kind).get("__getattribute__")
        attributes_of = object.__getattribute__

        def read(module: torch.nn.Module, name: str) -> Any:
            if is_here():
                key = (id(attributes_of(module, "__dict__")), name)
                if key not in self._set_first:
                    self._read.add(key)
            return attributes_of(module, name)

        def write(module: torch.nn.Module, name: str, value: Any) -> None:
            if is_here():
                key = (id(attributes_of(module, "__dict__")), name)
                if key not in self._read:
                    self._set_first.add(key)
            set_before(module, name, value)

        kind.__setattr__ = write
        kind.__getattribute__ = read
        try:
            yield
        finally:
            kind.__setattr__ = set_before
            if get_before is None:
                del kind.__getattribute__
            else:
                kind.__getattribute__ = get_before
