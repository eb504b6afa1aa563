"""Chunked: a graph whose losses are computed in chunks of rows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from olla.errors import PlanError
from olla.graph import Graph
from olla.plan import fields

_COLUMNS: dict[str, type[np.integer[Any]]] = {"origin": np.int32, "part": np.uint8, "loss": np.int32, "chunk": np.int32}


class Part(IntEnum):
    """What an op of a chunked graph does for the op it stands for. What adds up is written by the first chunk."""

    WHOLE = 0  # it is that op
    COUNT = 1  # number of rows that count, from the targets alone
    ROWS = 2  # of every row: the gradient of its loss, 0 where it does not count; a target that is a class
    LOGITS = 3
    LOG_PROBS = 4
    LOSS = 5  # sum over the rows of the chunk
    PROBS = 6  # gradient of that sum by the logits, but for the targets
    LOGITS_GRAD = 7  # one less at the targets
    WEIGHT_GRAD = 8  # from the input, scaled by rows; adds up
    BIAS_GRAD = 9  # adds up
    INPUT_GRAD = 10  # rows of one tensor, scaled
    MEAN = 11  # the loss, from the sums


@dataclass(frozen=True, eq=False, kw_only=True)
class Chunked:
    """A graph whose losses are computed in chunks, and where it comes from.

    Attributes:
        graph: the chunked graph; tensors of the original keep their ids.
        num_chunks: of every loss, at most; a loss of fewer rows has one per row.
        origin: int32[graph.num_ops], op of the original that op i stands for.
        part: uint8[graph.num_ops], a `Part`: what op i does for it.
        loss: int32[graph.num_ops], the chunked loss that op i belongs to; -1: none.
        chunk: int32[graph.num_ops], the chunk of rows that op i works on; -1: it works on none or on all.
    """

    graph: Graph
    num_chunks: int
    origin: NDArray[np.int32]
    part: NDArray[np.uint8]
    loss: NDArray[np.int32]
    chunk: NDArray[np.int32]

    @property
    def num_losses(self) -> int:
        """How many losses are chunked."""
        return int(self.loss.max(initial=-1)) + 1

    def to_dict(self) -> dict[str, Any]:
        """Return it as what `json.dumps` takes."""
        columns = {name: getattr(self, name).tolist() for name in _COLUMNS}
        return {"graph": self.graph.to_dict(), "num_chunks": self.num_chunks, **columns}

    @classmethod
    def from_dict(cls, content: object) -> Chunked:
        """Return what `to_dict` was called on.

        Raises:
            GraphError: the graph is invalid.
            PlanError: a key is missing or has another type.
        """
        if not isinstance(content, dict) or not {"graph", "num_chunks", *_COLUMNS} <= content.keys():
            raise PlanError("'chunked' lacks one of its keys: was the file cut or edited?", rule="missing")
        columns: dict[str, Any] = {
            name: fields.integers(kind)(f"chunked.{name}", content[name]) for name, kind in _COLUMNS.items()
        }
        num_chunks = fields.count("chunked.num_chunks", content["num_chunks"])
        return cls(graph=Graph.from_dict(content["graph"]), num_chunks=num_chunks, **columns)
