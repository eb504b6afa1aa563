"""Chunked: a graph whose losses are computed in chunks of rows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from olla.plan.rewrite import NEW, Rewrite


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
class Chunked(Rewrite, kind="chunked"):
    """A graph whose losses are computed in chunks; tensors of the graph before keep their ids.

    Chunks change rounding, and the bounds of a plan hold with these chunks only.

    Attributes:
        num_chunks: of every loss, at most; a loss of fewer rows has one per row.
        part: uint8[graph.num_ops], a `Part`: what op i does for the op it stands for.
        loss: int32[graph.num_ops], the chunked loss that op i belongs to; -1: none.
        chunk: int32[graph.num_ops], the chunk of rows that op i works on; -1: it works on none or on all.
    """

    num_chunks: int
    part: NDArray[np.uint8]
    loss: NDArray[np.int32]
    chunk: NDArray[np.int32]

    @property
    def num_losses(self) -> int:
        """How many losses are chunked."""
        return int(self.loss.max(initial=-1)) + 1

    def line(self) -> str:
        """Say in one line what was rewritten."""
        losses = f"{self.num_losses} loss{'es' if self.num_losses > 1 else ''}"
        return f"{losses} in {self.num_chunks} chunks of rows: other rounding."

    def tensors(self) -> NDArray[np.int32]:
        """int32[graph.num_tensors], tensor of the graph before that tensor t stands for, or is a part of; NEW: none."""
        found = np.arange(self.graph.num_tensors, dtype=np.int32)
        first: dict[tuple[int, int], int] = {}  # (loss, part) -> the tensor of the first chunk, once the whole one
        for v in np.flatnonzero(self.part != Part.WHOLE).tolist():
            part, written = Part(self.part[v]), self.graph.writes.of(v)
            if part in (Part.LOGITS, Part.LOG_PROBS, Part.PROBS):
                found[written] = first.setdefault((int(self.loss[v]), part), int(written[0]))
            elif part == Part.LOSS:
                found[written] = NEW
            elif part == Part.ROWS:
                found[written[1:]] = NEW  # the classes of the rows
        return found

    def remark(self, op: int) -> str:
        """Say what became of an op."""
        if self.part[op] == Part.WHOLE:
            return ""
        return f"chunk {self.chunk[op] + 1} of {self.num_chunks}" if self.chunk[op] >= 0 else "for all chunks"
