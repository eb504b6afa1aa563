"""Losses in chunks of rows inside torch.compile: eager's gradients, and a peak without the logits."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

import olla.inductor
from olla.inductor.compat.compat import config
from olla.inductor.saving import chunked
from olla.inductor.settings import patches
from olla.inductor.simulate.step import replay
from tests.support.pytorch.compiling import LEAST, fresh, other_fusions, without_kernels  # noqa: F401
from tests.support.pytorch.steps import nn, torch

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")]

VOCABULARY, WIDTH, BATCH, LENGTH = 211, 16, 4, 15
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Language(nn.Module):
    """Tokens to logits, with dropout ahead of the last layer, which may be the embedding."""

    def __init__(self, *, tied: bool = True, bias: bool = False, width: int = WIDTH, tokens: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.hidden, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + nn.functional.dropout(nn.functional.gelu(self.hidden(x)), 0.1, self.training)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def total(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return 3 * nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def shifted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of transformers' causal language models, with the number of items that Trainer gives."""
    labels = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    rows = logits.view(-1, VOCABULARY)
    return nn.functional.cross_entropy(rows, labels.view(-1), ignore_index=-100, reduction="sum") / 37


def capped(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return mean(30 * torch.tanh(logits / 30), labels)


def smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def per_row(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    rows = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (rows * torch.linspace(0, 1, len(rows), dtype=rows.dtype)).square().sum()


def batch(number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(number)
    tokens, labels = torch.randint(VOCABULARY, (2, BATCH, LENGTH))
    labels[0, : 3 + number] = -100
    return tokens, labels


def op_by_op(**options: Any) -> Any:
    """A backend that divides graphs as olla does, and generates no code."""
    return without_kernels(patches(**options)["custom_partitioner_fn"])


def trained(loss: Loss, backend: Any, **kind: bool) -> list[torch.Tensor]:
    """Losses and parameters of three steps in float64, and the last gradients."""
    torch.manual_seed(1)
    model = Language(**kind).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss(model(tokens), labels)

    run = torch.compile(step, **backend) if isinstance(backend, dict) else torch.compile(step, backend=backend)
    found = []
    for i in range(3):
        optimizer.zero_grad()
        torch.manual_seed(i)
        result = run(*batch(i))
        result.backward()
        optimizer.step()
        found.append(result.detach())
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*found, *(p.detach() for p in model.parameters()), *gradients]


class Counted:
    """How many losses of a graph ran in chunks, and the graphs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.losses: list[int] = []
        self.nodes: list[list[Any]] = []
        in_chunks = chunked.in_chunks

        def watch(module: Any, num_chunks: int | str) -> tuple[int, str]:
            found = in_chunks(module, num_chunks)
            self.losses.append(found[0])
            self.nodes.append(list(module.graph.nodes))
            return found

        monkeypatch.setattr(chunked, "in_chunks", watch)


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (mean, {}),
        (mean, {"tied": False, "bias": True}),
        (total, {"tied": False}),
        (shifted, {}),
        (capped, {"bias": True}),
    ],
)
def test_gradients_are_eagers(loss: Loss, kind: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    monkeypatch.setattr(nn.functional, "dropout", lambda x, *_: x)  # compiled code draws other numbers
    found = trained(loss, op_by_op(**LEAST, chunked_loss=4), **kind)
    assert counted.losses == [1]
    wide = [n for n in counted.nodes[0] if getattr(n.meta.get("val"), "shape", ()) == (BATCH * LENGTH, VOCABULARY)]
    assert not wide
    torch.testing.assert_close(found, trained(loss, "eager", **kind), rtol=1e-10, atol=1e-12)


def test_dropout_ahead_of_the_loss_is_the_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    found = trained(mean, {"backend": "olla", "options": {**LEAST, "chunked_loss": 7}})
    torch.compiler.reset()
    whole = trained(mean, {"backend": "olla", "options": LEAST})
    assert counted.losses == [1]
    torch.testing.assert_close(found, whole, rtol=1e-10, atol=1e-12)


def test_several_losses_of_one_model_each_run_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)

    def step(heads: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return sum(nn.functional.cross_entropy(head(x), labels) for head in heads)  # type: ignore[return-value]

    def gradients(run: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        heads = nn.ModuleList(nn.Linear(WIDTH, VOCABULARY) for _ in range(2)).double()
        x = torch.randn(64, WIDTH, dtype=torch.float64, requires_grad=True)
        run(heads, x, torch.arange(64)).backward()
        return [x.grad, *(p.grad for p in heads.parameters())]  # type: ignore[list-item]

    found = gradients(torch.compile(step, backend=op_by_op(chunked_loss=4)))
    assert counted.losses == [2]
    torch.testing.assert_close(found, gradients(step), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("loss", [per_row, smoothed])
def test_other_losses_are_eagers_too(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    monkeypatch.setattr(nn.functional, "dropout", lambda x, *_: x)
    found = trained(loss, op_by_op(**LEAST, chunked_loss=4))
    assert counted.losses == [1]
    torch.testing.assert_close(found, trained(loss, "eager"), rtol=1e-10, atol=1e-12)


def test_what_cannot_run_in_chunks_is_said_once(recwarn: pytest.WarningsRecorder) -> None:
    def step(model: Any, x: torch.Tensor) -> Any:
        logits = model(x)
        return logits.square().mean(), logits

    model = nn.Linear(WIDTH, VOCABULARY)
    for _ in range(2):
        torch.compile(step, backend=op_by_op(chunked_loss=4))(model, torch.ones(8, WIDTH))[0].backward()
        torch.compiler.reset()
    said = [str(w.message) for w in recwarn if "chunked_loss=4" in str(w.message)]
    assert len(said) == 1
    assert "its logits not returned" in said[0]
    torch.compile(step, backend=op_by_op(chunked_loss="auto"))(model, torch.ones(8, WIDTH))[0].backward()
    assert len([w for w in recwarn if "chunked_loss" in str(w.message)]) == 1


def large() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], Any]:
    """Logits of 128 MiB, beside 8 MiB of weights."""
    labels = torch.zeros(8, 512, dtype=torch.long)
    with torch.device("meta"):
        model = Language(width=256, tokens=8192)
    return model, (labels, labels), lambda m, b: mean(m(b[0]), b[1])


@other_fusions
def test_the_peak_falls_by_the_logits() -> None:
    logits = 8 * 512 * 8192 * 4
    with olla.inductor.enable(max_slowdown=0.05):
        whole = replay(*large())
    peaks = []
    for number in (2, 8, "auto"):
        with olla.inductor.enable(max_slowdown=0.05, chunked_loss=number):
            found = replay(*large())
        peaks.append(found.peak_bytes)
        assert found.flops == whole.flops
    assert whole.peak_bytes - peaks[0] > logits // 4
    assert whole.peak_bytes - peaks[1] > 0.7 * logits
    assert peaks[2] < peaks[0]


def test_explain_shows_what_chunks_are_worth() -> None:
    whole, in_chunks = (
        olla.inductor.explain(*large(), minimise="peak", max_recomputed=0.0, chunked_loss=number, shares=())
        for number in (None, 8)
    )
    assert in_chunks.ours.peak_bytes < 0.7 * whole.ours.peak_bytes
    assert in_chunks.ours.recomputed_flops == whole.ours.recomputed_flops == 0


def test_gradients_of_a_weight_are_added_in_place() -> None:
    with olla.inductor.enable(max_slowdown=0.05, chunked_loss=8):
        forward, *_ = (source for source in replay(*large()).sources if "aten.addmm_" in source)
    assert forward.count("aten.addmm_.default(buf") == 7
    assert forward.count("= empty_strided_cpu((8192, 256)") == 1


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_losses_of_transformers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": VOCABULARY, "use_cache": False}
    if kind == "llama":
        heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(hidden_size=16, intermediate_size=32, **heads, **common)
    else:
        config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, bos_token_id=0, eos_token_id=0, **common)
    counted = Counted(monkeypatch)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.loss_type = "ForCausalLM"  # without, GPT-2 logs a warning, and that breaks the graph
    tokens, labels = batch()

    def gradients(backend: Any) -> list[torch.Tensor]:
        model.zero_grad()
        step = torch.compile(lambda x, y: model(input_ids=x, labels=y).loss, backend=backend)
        loss = step(tokens, labels)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    found = gradients(op_by_op(chunked_loss=4))
    assert counted.losses == [1]
    torch.testing.assert_close(found, gradients("eager"), rtol=1e-4, atol=1e-6)


def test_auto_leaves_alone_what_fits_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    with olla.inductor.enable(budget="4GB", chunked_loss="auto"):
        found = replay(*large())
    assert found.peak_bytes > 8 * 512 * 8192 * 4


def test_a_failure_leaves_losses_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("logits")

    monkeypatch.setattr(chunked, "found", broken)
    with pytest.warns(UserWarning, match="losses run whole, not in chunks"):
        found = trained(mean, op_by_op(**LEAST, chunked_loss=4))
    torch.compiler.reset()
    torch.testing.assert_close(found, trained(mean, op_by_op(**LEAST)), rtol=0, atol=0)


@pytest.mark.parametrize("number", [0, -1, True, 2.0, "many", 4097])
def test_what_is_no_number_of_chunks_is_refused(number: Any) -> None:
    with pytest.raises(ValueError, match=r"chunked_loss is .*, expected 1 to 4096 chunks, 'auto', or None"):
        olla.inductor.enable(chunked_loss=number)


def test_the_number_of_chunks_is_a_part_of_what_is_cached() -> None:
    made = [patches(chunked_loss=number)["custom_partitioner_fn"] for number in (None, 4, 8, "auto")]
    assert len({p.uuid() for p in made}) == 4
    assert len({pickle.dumps(p.__getstate__()) for p in made}) == 4
    assert pickle.loads(pickle.dumps(made[1])).chunked_loss == 4
    with config.patch(patches(chunked_loss=4)):
        assert torch._inductor.config.custom_partitioner_fn.chunked_loss == 4
