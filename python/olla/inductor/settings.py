"""Turning olla on for code that already compiles, and off again."""

from __future__ import annotations

from typing import Any

from olla.graph import DeviceProfile, profile_of
from olla.inductor.compat import compat
from olla.inductor.compat.host import offload_operators
from olla.inductor.kernels import inlining, order
from olla.inductor.saving import saved_inputs
from olla.inductor.saving.partition import Partitioner
from olla.inductor.simulate import halves
from olla.plan import asked
from olla.plan.goal import MOST_CHUNKS


def patches(
    budget: int | str | None = None,
    max_slowdown: float | None = None,
    minimise: str | None = None,
    device: str | DeviceProfile | None = None,
    max_recomputed: float | None = None,
    chunked_loss: int | str | None = None,
    segment: bool = True,
    host_budget: int | str | None = None,
) -> dict[str, Any]:
    """Return what olla changes in Inductor's configuration, by name.

    Raises:
        BudgetError, ValueError: as `enable`.
    """
    if max_recomputed is not None and not (isinstance(max_recomputed, int | float) and max_recomputed >= 0):
        raise ValueError(f"max_recomputed is {max_recomputed!r}, expected a share of the step's flops: 0.05 for 5 %")
    number = isinstance(chunked_loss, int) and not isinstance(chunked_loss, bool)
    if not (chunked_loss in (None, "auto") or (number and 1 <= chunked_loss <= MOST_CHUNKS)):  # type: ignore[operator]
        raise ValueError(
            f"chunked_loss is {chunked_loss!r}, expected 1 to {MOST_CHUNKS} chunks, 'auto', or None for a whole loss"
        )
    if budget is None and max_slowdown is None and minimise is None and max_recomputed is not None:
        minimise = "peak"
    goal, swapping = asked(
        budget=budget,
        max_slowdown=max_slowdown,
        minimise=minimise,
        device="a100" if device is None else device,
        host_budget=host_budget,
    )
    if swapping is not None:
        offload_operators()
    profile = None if device is None else profile_of(device)
    return {
        "custom_partitioner_fn": Partitioner(
            goal,
            device=profile,
            max_recomputed=max_recomputed,
            foresee=_code_peak_bytes,
            chunked_loss=chunked_loss,
            segment=bool(segment),
            swapping=swapping,
        ),
        **saved_inputs.patches(),
        **inlining.patches(),
        **order.patches(),
    }


def _code_peak_bytes(forward: Any, backward: Any, num_results: int) -> int | None:
    with order.unrecorded():
        return halves.peak_bytes(forward, backward, num_results)


class Enabled:
    """olla is on until the end of a ``with`` block, or until `disable`; then what was set before holds again."""

    def __init__(self, patch: Any) -> None:
        self._patch = patch

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *_: object) -> None:
        """Undo this, and all that came after it; nothing happens where it has ended already."""
        layers = _enabled.get()
        if self in layers:
            place = layers.index(self)
            _enabled.set(layers[:place])
            for layer in reversed(layers[place:]):
                layer._patch.__exit__(None, None, None)


# What `enable` returned and has not ended, oldest first.
_enabled: Any = compat.variable_like_config("olla_enabled", ())


def enable(
    *,
    budget: int | str | None = None,
    max_slowdown: float | None = None,
    minimise: str | None = None,
    device: str | DeviceProfile | None = None,
    max_recomputed: float | None = None,
    chunked_loss: int | str | None = None,
    segment: bool = True,
    host_budget: int | str | None = None,
) -> Enabled:
    """Let olla decide what every ``torch.compile`` from now on saves for backward.

    Without a goal, graphs on a GPU get the least peak with which matrix products, convolutions and attention run again
    for at most 1 % of their flops and of the estimated time, those on a CPU the least for at most 5 % of added time.

    Code that has been compiled already stays as it is. A second call replaces the goal of the first, until its own
    block ends. Since torch 2.13 every thread has settings of its own: this call counts for the thread that makes it.

    Args:
        budget: bytes a compiled forward and backward may need with all they take and return: "16GB", "16GiB" or a
            number. What lies outside of them (other graphs, an optimizer's state) comes on top.
        max_slowdown: the least peak for at most this share of added time, 0.05 for 5 %.
        minimise: "peak": the least peak at whatever time.
        device: what seconds are estimated for: a name of `olla.graph.PROFILES` or a profile; by default by the
            device of the graph.
        max_recomputed: beside any goal, or alone for the least peak: most flops of matrix products, convolutions and
            attention to run again, as a share of the graph's, 0.05 for 5 %; known exactly, as seconds are not.
        chunked_loss: compute large linear layers with their cross-entropy in so many chunks of rows, or "auto": as many
            as bring a chunk of logits to the size of the layer's weight. This changes rounding: gradients of weights
            are sums over chunks.
        segment: on a GPU, let torch's allocator take what a step has in memory at its peak from the device in one
            piece before the step first runs, so that less is reserved; False: piece by piece, as it is asked for.
            See docs/inductor.md.
        host_budget: beside a goal, on a GPU: bytes of pinned host memory in which tensors may wait between forward and
            backward; what is copied and what is recomputed are chosen together. None: nothing is copied. Torch 2.13 or
            later.

    Returns:
        An object for a ``with`` block that ends it; it may be ignored.

    Raises:
        BudgetError: a budget is no number of bytes.
        ValueError: two goals are given, or one is out of its range, or ``host_budget`` stands alone.
        CaptureError: ``host_budget`` with a torch that has no operators for it.

    Example:
        >>> import olla.inductor
        >>> with olla.inductor.enable(max_slowdown=0.05):
        ...     pass  # torch.compile(model)(batch).backward()
    """
    settings = patches(budget, max_slowdown, minimise, device, max_recomputed, chunked_loss, segment, host_budget)
    layer = Enabled(compat.config.patch(settings))
    layer._patch.__enter__()
    _enabled.set((*_enabled.get(), layer))
    return layer


def disable() -> None:
    """Give Inductor back the settings it had before the first `enable`; nothing happens where olla is not on."""
    layers = _enabled.get()
    if layers:
        layers[0].__exit__()
