"""Whether a loss would run the operators that were captured, as Dynamo sees it: its guards on all that it has read."""

from __future__ import annotations

import logging
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from olla.errors import CaptureError
from olla.inductor.compat import dynamo

NOT_FOLLOWED = -1  # in place of a variant
_SETTINGS = {  # of Dynamo, while it follows
    "skip_nnmodule_hook_guards": True,  # our own guard compares hooks; with many modules Dynamo's takes milliseconds
    "recompile_limit": 64,
    "capture_scalar_outputs": True,
    "capture_dynamic_output_shape_ops": True,
    "trace_autograd_ops": True,
    "allow_rnn": True,
    "optimize_ddp": False,
    "suppress_errors": False,
}


class _Held(Exception):
    """Raised in place of running a graph: the guards of a variant hold."""

    def __init__(self, variant: int) -> None:
        super().__init__(variant)
        self.variant = variant


class _Ordinary(Exception):
    """Dynamo left the function alone, and it would run."""


class Kept:
    """A loss function that sets attributes of objects, as one that returns them.

    Args:
        function: the loss function.
        places: where it leaves something: Dynamo's source of an object, and an attribute of that.

    Attributes:
        names: of the attributes.
    """

    def __init__(self, function: Callable[[Any, Any], Any], places: tuple[tuple[str, str], ...]) -> None:
        self._function = function
        self.names = frozenset(attribute for _, attribute in places)
        self._places = [(compile(source, source, "eval"), attribute) for source, attribute in places]

    def loss(self, model: Any, batch: Any) -> tuple[Any, Any, list[Any]]:
        """Return the loss, what the function returned, and what it has set."""
        result = self._function(model, batch)
        first = result[0] if isinstance(result, tuple | list) else result
        return first, result, [getattr(holder, name) for holder, name in self._holders(model, batch)]

    def leave(self, model: Any, batch: Any, returned: tuple[Any, Any, list[Any]]) -> Any:
        """Set what was returned for that; return what the function would have."""
        _, result, values = returned
        for (holder, name), value in zip(self._holders(model, batch), values, strict=True):
            setattr(holder, name, value)
        return result

    def _holders(self, model: Any, batch: Any) -> list[tuple[Any, str]]:
        scope = {"L": {"model": model, "batch": batch, "function": self._function}, "G": globals()}
        return [(eval(source, scope), name) for source, name in self._places]


class Followed:
    """Has Dynamo follow a function, and says at every call which of the ways it went before it would go again.

    Nothing is run: in place of the graphs that Dynamo makes stand functions that raise an exception.

    Args:
        function: of a model and a batch.
    """

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        def entry(model: Any, batch: Any) -> Any:
            if not torch.compiler.is_compiling():
                raise _Ordinary
            return function(model, batch)

        # Code of its own, since Dynamo counts compilations by code.
        own = types.FunctionType(entry.__code__.replace(), entry.__globals__, closure=entry.__closure__)
        self._compiled = torch.compile(own, backend=self._note, fullgraph=True, dynamic=False)
        self._change_settings = dynamo.settings({**_SETTINGS, "ignore_logging_functions": _logging()})
        self._function = function
        self._left: list[list[tuple[str, str]]] = []  # of each variant, what it changes in Python
        self._known: list[Any] = []  # keys of batches with which it was followed
        self._lost: list[Any] = []  # and of those with which it could not be

    def variant(self, model: torch.nn.Module, batch: Any, key: Any) -> int:
        """Return the number of the way that the function would go, or NOT_FOLLOWED.

        Args:
            model: the function's first argument.
            batch: its second.
            key: of the batch; where a batch with it could not be followed, none is tried again.

        Complexity: that of Dynamo's guards; of a way that is new, its tracing.
        """
        if key in self._lost:
            return NOT_FOLLOWED
        found = self._held(model, batch, "fail_on_recompile") if self._left else None
        if found is None:
            with warnings.catch_warnings():  # what Dynamo has to say is about code that it makes
                warnings.simplefilter("ignore")
                found = self._held(model, batch, "default")
        if found is not None and key not in self._known:
            self._known.append(key)
        if found is None and key not in self._known:
            self._lost.append(key)
        return NOT_FOLLOWED if found is None else found

    def _held(self, model: torch.nn.Module, batch: Any, stance: str) -> int | None:
        """Return the variant whose guards hold; None: Dynamo does not follow, or may not at this stance."""
        change_back = self._change_settings()
        try:
            with torch.compiler.set_stance(stance):
                self._compiled(model, batch)
        except _Held as held:
            return held.variant
        except Exception:  # a graph break, most of all
            return None
        finally:
            change_back()
        return None

    def kept(self, variant: int) -> Kept | None:
        """Return the function of a variant that sets attributes and changes nothing else; None: it is another."""
        left = self._left[variant] if variant != NOT_FOLLOWED else []
        return Kept(self._function, tuple(left)) if left and all(attribute for _, attribute in left) else None

    def check_left(self, variant: int) -> None:
        """Raise a CaptureError where the function of a variant changes Python objects, which would stay as they are."""
        left = self._left[variant] if variant != NOT_FOLLOWED else []
        if left:
            names = ", ".join(_readable(source, attribute) for source, attribute in left[:3])
            raise CaptureError(
                f"the step changes what it leaves in Python ({names}), and a planned step runs operators, not Python "
                "code. Return that from the loss function, behind the loss, and keep it outside; or keep it in a buffer"
            )

    def _note(self, module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        variant = len(self._left)
        self._left.append(dynamo.changed_objects())

        def held(*_: Any) -> Any:
            raise _Held(variant)

        return held


def _logging() -> set[Any]:
    """Return functions that only tell a person something, those that packages have given to loggers among them."""
    names = ("debug", "info", "warn", "error", "exception", "critical", "log")
    return {warnings.warn, *(f for name, f in vars(logging.Logger).items() if name.startswith(names))}


def _readable(source: str, attribute: str) -> str:
    """Return Dynamo's source of an object, and an attribute of that, without markup."""
    for old, new in (("L['", ""), ("G['", ""), ("']", ""), (".__closure__[0].cell_contents", "'s closure")):
        source = source.replace(old, new)
    return f"{source}.{attribute}" if attribute else source
