"""olla in the Trainer of Lightning: the same losses, every callback, few plans."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'olla-planner[lightning]'")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pl = pytest.importorskip("lightning.pytorch", reason="pip install 'olla-planner[lightning]'")

import olla  # noqa: E402
from olla.inductor.kernels import order  # noqa: E402
from olla.integrations.lightning import OllaCallback, OllaStep  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
EVENTS = [name for name in dir(pl.Callback) if name.startswith("on_")]
INSIDE = ["on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"]  # of a step


class Network(torch.nn.Sequential):
    """Layers with a forward of their own: torch.compile passes over that of torch's Sequential."""

    def forward(self, x: Any) -> Any:
        for layer in self:
            x = layer(x)
        return x


class Module(pl.LightningModule):
    """A small network with dropout, trained by Lightning or by a planned step."""

    def __init__(self, **planned: Any) -> None:
        super().__init__()
        self.model = Network(
            torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 64), torch.nn.GELU(),
            torch.nn.Linear(64, 16),
        )  # fmt: skip
        self.automatic_optimization = not planned
        self.planned = OllaStep(self, **planned) if planned else None
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.planned is None:
            loss = loss_of(self, batch)
        else:
            loss = self.planned(batch)
            self.lr_schedulers().step()
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", loss_of(self, batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def loss_of(module: Any, batch: Any) -> Any:
    return torch.nn.functional.mse_loss(module.model(batch), batch)


def clipped(module: Any, optimizer: Any, batch: Any) -> Any:
    optimizer.zero_grad()
    loss = loss_of(module, batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    optimizer.step()
    return loss.detach()


class Events(pl.Callback):
    """Writes down what Lightning calls, in order, and the step it is at."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        for name in EVENTS:
            setattr(self, name, lambda trainer, *_, _name=name: self.seen.append((_name, trainer.global_step)))


class Plans(pl.Callback):
    """Keeps the report of a pool at the end of each epoch."""

    def __init__(self, callback: OllaCallback) -> None:
        self.callback, self.reports = callback, list[Any]()

    def on_train_epoch_end(self, *_: Any) -> None:
        self.reports.append(self.callback.report())


def trained(module: Any, *callbacks: Any, num_rows: int = 30, folder: Path | None = None, **options: Any) -> Any:
    """Train a module and return the Trainer, its events, and the parameters."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    rows = torch.randn(num_rows + 8, 16, generator=torch.Generator().manual_seed(1))
    training, validation = (torch.utils.data.DataLoader(part, batch_size=4) for part in (rows[8:], rows[:8]))
    events = Events()
    settings = {
        "max_epochs": 3, "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "enable_checkpointing": folder is not None, "default_root_dir": folder,
    }  # fmt: skip
    trainer = pl.Trainer(callbacks=[events, *callbacks], **{**settings, **options})
    trainer.fit(module, training, validation)
    return trainer, events.seen, [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_planned_step_loses_the_same_to_the_bit_and_loses_no_callback(tmp_path: Path, precision: str) -> None:
    theirs, ours = Module(), Module(loss=loss_of)
    trainer, events, expected = trained(theirs, folder=tmp_path / "a", precision=precision)
    again, seen, found = trained(ours, folder=tmp_path / "b", precision=precision)
    assert ours.losses == theirs.losses
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert [event for event in seen if event[0] not in INSIDE] == [event for event in events if event[0] not in INSIDE]
    assert again.global_step == trainer.global_step == 24
    assert again.callback_metrics == trainer.callback_metrics
    report = ours.planned.report()
    assert report.num_misses == 0
    saved = torch.load(again.checkpoint_callback.best_model_path, weights_only=True)
    assert saved["global_step"] == 24
    assert len(saved["optimizer_states"][0]["state"]) == len(expected)


def test_a_planned_step_clips_where_the_body_of_the_loop_does() -> None:
    theirs, ours = Module(), Module(step=clipped)
    _, _, expected = trained(theirs, gradient_clip_val=0.1)
    _, _, found = trained(ours)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_a_planned_step_ends_where_steps_are_counted() -> None:
    ours = Module(loss=loss_of, minimise="peak")
    trainer, _, _ = trained(ours, max_steps=5)
    assert (trainer.global_step, len(ours.losses)) == (5, 5)
    assert ours.planned.report().budget is not None


def test_automatic_optimization_is_refused() -> None:
    module = Module(loss=loss_of)
    module.automatic_optimization = True
    with pytest.raises(olla.CaptureError, match="update Module a second time: set self"):
        trained(module)


def test_several_optimizers_are_refused() -> None:
    module = Module(loss=loss_of)
    module.configure_optimizers = lambda: [torch.optim.SGD(layer.parameters()) for layer in (module.model, module)]
    with pytest.raises(olla.CaptureError, match="takes one optimizer, Module has 2"):
        trained(module)


def test_several_processes_and_scaled_gradients_are_refused() -> None:
    class Trainer:
        world_size, optimizers = 1, (None,)

        class precision_plugin:
            scaler = object()

    module = Module(loss=loss_of)
    module._trainer = Trainer
    with pytest.raises(olla.CaptureError, match="use bf16-mixed"):
        module.planned(torch.ones(4, 16))
    Trainer.world_size = 2
    with pytest.raises(olla.CaptureError, match="one process with one device, not 2"):
        module.planned(torch.ones(4, 16))


def test_lightnings_wrapper_of_an_optimizer_is_refused_with_the_remedy() -> None:
    module = Module()

    def training_step(batch: Any, batch_idx: int) -> Any:
        return olla.compile(module, optimizer=module.optimizers(), loss=loss_of, on_unsupported="raise")(batch)

    module.automatic_optimization, module.training_step = False, training_step
    with pytest.raises(olla.CaptureError, match=r"LightningAdamW wraps another .* pass its \.optimizer"):
        trained(module)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"num_rows": 32},
        pytest.param({"accumulate_grad_batches": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_pool_does_not_plan_anew_at_every_epoch(options: dict[str, Any]) -> None:
    theirs, ours, callback = Module(), Module(), OllaCallback()
    plans = Plans(callback)
    _, events, expected = trained(theirs, max_epochs=10, **options)
    _, seen, found = trained(ours, callback, plans, max_epochs=10, **options)
    assert ours.losses == theirs.losses
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert seen == events
    first, last = plans.reports[4], plans.reports[-1]
    assert last.num_plans == first.num_plans  # each kind of iteration was seen by then
    served = (last.served_bytes - first.served_bytes) / (last.requested_bytes - first.requested_bytes)
    assert served >= 0.95, served
    assert callback.report().state == "off"


def test_a_pool_goes_with_what_is_compiled() -> None:
    callback, ours = OllaCallback(), Module(loss=loss_of)
    trained(ours, callback)
    assert ours.planned.report().num_misses == 0
    assert callback.report().num_iterations == 24 + 3 * 2  # updates, and both sides of a validation


def test_a_training_that_fails_leaves_no_pool_behind() -> None:
    class Fails(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise RuntimeError("here")

    callback = OllaCallback()
    with pytest.raises(RuntimeError, match="here"):
        trained(Module(), callback, Fails())
    assert callback.report().state == "off"
    trained(Module(), callback)
    assert callback.report().num_planned > 0


@pytest.mark.parametrize("goal", [{"max_slowdown": 0.3}, {"budget": "1MB"}], ids=str)
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}], ids=str)
def test_a_goal_checkpoints_the_network(goal: dict[str, Any], options: dict[str, Any]) -> None:
    theirs, ours, callback = Module(), Module(), OllaCallback(**goal)
    _, events, expected = trained(theirs, max_epochs=2, **options)
    _, seen, found = trained(ours, callback, max_epochs=2, **options)
    assert ours.losses == theirs.losses
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert seen == events
    assert callback.report().peak_bytes <= callback.report().eager_peak_bytes
    assert all("forward" not in vars(module) for module in ours.modules())


@pytest.mark.parametrize("goal", [{}, {"max_slowdown": 0.3}], ids=str)
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}], ids=str)
def test_a_wrapped_network_trains_as_it_is(goal: dict[str, Any], options: dict[str, Any]) -> None:
    theirs, ours, callback = Module(), Module(), OllaCallback(how="aten", **goal)
    _, events, expected = trained(theirs, max_epochs=2, **options)
    _, seen, found = trained(ours, callback, max_epochs=2, **options)
    assert ours.losses == theirs.losses
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert seen == events
    assert callback.report().graphs
    assert ours.model._compiled_call_impl is None


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"how": "pool", "budget": "1GB"}, "how='pool' leaves budget without effect"),
        ({"how": "checkpoint"}, "how='checkpoint' needs a goal"),
        ({"how": "zero"}, "how is 'zero', expected one of checkpoint, aten, inductor, pool"),
    ],
)
def test_a_way_and_a_goal_that_do_not_go_together_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        OllaCallback(**arguments)


def test_a_sequence_of_layers_that_torch_compile_passes_over_is_named() -> None:
    module = Module()
    module.model = torch.nn.Sequential(*module.model)
    with pytest.warns(UserWarning, match=r"passes over a bare torch.nn.Sequential.* how='aten'"):
        trained(module, OllaCallback(how="inductor"), max_epochs=1)


def test_a_module_with_several_networks_is_asked_which_one() -> None:
    class Several(Module):
        def __init__(self) -> None:
            super().__init__()
            self.other = torch.nn.Linear(2, 2)

    with pytest.raises(ValueError, match=r"Several has 2 modules with parameters \(model, other\): say which one"):
        trained(Several(), OllaCallback(max_slowdown=0.3))
    trained(Several(), OllaCallback(max_slowdown=0.3, network="model"))


@pytest.mark.parametrize("by_callback", [False, True])
def test_a_goal_compiles_the_model_with_plans(by_callback: bool) -> None:
    theirs, ours = Module(), Module()
    for module in (theirs, ours):
        module.model[2].p = 0.0  # torch.compile draws other masks
    trained(theirs, num_rows=16, max_epochs=1)
    before = len(order.records())
    torch.compiler.reset()
    callbacks = [OllaCallback(max_slowdown=0.05, how="inductor")] if by_callback else []
    if not by_callback:
        ours.model.compile(backend="olla", options={"max_slowdown": 0.05})
    with torch._inductor.config.patch(force_disable_caches=True):
        trained(ours, *callbacks, num_rows=16, max_epochs=1, limit_val_batches=0, num_sanity_val_steps=0)
    assert len(order.records()) > before
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-4)
