"""olla in the Trainer of Lightning: a callback for its memory, and a step that is planned as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from olla.base.packages import missing

try:
    import lightning.pytorch as pl
except ModuleNotFoundError as error:
    raise missing(str(error.name), "lightning") from error

import torch

from olla.aten.wrap import report_of, wrap
from olla.checkpointing.first_batch import AtFirstBatch
from olla.checkpointing.ways import How, require_goal
from olla.errors import CaptureError
from olla.pytorch.compile import compile as compile_step
from olla.pytorch.pool import Pool, PoolReport, pool
from olla.pytorch.step import Step
from olla.report.step import StepReport

if TYPE_CHECKING:
    from olla.aten.record import WrapReport
    from olla.checkpointing.table import Checkpoints


class OllaLightningCallback(pl.Callback):  # type: ignore[misc]
    """Plan the memory of a Trainer, which stays as it is: ``Trainer(..., callbacks=[OllaCallback()])``.

    It is imported as ``OllaCallback``, the name that callbacks of olla have in every trainer.

    Args:
        budget: bytes, or text such as ``"16GB"``.
        max_slowdown: least peak for this share of added time.
        minimise: ``"peak"``: least peak at whatever time.
        how: "pool": the training runs in ``olla.pool``, every allocation at its planned address; it takes no goal. An
            iteration of the pool ends with an update; a whole validation is one, too. "checkpoint": ``olla.checkpoint``
            chooses which modules are checkpointed when the first batch comes, and again where a larger one does; a
            budget counts the optimizer, too. "aten": ``olla.wrap`` plans forward and backward on torch's own kernels.
            "inductor": the backend "olla" of torch.compile chooses what is saved for backward. None: with a goal,
            "checkpoint", and without, "pool".
        network: for all but "pool", the name of the module inside of the LightningModule that ``training_step`` calls;
            by default the only one that has parameters.

    Raises:
        ValueError: how is unknown, or does not go with a goal, or with none; when training begins: several modules
            have parameters, and none is named.

    Example:
        >>> callback = OllaCallback()  # Trainer(..., callbacks=[callback]).fit(module)
        >>> print(callback.report())
        None
    """

    def __init__(
        self,
        *,
        budget: int | str | None = None,
        max_slowdown: float | None = None,
        minimise: Literal["peak"] | None = None,
        how: How | None = None,
        network: str | None = None,
    ) -> None:
        given = {"budget": budget, "max_slowdown": max_slowdown, "minimise": minimise}
        self._goal: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        self._how = how or ("checkpoint" if self._goal else "pool")
        require_goal(self._how, self._goal)
        self._network = network
        self._checkpoints: AtFirstBatch | None = None
        self._wrapped: Any = None
        self._report: Checkpoints | WrapReport | None = None
        self._pool: Pool | None = None
        self._is_inside = False
        self._num_updates = 0

    def report(self) -> PoolReport | Checkpoints | WrapReport | None:
        """Return what was done in the latest training: of "pool", "checkpoint" and "aten"; None: nothing yet."""
        if self._how != "pool":
            return self._report
        return None if self._pool is None else self._pool.report()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Enter the pool, or prepare the network for its first batch; the sanity check is over then."""
        self._leave()
        if self._how == "pool":
            entered = pool(trainer.strategy.root_device)
            entered.__enter__()
            self._pool, self._is_inside, self._num_updates = entered, True, trainer.global_step
            return
        network = pl_module.get_submodule(self._network or _only_network(pl_module))
        if self._how == "checkpoint":
            options = dict(self._goal)
            if "budget" in options and len(trainer.optimizers) == 1:
                options["optimizer"] = getattr(trainer.optimizers[0], "optimizer", trainer.optimizers[0])
            self._checkpoints = AtFirstBatch(network, options, self._tell)
        elif self._how == "aten":
            self._wrapped = wrap(network, **self._goal)
            self._report = report_of(network)
        else:
            if type(network).forward is torch.nn.Sequential.forward:
                pl.utilities.rank_zero_warn(
                    "olla: torch.compile passes over a bare torch.nn.Sequential, so nothing is planned of it: put it "
                    "into a module with a forward of its own, or take how='aten' or how='checkpoint'"
                )
            network.compile(backend="olla", options=self._goal)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """End an iteration: micro-batches of one update are one."""
        if trainer.global_step != self._num_updates or not pl_module.automatic_optimization:
            self._num_updates = trainer.global_step
            self._step()

    def _tell(self, chosen: Checkpoints) -> None:
        self._report = chosen
        pl.utilities.rank_zero_info("olla: %s", "; ".join(chosen.summary))

    def _step(self, *_: Any) -> None:
        if self._is_inside and self._pool is not None:
            self._pool.step()

    on_validation_start = on_validation_end = _step

    def _leave(self, *_: Any) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close()
            self._checkpoints = None
        if self._wrapped is not None:
            self._wrapped._compiled_call_impl = None
            self._wrapped = None
        if self._is_inside and self._pool is not None:
            self._is_inside = False
            self._pool.__exit__(None, None, None)

    on_train_end = on_exception = _leave


OllaCallback = OllaLightningCallback


def _only_network(module: Any) -> str:
    """Return the name of the only module inside of a LightningModule that has parameters."""
    names = [name for name, part in module.named_children() if any(True for _ in part.parameters())]
    if len(names) != 1:
        inside = ", ".join(names) or "none"
        raise ValueError(
            f"{type(module).__name__} has {len(names)} modules with parameters ({inside}): say which one training_step "
            'calls, as in OllaCallback(..., network="model")'
        )
    return str(names[0])


class OllaStep:
    """A step that ``olla.compile`` plans, called by the ``training_step`` of a module with manual optimization.

    Forward, backward and update run as one. Lightning counts it as a step of the optimizer, so ``global_step``, the
    loggers and the callbacks go on as ever; gradients live inside the step only, and hooks around backward and the
    optimizer's step are not called. Rates are the module's own matter, as always in manual optimization.

    Args:
        module: it returns one optimizer from ``configure_optimizers``.
        loss: ``loss(module, batch)``; it logs nothing, ``training_step`` does.
        options: of ``olla.compile``, such as ``max_slowdown=0.1``; ``step=`` in place of ``loss`` takes the body of a
            loop, for clipping.

    Raises:
        CaptureError: at the first call: several optimizers or processes, float16 with its scaler, or automatic
            optimization; the message says what to change.

    Example:
        >>> class Module(pl.LightningModule):
        ...     def __init__(self, model):
        ...         super().__init__()
        ...         self.model, self.automatic_optimization = model, False
        ...         self.planned = OllaStep(self, lambda module, batch: module.model(batch).square().mean())
        ...
        ...     def training_step(self, batch, batch_idx):
        ...         self.log("loss", self.planned(batch))
    """

    def __init__(
        self, module: pl.LightningModule, loss: Callable[[Any, Any], Any] | None = None, **options: Any
    ) -> None:
        self._module = module
        self._options = {**options, "loss": loss}
        self._step: Step | None = None

    def __call__(self, batch: Any) -> Any:
        """Run the step on a batch and return its loss, or what else it returns."""
        optimizer = self._optimizer()
        if self._step is None or self._step.optimizer is not optimizer:
            self._step = compile_step(self._module, optimizer=optimizer, **self._options)
        progress = self._module.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        progress.increment_ready()
        result = self._step(batch)
        progress.increment_completed()
        return result

    def report(self) -> StepReport | None:
        """Return the report of the planned step; None before the first one."""
        return None if self._step is None else self._step.report()

    def _optimizer(self) -> Any:
        """Return the module's optimizer, and refuse what no captured step can stand for."""
        trainer, name = self._module.trainer, type(self._module).__name__
        if self._module.automatic_optimization:
            raise CaptureError(
                f"OllaStep: Lightning would update {name} a second time: set self.automatic_optimization = False"
            )
        if trainer.world_size > 1:
            raise CaptureError(
                f"OllaStep plans one process with one device, not {trainer.world_size}: train with automatic "
                "optimization, and OllaCallback() for its memory"
            )
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise CaptureError(
                "OllaStep: precision 16-mixed scales gradients by values: use bf16-mixed, which needs no scaler"
            )
        if len(trainer.optimizers) != 1:
            raise CaptureError(f"OllaStep takes one optimizer, {name} has {len(trainer.optimizers)}")
        return trainer.optimizers[0]
