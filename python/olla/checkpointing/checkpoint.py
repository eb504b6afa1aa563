"""olla.checkpoint: which modules of a model are checkpointed, for a budget. Importing this does not import torch."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from olla.checkpointing.table import Checkpoints, rows_of
from olla.errors import BudgetError, CaptureError, free_frames
from olla.graph import DeviceProfile, profile_of
from olla.plan import Goal, asked

if TYPE_CHECKING:
    import torch

    from olla.checkpointing.memory import Memory
    from olla.checkpointing.model import CheckpointChoice, Model
    from olla.checkpointing.optimizer_memory import OptimizerMemory
    from olla.checkpointing.regions import ModuleRegion
    from olla.checkpointing.trace import StepTrace, TrainingStep

_MOST_TRIES = 5  # of choices that miss the goal once they are measured
_TIE = 1e-4  # of the peak: of choices that need about as much, the one of least time
_WORTH = 1e-3  # of the peak: what saves less is not worth a checkpoint
_SLACK = 0.01  # of the seconds that may be added: if more is unused, the search is repeated with as much more
_ROUNDING = 1e-9  # of the step's seconds, which are sums
_MARGIN = 0.1  # by which the program's seconds may be above those that are measured
_LEAST_SECONDS = 0.5  # for one search, though the time is over

# Recurrent layers of libraries, whose fake results lack what they keep for backward.
_UNKNOWN = ("aten.mkldnn_rnn_layer", "aten._cudnn_rnn", "aten.miopen_rnn")


def checkpoint(
    model: torch.nn.Module,
    batch: Any,
    *,
    budget: int | str | None = None,
    max_slowdown: float | None = None,
    minimise: str | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    selective: bool | None = None,
    plan_for: str | DeviceProfile | None = None,
    time_limit: float = 10.0,
    seed: int = 0,
) -> Checkpoints:
    """Choose which modules of a model are checkpointed, and have torch's own checkpoint do it; the loop stays as it is.

    One forward and backward pass runs on fake tensors: nothing is computed, no memory is taken. An integer program then
    chooses modules, and operators inside of them whose results are saved (torch's selective checkpoint). What is chosen
    is measured on fake tensors, too. Where values decide what runs, as with experts, the pass runs on the model's own
    parameters instead; their gradients stay as they are.

    Losses and gradients are those of the loop as it was, to the bit, as with ``torch.utils.checkpoint``; running
    statistics of batch norm are updated once.

    Args:
        model: is changed in place: chosen modules get another ``forward``. Classes, parameters and the keys of the
            state stay the same. What an earlier call chose is replaced. It may be in a DistributedDataParallel, or in
            FSDP2's ``fully_shard``; where several processes train, all of them call this, and take what the first one
            chooses.
        batch: ``model(**batch)`` is called for a dict, ``model(*batch)`` for a tuple or list, else ``model(batch)``.
            What is returned should have a ``loss``; otherwise all of it counts as if it were used in one.
        budget: the memory there is, "16GB", "16GiB" or bytes: for parameters, gradients, the batch and what forward
            and backward take, and with ``optimizer`` for its state and its step. The least added time with which it
            fits is chosen.
        max_slowdown: in place of a budget: the least peak within this share of added time; 0.05 is 5 %.
        minimise: "peak", in place of a budget: the least peak at whatever time.
        loss: ``loss(model, batch)`` is called in place of the model, and returns the loss, or a tuple that starts with
            it. Run what the loop runs here: under its autocast, for example.
        optimizer: of the model; nothing of it is changed.
        selective: whether operators inside of checkpointed modules may be saved. Each operator of such a module takes
            some microseconds more of the processor, so by default not where that is what computes.
        plan_for: what time is estimated for, see `olla.plan`; by default "cpu" or "a100", by where the model is.
        time_limit: seconds for the search.
        seed: of it.

    Returns:
        A table of the modules, with the peak before and after, the added time and a bound; ``print`` shows it.

    Raises:
        BudgetError: no choice fits the budget; the message says what the least one needs.
        CaptureError: the model checkpoints modules itself, its forward pass fails, or nothing in it is trained.
        ValueError: no goal is given, or more than one, or one is out of its range.

    Example:
        >>> import torch, olla
        >>> block = lambda: torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
        >>> model = torch.nn.Sequential(*[block() for _ in range(8)])
        >>> chosen = olla.checkpoint(model, torch.ones(512, 64), max_slowdown=0.2)
        >>> chosen.peak_bytes < chosen.eager_peak_bytes, chosen.added_seconds <= 0.2 * chosen.base_seconds
        (True, True)
        >>> model(torch.ones(512, 64)).sum().backward()
        >>> olla.checkpoint.remove(model) == len(chosen.modules)
        True
    """
    from olla.checkpointing import regions
    from olla.checkpointing.candidates import candidates
    from olla.checkpointing.model import Model
    from olla.checkpointing.optimizer_memory import optimizer_memory
    from olla.checkpointing.ranks import of_first_rank

    inner = _inside(model)
    on_gpu = any(p.device.type != "cpu" for p in inner.parameters())
    device = profile_of(plan_for or ("a100" if on_gpu else "cpu"))
    goal, _ = asked(budget=budget, max_slowdown=max_slowdown, minimise=minimise, device=device)
    if goal is None:
        raise ValueError('nothing is asked for: give budget="16GB", max_slowdown=0.1 or minimise="peak"')
    remove(inner)
    _require_own(inner)
    held = optimizer_memory(optimizer, on_gpu=on_gpu)
    step, traced = _traced(inner, batch, loss, device)
    # Where values decide what runs, an operator is at another position in every batch.
    is_selective = device.name != "cpu" if selective is None else selective
    found, reasons = candidates(traced, is_selective and not step.is_real)
    search = _Search(step, Model(traced, found), goal, held, time_limit, seed)
    choice, chosen, memory = of_first_rank(search.run, search.of_regions)
    for name, region in chosen.items():
        regions.apply(inner.get_submodule(name), region)
    return Checkpoints(
        name=type(inner).__name__,
        modules={name: tuple(sorted(region.saved)) for name, region in chosen.items()},
        rows=rows_of(inner, found, choice.saved, reasons),
        eager_peak_bytes=search.base.peak_bytes,
        peak_bytes=memory.peak_bytes,
        needed_bytes=held.needed(memory),
        # The model overestimates temporaries of recomputations: a measured peak can be below its bound.
        bound_bytes=None if search.bound_bytes is None else min(search.bound_bytes, memory.peak_bytes),
        bound_seconds=search.bound_seconds,
        base_seconds=search.base.seconds,
        added_seconds=memory.seconds - search.base.seconds,
        device=device.name,
        is_real=step.is_real,
    )


def remove(model: torch.nn.Module) -> int:
    """Undo what `olla.checkpoint` did to a model; return how many modules were checkpointed.

    Example:
        >>> import torch, olla
        >>> olla.checkpoint.remove(torch.nn.Linear(2, 2))
        0
    """
    from olla.checkpointing import regions

    return sum(regions.remove(module) for module in _inside(model).modules())


checkpoint.remove = remove  # type: ignore[attr-defined]


class Found(NamedTuple):
    """A choice, what it means for modules, and what was measured of it."""

    choice: CheckpointChoice
    regions: dict[str, ModuleRegion]
    memory: Memory


class _Search:
    """Looks for the choice that reaches a goal once it is measured.

    Attributes:
        base: the step without checkpoints.
        bound_bytes, bound_seconds: no choice needs less, or takes less time, as the linear model has it; None: not
            asked for.
    """

    def __init__(
        self, step: TrainingStep, model: Model, goal: Goal, held: OptimizerMemory, time_limit: float, seed: int
    ) -> None:
        self._step, self._model, self._goal, self._held, self._seed = step, model, goal, held, seed
        self._end = time.perf_counter() + time_limit
        self.base = step.measure({})
        self.bound_bytes: int | None = None
        self.bound_seconds: float | None = None

    def run(self) -> Found:
        """Return the choice that was found."""
        if self._goal.budget_bytes is not None:
            return self._within(self._goal.budget_bytes)
        share = self._goal.max_slowdown
        return self._least(math.inf if share is None else share * self.base.seconds)

    def _least(self, allowed: float) -> Found:
        """Return the choice of least peak within added seconds."""
        fitting = [self._measured(self._model.choice({}))]
        seconds = allowed
        for k in range(_MOST_TRIES):
            choice = self._solve(most_seconds=seconds)
            bound = int(choice.bound)
            self.bound_bytes = bound if self.bound_bytes is None else min(bound, self.bound_bytes)
            tied = self._solve(most_bytes=choice.peak_bytes * (1 + _TIE))
            measured = self._measured(tied if tied.seconds < choice.seconds else choice)
            over = measured.memory.seconds - self.base.seconds - allowed
            if over <= _ROUNDING * self.base.seconds:
                fitting.append(measured)
                if k or -over <= _SLACK * allowed or seconds == math.inf:
                    break
            seconds = max(seconds - (1.05 * over if over > 0 else over), seconds / 2)
        fitting += self._by_hand(allowed, min(found.memory.peak_bytes for found in fitting))
        least = min(found.memory.peak_bytes for found in fitting)
        if least > (1 - _WORTH) * self.base.peak_bytes:
            return fitting[0]
        return min(fitting, key=lambda found: (found.memory.peak_bytes, found.memory.seconds))

    def _by_hand(self, allowed: float, peak_bytes: int) -> list[Found]:
        """Return a choice that people make by hand, every n-th module, which fits and needs less; empty: none does.

        The program finds it, too, unless the time for the search is over.
        """
        for choice in sorted(self._model.by_hand(), key=lambda choice: choice.peak_bytes):
            if choice.peak_bytes >= peak_bytes:
                break
            if choice.seconds <= (1 + _MARGIN) * allowed:
                found = self._measured(choice)
                if found.memory.seconds - self.base.seconds <= allowed and found.memory.peak_bytes < peak_bytes:
                    return [found]
        return []

    def _within(self, budget: int) -> Found:
        """Return the choice of least time that fits a budget."""
        if (least := self._held.least(self.base)) > budget:
            raise BudgetError(
                f"the optimizer's step needs {least:,} bytes, which no checkpoint lowers, and the budget is "
                f"{budget:,}: raise the budget, or use another optimizer",
                rule="budget",
            )
        if self._held.needed(self.base) <= budget:
            self.bound_seconds = 0.0
            return self._measured(self._model.choice({}))
        target = budget - self._held.state
        for _ in range(_MOST_TRIES):
            choice = self._solve(most_bytes=target)
            if choice.peak_bytes > target:
                break
            if self.bound_seconds is None:
                self.bound_seconds = choice.bound
            measured = self._measured(choice)
            missed = self._held.needed(measured.memory) - budget
            if missed <= 0:
                return measured
            target -= missed
        measured = self._least(math.inf)
        self.bound_bytes = None
        if (needed := self._held.needed(measured.memory)) <= budget:
            return measured
        raise BudgetError(
            f"no choice of modules to checkpoint fits {budget:,} bytes: the least one needs {needed:,}. Raise the "
            "budget or lower the batch size; olla.wrap and olla.compile plan single operators within a budget",
            rule="budget",
        )

    def _solve(self, most_seconds: float = math.inf, most_bytes: float | None = None) -> CheckpointChoice:
        """Return the integer program's choice; if it has none in time, the choice to checkpoint nothing."""
        limit = max(_LEAST_SECONDS, (self._end - time.perf_counter()) / 2)
        choice = self._model.solve(most_seconds=most_seconds, most_bytes=most_bytes, time_limit=limit, seed=self._seed)
        return self._model.choice({}) if choice is None else choice

    def _measured(self, choice: CheckpointChoice) -> Found:
        regions = self._model.regions(choice)
        return Found(choice, regions, self._step.measure(regions) if regions else self.base)

    def of_regions(self, regions: dict[str, ModuleRegion]) -> Found:
        """Return what another rank has chosen, as it is measured here."""
        return Found(self._model.choice_of(regions), regions, self._step.measure(regions) if regions else self.base)


def _traced(model: torch.nn.Module, batch: Any, loss: Any, device: DeviceProfile) -> tuple[TrainingStep, StepTrace]:
    """Trace a step on fake tensors; where its forward pass asks for values, on the model's own.

    Raises:
        Exception: whatever the forward or backward pass raises on the model's own tensors.
    """
    from olla.checkpointing.trace import TrainingStep

    step = TrainingStep(model, batch, loss, device)
    handled = sys.exception()
    is_meta = any(p.device.type == "meta" for p in model.parameters())
    try:
        traced = step.trace()
        if is_meta or not any(name.startswith(_UNKNOWN) for name, _, _ in traced.operators):
            return step, traced
    except Exception as error:
        if is_meta:
            raise
        free_frames(error, handled)
    step = TrainingStep(model, batch, loss, device, is_real=True)
    return step, step.trace()


def _inside(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module that a DistributedDataParallel or DataParallel holds; any other model as it is."""
    import torch

    if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        return model.module  # type: ignore[no-any-return]
    return model


def _require_own(model: torch.nn.Module) -> None:
    """Refuse a model that checkpoints modules itself."""
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True and module.training:
            raise CaptureError(
                f"the model checkpoints by itself: {name or type(module).__name__}.gradient_checkpointing is True. "
                "Switch that off first: in a trainer leave gradient_checkpointing=True out, otherwise call "
                "model.gradient_checkpointing_disable() (newer transformers: activation_checkpointing_disable())"
            )
