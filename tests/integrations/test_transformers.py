"""olla in the Trainer of transformers: the same losses and norms, every callback, few plans."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'olla-planner[transformers]'")
transformers = pytest.importorskip("transformers", reason="pip install 'olla-planner[transformers]'")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate: pip install 'olla-planner[transformers]'")

from olla.errors import CaptureError  # noqa: E402
from olla.inductor.kernels import order  # noqa: E402
from olla.inductor.saving import chunked  # noqa: E402
from olla.integrations import transformers as integration  # noqa: E402
from olla.integrations.transformers import OllaCallback, OllaTrainer  # noqa: E402

pytestmark = pytest.mark.torch
EVENTS = [name for name in dir(transformers.TrainerCallback) if name.startswith("on_")]


class Events(transformers.TrainerCallback):
    """Writes down what the Trainer calls, in order."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        for name in EVENTS:
            setattr(
                self, name, lambda args, state, control, _name=name, **_: self.seen.append((_name, state.global_step))
            )


def trained(folder: Path, kind: Any = transformers.Trainer, callbacks: tuple[Any, ...] = (), **arguments: Any) -> Any:
    """Train a tiny GPT-2 and return the Trainer, its logs as rows of (loss, norm, rate), and its events."""
    options = {name: arguments.pop(name) for name in ("olla_options",) if name in arguments}
    torch.compiler.reset()
    torch.manual_seed(0)
    dropout = arguments.pop("dropout", 0.1)  # 0 where torch.compile, which draws other masks, is compared
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=arguments.pop("vocabulary", 64), n_positions=16,
        bos_token_id=0, eos_token_id=0,
        attn_pdrop=dropout, embd_pdrop=dropout, resid_pdrop=dropout,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    tokens = torch.randint(64, (arguments.pop("num_rows", 30), 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    settings = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "num_train_epochs": 2, "logging_steps": 1,
        "max_grad_norm": 1.0, "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
        "learning_rate": 1e-3, "seed": 0,
    } | arguments  # fmt: skip
    events = Events()
    trainer = kind(
        model=model, args=transformers.TrainingArguments(**settings), train_dataset=data, eval_dataset=data[:6],
        callbacks=[events, *callbacks], **options,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    rows = [(e["loss"], e["grad_norm"], e["learning_rate"]) for e in trainer.state.log_history if "loss" in e]
    return trainer, torch.tensor(rows, dtype=torch.float64), events.seen


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        pytest.param({"max_grad_norm": 0.0}, marks=pytest.mark.slow),
        pytest.param({"gradient_accumulation_steps": 3}, marks=pytest.mark.slow),
        {"eval_strategy": "epoch", "save_strategy": "epoch"},
    ],
    ids=["clipped", "not clipped", "accumulated", "evaluated and saved"],
)
def test_a_planned_trainer_logs_what_the_trainer_logs_and_loses_no_callback(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    theirs, expected, events = trained(tmp_path / "a", **arguments)
    ours, rows, seen = trained(tmp_path / "b", OllaTrainer, **arguments)
    torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-6)
    assert (rows[:, 1] > 0.1).all()
    assert seen == events
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    report = ours.step_report()
    assert report is not None
    assert report.measured_peak_bytes > 0


def test_a_goal_reaches_the_planned_step(tmp_path: Path) -> None:
    _, expected, _ = trained(tmp_path / "a", num_rows=16)
    ours, rows, _ = trained(tmp_path / "b", OllaTrainer, num_rows=16, olla_options={"minimise": "peak"})
    torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-6)
    assert ours.step_report().budget is not None


def test_a_planned_trainer_refuses_a_compiled_model(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="wrapped or compiled"):
        trained(tmp_path, OllaTrainer, torch_compile=True)


@pytest.mark.parametrize("num_rows", [32, 30], ids=["equal batches", "smaller last batch"])
def test_a_pool_does_not_plan_anew_at_every_epoch(tmp_path: Path, num_rows: int) -> None:
    callback = OllaCallback()
    _, expected, events = trained(tmp_path / "a", num_rows=num_rows, num_train_epochs=8)

    class AfterFirstEpoch(transformers.TrainerCallback):
        reports: list[Any] = []  # noqa: RUF012

        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            self.reports.append(callback.report())

    later = AfterFirstEpoch()
    _, rows, seen = trained(tmp_path / "b", callbacks=(callback, later), num_rows=num_rows, num_train_epochs=8)
    assert torch.equal(rows, expected)
    assert seen == events
    first, last = later.reports[0], later.reports[-1]
    assert last.num_plans <= 4  # in eight epochs: once for each kind
    served = (last.served_bytes - first.served_bytes) / (last.requested_bytes - first.requested_bytes)
    assert served >= 0.95, served
    assert callback.report().state == "off"


def test_a_pool_goes_through_evaluations_and_checkpoints(tmp_path: Path) -> None:
    callback = OllaCallback()
    arguments = {
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "num_train_epochs": 4,
        "gradient_accumulation_steps": 2,
    }
    _, expected, events = trained(tmp_path / "a", **arguments)
    _, rows, seen = trained(tmp_path / "b", callbacks=(callback,), **arguments)
    assert torch.equal(rows, expected)
    assert seen == events
    assert callback.report().num_plans <= 8


def test_a_training_that_fails_leaves_no_pool_behind(tmp_path: Path) -> None:
    class Fails(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, callbacks=(OllaCallback(), Fails()))
    again = OllaCallback()
    trained(tmp_path, callbacks=(again,))
    assert again.report().num_iterations == 16


@pytest.mark.parametrize("arguments", [{}, {"torch_compile": True}], ids=["by the callback", "by the Trainer"])
def test_a_goal_compiles_the_model_with_plans(tmp_path: Path, arguments: dict[str, Any]) -> None:
    _, expected, events = trained(tmp_path / "a", num_rows=8, dropout=0.0)
    before, callback = len(order.records()), OllaCallback(max_slowdown=0.05)
    with torch._inductor.config.patch(force_disable_caches=True):  # both cases compile the same graphs
        _, rows, seen = trained(tmp_path / "b", callbacks=(callback,), num_rows=8, dropout=0.0, **arguments)
    assert len(order.records()) > before
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-5)
    assert seen == events


@pytest.mark.parametrize("arguments", [{}, {"torch_compile": True}], ids=["by the callback", "by the Trainer"])
@pytest.mark.parametrize("loss_only", [None, False])
def test_logits_that_nobody_reads_are_not_returned_so_that_the_loss_runs_in_chunks(
    tmp_path: Path, loss_only: bool | None, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    said: list[str] = []
    in_chunks = chunked.in_chunks

    def watch(module: Any, number: int | str) -> tuple[int, str]:
        answer = in_chunks(module, number)
        found.append(answer[0])
        return answer

    monkeypatch.setattr(chunked, "in_chunks", watch)
    monkeypatch.setattr(integration._logger, "warning", lambda text, *args: said.append(text % args))
    callback = OllaCallback(max_slowdown=0.05, chunked_loss=4, loss_only=loss_only)
    common = {"dropout": 0.0, "vocabulary": 96, "max_steps": 4, "num_rows": 32}
    with torch._inductor.config.patch(force_disable_caches=True):  # both cases compile the same graphs
        ours, rows, _ = trained(tmp_path / "a", callbacks=(callback,), **common, **arguments)
    assert set(found) == ({1} if loss_only is None else {0})
    assert len(said) == (loss_only is None)
    assert all("GPT2LMHeadModel returns its loss alone" in line for line in said)
    assert "forward" not in vars(ours.model)
    torch.testing.assert_close(rows, trained(tmp_path / "b", **common)[1], rtol=1e-4, atol=1e-5)
    assert ours.predict([{"input_ids": torch.arange(16), "labels": torch.arange(16)}]).predictions.shape == (1, 16, 96)


def test_a_pool_with_a_goal_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves budget without effect"):
        OllaCallback(budget="1GB", how="pool")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"how": "magic"}, "how is 'magic', expected one of checkpoint, aten, inductor, pool"),
        ({"how": "checkpoint"}, "needs a goal"),
        ({"how": "aten", "chunked_loss": 4}, "chunked_loss is for how='inductor', not 'aten'"),
        ({"how": "aten", "host_budget": "1GB"}, "host_budget is for how='inductor', not 'aten'"),
        ({"how": "inductor", "host_budget": "1GB"}, "host_budget is for a goal"),
    ],
)
def test_ways_that_do_not_go_with_a_goal_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OllaCallback(**arguments)


@pytest.mark.parametrize("how", ["checkpoint", "aten"])
@pytest.mark.parametrize(
    "arguments", [{}, {"gradient_accumulation_steps": 3, "eval_strategy": "epoch"}], ids=["plain", "accumulated"]
)
def test_a_trainer_with_a_goal_logs_what_the_trainer_logs(
    tmp_path: Path, how: Any, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(integration._logger, "warning", lambda text, *args: said.append(text % args))
    callback = OllaCallback(max_slowdown=0.3, how=how)
    _, expected, events = trained(tmp_path / "a", num_rows=16, **arguments)
    ours, rows, seen = trained(tmp_path / "b", callbacks=(callback,), num_rows=16, **arguments)
    assert torch.equal(rows, expected)
    assert seen == events
    report = callback.report()
    if how == "aten":
        assert report.planned
    else:
        assert report.modules
        assert report.peak_bytes < report.eager_peak_bytes
        assert len(said) == 1  # all batches are of one size
        assert "modules checkpointed, peak" in said[0]
    assert all("forward" not in vars(module) for module in ours.model.modules())
    assert ours.model._compiled_call_impl is None
