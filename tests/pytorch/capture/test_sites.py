"""Every op of a captured step says which module computes it, and which line of the user's own asked for it."""

from __future__ import annotations

import gc
import inspect
import weakref
from typing import Any

import pytest

import olla
from olla.pytorch.sites.sites import SITE, Sites
from tests.support.pytorch.steps import nn, torch

pytestmark = pytest.mark.torch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.act = nn.GELU()

    def forward(self, x: Any) -> Any:
        return self.act(self.inner(x)) + x


def loss(model: Any, batch: Any) -> Any:
    value = model(batch)
    return value.square().mean()


def line_of(function: Any, part: str) -> str:
    """Return the place of the line of a function that has this text in it."""
    lines, first = inspect.getsourcelines(function)
    return f"test_sites.py:{next(first + i for i, line in enumerate(lines) if part in line)}"


def captured(model: Any, **options: Any) -> olla.Graph:
    given: dict[str, Any] = {"optimizer": torch.optim.AdamW(model.parameters()), "loss": loss, **options}
    return olla.capture(model, torch.randn(4, 8), **given).graph


def sites(graph: olla.Graph, kind: str, target: str) -> list[tuple[str, str]]:
    rows = zip(graph.op_kinds, graph.targets, graph.modules, graph.sources, strict=True)
    return [(m, s.rpartition("/")[2]) for k, t, m, s in rows if k == kind and t.startswith(f"aten.{target}.")]


def test_ops_of_the_forward_pass_have_their_module_and_the_innermost_line() -> None:
    graph = captured(nn.Sequential(Block(), Block()))
    here = line_of(Block.forward, "self.act(")
    assert sites(graph, "forward", "addmm") == [("0.inner", here), ("1.inner", here)]
    assert sites(graph, "forward", "gelu") == [("0.act", here), ("1.act", here)]
    assert sites(graph, "forward", "add") == [("0", here), ("1", here)]
    assert sites(graph, "forward", "mean") == [("", line_of(loss, "mean()"))]


def test_ops_of_the_backward_pass_have_those_of_the_op_they_are_the_gradient_of() -> None:
    graph = captured(nn.Sequential(Block(), Block()))
    here = line_of(Block.forward, "self.act(")
    assert sites(graph, "backward", "gelu_backward") == [("1.act", here), ("0.act", here)]
    found = sites(graph, "backward", "mm")
    assert found == [("1.inner", here), ("1.inner", here), ("0.inner", here)]  # the batch needs no gradient


def test_what_the_step_function_asks_for_has_its_line() -> None:
    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # here
        optimizer.step()
        return value

    graph = captured(nn.Sequential(Block()), loss=None, step=step)
    clipped = [site for kind in set(graph.op_kinds) for site in sites(graph, kind, "stack")]
    assert ("", line_of(step, "# here")) in clipped
    assert sites(graph, "forward", "gelu") == [("0.act", line_of(Block.forward, "self.act("))]


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_runs_again_has_the_module_that_runs(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.last = Block(), nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            x = x + self.last.bias
            return self.last(torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=reentrant))

    graph = captured(Checkpointed())
    assert [module for module, _ in sites(graph, "backward", "gelu_backward")] == ["block.act"]
    assert [module for module, _ in sites(graph, "backward", "addmm")] == ["block.inner"]  # the second run


def test_a_module_that_is_called_twice_has_one_name() -> None:
    block = Block()
    graph = captured(nn.Sequential(block, block))
    assert {module for module, _ in sites(graph, "forward", "addmm")} == {"0.inner"}


def test_the_gradient_of_a_function_of_the_users_own_has_the_site_of_its_call() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient.cos()

    class Doubled(nn.Linear):
        def forward(self, x: Any) -> Any:
            return Double.apply(super().forward(x))

    graph = captured(nn.Sequential(Doubled(8, 8)))
    assert [module for module, _ in sites(graph, "backward", "cos")] == ["0"]


def test_a_capture_keeps_names_and_nothing_else_of_the_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    begin = Sites.__init__

    def noted(self: Sites, *arguments: Any) -> None:
        begin(self, *arguments)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Sites, "__init__", noted)
    model = nn.Sequential(Block())
    kept = olla.capture(model, torch.randn(4, 8), optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
    found = [node.meta[SITE] for node in kept.module.graph.nodes if SITE in node.meta]
    assert {type(text) for site in found for text in site} == {str}
    assert len({id(site) for site in found}) == len(set(found))  # equal ones are one object
    gc.collect()
    assert [sites() for sites in made] == [None]


def test_a_file_keeps_modules_and_lines_and_neither_changes_the_digest(tmp_path: Any) -> None:
    graph = captured(nn.Sequential(Block()))
    graph.save(tmp_path / "step.json.gz")
    again = olla.Graph.load(tmp_path / "step.json.gz")
    assert (again.modules, again.sources) == (graph.modules, graph.sources)
    content = graph.to_dict()
    for row in content["ops"]:
        for name in ("module", "source"):
            row.pop(name, None)
    assert olla.Graph.from_dict(content).digest == graph.digest


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch about its own
def test_an_exported_program_has_the_modules_and_lines_that_torch_noted() -> None:
    program = torch.export.export(nn.Sequential(Block(), Block()), (torch.randn(4, 8),))
    graph = olla.from_fx(program.graph_module)
    here = line_of(Block.forward, "self.act(")
    assert sites(graph, graph.op_kinds[0], "gelu") == [("0.act", here), ("1.act", here)]
