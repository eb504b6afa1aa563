"""DistributedDataParallel under trace: its forward pass, and what it does to gradients, in functional collectives."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from olla.errors import CaptureError, ReplayError
from olla.pytorch.ranks import wrapped

_Parameters = list[torch.nn.Parameter]


class Left(NamedTuple):
    """What a captured step of a wrapped model does beside its operators.

    Attributes:
        syncs_next: whether buffers are broadcast before the next forward pass.
        reduces: whether it reduces gradients.
    """

    syncs_next: bool
    reduces: bool

    def begin(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """Refuse to add what is reduced to gradients that are there: DistributedDataParallel would reduce these, too.

        Args:
            gradients: that are there, of the parameters whose gradients the step leaves.

        Raises:
            ReplayError: there are any.
        """
        if self.reduces and any(gradient is not None for gradient in gradients):
            raise ReplayError(
                "the step reduces its gradients over the ranks and leaves them in .grad, where there are some already, "
                "which DistributedDataParallel would reduce as well: call model.zero_grad() before the step, or "
                "accumulate in one step function, with model.no_sync()"
            )

    def end(self, model: Any) -> None:
        """Leave the model as its forward passes would."""
        if model.require_forward_param_sync is not self.syncs_next:
            model.require_forward_param_sync = self.syncs_next


class DataParallel:
    """What takes the place of a DistributedDataParallel while a step is traced: it computes the same, to the bit.

    Gradients are copied into flat buckets, in the order in which they arrive, scaled, and summed over the ranks; from
    then on they are views of these. Nothing of the reducer itself is used, and nothing in it changes.

    Raises:
        CaptureError: it does what no captured step does.
    """

    def __init__(self, model: Any) -> None:
        wrapped.require_supported(model)
        self._model = model
        self._group: str = model.process_group.group_name
        self._num_ranks: int = model.process_group.size()
        self._parameters = wrapped.reduced_parameters(model)
        self._buckets = wrapped.final_buckets(model)
        self._names: dict[int, str] = {id(p): name for name, p in model.named_parameters()}
        self._dense = {id(p) for p in self._parameters if torch.ops.aten.is_non_overlapping_and_dense.default(p)}
        self._stand_ins: Mapping[str, torch.Tensor] = {}
        # In the backward pass that is to be reduced, in order: the last operator before each gradient was there.
        self._arrived: dict[str, fx.Node] = {}
        self._used: set[str] = set()  # since gradients were reduced last
        self._views: dict[str, torch.Tensor] = {}  # gradients as they were left
        self._syncs_buffers: bool = model.require_forward_param_sync
        self._expects = False  # that the next backward pass is to be reduced
        self._is_reduced = False  # the last forward pass led to gradients that were reduced
        self._reduces = False

    @property
    def left(self) -> Left:
        """What the traced step does beside its operators."""
        return Left(self._syncs_buffers, self._reduces)

    def watch(self, stand_ins: Mapping[str, torch.Tensor], graph: fx.Graph) -> None:
        """Note when the gradients arrive of what stands for the parameters, by name, in the graph that is recorded."""
        self._stand_ins, self._graph = stand_ins, graph
        watching = weakref.proxy(self)  # the garbage collector does not see what hooks of gradients hold
        for parameter in self._parameters:
            name = self._names[id(parameter)]
            stand_ins[name].register_post_accumulate_grad_hook(lambda _, name=name: watching._arrive(name))  # type: ignore[no-untyped-call]

    def _arrive(self, name: str) -> None:
        if self._is_reduced:
            raise CaptureError(
                f"a second backward pass through one forward pass of the DistributedDataParallel adds to the gradient "
                f"of {name}, which was reduced already: add the losses and call backward() once, or call the model "
                "again"
            )
        self._arrived.pop(name, None)
        self._arrived[name] = self._latest()
        self._used.add(name)

    def forward(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand in for DistributedDataParallel.forward."""
        if model is not self._model:
            raise CaptureError("the step calls another DistributedDataParallel than the one it trains: pass its module")
        wrapped.require_supported(model)
        if self._syncs_buffers:
            self._broadcast()
        result = model.module(*args, **kwargs)
        self._syncs_buffers = torch.is_grad_enabled() and model.require_backward_grad_sync
        if torch.is_grad_enabled():
            self._is_reduced = False
            if model.require_backward_grad_sync:
                self.check_finished()
                self._expects = True
                self._arrived.clear()
        return result

    def _broadcast(self) -> None:
        """Give all ranks the buffers of the first."""
        with torch.no_grad():
            for buffers in wrapped.synced_buffers(self._model):
                flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
                told = torch.ops._c10d_functional.broadcast_(flat, 0, self._group)
                told = torch.ops._c10d_functional.wait_tensor(told)
                for buffer, part in zip(buffers, told.split([b.numel() for b in buffers]), strict=True):
                    buffer.copy_(part.view(buffer.shape))

    def check_finished(self) -> None:
        """Raise a CaptureError where gradients wait for others that never come."""
        if self._expects and self._arrived:
            missing = [n for n in map(self._name, self._parameters) if n not in self._arrived]
            raise CaptureError(
                f"{len(missing)} parameters of the DistributedDataParallel get no gradient ({', '.join(missing[:3])}"
                f"{', ...' if missing[3:] else ''}), and it waits for all of them: wrap the model with "
                "find_unused_parameters=True or static_graph=True, or freeze them (requires_grad_(False)) before"
            )

    def _name(self, parameter: torch.nn.Parameter) -> str:
        return self._names[id(parameter)]

    def reduce(self) -> None:
        """Reduce the gradients of a backward pass, if it is one that does, and all have arrived."""
        model = self._model
        may_miss = model.find_unused_parameters or model.static_graph
        if not self._expects or not self._arrived or (len(self._arrived) < len(self._parameters) and not may_miss):
            return
        place = {name: i for i, name in enumerate(self._arrived)}
        if self._buckets is None:  # made of the order of arrival, parameters without gradient last
            in_order = sorted(self._parameters, key=lambda p: place.get(self._name(p), len(place)))
            self._buckets = wrapped.rebuilt_buckets(model, in_order)
        with torch.no_grad():
            begun: list[tuple[_Parameters, torch.Tensor]] = []
            issue = next(iter(self._arrived.values()))
            for bucket in self._buckets:
                flat, issue = self._begin(bucket, place, issue)
                begun.append((bucket, flat))
            for bucket, flat in begun:
                self._end(bucket, torch.ops._c10d_functional.wait_tensor(flat))
        self._expects, self._is_reduced, self._reduces = False, True, True
        self._used.clear()

    def _begin(self, bucket: _Parameters, place: Mapping[str, int], issue: fx.Node) -> tuple[torch.Tensor, fx.Node]:
        """Fill a bucket as its gradients arrive, and begin to sum it over the ranks.

        Args:
            bucket: its parameters, in order.
            place: name -> how many gradients arrived before its own.
            issue: where the bucket before was begun to be summed.

        Returns:
            The sum, once it is waited for, and where it was begun.
        """
        names = sorted(map(self._name, bucket), key=lambda name: place.get(name, -1))
        at = next((self._arrived[name] for name in names if name in self._arrived), self._latest())
        first, before = self._stand_ins[names[0]], self._latest()
        flat = torch.empty(sum(p.numel() for p in bucket), dtype=first.dtype, device=first.device)
        of = dict(zip(map(self._name, bucket), self._slices(bucket, flat), strict=True))
        at = self._move(before, at)
        kept: set[str] = set()  # in the bucket since they were summed before: these are divided
        for name in names:
            gradient, before = self._stand_ins[name].grad, self._latest()
            if gradient is None:
                of[name].zero_()
            else:
                of[name].copy_(gradient)
                if self._model.gradient_as_bucket_view and gradient is self._views.get(name):
                    kept.add(name)
            at = self._move(before, max(at, self._arrived.get(name, at)))
        before = self._latest()
        self._scale(flat, of, kept)
        summed: torch.Tensor = torch.ops._c10d_functional.all_reduce_(flat, "sum", self._group)
        return summed, self._move(before, max(at, issue))

    def _latest(self) -> fx.Node:
        """Return the operator that was recorded last."""
        last: fx.Node = next(iter(reversed(self._graph.nodes)))
        return last

    def _move(self, before: fx.Node, at: fx.Node) -> fx.Node:
        """Put what was recorded since an operator behind another one; return the last of it."""
        while (node := before.next).op != "root":
            at.append(node)
            at = node
            if before.next is node:  # it stays where it is
                before = node
        return at

    def _scale(self, flat: torch.Tensor, of: Mapping[str, torch.Tensor], kept: Container[str]) -> None:
        """Divide a bucket by the ranks, with the rounding of DistributedDataParallel."""
        if getattr(self._model, "batched_grad_copy", False) or all(name in kept for name in of):
            flat.div_(self._num_ranks)
        elif not any(name in kept for name in of):
            flat.mul_(1.0 / self._num_ranks)
        else:
            for name, view in of.items():
                view.div_(self._num_ranks) if name in kept else view.mul_(1.0 / self._num_ranks)

    def _slices(self, bucket: _Parameters, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the place of each gradient in a bucket, in the layout of its parameter where that is dense."""
        found, start = [], 0
        for parameter in bucket:
            if id(parameter) in self._dense:
                found.append(flat.as_strided(parameter.shape, parameter.stride(), start))
            else:
                found.append(flat.narrow(0, start, parameter.numel()).view(parameter.shape))
            start += parameter.numel()
        return found

    def _end(self, bucket: _Parameters, flat: torch.Tensor) -> None:
        """Leave the sums in the gradients; those of parameters that no rank used stay as they are."""
        for parameter, view in zip(bucket, self._slices(bucket, flat), strict=True):
            name = self._name(parameter)
            if name in self._used:
                self._stand_ins[name].grad = self._views[name] = view
