"""A rewriting of a graph as data: the graph it ends in, and where its ops come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from olla.graph import Graph
from olla.plan import fields

COPY = -1  # origin of an op that stands for none: a copy to host memory or back
NEW = -1  # origin of a tensor that stands for none


@dataclass(frozen=True, eq=False, kw_only=True)
class Rewrite(ABC):
    """One step from the graph that was given to the graph that is planned.

    Attributes:
        graph: the graph behind it.
        origin: int32[graph.num_ops], op of the graph before it that op i stands for; COPY: none.
        added_seconds: estimated time that it adds to the step; below 0 where it saves some.
    """

    graph: Graph
    origin: NDArray[np.int32]
    added_seconds: float

    kind: ClassVar[str]
    readers: ClassVar[dict[str, fields.Reader]] = {"added_seconds": fields.number}  # see `fields.readers`
    kinds: ClassVar[dict[str, type[Rewrite]]] = {}

    def __init_subclass__(cls, kind: str, **kwargs: Any) -> None:
        """Register a kind of rewriting under its name in plan files."""
        super().__init_subclass__(**kwargs)
        cls.kind = kind
        Rewrite.kinds[kind] = cls

    def __post_init__(self) -> None:
        """Make the arrays read-only."""
        for value in vars(self).values():
            if isinstance(value, np.ndarray):
                value.flags.writeable = False

    @abstractmethod
    def line(self) -> str:
        """Say in one line what was rewritten."""

    @abstractmethod
    def tensors(self) -> NDArray[np.int32]:
        """int32[graph.num_tensors], tensor of the graph before that tensor t stands for; NEW: none."""

    @abstractmethod
    def remark(self, op: int) -> str:
        """Say what became of an op, in a few words; empty where it runs as before."""

    def to_object(self) -> dict[str, Any]:
        """Return it as what `json.dumps` takes: its kind, then a key per attribute."""
        return {"kind": self.kind, **fields.to_object(self)}


def read_rewrites(key: str, value: object) -> tuple[Rewrite, ...]:
    """Read a list of rewritings."""
    return fields.items(key, value, "a list of rewritings", _read)


def _read(key: str, value: object) -> Rewrite:
    content = fields.section(key, value, ("kind",))
    kind = Rewrite.kinds.get(fields.text(f"{key}.kind", content["kind"]))
    if kind is None:
        raise fields.reject(f"{key}.kind", content["kind"], f"one of {', '.join(Rewrite.kinds)}")
    table = fields.readers(kind, kind.readers)
    return kind(**fields.from_object(fields.section(key, value, table), table, f"{key}."))


def composed(origins: Iterable[NDArray[np.int32]], num: int) -> NDArray[np.int32]:
    """Return which op (tensor) of the first graph each one of the last graph stands for; -1: none.

    Args:
        origins: of rewritings, one behind the other.
        num: of ops (tensors) of the first graph.
    """
    found = np.arange(num, dtype=np.int32)
    for origin in origins:
        found = np.where(origin < 0, np.int32(-1), found[origin])
    return found
