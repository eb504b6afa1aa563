"""Pad batches to few lengths, so that few captures serve them all."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any


class Padding:
    """Pads the tensors of a batch along dimension 1 to the next of a few lengths.

    Args:
        buckets: the lengths. A longer batch stays as it is.
        fill: entry of the batch, a dict -> the value that it is padded with. Other entries stay as they are.

    Raises:
        ValueError: there are no buckets or nothing to fill, or a bucket is no positive whole number.

    Example:
        >>> import torch
        >>> padding = Padding([4, 8], {"input_ids": 0, "labels": -100})
        >>> batch = {"input_ids": torch.ones(1, 3, dtype=torch.int64), "labels": torch.ones(1, 3, dtype=torch.int64)}
        >>> {name: tensor.tolist() for name, tensor in padding.padded(batch).items()}
        {'input_ids': [[1, 1, 1, 0]], 'labels': [[1, 1, 1, -100]]}
    """

    def __init__(self, buckets: Sequence[int], fill: Mapping[str, float]) -> None:
        self._buckets = sorted(buckets)
        self._fill = dict(fill)
        if not self._buckets or not all(isinstance(n, int) and n > 0 for n in self._buckets):
            raise ValueError(f"buckets are {list(buckets)!r}, expected lengths: whole numbers from 1 on")
        if not self._fill:
            raise ValueError(
                'buckets need fill: what each entry of the batch is padded with, as fill={"input_ids": 0, '
                '"attention_mask": 0, "labels": -100}'
            )

    def padded(self, batch: Any) -> Any:
        """Return a batch at the next bucket's length; the given one is not changed.

        Raises:
            ValueError: it is no dict, lacks an entry that is to be padded, or these differ in length.
        """
        import torch

        if not isinstance(batch, Mapping):
            raise ValueError(f"the batch is a {type(batch).__name__}, expected a dict: fill names entries to pad")
        lengths = {name: _length(batch, name) for name in self._fill}
        length = next(iter(lengths.values()))
        if len(set(lengths.values())) > 1:
            raise ValueError(f"entries of the batch differ in length: {lengths}, expected one for all that are padded")
        at = bisect.bisect_left(self._buckets, length)
        if at == len(self._buckets):
            return batch
        # Copied even at the bucket's own length: one tensor that stands in two entries would need another capture.
        result = dict(batch)
        for name, value in self._fill.items():
            tensor = batch[name]
            shape = (tensor.shape[0], self._buckets[at], *tensor.shape[2:])
            result[name] = torch.full(shape, value, dtype=tensor.dtype, device=tensor.device)
            result[name][:, :length] = tensor
        return result


def _length(batch: Mapping[str, Any], name: str) -> int:
    tensor = batch.get(name)
    if tensor is None or getattr(tensor, "ndim", 0) < 2:
        found = "has none" if tensor is None else f"holds a {type(tensor).__name__} of less than two dimensions there"
        raise ValueError(f"fill names {name!r}, and the batch {found}: expected a tensor of batch times length")
    length: int = tensor.shape[1]
    return length
