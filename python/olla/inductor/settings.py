"""Turn olla on for every later torch.compile (`enable`), and off again (`disable`)."""

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
    """A context in which olla is on; its end, or `disable`, restores the settings from before."""

    def __init__(self, patch: Any) -> None:
        self._patch = patch

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *_: object) -> None:
        """Undo this `enable` and all later ones; a no-op if it is undone already."""
        layers = _enabled.get()
        if self in layers:
            place = layers.index(self)
            _enabled.set(layers[:place])
            for layer in reversed(layers[place:]):
                layer._patch.__exit__(None, None, None)


# Results of `enable` that are still in force, oldest first.
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

    Without a goal, graphs on a GPU get the lowest peak that recomputes matrix products, convolutions and attention for
    at most 1 % of their flops and of the estimated time; graphs on a CPU the lowest peak for at most 5 % added time.

    Code that has been compiled already stays as it is. A second call replaces the goal of the first, until its own
    block ends. Since torch 2.13 Inductor's settings are per thread, so the call applies to the calling thread only.

    Args:
        budget: peak bytes of a compiled forward and backward with their inputs and results: "16GB", "16GiB" or a
            number. Memory outside of them (other graphs, an optimizer's state) comes on top.
        max_slowdown: the least peak for at most this share of added time, 0.05 for 5 %.
        minimise: "peak": the least peak at whatever time.
        device: what seconds are estimated for: a name of `olla.graph.PROFILES` or a profile; by default by the
            device of the graph.
        max_recomputed: limit on the recomputed flops of matrix products, convolutions and attention, as a share of the
            graph's, 0.05 for 5 %; with any goal, or alone for the least peak. Flops are exact, seconds estimates.
        chunked_loss: compute large linear layers with their cross-entropy in so many chunks of rows, or "auto": enough
            that a chunk of logits takes at most a quarter of the layer's weight, or has at most 256 rows. This changes
            rounding: gradients of weights are sums over chunks.
        segment: on a GPU, have torch's caching allocator reserve most of the step's peak in one segment before the
            first run, which lowers reserved memory; False: segments are reserved as requests come. See
            docs/inductor.md.
        host_budget: with a goal, on a GPU: bytes of pinned host memory for offloading tensors between forward and
            backward; offloading and recomputation are chosen together. None: no offloading. Torch 2.13 or later.

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
