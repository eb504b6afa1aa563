"""Compiled steps that run: the same losses, gradients and buffers as torch.compile's, through whatever torch adds."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import subprocess
import sys
import warnings
from typing import Any

import pytest
from torch._dynamo.utils import counters
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import olla.inductor
from olla.inductor.compat import compat
from olla.inductor.kernels import order
from olla.inductor.settings import patches
from tests.support.pytorch import compile_cases
from tests.support.pytorch.compiled import Compiled, compare, fresh_batches, spread
from tests.support.pytorch.compiling import (  # noqa: F401
    LEAST,
    NUM_STEPS,
    Block,
    blocks,
    caches,
    fresh,
    inputs,
    square,
    without_kernels,
)
from tests.support.pytorch.models import Example
from tests.support.pytorch.steps import nn, torch

pytestmark = pytest.mark.torch
CASES = [case for case in compile_cases.CASES if case != "gpt2 b8, 1024 tokens"]  # tiny, it is the other GPT-2
LONG = "mobilenetv2 b32"
SHORT = [case for case in CASES if case.startswith(("gpt2", "transformer"))]


def example_of(model: nn.Module, batch: Any = None) -> Example:
    return Example(model, inputs(1)[0] if batch is None else batch, square)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def alike(example: Example, optimizer: Any = sgd, num_steps: int = 3, **compiling: Any) -> tuple[Compiled, Compiled]:
    """Check olla beside torch.compile's default, with Inductor's kernels; the two that were compared."""
    default = Compiled(example)
    ours = Compiled(example, **({"backend": "olla", "options": LEAST} | compiling))
    found = compare(default, ours, optimizer, list(fresh_batches(example.batch, num_steps)))
    assert found.equal, found
    return default, ours


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in SHORT else pytest.mark.slow) for c in CASES])
def test_twenty_steps_of_a_network_train_as_with_torchs_partitioner(case: str) -> None:
    torch.manual_seed(0)
    example, _ = compile_cases.build(case, "tiny")
    partitioner = patches(**LEAST)["custom_partitioner_fn"]
    partitioner.choices = []
    default = Compiled(example, backend=without_kernels(compat.min_cut_partition))
    ours = Compiled(example, backend=without_kernels(partitioner))
    optimizer = functools.partial(compile_cases.optimizer, case)
    found = compare(default, ours, optimizer, list(fresh_batches(example.batch, NUM_STEPS)))
    assert found.equal, found
    (choice,) = partitioner.choices
    assert choice.runs.again.any()


@pytest.mark.slow
def test_the_tiny_mobilenet_is_compared_where_an_ulp_is_no_matter() -> None:
    torch.manual_seed(0)
    double, _ = compile_cases.build(LONG, "tiny")
    batches = list(fresh_batches(double.batch, NUM_STEPS))
    optimizer = functools.partial(compile_cases.optimizer, LONG)
    assert spread(double, optimizer, batches) < 0.01
    single = Example(copy.deepcopy(double.model).float(), double.batch, double.loss)
    floats = [{key: t.float() if t.is_floating_point() else t for key, t in batch.items()} for batch in batches]
    assert spread(single, optimizer, floats) > 1


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_twenty_steps_of_a_network_train_as_with_inductor(case: str) -> None:
    torch.manual_seed(0)
    example, _ = compile_cases.build(case, "tiny")
    default, ours = alike(example, functools.partial(compile_cases.optimizer, case), NUM_STEPS)
    assert ours.splits[0].digest != default.splits[0].digest


@pytest.mark.slow
def test_twenty_steps_with_dropout_train_as_with_inductor() -> None:
    default, ours = alike(example_of(blocks(4), torch.randn(512, 32)), num_steps=NUM_STEPS)
    assert ours.splits[0].recomputed_flops > default.splits[0].recomputed_flops == 0


def test_buffers_and_convolutions_train_as_with_inductor_under_autocast() -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return square(model, x)

    example = Example(nn.Sequential(*layers), torch.randn(4, 3, 8, 8), loss)
    ours = Compiled(example, backend="olla", options=LEAST)
    found = compare(Compiled(example), ours, sgd, [example.batch])
    assert found.many_steps <= 1, found  # a step in bfloat16 is as uncertain as many in float32


def test_what_a_policy_wants_saved_is_saved_and_the_rest_made_again() -> None:
    """Of a block that is checkpointed but for its products, backward recomputes no product."""

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.PREFER_RECOMPUTE

    class Checkpointed(nn.Module):
        def __init__(self, **settings: Any) -> None:
            super().__init__()
            self.inner, self.settings = blocks(1, dropout=0.0), settings

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False, **self.settings)
            return y

    saving = {"context_fn": functools.partial(create_selective_checkpoint_contexts, policy)}
    _, free = alike(example_of(Checkpointed()))
    _, bound = alike(example_of(Checkpointed(**saving)))
    assert free.splits[0].recomputed_flops > 0
    assert bound.splits[0].recomputed_flops == 0
    assert bound.splits[0].num_recomputed > 0


def test_control_flow_is_planned_around() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = blocks(1, dropout=0.0), blocks(1, dropout=0.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (self.first(x),))
            z: torch.Tensor = self.last(y)
            return z

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="olla")
        alike(example_of(Branching()))


@pytest.mark.slow
def test_two_models_and_a_batch_of_another_size_train_side_by_side() -> None:
    first, second = example_of(blocks(1)), example_of(blocks(2))
    olla_too = {"backend": "olla", "options": LEAST, "recompiles": True}
    steps = [(Compiled(example, recompiles=True), Compiled(example, **olla_too)) for example in (first, second)]
    for size in (16, 12):  # from the second on, torch takes the size for a symbol
        for default, ours in steps:
            assert compare(default, ours, sgd, inputs(1, size)).equal


def test_a_mode_beside_a_goal_trains_the_same() -> None:
    default, ours = alike(example_of(blocks(2)), num_steps=1, options={**LEAST, "mode": "reduce-overhead"})
    assert ours.splits[0].digest != default.splits[0].digest


@pytest.mark.usefixtures("caches")
def test_code_comes_out_of_torchs_caches_for_the_same_goal_and_is_made_anew_for_another() -> None:
    """What stays is the code on disk: the process forgets the rest."""
    model, x = blocks(1, dropout=0.0), inputs(1)[0]

    def step(**goal: Any) -> tuple[int, int, int]:
        torch.compiler.reset()
        counters.clear()
        order.forget()
        torch.compile(square, backend="olla", options=goal)(model, x).backward()
        found = counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_miss"]
        assert counters["aot_autograd"]["autograd_cache_bypass"] == 0
        assert counters["inductor"]["fxgraph_cache_bypass"] == 0
        return *found, len(order.records())

    assert step(minimise="peak") == (0, 1, 2)
    assert step(minimise="peak") == (1, 0, 0)
    assert step(budget="1GB") == (0, 1, 2)
    assert step(budget=10**9) == (1, 0, 0)
    assert step(budget="2GB")[1] == 1


def test_dynamos_explain_counts_graphs_while_olla_is_on() -> None:
    def broken(model: Any, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        torch._dynamo.graph_break()
        return square(model, y)

    with olla.inductor.enable(**LEAST):
        found = torch._dynamo.explain(broken)(blocks(1), inputs(1)[0])
    assert (found.graph_count, found.graph_break_count) == (2, 1)


_DDP = """
import sys, warnings
warnings.simplefilter("ignore")
sys.path[:0] = sys.argv[3:]
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

rank = int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
torch._dynamo.config.optimize_ddp = True

def train(backend, options=None):
    torch.compiler.reset()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(1024, 256)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1)
    step = torch.compile(model, backend=backend, options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for seed in range(3):
        torch.manual_seed(10 * seed + rank)
        optimizer.zero_grad()
        loss = step(torch.randn(16, 256)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), [p.detach() for p in model.parameters()]

ours, theirs = train("olla", {"minimise": "peak"}), train("inductor")
torch.testing.assert_close(ours, theirs)
everywhere = [torch.empty_like(ours[1][0]) for _ in range(2)]
dist.all_gather(everywhere, ours[1][0])
assert torch.equal(everywhere[0], everywhere[1])
print("trained")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_train_the_same_with_gradients_in_buckets(tmp_path: Any) -> None:
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", _DDP, str(tmp_path / "rendezvous"), str(rank)],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(2)
        ]
        for process in processes:
            out, errors = process.communicate(timeout=900)
            assert process.returncode == 0, errors[-3000:]
            assert out == "trained\n"
