"""What waits in host memory between forward and backward: which tensors, when they are copied, and what comes of it.

There is no GPU here: torch's operators for copies run with a stream that copies at once, and the planner takes the
graphs of a CPU for those of a GPU. tests/cuda/test_inductor.py has them on CUDA's streams.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import olla
import olla.inductor
from olla.errors import BudgetError, CaptureError, PlanError
from olla.graph import PROFILES
from olla.inductor import settings
from olla.inductor.compat import host
from olla.inductor.explain import explain
from olla.inductor.kernels import order
from olla.inductor.saving import offload, partition, saving, verify
from olla.inductor.saving.joint import Joint
from olla.plan import Goal, Link, Swapping
from tests.support.pytorch.compiling import Block, blocks, fresh  # noqa: F401
from tests.support.pytorch.compiling import square as loss
from tests.support.pytorch.steps import nn, torch

ops = pytest.importorskip("torch._functorch._activation_offloading.offload_ops", reason="torch before 2.13")
if not hasattr(ops, "pinned_memory_pool"):
    pytest.skip("torch before 2.13", allow_module_level=True)
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")]
# Small models are done in microseconds: on a link as fast as theirs, copies pay.
LINK = Link(out_bytes_per_second=1e13, in_bytes_per_second=1e13, out_latency_seconds=1e-9, in_latency_seconds=1e-9)
SLOW = Link(out_bytes_per_second=2e11, in_bytes_per_second=1e11, out_latency_seconds=1e-7, in_latency_seconds=2e-7)


class Stream:
    """Notes what is asked of a stream on which copies are done at once."""

    def __init__(self) -> None:
        self.waits: list[Any] = []

    def wait_stream(self, _: Any) -> None: ...

    def record_event(self, event: Any) -> None:
        event.recorded = True

    def wait_event(self, event: Any) -> None:
        assert event.recorded
        self.waits.append(event)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    """Let graphs of a CPU have tensors that wait in host memory; every copy has been waited for at the end."""
    stream = Stream()

    class Torch(types.ModuleType):
        Event = types.SimpleNamespace
        accelerator = types.SimpleNamespace(current_stream=lambda _: stream, set_stream=lambda _: None)
        __getattr__ = staticmethod(functools.partial(getattr, torch))

    monkeypatch.setattr(ops, "torch", Torch("torch"))
    monkeypatch.setattr(ops, "_get_or_create_transfer_stream", lambda _: stream)
    monkeypatch.setattr(ops, "_maybe_pool_alloc", lambda numel, dtype: torch.empty(numel, dtype=dtype))
    monkeypatch.setattr(offload, "LEAST_BYTES", 1 << 10)
    monkeypatch.setattr(settings, "_code_peak_bytes", lambda *_: None)  # in which these tensors would count
    monkeypatch.setattr(partition.Partitioner, "_host", lambda self, *_: self.swapping and Swapping(link=LINK))
    yield stream
    assert not ops._wait_registry


class Seen:
    """Keeps the fronts of plans, and what was chosen on them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fronts: list[saving.Front] = []
        self.choices: list[saving.SavedChoice] = []
        choose = saving.Front.choose

        def watch(front: saving.Front, goal: Goal, **options: Any) -> saving.SavedChoice:
            self.fronts.append(front)
            self.choices.append(choose(front, goal, **options))
            return self.choices[-1]

        monkeypatch.setattr(saving.Front, "choose", watch)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(monkeypatch)


class Attention(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


def convolutions() -> nn.Module:
    layers = [[nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()] for _ in range(4)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *[layer for each in layers for layer in each])


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "blocks": (lambda: blocks(6, dropout=0.0), (256, 32)),
    "attention": (lambda: nn.Sequential(*[m for _ in range(4) for m in (Attention(), Block(64, 0.0))]), (4, 32, 64)),
    "convolutions": (convolutions, (4, 3, 32, 32)),
    "recurrent": (lambda: nn.Sequential(*[nn.Linear(64, 64) if i % 2 else nn.Tanh() for i in range(16)]), (512, 64)),
}
GOALS: dict[str, dict[str, Any]] = {
    "least": {"minimise": "peak"},
    "time": {"max_slowdown": 0.5},
}


def example(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    build, shape = MODELS[name]
    return build().double(), torch.randn(shape, dtype=torch.float64)


def gradients(step: Any, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    step(model, x).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("name", MODELS)
def test_steps_compute_what_they_compute_without_copies(name: str, goal: str, stream: Stream, seen: Seen) -> None:
    model, x = example(name)
    expected = gradients(loss, model, x)
    step = torch.compile(loss, backend="olla", options={**GOALS[goal], "host_budget": "1GB", "device": "a100"})
    for _ in range(2):
        for found, right in zip(gradients(step, model, x), expected, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)
    copies = [choice.offload for choice in seen.choices if choice.offload is not None][-1]
    assert len(stream.waits) == 2 * 2 * len(copies.copy)
    assert order.records()  # kernels were ordered, not left to torch


@pytest.mark.usefixtures("stream")
def test_explain_says_how_much_waits_in_host_memory(seen: Seen) -> None:
    model, x = example("blocks")
    options: dict[str, Any] = {"max_slowdown": 0.5, "device": "a100", "shares": (0.5,)}
    found = explain(model, x, loss, host_budget="1GB", **options)
    copies = [choice.offload for choice in seen.choices if choice.offload is not None][-1]
    front = seen.fronts[-1]
    values = seen.choices[-1].values.tensor[seen.choices[-1].runs.value[copies.copy]]
    [split] = found.ours.splits
    assert split.host_bytes == front.joint.graph.tensor_bytes[values].sum() > 0
    assert "in host memory" in str(found)
    assert "in host memory" not in str(explain(model, x, loss, **options))


@pytest.fixture
def fronts(stream: Stream, seen: Seen) -> Any:
    """Return the front of a model's plans, as a GPU's, with other links and other host memory."""

    def build(name: str, link: Link = LINK, host_bytes: int | None = None) -> saving.Front:
        torch.compiler.reset()
        model, x = example(name)
        with olla.inductor.enable(minimise="peak", device="a100"):
            torch.compile(loss)(model, x).backward()
        return saving.Front(seen.fronts[-1].joint, host=Swapping(link=link, host_bytes=host_bytes))

    return build


def asked(**goal: Any) -> Goal:
    return Goal(device=PROFILES["a100"], **goal)


@pytest.mark.parametrize("name", MODELS)
def test_no_budget_takes_longer_than_without_copies(name: str, fronts: Any) -> None:
    front = fronts(name)
    alone = saving.Front(front.joint)
    most, least = (alone.choose(asked(**goal)).peak_bytes for goal in ({"max_slowdown": 0.0}, {"minimise": "peak"}))
    faster = 0
    for budget in np.linspace(least, most, 9).astype(int).tolist():
        without, found = alone.choose(asked(budget_bytes=budget)), front.choose(asked(budget_bytes=budget))
        assert found.peak_bytes <= budget
        assert found.added_seconds <= without.added_seconds
        faster += found.added_seconds < without.added_seconds
    assert faster
    assert front.choose(asked(minimise="peak")).peak_bytes <= 1.001 * least


@pytest.mark.parametrize("name", MODELS)
def test_the_figures_are_those_of_a_step_simulated_by_hand(name: str, fronts: Any) -> None:
    stalls = []
    for link in (LINK, SLOW):
        front = fronts(name, link)
        for goal in (asked(minimise="peak"), asked(max_slowdown=0.2), asked(max_slowdown=1.0)):
            choice = front.choose(goal)
            if choice.offload is not None:
                peak, stall = simulated(front.joint, choice, link)
                assert choice.peak_bytes == peak
                assert choice.offload.stall_seconds == pytest.approx(stall, rel=1e-9, abs=1e-12)
                stalls.append(stall)
    assert max(stalls) > 0


def simulated(joint: Joint, choice: saving.SavedChoice, link: Link) -> tuple[int, float]:
    """Run a step run by run, with one stream for copies; return its peak and how long it waits."""
    copies, runs = choice.offload, choice.runs
    assert copies is not None
    sizes = joint.graph.tensor_bytes[choice.values.tensor[runs.value[copies.copy]]].tolist()
    seconds = np.where(runs.again != 0, joint.rerun_seconds[runs.op], joint.seconds[runs.op]).tolist()
    ready, freed, issue, following = ([int(n) for n in column] for column in copies[1:5])
    now = waited = stream_free = 0.0
    out, back = {}, {}
    live, peak = 0, 0
    for run in range(len(seconds)):
        for i in range(len(sizes)):
            if ready[i] + 1 == run:
                stream_free = max(now, stream_free) + link.out_latency_seconds + sizes[i] / link.out_bytes_per_second
                out[i] = stream_free
        for i in range(len(sizes)):
            if freed[i] == run:
                waited, now = waited + max(0.0, out[i] - now), max(now, out[i])
                live -= sizes[i]
        for i in range(len(sizes)):
            if issue[i] == run:
                stream_free = max(now, stream_free) + link.in_latency_seconds + sizes[i] / link.in_bytes_per_second
                back[i] = stream_free
                live += sizes[i]
        for i in range(len(sizes)):
            if following[i] == run:
                waited, now = waited + max(0.0, back[i] - now), max(now, back[i])
        now += seconds[run]
        peak = max(peak, int(runs.live_bytes[run]) + live)
    return peak, waited


def test_host_memory_is_counted_as_it_is_pinned_and_never_exceeded(fronts: Any) -> None:
    free = fronts("blocks").choose(asked(minimise="peak"))
    sizes = free.offload.host_bytes
    for share in (1.0, 0.5, 0.2):
        front = fronts("blocks", host_bytes=int(share * sizes))
        found = front.choose(asked(minimise="peak"))
        assert found.offload is None or found.offload.host_bytes <= share * sizes
        assert found.peak_bytes >= free.peak_bytes
    assert fronts("blocks", host_bytes=0).choose(asked(minimise="peak")).offload is None


def test_a_slow_link_is_left_alone(fronts: Any) -> None:
    front = fronts("blocks", Link.of(1e6))
    assert front.choose(asked(max_slowdown=0.1)).offload is None


def test_a_tensor_that_backward_reads_itself_is_refused() -> None:
    graph = torch.fx.Graph()
    x, out, host, reload, back = (graph.placeholder(name) for name in ("x", "out", "host", "reload", "back"))
    for node in (x, back):
        node.meta["val"] = torch.empty(4)
    for node, args in ((out, (x,)), (host, (out, None, x)), (reload, (host,)), (back, (reload, None, host))):
        node.args = args
    written = {x: offload.Inserted(out, host, reload, back)}
    verify.waiting(written, {x, out, host})
    with pytest.raises(PlanError, match="not copied to host memory in forward"):
        verify.waiting(written, {x, out, host, back})
    back.meta["val"] = torch.empty(2, 2)
    with pytest.raises(PlanError, match="not as x is"):
        verify.waiting(written, {x, out, host})
    back.meta["val"] = torch.empty(4)
    graph.call_function(torch.neg, (x,))
    with pytest.raises(PlanError, match="reads x itself"):
        verify.waiting(written, {x, out, host})


def test_on_a_cpu_nothing_is_copied_and_one_warning_says_so() -> None:
    model, x = example("blocks")
    step = torch.compile(loss, backend="olla", options={"minimise": "peak", "host_budget": "1GB"})
    with pytest.warns(UserWarning, match="host_budget changes nothing in a compiled graph on a CPU"):
        step(model, x).backward()


def test_a_torch_without_operators_for_copies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ops, "pinned_memory_pool")
    host.offload_operators.cache_clear()
    with pytest.raises(CaptureError, match=r"host_budget needs torch 2.13 or later, and this is .*: leave it out"):
        olla.inductor.enable(minimise="peak", host_budget="1GB")


def test_host_memory_without_a_goal_and_no_number_of_bytes_are_errors() -> None:
    with pytest.raises(ValueError, match="host_budget is for a goal"):
        olla.inductor.enable(host_budget="1GB")
    with pytest.raises(BudgetError, match="host_budget"):
        olla.inductor.enable(minimise="peak", host_budget="much")
