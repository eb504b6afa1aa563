"""The order of Inductor's fused kernels, in code compiled for real."""

import logging
import os
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.support.pytorch.compiling import caches, fresh  # noqa: F401

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch._inductor import config as inductor_config  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from olla import _core  # noqa: E402
from olla.inductor.compat import compat  # noqa: E402
from olla.inductor.kernels import fused, order, scheduler  # noqa: E402
from olla.inductor.simulate.step import replay  # noqa: E402
from olla.inductor.simulate.wrappers import LiveBytes, watched_wrappers  # noqa: E402


class Mixed(torch.nn.Module):
    """A convolution, batch statistics that are mutated, a concatenation, dropout, views, a kernel with two results."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.head = torch.nn.Linear(16, 4)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        tokens = torch.nn.functional.dropout(torch.cat([x, x.sin()], 2), 0.2).flatten(2)
        largest, _ = torch.topk(tokens, 3, 2)
        return self.head(torch.cat([largest.mean(2), tokens.sum(2)], 1)).logsumexp(1).mean()


class Wide(torch.nn.Module):
    """All wide results are there at once in program order, and need not be."""

    def forward(self, x):
        small = [torch.mm(x, x[:, i : i + 1] + i) for i in range(4)]
        wide = [torch.mm(s, s.t()) for s in small]
        return torch.stack([torch.mm(w, s).sum() for w, s in zip(wide, small, strict=True)]).sum()


class Keeping(order.KernelOrder):
    """Keeps the graphs it plans, and which of their kernels runs at each step."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __call__(self, nodes):
        ordered = super().__call__(nodes)
        nodes = nodes if set(nodes) == set(ordered) else ordered  # where fusions are taken back
        scheduler.prepare(nodes)
        position = {node: i for i, node in enumerate(nodes)}
        graph = fused.Storages(nodes).graph("")
        self.found.append((graph, np.array([position[node] for node in ordered], dtype=np.int32)))
        return ordered


def planned(model, x, **settings):
    """Compile a training step of a model but for its kernels: (its replay, the graphs planned)."""
    keeping = Keeping()
    with inductor_config.patch({**order.patches(), "_post_fusion_custom_pass": keeping, **settings}):
        found = replay(model, x, lambda model, x: model(x).sum())
    return found, keeping.found


def step(model, x):
    """Train for one compiled step with random numbers that are always the same: loss, gradients, buffers."""
    torch.manual_seed(1)
    loss = torch.compile(model)(x)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters()), *model.buffers()]


def seeded(cls):
    torch.manual_seed(0)
    return cls()


@pytest.mark.usefixtures("caches")
def test_a_step_computes_the_same_and_comes_out_of_the_cache_again():
    from torch._dynamo.utils import counters

    x = torch.randn(2, 3, 8, 8)
    default = step(seeded(Mixed), x)
    torch.compiler.reset()
    with torch._functorch.config.patch(enable_autograd_cache=False), inductor_config.patch(order.patches()):
        counters.clear()
        ours = step(seeded(Mixed), x)
        assert counters["inductor"]["fxgraph_cache_bypass"] == 0
        num_planned = len(order.records())
        torch.compiler.reset()
        again = step(seeded(Mixed), x)
    assert counters["inductor"]["fxgraph_cache_hit"] >= 2
    assert len(order.records()) == num_planned
    for a, b, c in zip(default, ours, again, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert torch.equal(b, c)


def test_orders_are_proved_valid_and_never_above_the_given_ones():
    _, graphs = planned(Mixed(), torch.randn(2, 3, 8, 8))
    assert [record.name.split()[-1] for record in order.records()] == ["forward", "backward"]
    for record, (graph, steps) in zip(order.records(), graphs, strict=True):
        assert graph.core.is_order(steps)
        assert _core.profile(graph.core, steps).peak_bytes == record.peak_bytes <= record.given_peak_bytes
        assert record.peak_bytes == record.lower_bound_bytes
        assert record.gap == 0.0


def test_the_peak_of_the_generated_code_falls_as_planned():
    given = peak_without_gradients({"reorder_for_peak_memory": False})
    found = peak_without_gradients(order.patches())
    [record] = order.records()
    assert record.given_peak_bytes - record.peak_bytes >= 2 * 64 * 64 * 4
    assert given - found == record.given_peak_bytes - record.peak_bytes


def peak_without_gradients(settings):
    """Return the peak of the generated code where nothing is saved, and no pass before ours sorts the kernels."""
    torch.compiler.reset()
    mode, live = FakeTensorMode(), LiveBytes()
    with (
        mode,
        torch.no_grad(),
        watched_wrappers([]),
        inductor_config.patch({"reorder_for_locality": False, **settings}),
    ):
        x, compiled = torch.randn(64, 64), torch.compile(Wide())
        compiled(x)
        with torch.compiler.set_stance(skip_guard_eval_unsafe=True), live:
            compiled(x)
    return live.peak_bytes


def test_saved_views_of_parameters_cost_nothing():
    model = torch.nn.Sequential(torch.nn.Linear(512, 8), torch.nn.Tanh(), torch.nn.Linear(8, 512))
    _, graphs = planned(model, torch.randn(4, 512, requires_grad=True))
    backward = graphs[-1][0]
    assert backward.tensor_bytes[backward.donated].sum() < 512 * 8 * 4  # of neither weight


def test_cached_graphs_depend_on_the_settings_and_the_code(monkeypatch):
    assert order.KernelOrder().uuid() != order.KernelOrder(readers_only=True).uuid()
    before = pickle.dumps(order.KernelOrder()), order.KernelOrder().uuid()
    monkeypatch.setattr(compat, "code_digest", lambda: "another olla")
    assert pickle.dumps(order.KernelOrder()) != before[0]  # older torch hashes the pass as part of its configuration
    assert order.KernelOrder().uuid() != before[1]


def test_graphs_outside_the_model_keep_torchs_order_with_one_warning(monkeypatch):
    monkeypatch.setattr(scheduler, "uses_streams", lambda: True)
    with inductor_config.patch(order.patches()), pytest.warns(UserWarning, match="order: .* streams") as caught:
        found = replay(Wide(), torch.randn(8, 8, requires_grad=True), lambda model, x: model(x))
    assert found.num_wrappers == 2
    assert sum("own order" in str(warning.message) for warning in caught) == 1
    assert order.records() == []


def test_a_scheduler_that_has_changed_is_named_and_left_alone():
    nodes = [object()]  # outside of a compilation, and no node
    with pytest.warns(UserWarning, match=rf"AttributeError.*torch {re.escape(torch.__version__)}"):
        assert order.KernelOrder()(nodes) is nodes


def test_every_graph_is_logged(caplog):
    with caplog.at_level(logging.INFO, logger="olla.inductor"):
        planned(Wide(), torch.randn(8, 8, requires_grad=True))
    logged = [r.getMessage() for r in caplog.records if r.name == "olla.inductor"]
    assert logged == [str(record) for record in order.records()]
    assert "bound" in logged[0]


def test_random_kernels_keep_their_order():
    class Draws(torch.nn.Module):
        def forward(self, x):
            return (x * torch.bernoulli(x.detach()) + torch.bernoulli(x.detach() * 0.5)).sum()

    _, graphs = planned(Draws(), torch.rand(64, requires_grad=True), fallback_random=True)
    assert graphs[0][0].random.sum() == 2


def test_a_symbolic_batch_is_planned_with_hints():
    x = torch.randn(48, 8, requires_grad=True)
    with inductor_config.patch(order.patches()):
        compiled = torch.compile(lambda x: torch.mm(x, x.t()).sin().sum(), dynamic=True)
        compiled(x).backward()
        compiled(torch.randn(64, 8, requires_grad=True)).backward()
    assert len(order.records()) == 2
    assert order.records()[0].peak_bytes >= 48 * 48 * 4


_DDP = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch._inductor import config
import olla.inductor
from olla.inductor.kernels import order

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
wrapped = torch.nn.parallel.DistributedDataParallel(torch.compile(model, backend="olla"))
x = torch.randn(4, 8)
wrapped(x).square().mean().backward()
compiled = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
model(x).square().mean().backward()
for a, b in zip(compiled, (p.grad for p in model.parameters()), strict=True):
    torch.testing.assert_close(a, b)
print(len(order.records()), "graphs ordered")

def step(x):
    first = collectives.all_reduce(x + 1, "sum", dist.group.WORLD)
    second = collectives.all_reduce(torch.mm(x, x), "sum", dist.group.WORLD)
    return first.cos() + torch.mm(second, x)

kept = []
class Keeping(order.KernelOrder):
    def __call__(self, nodes):
        ordered = super().__call__(nodes)
        kept.append([[type(n.node).__name__ for n in ns] for ns in (nodes, ordered)])
        return ordered

x = torch.randn(16, 16)
with config.patch({**order.patches(), "_post_fusion_custom_pass": Keeping()}):
    torch.testing.assert_close(torch.compile(step)(x), step(x))
[(before, after)] = kept
assert before.count("_AllReduce_Kernel") == before.count("_WaitKernel") == 2, before
assert [n for n in before if n[0] == "_"] == [n for n in after if n[0] == "_"]
print("collectives kept")
dist.destroy_process_group()
"""


def test_ddp_and_collectives_work(tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    command = [sys.executable, "-c", _DDP, str(tmp_path / "rendezvous")]
    environment = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[:2] == ["2 graphs ordered", "collectives kept"]


def test_reduce_overhead_is_accepted():
    x = torch.randn(8, 8, requires_grad=True)
    compiled = torch.compile(Wide(), backend="olla", mode="reduce-overhead", options=None)(x)
    compiled.backward()
    assert len(order.records()) == 2
    torch.testing.assert_close(compiled, Wide()(x))
