"""olla in loops of Accelerate: the same losses in a pool, in a compiled model and in a planned step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'olla-planner[transformers]'")
transformers = pytest.importorskip("transformers", reason="pip install 'olla-planner[transformers]'")
accelerate = pytest.importorskip("accelerate", reason="pip install 'olla-planner[transformers]'")

from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402

import olla  # noqa: E402
import olla.inductor  # noqa: E402
from olla.inductor.kernels import order  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]


def made(*, compiled: bool = False) -> tuple[Any, ...]:
    """Return a tiny GPT-2, its optimizer, its schedule, and eight batches, the last one smaller.

    Where torch.compile is compared, which draws other masks, there are none; and one layer and two batches, equal ones.
    """
    dropout, num_rows = (0.0, 8) if compiled else (0.1, 30)
    torch.compiler.reset()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=32, n_layer=1 if compiled else 2, n_head=2, vocab_size=64, n_positions=16,
        bos_token_id=0, eos_token_id=0, attn_pdrop=dropout, embd_pdrop=dropout, resid_pdrop=dropout,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(64, (num_rows, 16), generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(tokens, batch_size=4, shuffle=True)
    return model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer), loader


def accelerator(**options: Any) -> Any:
    AcceleratorState._reset_state(True)  # it is one per process, and keeps the first options
    return Accelerator(cpu=True, **options)


def loss_of(model: Any, tokens: Any) -> Any:
    return model(input_ids=tokens, labels=tokens).loss


def trained(
    accelerator: Any, parts: tuple[Any, ...], num_epochs: int = 3, clip: float = 0.0, ended: Callable[[], Any] = int
) -> tuple[list[float], list[Any]]:
    """Run an ordinary loop; return its losses, and what `ended` returned at the end of each epoch."""
    model, optimizer, schedule, loader = accelerator.prepare(*parts)
    losses, seen = [], []
    torch.manual_seed(1)
    for _ in range(num_epochs):
        for tokens in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, tokens)
                accelerator.backward(loss)
                if clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            found = ended()
        seen.append(found)
    return losses, seen


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"mixed_precision": "bf16"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_loop_in_a_pool_loses_the_same_and_is_not_planned_at_every_epoch(options: dict[str, Any]) -> None:
    expected, _ = trained(accelerator(**options), made(), 8, clip=1.0)
    used = accelerator(**options)
    with olla.pool(used.device) as pool:

        def ended() -> Any:
            if used.sync_gradients:
                pool.step()
            return pool.report()

        losses, reports = trained(used, made(), 8, clip=1.0, ended=ended)
    assert losses == expected
    first, last = reports[3], reports[-1]
    assert last.num_plans == first.num_plans  # each kind of iteration was seen by then
    assert (last.served_bytes - first.served_bytes) / (last.requested_bytes - first.requested_bytes) >= 0.95


@pytest.mark.parametrize("options", [{}, {"mixed_precision": "bf16"}], ids=str)
def test_a_planned_step_loses_the_same_to_the_bit(options: dict[str, Any]) -> None:
    expected, _ = trained(accelerator(**options), made())
    model, optimizer, schedule, loader = accelerator(**options).prepare(*made())
    step = olla.compile(model, optimizer=optimizer.optimizer, loss=loss_of)
    losses = []
    torch.manual_seed(1)
    for _ in range(3):
        for tokens in loader:
            losses.append(step(tokens).item())
            schedule.step()
    assert losses == expected
    assert step.report().num_misses == 0


def test_the_wrapper_of_an_optimizer_is_refused_with_the_remedy() -> None:
    model, optimizer, _, loader = accelerator().prepare(*made())
    step = olla.compile(model, optimizer=optimizer, loss=loss_of, on_unsupported="raise")
    with pytest.raises(olla.CaptureError, match=r"AcceleratedOptimizer wraps another .* pass its \.optimizer"):
        step(next(iter(loader)))


@pytest.mark.parametrize("by", ["the model", pytest.param("the accelerator", marks=pytest.mark.slow)])
def test_a_goal_compiles_the_model_with_plans(by: str) -> None:
    expected, _ = trained(accelerator(), made(compiled=True))
    before, parts = len(order.records()), made(compiled=True)
    with torch._inductor.config.patch(force_disable_caches=True):  # both cases compile the same graphs
        if by == "the model":
            parts[0].compile(backend="olla", options={"max_slowdown": 0.05})
            losses, _ = trained(accelerator(), parts)
        else:
            with olla.inductor.enable(max_slowdown=0.05):
                losses, _ = trained(accelerator(dynamo_backend="inductor"), parts)
    assert len(order.records()) > before
    assert losses == pytest.approx(expected, rel=1e-4)


def test_the_name_of_the_backend_is_not_on_accelerates_list() -> None:
    """Where this fails, docs/trainers.md may name it: nothing else stands in the way."""
    assert "olla" in torch._dynamo.list_backends(exclude_tags=())
    with pytest.raises(ValueError, match="'OLLA' is not a valid DynamoBackend"):
        accelerator(dynamo_backend="olla")
    with pytest.raises(ValueError, match="'OLLA' is not a valid DynamoBackend"):
        accelerate.utils.TorchDynamoPlugin(backend="olla")


def test_training_arguments_refuse_the_name_of_the_backend(tmp_path: Any) -> None:
    settings = {"output_dir": str(tmp_path), "report_to": [], "use_cpu": True, "torch_compile_backend": "olla"}
    AcceleratorState._reset_state(True)
    arguments = transformers.TrainingArguments(**settings)
    with pytest.raises(ValueError, match="'OLLA' is not a valid DynamoBackend"):
        transformers.Trainer(model=made()[0], args=arguments)
