"""Arguments of one call of a step, and the properties of tensors that a capture assumes constant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from olla.pytorch.guards.values import same


@dataclass(frozen=True, eq=False)
class StepCall:
    """One call of a step, as far as a capture depends on it.

    Attributes:
        batch: of the step; of a graph of Dynamo's, the tensors that are neither parameters nor buffers.
        key: a capture is right for batches with this key only.
        leaves: of the batch.
        loss: what computes the loss from the model and the batch; None: there is none.
        own: parameters and buffers that a graph of Dynamo's reads.
        change: why it is another graph than before, in words.
    """

    batch: Any
    key: tuple[Any, ...]
    leaves: Sequence[Any]
    loss: Callable[[Any, Any], Any] | None
    own: Sequence[Any] = ()
    change: str = ""


class _Attribute:
    """The value of an attribute of a batch. It lives as long as the key: no later object gets its id."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Attribute) and same(self.value, other.value)


def own_attributes(tensor: torch.Tensor) -> list[tuple[str, Any]]:
    """Return the attributes that the user has set on a tensor, without those that Dynamo sets."""
    return [item for item in vars(tensor).items() if not item[0].startswith("_dynamo_")]


def leaf_facts(leaves: Sequence[Any]) -> list[Any]:
    """Return the properties of batch leaves that a capture assumes constant."""
    objects: dict[int, int] = {}  # a tensor that stands twice in the batch is one input
    storages: dict[int, int] = {}
    facts: list[Any] = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            shared = storages.setdefault(leaf.untyped_storage()._cdata, i) if leaf.layout == torch.strided else i
            facts.append((
                type(leaf), leaf.shape, leaf.stride() if leaf.layout == torch.strided else (), leaf.dtype, leaf.device,
                leaf.requires_grad, leaf.is_conj(), leaf.is_neg(), objects.setdefault(id(leaf), i), shared,
                [(name, _Attribute(value)) for name, value in own_attributes(leaf)],
            ))  # fmt: skip
        else:  # no other values than these are taken; some cannot be compared
            facts.append((type(leaf), leaf if isinstance(leaf, bool | str | None) else None))
    return facts
