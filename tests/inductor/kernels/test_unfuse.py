"""Fusions taken back, and functions ended, where they would raise the peak of code that Inductor generates."""

import re

import numpy as np
import pytest

from tests.support.pytorch.compiling import fresh  # noqa: F401

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch._inductor import config as inductor_config  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from olla import _core  # noqa: E402
from olla.inductor.compat import codegen  # noqa: E402
from olla.inductor.kernels import order, scheduler  # noqa: E402
from olla.inductor.kernels.fused import Storages  # noqa: E402
from olla.inductor.kernels.parts import parts_of  # noqa: E402
from olla.inductor.simulate.wrappers import LiveBytes, watched_wrappers  # noqa: E402

HEIGHT, WIDTH = 512, 256


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def twins(x, w):
    """Needs sin(x) first and cos(x) last, which Inductor makes in one kernel, and much memory in between."""
    early = torch.mm(x.sin(), w)
    wide = torch.mm(early, early.t())
    return torch.mm(x.cos().t(), torch.mm(wide, early))


def normed_twins(x, w):
    """The same with a mean that both need."""
    y = x - x.mean(1, keepdim=True)
    early = torch.mm(y.sin(), w)
    wide = torch.mm(early, early.t())
    return torch.mm(y.cos().t(), torch.mm(wide, early))


def linked_twins(x, w):
    """The same where what is needed last is made from a value as large: a split pays where other kernels move too."""
    early = torch.mm(x.sin(), w)
    late = torch.mm(x.cos(), torch.mm(w, w.t()))
    z = early.mean(1, keepdim=True)
    early = torch.mm((z + x).sin(), w)
    late = (z + late).tanh()
    wide = torch.mm(early, early.t())
    return torch.mm(late.t(), torch.mm(wide, early))


def counting_twins(x, w):
    """The same, and the kernel changes its input."""
    early = torch.mm(x.sin(), w)
    wide = torch.mm(early, early.t())
    late = torch.mm(x.cos().t(), torch.mm(wide, early))
    x.add_(1)
    return late


def chain(x, w):
    """Wide values, each from the last, none of whose kernels can be fused with the next."""
    early = torch.mm(x, w)
    y = torch.mm(early, early.t())
    for _ in range(4):
        y = sum(y[shift : len(y) - 4 + shift].sin() for shift in range(5))
    return torch.mm(y, x)


def inputs():
    torch.manual_seed(0)
    return torch.randn(HEIGHT, WIDTH), torch.randn(WIDTH, 16)


def generated(function, settings):
    """Compile but for the kernels: (most bytes the wrapper has at once, calls of functions with kernels)."""
    torch.compiler.reset()
    sources, mode, live = [], FakeTensorMode(), LiveBytes()
    with mode, watched_wrappers(sources), inductor_config.patch({"reorder_for_locality": False, **settings}):
        args, compiled = inputs(), torch.compile(function)
        compiled(*args)
        with torch.compiler.set_stance(skip_guard_eval_unsafe=True), live:
            compiled(*args)
    return live.peak_bytes, len(re.findall(r"^ +cpp_fused\w*\(", "\n".join(sources), re.MULTILINE))


@pytest.mark.parametrize("function", [twins, normed_twins])
def test_a_fusion_that_raises_the_peak_is_taken_back(function):
    usual, _ = generated(function, {"reorder_for_peak_memory": False})
    found, _ = generated(function, order.patches())
    [record] = order.records()
    assert record.num_unfused == 1
    assert record.fused_peak_bytes - record.peak_bytes >= 0.99 * HEIGHT * WIDTH * 4
    assert record.peak_bytes == record.lower_bound_bytes == found
    assert usual - found >= 0.99 * HEIGHT * WIDTH * 4
    assert "1 fusions taken back" in str(record)


def test_a_fusion_is_taken_back_where_that_pays_once_other_kernels_move(monkeypatch):
    found, _ = generated(linked_twins, order.patches())
    monkeypatch.setattr(order.KernelOrder, "_fused_anew", lambda self, given, best, name: best)
    one_by_one, _ = generated(linked_twins, order.patches())
    together, alone = order.records()
    assert (together.num_unfused, alone.num_unfused) == (1, 0)
    assert one_by_one - found == alone.peak_bytes - together.peak_bytes >= 0.5 * HEIGHT * WIDTH * 4


@pytest.mark.parametrize("function", [twins, normed_twins, linked_twins, counting_twins, chain])
def test_results_stay_the_same(function):
    x, w = (tensor.double() for tensor in inputs())
    expected_x = x.clone()
    expected = function(expected_x, w)
    with inductor_config.patch(order.patches()):
        found = torch.compile(function)(x, w)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(x, expected_x)


def test_fusions_that_do_not_raise_the_peak_stay():
    def both_at_once(x, w):
        return torch.mm(x.sin().t(), x.cos())

    generated(both_at_once, order.patches())
    [record] = order.records()
    assert record.num_unfused == 0
    assert record.num_kernels == 2


def test_a_kernel_that_changes_its_input_is_left_whole():
    class Keeping(order.KernelOrder):
        def __call__(self, nodes):
            rigid = scheduler.mutable_names()
            parts = parts_of(nodes, storages_of(nodes))
            for node, movable in zip(parts.nodes, parts.movable, strict=True):
                touched = {dep.name for dep in node.read_writes.reads_and_writes()}
                assert not (movable and rigid & touched)
            found.append(rigid)
            return super().__call__(nodes)

    found = []
    generated(counting_twins, {**order.patches(), "_post_fusion_custom_pass": Keeping()})
    assert any(found)


def storages_of(nodes):
    scheduler.prepare(nodes)
    storages = Storages(nodes)
    storages.built = storages.graph("test")
    return storages


@pytest.mark.parametrize("function", [twins, normed_twins, counting_twins, chain])
def test_kernels_in_parts_need_the_same_memory_while_together(function):
    class Comparing(order.KernelOrder):
        def __call__(self, nodes):
            storages = storages_of(nodes)
            parts = parts_of(nodes, storages)
            live = _core.profile(storages.built.core, np.arange(len(nodes), dtype=np.int32)).live_bytes
            assert parts.live_bytes(parts.kernel).tolist() == live.tolist()
            found.append(len(parts.nodes) - len(nodes))
            return super().__call__(nodes)

    found = []
    generated(function, {**order.patches(), "_post_fusion_custom_pass": Comparing()})
    assert len(found) == 1
    assert (found[0] > 0) == (function in (twins, normed_twins))  # the others have none that may be taken apart


def test_functions_end_where_their_kernels_together_need_more_than_the_peak():
    usual, few = generated(chain, {"reorder_for_peak_memory": False})
    found, more = generated(chain, order.patches())
    [record] = order.records()
    assert found == record.peak_bytes
    assert usual - found >= 2 * HEIGHT * HEIGHT * 4
    assert more > few


def test_functions_hold_as_many_kernels_as_before_where_the_peak_is_elsewhere():
    def narrow_chain(x, w):
        wide = torch.mm(x, x.t())
        return chain(x[:32], w) + torch.mm(wide, wide).sum()

    _, usual = generated(narrow_chain, {"reorder_for_peak_memory": False})
    _, found = generated(narrow_chain, order.patches())
    assert found <= usual


def test_kernels_that_cannot_be_taken_apart_are_still_ordered(monkeypatch):
    monkeypatch.setattr(codegen, "is_plain_fusion", lambda node: node.gone)
    with pytest.warns(UserWarning, match="fusions stay as they are: .*AttributeError"):
        found, _ = generated(twins, order.patches())
    [record] = order.records()
    assert record.num_unfused == 0
    assert found == record.peak_bytes
