"""ExecuTorch programs planned by `olla.layout`: they run in its own runtime, and its verifier agrees."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

from olla.errors import PlanError
from olla.integrations.executorch import layout_algorithm, memory_planning

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of executorch's own imports
    pytest.importorskip("executorch.exir", reason="pip install executorch: its programs are planned and run here")
    from executorch.exir import ExecutorchBackendConfig, to_edge
    from executorch.exir.memory_planning import MemoryPlanningAlgorithmSuite, Verifier, greedy
    from executorch.exir.passes import MemoryPlanningPass
    from executorch.exir.tensor import TensorSpec

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]


class Branches(torch.nn.Module):
    """Tensors of several sizes that live across others, so that their offsets differ from a greedy rule's."""

    def forward(self, x: Any) -> Any:
        wide = torch.cat([x, x * 2, x * 3], 1)
        middle = torch.cat([x.tanh(), x + 1], 1)
        return (wide[:, 4:12].sigmoid() @ middle.T).softmax(-1) @ middle + wide[:, :1]


class Choice(torch.nn.Module):
    """A branch on a value: both sides are graphs inside the program."""

    def forward(self, x: Any) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x.exp() * x + 1, lambda x: x.tanh() * 2, (x,)) * 3


class Counter(torch.nn.Module):
    """A buffer that every call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Any) -> Any:
        self.seen.add_(x.sum(0))
        return (x + self.seen).relu()


def small() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.GELU(), torch.nn.Linear(64, 8), torch.nn.Softmax(-1))


MODELS: dict[str, Callable[[], Any]] = {"mlp": small, "branches": Branches, "choice": Choice, "counter": Counter}


def planned(model: Any, algorithm: Any, *, in_place: bool = False) -> Any:
    """Return the program of a model on inputs of shape (8, 4)."""
    edge = to_edge(torch.export.export(model.eval(), (torch.zeros(8, 4),)))
    config = ExecutorchBackendConfig(memory_planning_pass=MemoryPlanningPass(algorithm), run_reinplace_pass=in_place)
    return edge.to_executorch(config)


def verified(program: Any) -> int:
    """Let ExecuTorch's verifier look for tensors that share bytes while both live; return how many pairs share any."""
    exported = program.exported_program()
    return Verifier(exported.graph_module, True, True, True, exported.graph_signature).verify_storage_reuse()


def sizes(program: Any) -> list[int]:
    return list(program.executorch_program.execution_plan[0].non_const_buffer_sizes)


@pytest.mark.parametrize(("name", "in_place"), [*((name, False) for name in MODELS), ("branches", True)])
def test_a_program_planned_by_olla_alone_runs_and_its_verifier_agrees(name: str, in_place: bool) -> None:
    runtime = pytest.importorskip("executorch.runtime", reason="executorch without its runtime").Runtime
    torch.manual_seed(0)
    model = MODELS[name]()
    program = planned(model, MemoryPlanningAlgorithmSuite([layout_algorithm()]), in_place=in_place)
    assert verified(program) > 0
    method = runtime.get().load_program(program.buffer).load_method("forward")
    for sign in (1, -1, 1):
        x = sign * torch.rand(8, 4)
        with torch.no_grad():
            torch.testing.assert_close(method.execute([x])[0], model(x))


@pytest.mark.parametrize("name", MODELS)
def test_no_program_needs_more_than_with_greedy(name: str) -> None:
    assert sum(sizes(planned(MODELS[name](), memory_planning()))) <= sum(sizes(planned(MODELS[name](), None)))


def test_a_program_needs_less_where_greedy_leaves_gaps() -> None:
    """Sizes and lifetimes, chosen so that large tensors first leave a gap; the bound is the load, 24 blocks."""
    lifetimes = [(0, 2, 8), (1, 4, 6), (3, 6, 10), (4, 7, 8), (6, 9, 12), (0, 9, 2), (8, 9, 8)]
    specs = [spec(num * 16, first, last) for first, last, num in lifetimes]
    result = layout_algorithm()(16, specs, None, None, 0)
    alive = max(sum(num for first, last, num in lifetimes if first <= t <= last) for t in range(10))
    assert result.bufsizes == [0, 16 * alive]
    assert sum(greedy(16, set(specs), None, None, 0).bufsizes) > 16 * alive


def spec(num_bytes: int, first: int, last: int, **values: Any) -> Any:
    made = TensorSpec(torch.uint8, torch.Size([num_bytes]))
    made.lifetime = [first, last]
    for key, value in values.items():
        setattr(made, key, value)
    return made


def test_memories_alignment_padding_and_what_branches_take_are_kept() -> None:
    module = type("Module", (), {"input_mem_buffer_sizes": [0, 48, 0, 32]})
    one, two, three = spec(10, 0, 1), spec(20, 0, 1, mem_id=3), spec(5, 0, 1, mem_id=3)
    result = layout_algorithm()(16, [one, two, three], module, None, 64)
    assert result.bufsizes == [0, 48 + 16 + 64, 0, 32 + 48 + 64]
    assert result.bufsizes == greedy(16, {one, two, three}, module, None, 64).bufsizes
    assert (result.spec_dict[one].mem_id, result.spec_dict[one].mem_offset) == (1, 48)
    places = sorted(result.spec_dict[s].mem_offset for s in (two, three))
    assert places in ([32, 64], [32, 48])


def test_tensors_in_place_lie_inside_what_backs_them() -> None:
    base = spec(64, 0, 5)
    view = spec(32, 1, 2, storage_base=base, storage_base_offset=32)
    inner = spec(16, 1, 1, storage_base=view, storage_base_offset=16)
    below = spec(16, 0, 5)
    result = layout_algorithm()(16, [inner, view, below, base], None, None, 0)
    offset = {name: result.spec_dict[s].mem_offset for name, s in (("base", base), ("view", view), ("inner", inner))}
    assert (offset["view"] - offset["base"], offset["inner"] - offset["base"]) == (32, 48)
    assert result.bufsizes == [0, 80]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"storage_base_offset": 56}, "a tensor of 16 bytes at byte 56 does not fit into the 64 bytes"),
        ({"storage_base": "self"}, r"a tensor of shape \[16\] is backed by itself"),
        ({"storage_base": "absent"}, "backed by one that is not planned with it"),
    ],
)
def test_a_tensor_that_does_not_fit_what_backs_it_is_refused(values: dict[str, Any], words: str) -> None:
    base = spec(64, 0, 5)
    view = spec(16, 1, 2, storage_base=base, storage_base_offset=0)
    for key, value in values.items():
        setattr(view, key, {"self": view, "absent": spec(64, 0, 5)}.get(value, value))
    with pytest.raises(PlanError, match=words):
        layout_algorithm()(16, [base, view], None, None, 0)


def test_offsets_that_are_to_stay_stay() -> None:
    still, first, second = spec(32, 0, 9, mem_offset=64), spec(64, 0, 4), spec(48, 5, 9, mem_offset=None)
    result = layout_algorithm(keep_offsets=True)(16, [still, first, second], None, None, 0)
    assert result.spec_dict[still].mem_offset == 64
    assert result.bufsizes == [0, 96]
    ignored = layout_algorithm()(16, [still, first, second], None, None, 0)
    assert ignored.bufsizes == [0, 96]


def test_an_offset_among_bytes_that_are_taken_is_refused() -> None:
    module = type("Module", (), {"input_mem_buffer_sizes": [0, 64]})
    with pytest.raises(
        PlanError, match=r"is to stay at byte 32, but the first 64 bytes of its memory belong to branches"
    ):
        layout_algorithm(keep_offsets=True)(16, [spec(32, 0, 9, mem_offset=32)], module, None, 0)


def test_nothing_to_plan_gives_empty_memories() -> None:
    assert layout_algorithm()(16, [], None, None, 0).bufsizes == greedy(16, set(), None, None, 0).bufsizes == [0, 0]
