"""One of many ranks, simulated: the shards it holds and its collectives (parameters gathered, gradients averaged).

Source: torch.distributed.fsdp.fully_shard (FSDP2), whose shards of dim 0 these are; that the collectives are operators
of the step is the way of SimpleFSDP (arXiv 2411.00284).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from olla.errors import CaptureError

_TALK = torch.ops._c10d_functional
_PART = "olla_part"  # key of node.meta: the node gathers a parameter, or averages a gradient
_GATHERS, _REDUCES = 0, 1


class Precision(NamedTuple):
    """Types of a parameter in shards; None: as what is there.

    Attributes:
        gathered: it is gathered in, and computed with.
        averaged: its gradient is averaged in.
    """

    gathered: torch.dtype | None = None
    averaged: torch.dtype | None = None


class ShardedRanks:
    """The ranks of a captured step.

    Args:
        parallel: "fsdp" or "ddp".
        world_size: how many.
        group: the name of their process group.
        sharded: the parameters in shards, by name; None: all of them are, in one type.
    """

    def __init__(
        self, parallel: str, world_size: int, group: str, sharded: Mapping[str, Precision] | None = None
    ) -> None:
        self.world_size, self.group = world_size, group
        self._sharded = sharded
        self.shards = parallel == "fsdp"
        self._rows: dict[str, int] = {}  # of each parameter
        self._held: dict[int, tuple[int, ...]] = {}  # id of a tensor in shards -> shape of the first of them

    def hold(
        self, named: Iterable[tuple[str, torch.Tensor]], optimizer: torch.optim.Optimizer | None
    ) -> dict[int, tuple[int, ...]]:
        """Return the shape of what this rank holds of parameters and their state, by the id of the whole tensor.

        The first rank has most: ceil(rows / ranks) rows of dim 0, as much as FSDP2 pads the others to.

        Args:
            named: the parameters.
            optimizer: whose state is in shards as well, where it has the parameter's shape.

        Raises:
            CaptureError: a parameter has no dim 0.
        """
        for name, parameter in named if self.shards else ():
            if self._sharded is not None and name not in self._sharded:
                continue
            if parameter.dim() == 0:
                raise CaptureError(
                    f"{name} is a single number, of which there are no shards (FSDP2 refuses it, too): give it a "
                    "dimension, torch.ones(1)"
                )
            self._rows[name] = parameter.shape[0]
            shape = (math.ceil(parameter.shape[0] / self.world_size), *parameter.shape[1:])
            state = optimizer.state.get(parameter, {}).values() if optimizer is not None else ()
            same = [t for t in state if isinstance(t, torch.Tensor) and t.shape == parameter.shape]
            self._held |= dict.fromkeys(map(id, (parameter, *same)), shape)
        return self._held

    def whole(self, parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what the model computes with: each parameter, gathered from its shards.

        The gradient of a shard is the average of what the ranks found for it.

        Args:
            parameters: name -> what this rank holds.
        """
        if not self.shards:
            return parameters
        gather: Any = _Gather.apply  # untyped
        types = self._sharded or {}
        return {
            name: gather(t, self._rows[name], self, types.get(name, Precision())) if name in self._rows else t
            for name, t in parameters.items()
        }

    def average(self, parameters: dict[str, torch.Tensor]) -> None:
        """Let the gradient of every whole parameter be averaged among the ranks as soon as it is there."""

        def average(parameter: torch.Tensor) -> None:
            parameter.grad = _TALK.wait_tensor(_TALK.all_reduce(parameter.grad, "avg", self.group))

        for parameter in parameters.values():
            if parameter.requires_grad and not self.shards:
                parameter.register_post_accumulate_grad_hook(average)  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    """A shard -> the parameter; backward: the gradient of the parameter -> the average of that of the shard."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, rows: int, ranks: ShardedRanks, precision: Precision) -> torch.Tensor:
        ctx.rows, ctx.ranks, ctx.averaged, ctx.dtype = rows, ranks, precision.averaged, shard.dtype
        with _marked(_GATHERS):
            shard = shard.to(precision.gathered or shard.dtype)
            whole = _TALK.wait_tensor(_TALK.all_gather_into_tensor(shard, ranks.world_size, ranks.group))
            return whole if whole.shape[0] == rows else whole.narrow(0, 0, rows)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,), ranks = gradients, ctx.ranks
        with _marked(_REDUCES):
            gradient = gradient.to(ctx.averaged or gradient.dtype)
            if missing := -ctx.rows % ranks.world_size:  # rows that only pad the last shards
                gradient = torch.constant_pad_nd(gradient, [0] * (2 * gradient.dim() - 1) + [missing])
            mine = _TALK.reduce_scatter_tensor(gradient.contiguous(), "avg", ranks.world_size, ranks.group)
            return _TALK.wait_tensor(mine).to(ctx.dtype), None, None, None


@contextlib.contextmanager
def _marked(part: int) -> Iterator[None]:
    """Say of the nodes recorded inside what they are part of."""
    mode = get_proxy_mode()
    assert mode is not None
    before = next(iter(reversed(mode.tracer.graph.nodes)))
    yield
    node = next(iter(reversed(mode.tracer.graph.nodes)))
    while node is not before:
        node.meta[_PART] = part
        node = node.prev


def settle(module: fx.GraphModule) -> None:
    """Gather each parameter right before its first use, and average each gradient as soon as it is there.

    Autograd sees parameters that were gathered before the model ran, and so reduces their gradients after all else.

    Complexity: O(nodes).
    """
    nodes = list(module.graph.nodes)
    at = {node: float(i) for i, node in enumerate(nodes)}
    for node in reversed([node for node in nodes if node.meta.get(_PART) == _GATHERS]):
        if node.users:
            first = min(node.users, key=at.__getitem__)
            first.prepend(node)
            at[node] = math.nextafter(at[first], -math.inf)
    for node in [node for node in nodes if node.meta.get(_PART) == _REDUCES]:
        last = max(node.all_input_nodes, key=at.__getitem__)
        last.append(node)
        at[node] = math.nextafter(at[last], math.inf)
