"""Arguments of operators as Python source, for functions that are written and compiled."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import fx

_LITERALS = (bool, int, str, type(None))


class PythonSource:
    """Writes values as Python source; what has no literal gets a name.

    Args:
        name_of: returns the name of a node's value in the function.

    Attributes:
        constants: values by the names that the source knows them by.
    """

    def __init__(self, name_of: Callable[[fx.Node], str]) -> None:
        self.constants: dict[str, Any] = {}
        self._name_of = name_of
        self._known: dict[int, str] = {}

    def text(self, value: Any) -> str:
        """Return an argument of an operator as Python source."""
        if isinstance(value, fx.Node):
            return self._name_of(value)
        if type(value) in _LITERALS or (type(value) is float and math.isfinite(value)):
            return repr(value)
        if type(value) is tuple or isinstance(value, list):  # an fx list is a kind of list
            items = "".join(f"{self.text(item)}, " for item in value)
            return f"({items})" if type(value) is tuple else f"[{items}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{k!r}: {self.text(v)}' for k, v in value.items())}}}"
        if isinstance(value, slice):
            return f"slice({', '.join(self.text(p) for p in (value.start, value.stop, value.step))})"
        return self.constant(value)

    def constant(self, value: Any) -> str:
        """Return the name the source knows a value by; holding the value keeps its id unique."""
        name = self._known.get(id(value))
        if name is None:
            name = self._known[id(value)] = f"c{len(self._known)}"
            self.constants[name] = value
        return name
