"""Buffers of compiled graphs at planned addresses of one arena."""

import re

import pytest

from tests.support.pytorch.compiling import fresh  # noqa: F401

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import olla.inductor  # noqa: E402
from olla.inductor.compat import codegen  # noqa: E402
from olla.inductor.kernels import arena, order  # noqa: E402
from olla.inductor.simulate.step import replay  # noqa: E402

WIDTH = 16


class Model(torch.nn.Module):
    """Layers, a concatenation, a buffer that is changed, dropout, and a result that is a view."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = torch.nn.BatchNorm1d(WIDTH)
        self.head = torch.nn.Linear(2 * WIDTH, 4)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.nn.functional.dropout(torch.nn.functional.gelu(layer(x)), 0.1)
        x = self.head(torch.cat([self.norm(x), x.softmax(1)], 1))
        return x.logsumexp(1).mean(), x.t()


def seeded():
    torch.manual_seed(0)
    return Model(), torch.randn(8, WIDTH, requires_grad=True)


def step(model, x, **options):
    """Train for one compiled step: results, gradients, buffers."""
    torch.compiler.reset()
    torch.manual_seed(1)
    loss, view = torch.compile(model, backend="olla", options=options or {"max_slowdown": 0.05})(x)
    (loss + view.square().sum()).backward()
    return [loss.detach(), view.detach(), x.grad, *(p.grad for p in model.parameters()), *model.buffers()]


def replayed():
    model, x = seeded()
    return replay(model, x.detach(), lambda model, x: model(x)[0])


def allocations(sources):
    return [re.findall(r"(\w+) = empty_strided_\w+\((\(.*?\)), .*?, torch.(\w+)\)", source) for source in sources]


def test_steps_compute_the_same_and_what_they_return_owns_its_memory():
    usual, found = step(*seeded()), step(*seeded(), arena=True)
    assert len(arena.records()) == 2
    assert all(record.num_buffers > 1 for record in arena.records())
    for a, b in zip(usual, found, strict=True):
        assert torch.equal(a, b)
    assert all(tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() for tensor in found)


def test_one_allocation_of_the_layouts_height_stands_for_many():
    with olla.inductor.enable():
        usual = allocations(replayed().sources)
    with olla.inductor.enable(arena=True):
        found = allocations(replayed().sources)
    assert len(usual) == len(found) == len(arena.records()) == 2
    for before, after, record in zip(usual, found, arena.records(), strict=True):
        assert record.load_bytes <= record.arena_bytes
        assert [size for name, size, dtype in after if name == "arena0"] == [f"({record.arena_bytes}, )"]
        assert len(after) < len(before)


def test_buffers_of_an_arena_never_overlap_while_in_use(monkeypatch):
    def check(groups, offsets, num_bytes, name, end):
        place(groups, offsets, num_bytes, name, end)
        spans = [
            (g.live_range.begin, g.live_range.end, o, o + codegen.static_bytes(g))
            for g, o in zip(groups, offsets, strict=True)
        ]
        for i, (begin, end, low, high) in enumerate(spans):
            assert 0 <= low < high <= num_bytes
            for other in spans[:i]:
                assert end <= other[0] or other[1] <= begin or high <= other[2] or other[3] <= low
        seen.append(len(spans))

    seen, place = [], codegen.place_groups
    monkeypatch.setattr(codegen, "place_groups", check)
    with olla.inductor.enable(arena=True):
        replayed()
    assert len(seen) == 2


def test_what_is_saved_and_returned_lies_outside():
    with olla.inductor.enable(arena=True):
        for source in replayed().sources:
            [returned] = re.findall(r"^ +return \((.*)\)$", source, re.MULTILINE)[:1]
            inside = set(re.findall(r"(\w+) = alloc_from_pool", source))
            assert inside
            assert inside.isdisjoint(re.findall(r"\w+", returned))


def test_symbolic_sizes_stay_outside():
    x = torch.randn(6, WIDTH, requires_grad=True)
    with olla.inductor.enable(arena=True):
        compiled = torch.compile(lambda x: torch.mm(torch.mm(x, x.t()).sin(), x).cos().sum(), dynamic=True)
        found = compiled(x)
    torch.testing.assert_close(found, torch.mm(torch.mm(x, x.t()).sin(), x).cos().sum())
    assert arena.records() == []


def test_a_planner_that_has_changed_is_named_and_buffers_stay_as_they_were(monkeypatch):
    monkeypatch.setattr(codegen, "_planning_module", "torch._inductor.codegen.gone")
    with olla.inductor.enable():
        usual = allocations(replayed().sources)
    with olla.inductor.enable(arena=True), pytest.warns(UserWarning, match="one by one: .*CaptureError") as caught:
        assert allocations(replayed().sources) == usual
    assert [torch.__version__ in str(w.message) for w in caught if "one by one" in str(w.message)] == [True]


def test_cached_graphs_depend_on_it():
    assert order.KernelOrder(arena=True).uuid() != order.KernelOrder().uuid()
