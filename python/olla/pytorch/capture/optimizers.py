"""A stand-in for the user's optimizer: same class and settings, other tensors, one update per parameter."""

from __future__ import annotations

import collections
import contextlib
import inspect
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from olla.errors import FIRST_STEP, CaptureError
from olla.pytorch.sharded.fully import local

State = dict[str, Any]
_ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "NAdam", "RMSprop", "SGD")
_CHANGED_BY_TORCH = {
    "state", "param_groups", "step", "_opt_called", "_step_count", "_warned_capturable_if_run_uncaptured",
}  # fmt: skip


def check(optimizer: torch.optim.Optimizer, parameters: Container[int]) -> None:
    """Raise a CaptureError if the step of this optimizer, over parameters with these ids, cannot be captured."""
    kind = type(optimizer).__name__
    if isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        raise CaptureError(f"{kind} wraps another optimizer, which a captured step takes itself: pass its .optimizer.")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise CaptureError(
            f"{kind} evaluates the loss several times per step (closure). Leave the optimizer out of the step, and "
            "call the step in the closure: it leaves gradients in .grad and returns the loss."
        )
    hooks = [
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
        *torch_optimizer._global_optimizer_pre_hooks.values(),
        *torch_optimizer._global_optimizer_post_hooks.values(),
    ]
    if hooks:
        raise CaptureError(
            f"{kind} has {len(hooks)} step hooks, which a captured step would not run. Remove them before the capture."
        )
    if own_step(optimizer) is not None:
        raise CaptureError(
            f"the step of {kind} was replaced on the object, which a captured step would not call: make a subclass "
            "with a step of its own."
        )
    if foreign := [p for group in optimizer.param_groups for p in group["params"] if id(p) not in parameters]:
        raise CaptureError(
            f"{kind} updates a parameter of shape {tuple(foreign[0].shape)} that the model does not have. "
            "Build the optimizer from model.parameters() after all changes to the model."
        )


def own_step(optimizer: torch.optim.Optimizer) -> Any:
    """Return the step that someone put on the object; None for that of its class, and for the wrapper of schedulers."""
    found = vars(optimizer).get("step")
    return None if hasattr(found, "_wrapped_by_lr_sched") else found


def run_stand_in(optimizer: torch.optim.Optimizer, groups: list[State], state: dict[torch.Tensor, State]) -> None:
    """Let a stand-in for the user's optimizer take its step.

    Raises:
        CaptureError: the step changes settings or attributes of the optimizer, which a captured step would not do.
    """
    copy = stand_in(optimizer, groups, state)
    before, *settings = [dict(values) for values in (vars(copy), *copy.param_groups)]
    held = {parameter: dict(entries) for parameter, entries in copy.state.items()}
    copy.step()
    _write_back(optimizer, held, copy.state)
    attributes = [{k: v for k, v in values.items() if k not in _CHANGED_BY_TORCH} for values in (before, vars(copy))]
    pairs = [attributes, *zip(settings, copy.param_groups, strict=True)]
    changed = [k for old, new in pairs for k in {**old, **new} if old.get(k) is not new.get(k)]
    if changed:
        raise CaptureError(
            f"the step of {type(optimizer).__name__} changes {', '.join(map(str, changed))}, which a captured step "
            "would not do again: keep it in a tensor of the optimizer's state."
        )


def _write_back(
    optimizer: torch.optim.Optimizer, before: dict[torch.Tensor, State], state: dict[torch.Tensor, State]
) -> None:
    """Copy new tensors that a step has put into its state into the old ones, in place; these outlive the step.

    Raises:
        CaptureError: there is no old tensor of the same shape, dtype and device.
    """
    for parameter, entries in state.items():
        old = before.get(parameter, {})
        for name in [n for n in {**old, **entries} if entries.get(n) is not old.get(n)]:
            place, value = old.get(name), entries.get(name)
            if not (isinstance(place, torch.Tensor) and isinstance(value, torch.Tensor) and _are_alike(place, value)):
                raise CaptureError(
                    f"the step of {type(optimizer).__name__} makes {name} of its state anew, which a captured step "
                    "would not do again: keep it in a tensor of one shape and type, made in the first step."
                )
            with torch.no_grad():
                place.copy_(value)
            entries[name] = place


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is one of torch's own, which create a parameter's state before its first update."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.") and hasattr(optimizer, "_init_group")


def updates_are_independent(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the update of a parameter is known to depend on its own gradient, state and group only."""
    return is_known(optimizer)


def updates_are_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a parameter's update is known to be the same operators for every shape, element by element."""
    return is_known(optimizer) and type(optimizer).__name__ in _ELEMENTWISE


def existing_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, name: str) -> State:
    """Return the state the optimizer keeps for a parameter; empty before its first step.

    Raises:
        CaptureError: an entry is neither a tensor nor None.
    """
    state: State = optimizer.state.get(parameter, {})
    for entry, value in state.items():
        if value is not None and not isinstance(value, torch.Tensor):
            raise CaptureError(
                f"{type(optimizer).__name__} keeps {entry} of {name} as a {type(value).__name__}, which would be "
                "frozen into the captured step. Leave the optimizer out of the step, and call optimizer.step() behind "
                "it, or keep that in a tensor."
            )
    return state


def first_state(optimizer: torch.optim.Optimizer, group: State, parameter: torch.Tensor) -> State:
    """Return the state the optimizer would create for a parameter (or for a fake one) in its first step.

    Raises:
        CaptureError: it cannot be known before that step.
    """
    if not is_known(optimizer):
        raise CaptureError(
            f"the state {type(optimizer).__name__} starts from is not known. "
            "Take one ordinary step (loss.backward(); optimizer.step()), then capture.",
            rule=FIRST_STEP,
        )
    if isinstance(optimizer, torch.optim.SGD):  # makes its state from the first gradient: as if it had been zero
        if group["momentum"] == 0:
            return {}
        if group["dampening"] != 0:
            raise CaptureError(
                f"SGD with dampening {group['dampening']} treats its first step differently from all later ones. "
                "Take one ordinary step (loss.backward(); optimizer.step()), then capture.",
                rule=FIRST_STEP,
            )
        return {"momentum_buffer": torch.zeros_like(parameter, memory_format=torch.preserve_format)}
    alone = parameter.detach()
    alone.grad = torch.empty_like(alone)
    copy = stand_in(optimizer, [{**group, "params": [alone]}], {})
    prepare: Callable[..., Any] = type(optimizer)._init_group  # type: ignore[attr-defined]
    num_lists = len(inspect.signature(prepare).parameters) - 2
    prepare(copy, {**copy.param_groups[0], "fused": group.get("fused")}, *([] for _ in range(num_lists)))
    alone.grad = None  # see trace: the garbage collector does not see through it
    return {entry: value for entry, value in copy.state[alone].items() if value is not None}


def first_state_of_fake(
    optimizer: torch.optim.Optimizer, group: State, parameter: torch.Tensor, made: dict[torch.dtype, State]
) -> State:
    """Return first_state of a fake parameter; for elementwise updates, derived from another parameter of its group.

    Args:
        optimizer, group, parameter: see first_state.
        made: dtype -> the state of one parameter, and that parameter as "". Entries are added.
    """
    simple = bool(parameter.shape) and parameter.is_contiguous() and not parameter.is_complex()
    if not simple or not updates_are_elementwise(optimizer):
        return first_state(optimizer, group, parameter)
    if (other := made.get(parameter.dtype)) is None:
        state = first_state(optimizer, group, parameter)
        if all(not t.shape or (t.shape == parameter.shape and t.is_contiguous()) for t in state.values()):
            made[parameter.dtype] = {"": parameter, **state}
        return state
    shape = other[""].shape
    return {
        entry: torch.empty(parameter.shape if t.shape == shape else (), dtype=t.dtype, device=t.device)
        for entry, t in other.items()
        if entry
    }


def parameter_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> State:
    """Return the optimizer's state of a parameter, after creating it if there is none."""
    state: State | None = optimizer.state.get(parameter)
    if not state:
        group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
        optimizer.state[parameter].update(first_state(optimizer, group, parameter))
        state = optimizer.state[parameter]
    return state


@contextlib.contextmanager
def kept_on_error(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Take away the state that was created inside this context if it ends in an error."""
    before = {} if optimizer is None else {id(p): bool(state) for p, state in optimizer.state.items()}
    try:
        yield
    except BaseException:
        for parameter, state in list(optimizer.state.items()) if optimizer is not None else ():
            if id(parameter) not in before:
                del optimizer.state[parameter]  # type: ignore[union-attr]
            elif not before[id(parameter)]:
                state.clear()
        raise


class _Momentum(torch.SymFloat):
    """A momentum that is an input of the step: not zero, and nothing else is known of it."""

    def __ne__(self, other: object) -> bool:
        return True if other == 0 else bool(super().__ne__(other))

    def __gt__(self, other: object) -> bool:
        return True if other == 0 else bool(super().__gt__(other))


def rates(group: State) -> list[str]:
    """Return the settings of a group that are inputs of a step: those that schedules change after every step."""
    # OneCycleLR and CyclicLR leave base_momentum in the groups whose momentum (or first beta) they cycle.
    cycled = "base_momentum" in group and bool(_momentum(group) != 0)
    return ["lr", "momentum"] if cycled else ["lr"]


def rate_tensor(group: State, entry: str) -> torch.Tensor:
    """Return one of ``rates`` as the step takes it: a float64 scalar on the CPU, or the user's own tensor."""
    rate = _momentum(group) if entry == "momentum" else group[entry]
    return rate if isinstance(rate, torch.Tensor) else torch.tensor(rate, dtype=torch.float64)


def with_rates(group: State, found: dict[str, torch.Tensor]) -> State:
    """Return a group with traced tensors for its rates: as numbers read from them, where the user has numbers."""
    changed = dict(group)
    for entry, tensor in found.items():
        rate: Any = tensor if isinstance(group.get(entry), torch.Tensor) else tensor.item()
        if entry == "momentum" and "betas" in group:
            changed["betas"] = (tensor.item(), *group["betas"][1:])
        else:
            plain = entry != "momentum" or rate is tensor
            changed[entry] = rate if plain else _Momentum(rate.node)  # type: ignore[no-untyped-call]
    return changed


def constants(group: State) -> State:
    """Return the settings of a group that a capture holds constant."""
    inputs = {*rates(group), "initial_lr", "params", "foreach", "fused"}
    kept = {k: v for k, v in group.items() if k not in inputs}
    return kept | {"betas": group["betas"][1:]} if "momentum" in inputs and "betas" in group else kept


def _momentum(group: State) -> Any:
    return group["betas"][0] if "betas" in group else group.get("momentum", 0)


def stand_in(
    optimizer: torch.optim.Optimizer, groups: list[State], state: dict[torch.Tensor, State]
) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and settings over other tensors, which updates one parameter at a time.

    One fused op over all parameters could not be scheduled, and would keep every gradient alive until it runs. The
    user's optimizer is not changed; groups are its own with other parameters, and the state is by these.
    """
    copy: torch.optim.Optimizer = type(optimizer).__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__)
    # A learning-rate scheduler, or a trace, leaves a step here that is bound to the user's optimizer.
    copy.__dict__.pop("step", None)
    copy.param_groups = [one_by_one(group) for group in groups]
    copy.state = collections.defaultdict(dict, state)
    return copy


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor like this rank's part of a tensor."""
    own = local(tensor)
    return torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device="meta")


def one_by_one(group: State) -> State:
    """Return the settings of a group with which its parameters are updated one after the other."""
    return group | {k: False for k in ("foreach", "fused") if k in group}


class NoState(collections.defaultdict[torch.Tensor, Any]):
    """The state of an optimizer before its first step: any access by the body of a loop raises a CaptureError.

    Later steps would find state there, which the captured one could not know.
    """

    def _refuse(self, *_: Any) -> Any:
        raise CaptureError(
            "the step reads the optimizer's state before the optimizer took its first step: what it finds would be "
            "frozen into the captured step. Take one ordinary step (loss.backward(); optimizer.step()), then capture.",
            rule=FIRST_STEP,
        )

    __len__ = __iter__ = __contains__ = __getitem__ = __bool__ = keys = values = items = get = _refuse
