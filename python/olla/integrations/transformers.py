"""olla in the Trainer of transformers: a callback, and a Trainer whose whole step is planned."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any, Literal

from olla.base.packages import missing

try:
    import torch
    import transformers
    from torch.nn.parallel import DistributedDataParallel
except ModuleNotFoundError as error:
    raise missing(str(error.name), "transformers") from error

from olla.aten.wrap import report_of, wrap
from olla.checkpointing.first_batch import AtFirstBatch
from olla.checkpointing.ways import How, require_goal
from olla.errors import CaptureError
from olla.pytorch.compile import compile as compile_step
from olla.pytorch.pool import Pool, PoolReport, pool

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from olla.aten.record import WrapReport
    from olla.checkpointing.table import Checkpoints
    from olla.pytorch.step import Step
    from olla.report.step import StepReport

_logger = transformers.utils.logging.get_logger(__name__)
_inside = threading.local()  # .pool: of the training that this thread is in, or that an exception ended


class OllaCallback(transformers.TrainerCallback):
    """Plan the memory of a Trainer, which stays as it is: ``Trainer(..., callbacks=[OllaCallback()])``.

    Args:
        budget: bytes, or text such as ``"16GB"``.
        max_slowdown: least peak for this share of added time.
        minimise: ``"peak"``: least peak at whatever time.
        how: "pool": the loop runs in ``olla.pool``, every allocation at its planned address; it takes no goal.
            "checkpoint": ``olla.checkpoint`` chooses which modules are checkpointed when the first batch comes, and
            again where a larger one does; a budget counts the optimizer, too. "inductor": the backend "olla" of
            torch.compile chooses what is saved for backward. "aten": ``olla.wrap`` plans forward and backward on
            torch's own kernels. None: with a goal, "inductor", and without, "pool".
        chunked_loss: chunks of rows for a large last layer with its loss, or ``"auto"``; rounding changes. It is for
            "inductor".
        host_budget: bytes of pinned host memory in which tensors of a GPU may wait between forward and backward. It is
            for "inductor", with a goal.
        loss_only: whether the model returns its loss alone while it trains with labels, and where an evaluation asks
            for no more; by default with ``chunked_loss``, since all logits are in memory where they are returned.

    Raises:
        ValueError: how is unknown, or does not go with a goal, or with none.

    Example:
        >>> callback = OllaCallback()  # Trainer(..., callbacks=[callback]).train()
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
        chunked_loss: int | Literal["auto"] | None = None,
        host_budget: int | str | None = None,
        loss_only: bool | None = None,
    ) -> None:
        given = {"budget": budget, "max_slowdown": max_slowdown, "minimise": minimise}
        given |= {"chunked_loss": chunked_loss, "host_budget": host_budget}
        self._goal: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        self._how = how or ("inductor" if self._goal else "pool")
        require_goal(self._how, self._goal)
        self._loss_only = chunked_loss is not None if loss_only is None else loss_only
        self._pool: Pool | None = None
        self._checkpoints: AtFirstBatch | None = None
        self._wrapped: Any = None
        self._report: Checkpoints | WrapReport | None = None
        self._shortened: _LossOnly | None = None
        self._settings: AbstractContextManager[Any] | None = None

    def report(self) -> PoolReport | Checkpoints | WrapReport | None:
        """Return what was done in the latest training: of "pool", "checkpoint" and "aten"; None: nothing yet."""
        if self._how == "pool":
            return None if self._pool is None else self._pool.report()
        return self._report

    def close(self) -> None:
        """Leave the pool and the settings of a training that an exception ended; the next training does so itself."""
        if (entered := self._entered()) is not None:
            _inside.pool = None
            entered.__exit__(None, None, None)
        if self._checkpoints is not None:
            self._checkpoints.close()
            self._checkpoints = None
        if self._wrapped is not None:
            self._wrapped._compiled_call_impl = None
            self._wrapped = None
        if self._shortened is not None:
            self._shortened.close()
            self._shortened = None
        if self._settings is not None:
            settings, self._settings = self._settings, None
            settings.__exit__(None, None, None)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        """Enter the pool, or prepare the model for its first call."""
        self.close()
        if self._loss_only and args.n_gpu <= 1:  # with more, torch copies the model with what hangs on it
            self._shortened = _LossOnly(model, evaluates=bool(args.prediction_loss_only))
        if self._how == "pool":
            if (left := getattr(_inside, "pool", None)) is not None:
                left.__exit__(None, None, None)
            entered = pool(args.device)
            entered.__enter__()
            _inside.pool = self._pool = entered
        elif self._how == "checkpoint":
            options = dict(self._goal)
            if "budget" in options:
                options["optimizer"] = getattr(optimizer, "optimizer", optimizer)  # in accelerate's wrapper
            self._checkpoints = AtFirstBatch(model, options, self._tell)
        elif self._how == "aten":
            self._wrapped = wrap(model, **self._goal)
            self._report = report_of(model)
        elif args.torch_compile:
            from olla import inductor

            self._settings = inductor.enable(**self._goal)
            self._settings.__enter__()
        else:
            model.compile(backend="olla", options=self._goal)

    def _tell(self, chosen: Checkpoints) -> None:
        self._report = chosen
        _logger.warning("olla: %s", "; ".join(chosen.summary))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave the pool, and the settings of torch.compile."""
        self.close()

    def _entered(self) -> Pool | None:
        inside: Pool | None = getattr(_inside, "pool", None)
        return inside if inside == self._pool else None

    def _step(self, *_: Any, **__: Any) -> None:
        """End an iteration of the pool: an update, a micro-batch, a batch of an evaluation, its rest, a checkpoint."""
        if (entered := self._entered()) is not None:
            entered.step()

    on_step_end = on_substep_end = on_prediction_step = on_evaluate = on_save = _step


class _LossOnly:
    """Has a model return its loss alone where it is given labels, until this is closed.

    Args:
        model: of transformers.
        evaluates: also where it does not train.
    """

    def __init__(self, model: Any, *, evaluates: bool) -> None:
        self._model, self._before = model, vars(model).get("forward")
        usual = model.forward

        @functools.wraps(usual)
        def forward(*args: Any, **kwargs: Any) -> Any:
            found = usual(*args, **kwargs)
            if kwargs.get("labels") is None or not (evaluates or model.training):
                return found
            if isinstance(found, tuple):
                return found[:1]
            loss = getattr(found, "loss", None)
            return found if loss is None else type(found)(loss=loss)

        model.forward = forward
        _logger.warning(
            "olla: while it trains with labels, %s returns its loss alone, so that no logits are kept: they are None "
            "for a compute_loss or callback of your own. OllaCallback(loss_only=False) keeps them.",
            type(model).__name__,
        )

    def close(self) -> None:
        """Have the model return what it returned before."""
        if self._before is None:
            del self._model.forward
        else:
            self._model.forward = self._before


class OllaTrainer(transformers.Trainer):
    """The Trainer, with steps that ``olla.compile`` plans: forward, backward, clipping and update in one.

    Callbacks, logs, ``grad_norm``, schedules and checkpoints are the Trainer's. Gradients live inside the step only:
    a callback finds none. With ``gradient_accumulation_steps`` above 1, forward and backward of each micro-batch are
    planned, and the Trainer clips and updates.

    Args:
        args, kwargs: those of ``transformers.Trainer``.
        olla_options: of ``olla.compile``, such as ``{"max_slowdown": 0.1}``.

    Raises:
        CaptureError: when training begins: float16 with its scaler, a model that is wrapped otherwise than in
            DistributedDataParallel, or gradients accumulated over several processes; the message says what to change.
    """

    def __init__(self, *args: Any, olla_options: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self._options = dict(olla_options or {})
        self._step: Step | None = None
        self._norm: torch.Tensor | None = None  # of the gradients of the step that ran last, until it is logged
        super().__init__(*args, **kwargs)

    def step_report(self) -> StepReport | None:
        """Return the report of the planned step; None before the first one."""
        return None if self._step is None else self._step.report()

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, which gives the norm of a planned step where the Trainer clips."""
        super().create_accelerator_and_postprocess()
        clip = self.accelerator.clip_grad_norm_

        def known_or_clip(*args: Any, **kwargs: Any) -> Any:
            norm, self._norm = self._norm, None
            return clip(*args, **kwargs) if norm is None else norm

        self.accelerator.clip_grad_norm_ = known_or_clip

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the model. Its configuration stays as steps were captured with it: saving changes it."""
        settings = vars(getattr(self.model, "config", self))
        before = dict(settings)
        super().save_model(*args, **kwargs)
        settings.update(before)

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Run a planned step on a batch and return its loss; see transformers.Trainer."""
        model.train()
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # in accelerate's wrapper
        whole = self.args.gradient_accumulation_steps == 1
        if self._step is None or self._step.model is not model or (whole and self._step.optimizer is not optimizer):
            self._refuse(model)
            self._step = self._planned(model, optimizer if whole else None)
        batch: dict[str, Any] = {"inputs": dict(self._prepare_inputs(inputs))}
        if num_items_in_batch is not None:
            batch["num_items"] = torch.as_tensor(num_items_in_batch)
        if not whole:
            loss: torch.Tensor = self._step(batch)
            return loss.detach()
        loss, self._norm = self._step(batch)
        return loss.detach()

    def _planned(self, model: Any, optimizer: torch.optim.Optimizer | None) -> Step:
        def loss_of(model: Any, batch: dict[str, Any]) -> Any:
            num_items = batch.get("num_items")
            loss: Any = self.compute_loss(model, dict(batch["inputs"]), num_items_in_batch=num_items)
            is_scaled = self.loss_is_scaled_for_ga
            if is_scaled is None:
                is_scaled = (
                    self.model_accepts_loss_kwargs and num_items is not None
                ) or self.compute_loss_func is not None
            return loss if is_scaled else loss / self.current_gradient_accumulation_steps

        def step(model: Any, optimizer: Any, batch: dict[str, Any]) -> tuple[Any, Any]:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            most = self.args.max_grad_norm or float("inf")
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), most)
            optimizer.step()
            return loss.detach(), norm

        if optimizer is None:
            return compile_step(model, loss=loss_of, **self._options)
        return compile_step(model, optimizer=optimizer, step=step, **self._options)

    def _refuse(self, model: Any) -> None:
        """Refuse what no captured step can stand for."""
        remedy = "train with transformers.Trainer, and OllaCallback() for its memory"
        if self.args.n_gpu > 1:
            raise CaptureError(
                f"OllaTrainer plans one device for each process, and this one has {self.args.n_gpu}: start it with "
                f"torchrun --nproc-per-node {self.args.n_gpu}"
            )
        num_batches = self.args.gradient_accumulation_steps
        if self.accelerator.num_processes > 1 and num_batches > 1:
            raise CaptureError(
                f"OllaTrainer: gradient_accumulation_steps={num_batches} on several processes leaves gradients between "
                f"steps that are not reduced yet: take 1, or {remedy}"
            )
        if self.accelerator.scaler is not None:
            raise CaptureError(
                "OllaTrainer: fp16=True scales gradients by values: use bf16=True, which needs no scaler"
            )
        inside = model.module if isinstance(model, DistributedDataParallel) else model
        if self.accelerator.unwrap_model(inside, keep_torch_compile=False) is not inside:
            raise CaptureError(f"OllaTrainer: the model is wrapped or compiled ({type(model).__name__}): {remedy}")
