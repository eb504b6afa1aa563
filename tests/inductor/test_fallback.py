"""Whatever fails in olla while a graph is compiled: torch's own decision stands, and one warning says so."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import fx
from torch._dynamo.utils import counters

import olla.inductor
from olla.errors import PlanError
from olla.inductor.compat import compat
from olla.inductor.kernels import fused, order, unfuse
from olla.inductor.saving import joint, rebuild, saving, split_sums, verify
from olla.inductor.settings import patches
from olla.inductor.simulate import split
from olla.inductor.simulate.step import replay
from tests.support.pytorch.compiling import LEAST, blocks, caches, fresh, inputs, square, without_kernels  # noqa: F401
from tests.support.pytorch.steps import nn, torch

pytestmark = pytest.mark.torch


class Planted(Exception):
    """Raised in place of what a part of olla does."""


def planted(*_: Any, **__: Any) -> Any:
    raise Planted("on purpose")


@contextmanager
def one_warning(*parts: str) -> Iterator[None]:
    """Expect one warning of olla's in a block, in which these words occur."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    ours = [text for w in caught if "olla" in (text := str(w.message))]
    assert len(ours) == 1, ours
    assert all(part in ours[0] for part in parts), ours[0]


def gradients(model: nn.Module, **compiled: Any) -> list[torch.Tensor]:
    torch.compiler.reset()
    model.zero_grad()
    torch.manual_seed(1)
    loss = torch.compile(lambda m, x: square(m, x), **compiled)(model, inputs(1)[0])
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


_PARTITION = [
    (compat, "obstacle"),
    (compat, "prepare"),
    (joint, "base_order"),
    (joint, "fusion_of"),
    (saving, "_points"),
    (saving, "_lower_bound"),
    (rebuild._Rebuilder, "run"),
    (rebuild._Rebuilder, "size"),
    (split_sums, "keep_apart"),
    (verify, "rewritten"),
    (compat, "split"),
    (verify, "halves"),
]


@pytest.mark.parametrize(("holder", "name"), _PARTITION, ids=lambda value: value if isinstance(value, str) else "")
def test_a_partitioner_that_fails_leaves_torchs_two_graphs(
    holder: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the letter: what olla did to the joint graph before it failed is not in them."""
    seen: list[list[str]] = []

    def watched(partition: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            halves = partition(*args, **kwargs)
            seen.append([half.code for half in halves])
            return halves

        return call

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (nn.functional.dropout(x @ w, 0.3).sin().exp() / x.shape[0] @ w).tanh().mean()

    def run(partition: Any) -> list[Any]:
        torch.compiler.reset()
        torch.manual_seed(1)
        x, w = torch.ones(6, 8, requires_grad=True), torch.eye(8, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        loss = torch.compile(program, backend=without_kernels(watched(partition)))(x, w)
        loss.backward()
        return [loss.detach(), x.grad, w.grad]

    expected = run(compat.min_cut_partition)
    partitioner = patches(**LEAST)["custom_partitioner_fn"]
    partitioner.choices = []
    monkeypatch.setattr(holder, name, planted)
    with one_warning("torch's own partitioner", "olla.inductor.", "Planted", "on purpose", "report"):
        found = run(partitioner)
        run(partitioner)
    assert all(map(torch.equal, found, expected))
    assert seen[0] == seen[1] == seen[2]
    assert partitioner.choices == []


_CODE = [
    (order.KernelOrder, "_ordered", "torch's own order", {}),
    (fused.Storages, "graph", "torch's own order", {}),
    (fused.Storages, "tell", "torch's own figures", {}),
    (unfuse.Unfusing, "search", "fusions stay", {}),
    (order, "ends", "functions of kernels end", {}),
    (compat, "keep_strides_of_results", "layout torch gives them", {}),
]


_QUICK = ("_ordered", "search", "keep_strides_of_results")


@pytest.mark.parametrize(
    ("holder", "name", "consequence", "options"),
    [pytest.param(*case, id=case[1], marks=() if case[1] in _QUICK else pytest.mark.slow) for case in _CODE],
)
def test_what_fails_while_code_is_generated_leaves_that_to_torch(
    holder: Any, name: str, consequence: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder, name, planted)
    model = blocks(1, dropout=0.0)
    settings = patches(max_recomputed=0.0, **options)
    with compat.config.patch(settings), one_warning(consequence, "Planted", "report"):
        found = gradients(model)
    torch.testing.assert_close(found, gradients(model), rtol=1e-4, atol=1e-5)


def test_where_everything_fails_the_code_is_torchs() -> None:
    def source(**settings: Any) -> list[str]:
        with compat.config.patch(settings):
            return replay(blocks(1, dropout=0.0), inputs(1)[0], square).sources

    expected = source()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for holder, name, *_ in (*_PARTITION, *_CODE):
            patch.setattr(holder, name, planted)
        found = source(**patches(**LEAST))
    assert [text.split("async_compile.wait")[1] for text in found] == [
        text.split("async_compile.wait")[1] for text in expected
    ]


def test_the_traceback_is_in_the_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(saving.Front, "choose", planted)
    with caplog.at_level(logging.DEBUG, logger="olla.inductor"), one_warning("partition._planned"):
        gradients(blocks(1), backend=without_kernels(patches(**LEAST)["custom_partitioner_fn"]))
    assert any(record.exc_info and record.exc_info[0] is Planted for record in caplog.records)


def test_figures_and_formulas_that_fail_end_no_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "flop_formula", lambda target: planted if "mm" in str(target) else None)
    splits: list[split.Split] = []
    with warnings.catch_warnings(), split.recorded(splits), olla.inductor.enable(**LEAST):
        warnings.filterwarnings("ignore", message="the flops of .* are left out")
        replay(blocks(1), inputs(1)[0], square, watch=splits.append)
    assert splits
    assert splits[0].flops == 0


def rewired(graph: fx.Graph, origin: dict[fx.Node, fx.Node]) -> None:
    """Make one node read another of the same shape."""
    sin, exp = graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)[:2]
    exp.args = (sin.args[0],)


def twice(graph: fx.Graph, origin: dict[fx.Node, fx.Node]) -> None:
    """Draw the same random numbers a second time."""
    node = next(n for n in graph.nodes if "rand" in str(n.target))
    with graph.inserting_after(node):
        origin[graph.node_copy(node, lambda n: n)] = origin[node]


def early(graph: fx.Graph, origin: dict[fx.Node, fx.Node]) -> None:
    """Use a value before it is there."""
    first = next(n for n in graph.nodes if n.op == "call_function")
    list(graph.nodes)[-2].append(first)


def stranger(graph: fx.Graph, origin: dict[fx.Node, fx.Node]) -> None:
    """Return something else."""
    (results,) = graph.output_node().args
    graph.output_node().args = ((results[0].args[0], *results[1:]),)  # type: ignore[index, union-attr]


@pytest.mark.parametrize("wrong", [rewired, twice, early, stranger])
def test_a_rewritten_graph_that_computes_something_else_is_not_used(
    wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(old: fx.Graph, new: fx.Graph, origin: dict[fx.Node, fx.Node]) -> None:
        rewritten(old, new, origin)
        wrong(new, origin)
        rewritten(old, new, origin)

    def run(partition: Any) -> list[torch.Tensor]:
        torch.compiler.reset()
        torch.manual_seed(1)
        x = torch.ones(4, 4, requires_grad=True)
        torch.compile(lambda x: (x.sin().sin() * torch.rand(4, 4)).exp(), backend=without_kernels(partition))(
            x
        ).sum().backward()
        assert x.grad is not None
        return [x.grad]

    rewritten = verify.rewritten
    expected = run(compat.min_cut_partition)
    monkeypatch.setattr(verify, "rewritten", broken)
    with one_warning("verify", "torch's own partitioner"):
        assert torch.equal(run(patches(**LEAST)["custom_partitioner_fn"])[0], expected[0])


def test_halves_that_do_not_fit_together_are_not_used() -> None:
    seen: list[tuple[Any, ...]] = []
    halves = verify.halves
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "halves", lambda *args: seen.append(args))
        gradients(blocks(1), backend=without_kernels(patches(**LEAST)["custom_partitioner_fn"]))
    ((forward, backward, graph, num_forward),) = seen
    halves(forward, backward, graph, num_forward)
    with pytest.raises(PlanError, match="beside what backward takes"):
        halves(forward, _other(backward), graph, num_forward)
    with pytest.raises(PlanError, match="do not return what the joint graph returns"):
        halves(backward, forward, graph, num_forward)


def _other(module: Any) -> Any:
    """The same graph with an input of another name."""
    graph = fx.Graph()
    results = graph.graph_copy(module.graph, {})
    first = next(n for n in graph.nodes if n.op == "placeholder")
    first.name = "somebody"
    graph.output(results)
    return fx.GraphModule(module, graph)


@pytest.mark.usefixtures("caches")
def test_what_was_warned_of_does_not_come_out_of_a_cache_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(**goal: Any) -> int:
        torch.compiler.reset()
        counters.clear()
        gradients(blocks(1, dropout=0.0), backend="olla", options=goal)
        return int(counters["aot_autograd"]["autograd_cache_hit"])

    with monkeypatch.context() as patch, one_warning("Planted"):
        patch.setattr(saving.Front, "choose", planted)
        assert step(**LEAST) == 0
    assert (step(**LEAST), step(**LEAST)) == (0, 1)
    for _ in range(2):  # the second stands for another process
        with monkeypatch.context() as patch, one_warning("a reason"):
            patch.setattr(compat, "obstacle", lambda _: "a reason")
            assert step(max_slowdown=0.1) == 0
        olla.inductor.compat.fallback.forget()
    with one_warning("budget=1000 bytes"):
        assert step(budget=1000) == 0
    olla.inductor.compat.fallback.forget()
    with one_warning("budget=1000 bytes"):
        assert step(budget=1000) == 0


@pytest.mark.usefixtures("caches")
def test_every_graph_of_a_process_comes_out_of_the_cache_in_the_next() -> None:
    """Two graphs divided by one partitioner: what happened to the first is no part of the key of the second."""
    found = []
    for _ in range(2):
        torch.compiler.reset()
        counters.clear()
        with olla.inductor.enable(**LEAST):
            for activation in (torch.sin, torch.cos):
                x = torch.ones(8, requires_grad=True)
                torch.compile(lambda x, activation=activation: activation(x).exp())(x).sum().backward()
        found.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert found == [0, 2]


def test_an_impossible_budget_is_named_with_the_least_that_was_found() -> None:
    partitioner = patches(budget="1KB")["custom_partitioner_fn"]
    partitioner.choices = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gradients(blocks(2), backend=without_kernels(partitioner))
    (choice,) = partitioner.choices
    (text,) = [str(w.message) for w in caught if "budget=1000 bytes" in str(w.message)]
    least = choice.known_peak_bytes
    assert least > 1000
    assert f"{least} bytes" in text
    assert f"Ask for budget={least}" in text
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="olla")
        gradients(blocks(2), backend=without_kernels(patches(budget=least)["custom_partitioner_fn"]))
