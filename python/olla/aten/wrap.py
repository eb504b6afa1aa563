"""olla.wrap: planned forward and backward behind an ordinary training loop. Importing this does not import torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from olla.aten.record import WrapReport
from olla.graph import DeviceProfile

if TYPE_CHECKING:
    import torch

Wrapped = TypeVar("Wrapped", bound=Callable[..., Any])
_wrapped: WeakKeyDictionary[Any, WrapReport] = WeakKeyDictionary()


def wrap(
    model: Wrapped,
    *,
    budget: int | str | None = None,
    max_slowdown: float | None = None,
    minimise: str | None = None,
    plan_for: str | DeviceProfile | None = None,
    time_limit: float = 15.0,
    dynamic: bool | None = False,
) -> Wrapped:
    """Plan the memory of a model's forward and backward; the training loop stays as it is.

    Calls of the model, and the backward passes behind them, run the same operators on torch's own kernels, in an order
    with a lower peak: results are written in place, and with a goal values are recomputed instead of saved. Losses,
    gradients, buffers and random numbers are those of the model as it was, to the bit. Whatever surrounds the model
    (loss, clipping, accumulation, optimizers, schedulers, scalers) is the user's own.

    The graphs are those of ``torch.compile``: where Dynamo cannot follow Python, a graph ends and another one begins,
    and that piece runs as it is. `olla.report_of` says what is planned.

    Args:
        model: wrapped in place, as by ``model.compile()``: its class, parameters and the keys of its state stay the
            same. A copy of it, or what is loaded from a pickle, is not wrapped. Or a function, such as
            ``loss(model, batch)``, which plans the loss as well: that is not changed, and what is returned is called in
            its place.
        budget: the memory there is for forward and backward, "16GB", "16GiB" or bytes, with parameters, inputs and
            gradients, without an optimizer's state: the least added time with which they fit.
        max_slowdown: in place of a budget: the least peak within this share of added time; 0.05 is 5 %.
        minimise: "peak", in place of a budget: the least peak at whatever time.
        plan_for: what added time is estimated for, see `olla.plan`; by default "cpu" or "a100", by where the model is.
        time_limit: seconds to search for the plan of one graph.
        dynamic: as of ``torch.compile``; by default a batch of another size gets a plan of its own.

    Returns:
        The model; of a function, one that takes the same and returns the same.

    Raises:
        BudgetError: the budget is no number of bytes.
        ValueError: two goals are given, or one is out of its range.
        TypeError: model is neither a torch.nn.Module nor a function.

    Example:
        >>> import torch, olla
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model = olla.wrap(model, max_slowdown=0.05)
        >>> for _ in range(3):
        ...     loss = model(torch.ones(4, 8)).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> len(olla.report_of(model).planned)
        1
    """
    import torch

    call, report = _planned(model, budget, max_slowdown, minimise, plan_for, time_limit, dynamic)
    given: Any = model
    is_module = isinstance(model, torch.nn.Module)
    if is_module:
        given._compiled_call_impl = call
    wrapped: Any = model if is_module else functools.wraps(model)(call)
    _wrapped[wrapped] = report
    return wrapped  # type: ignore[no-any-return]


def explain(
    model: torch.nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any, Any], Any] | None = None,
    budget: int | str | None = None,
    max_slowdown: float | None = None,
    minimise: str | None = None,
    plan_for: str | DeviceProfile | None = None,
    time_limit: float = 15.0,
) -> WrapReport:
    """Say what `olla.wrap` would plan of a model, before it trains: graphs, graph breaks with line and reason, peaks.

    As ``torch._dynamo.explain`` does, this runs the forward pass once. Buffers and random numbers are put back; nothing
    is wrapped, and no gradient is made.

    Args:
        model: as it will train.
        batch: ``model(**batch)`` is called for a dict, ``model(*batch)`` for a tuple or list, else ``model(batch)``.
        loss: called with model and batch in place of that, as a wrapped loss would be.
        budget, max_slowdown, minimise, plan_for, time_limit: see `olla.wrap`.

    Returns:
        The report that `olla.report_of` would return behind the first call.

    Raises:
        BudgetError: the budget is no number of bytes.
        ValueError: two goals are given, or one is out of its range.

    Example:
        >>> import torch, olla
        >>> report = olla.explain(torch.nn.Linear(8, 1), torch.ones(4, 8))
        >>> report.graph_count, report.graph_break_count
        (1, 0)
    """
    import torch

    from olla.pytorch.capture.generator import undrawn
    from olla.pytorch.ordinary.loop import inference

    call, report = _planned(loss or model, budget, max_slowdown, minimise, plan_for, time_limit, False)
    report.name = type(model).__name__
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with undrawn(), torch.enable_grad():
            if loss is not None:
                call(model, batch)
            else:
                inference(call, batch)
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    return report


def _planned(
    model: Callable[..., Any],
    budget: int | str | None,
    max_slowdown: float | None,
    minimise: str | None,
    plan_for: str | DeviceProfile | None,
    time_limit: float,
    dynamic: bool | None,
) -> tuple[Callable[..., Any], WrapReport]:
    """Return what calls a model or a function as planned, and its report; for the arguments see `wrap`."""
    import torch

    from olla.aten.backend import partitioner
    from olla.aten.calls import Calls
    from olla.aten.partition import model_bytes

    is_module = isinstance(model, torch.nn.Module)
    if not is_module and not callable(model):
        raise TypeError(f"model is a {type(model).__name__}, expected a torch.nn.Module or a function")
    report = WrapReport(name=type(model).__name__ if is_module else getattr(model, "__name__", "function"))
    partition = partitioner(budget, max_slowdown, minimise, plan_for, time_limit)
    partition.graphs = report.graphs
    if is_module:
        partition.model_bytes = model_bytes(model)
    calls = Calls(model, partition, report, dynamic)

    def call(*args: Any, **kwargs: Any) -> Any:
        return calls(*args, **kwargs)

    return call, report


def report_of(model: Callable[..., Any]) -> WrapReport:
    """Return what `olla.wrap` made of a model or a function so far: graphs, peaks, graph breaks.

    Raises:
        ValueError: the model is not wrapped.

    Example:
        >>> import torch, olla
        >>> model = olla.wrap(torch.nn.Linear(8, 1))
        >>> _ = model(torch.ones(4, 8))
        >>> olla.report_of(model).num_calls
        1
    """
    if model not in _wrapped:
        raise ValueError(f"this {type(model).__name__} is not wrapped: call olla.wrap(model, ...) first")
    return _wrapped[model]
