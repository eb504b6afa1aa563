"""What a step is captured for. Importing this does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a step, as far as a capture depends on it.

    Attributes:
        batch: of the step; of a graph of Dynamo's, the tensors that are neither parameters nor buffers.
        key: a capture is right for batches with this key only.
        leaves: of the batch.
        loss: what computes the loss from the model and the batch; None: there is none.
        names: of the leaves, where the loss runs a graph of Dynamo's; None: it is the user's own.
        own: parameters and buffers that this graph reads.
        change: why it is another graph than before, in words.
    """

    batch: Any
    key: tuple[Any, ...]
    leaves: Sequence[Any]
    loss: Callable[[Any, Any], Any] | None
    names: Sequence[str] | None = None
    own: Sequence[Any] = ()
    change: str = ""
