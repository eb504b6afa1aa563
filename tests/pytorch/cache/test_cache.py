"""The cache on disk: a second process runs the same step without planning it; what is there changes no number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import olla
from olla.base.folders import cache_folder
from olla.errors import PlanError
from olla.pytorch import cache
from olla.pytorch.ranks.agreement import checked_plan
from tests.support.pytorch.steps import nn, square, torch
from tests.support.training import training_chain

pytestmark = pytest.mark.torch

# A process that runs five steps and prints what came out; {...} are the places that tests change.
PROGRAM = """
import hashlib, json, sys
import torch, olla
import helper
from torch import nn

SCALE = {scale}

class Settings:
    def __init__(self):
        self.slope = {slope}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.settings = Settings()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.drop = nn.Dropout({p})
        if {tied}:
            self.second.weight = self.first.weight
        self.limits = torch.tensor({constant})
    def forward(self, x):
        hidden = nn.functional.leaky_relu(self.drop(self.first(x)), self.settings.slope)
        return helper.shift(self.second(hidden)).clamp(-2, 2) * self.limits.sum()

def make_loss(power):
    return lambda model, x: SCALE * model(x).abs().pow(power).mean()

torch.manual_seed(0)
model = Net()
{change}
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum={momentum})
step = olla.compile(model, optimizer=optimizer, loss=make_loss({power}), arena={arena}, time_limit=1.0)
batch = torch.randn({size}, 6)
torch.manual_seed(1)
losses = [step(batch).item() for _ in range(5)]
step._latest._captured.graph.save("{graph}")
state = b"".join(t.numpy().tobytes() for t in model.state_dict().values())
report = step.report()
print(json.dumps([report.cached, losses, hashlib.sha256(state).hexdigest(), report.note, report.num_misses,
                  report.capture_seconds, report.record_seconds, report.planned_peak_bytes]))
"""
DEFAULTS = {
    "scale": "1.0", "slope": "0.1", "p": "0.5", "tied": "False", "constant": "[1.0, 2.0]", "change": "", "power": "2",
    "momentum": "0.9", "arena": "False", "size": "4",
}  # fmt: skip
HELPER = "OFFSET = 1.0\ndef shift(x):\n    return x + OFFSET\n"


class Bench:
    """A folder with a program, a module it imports and a cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.helper = folder / "helper.py"
        self.helper.write_text(HELPER)
        self.entries = folder / "cache" / "steps"
        self.entries.parent.mkdir()
        (folder / "cache" / "replay").symlink_to(cache_folder() / "replay")  # the allocator is not compiled anew

    def graph(self) -> Path:
        """Where the last run has left the graph it captured."""
        return self.folder / "graph.json"

    def run(self, **changes: str) -> list[Any]:
        """Run the program in a process of its own: [cached, losses, state, note, misses, seconds..., peak]."""
        program = PROGRAM
        for name, value in (DEFAULTS | changes | {"graph": str(self.graph())}).items():
            program = program.replace(f"{{{name}}}", value)
        environment = os.environ | {"PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        environment["OLLA_DISK_CACHE"] = "1"
        environment["OLLA_CACHE_DIR"] = str(self.folder / "cache")
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        answer: list[Any] = json.loads(done.stdout.splitlines()[-1])
        return answer


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bench, list[Any]]:
    """A cache that knows the unchanged program, and what that printed."""
    bench = Bench(tmp_path_factory.mktemp("warm"))
    first = bench.run()
    assert first[0] is False
    assert "disk" not in first[3]
    return bench, first


def test_a_second_process_plans_nothing_and_computes_the_same_to_the_bit(warm: tuple[Bench, list[Any]]) -> None:
    bench, first = warm
    second = bench.run()
    assert second[0] is True
    assert second[1:5] == first[1:5]
    assert second[7] == first[7]


@pytest.mark.parametrize(
    "changes",
    [
        {"slope": "0.2"},  # a value in the model's settings
        pytest.param({"power": "3"}, marks=pytest.mark.slow),  # a constant in the closure of the loss
        pytest.param({"scale": "2.0"}, marks=pytest.mark.slow),  # a global that the loss names
        pytest.param({"p": "0.4"}, marks=pytest.mark.slow),
        {"tied": "True"},
        pytest.param({"constant": "[1.0, 3.0]"}, marks=pytest.mark.slow),  # the value of a plain tensor
        {"momentum": "0.8"},
        pytest.param({"size": "5"}, marks=pytest.mark.slow),
        pytest.param({"change": "model.first.bias.requires_grad_(False)"}, marks=pytest.mark.slow),
        pytest.param({"change": "helper.OFFSET = 3.0"}, marks=pytest.mark.slow),  # a global of a module
        {"change": "Net.forward = lambda self, x: self.second(self.first(x))"},
        {"change": "import os; os.environ['SCALE'] = '2'; helper.shift = lambda x: x * float(os.getenv('SCALE'))"},
    ],
    ids=str,
)  # fmt: skip
def test_another_step_computes_what_it_computes_without_a_cache(
    changes: dict[str, str], warm: tuple[Bench, list[Any]], tmp_path: Path
) -> None:
    bench, first = warm
    with_entries, without = bench.run(**changes), Bench(tmp_path).run(**changes)
    assert with_entries[1:3] == without[1:3] != first[1:3]


def test_an_entry_with_another_valid_plan_changes_no_number(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    first = bench.run()
    [entry] = bench.entries.glob("*.plan")
    content = json.loads(entry.read_bytes().partition(b"\n")[2])
    graph, order = olla.Graph.load(bench.graph()), content["order"]
    swapped = next(o for i in range(len(order) - 1) if graph.core.is_order(o := _exchanged(order, i)))
    _rewrite(entry, content | {"order": swapped.tolist()})
    other = bench.run()
    assert other[1:3] == first[1:3]


@pytest.mark.parametrize("order", ["reversed", *(pytest.param(o, marks=pytest.mark.slow) for o in ("strings", "code"))])
def test_an_injected_entry_is_made_again(order: str, tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    first = bench.run()
    [entry] = bench.entries.glob("*.plan")
    content = json.loads(entry.read_bytes().partition(b"\n")[2])
    code = "__import__('pathlib').Path('was_run').touch()"
    orders = {
        "reversed": content["order"][::-1],
        "strings": [str(v) for v in content["order"]],
        "code": [code] * len(content["order"]),
    }
    _rewrite(entry, content | {"order": orders[order], "method": code, "name": code})
    again = bench.run()
    assert again[0] is False
    assert again[1:3] == first[1:3]
    assert not list(tmp_path.rglob("was_run"))


def test_a_plan_of_the_last_graph_alone_is_no_entry_of_the_first() -> None:
    graph = training_chain()
    plan = olla.plan(graph, minimise="peak", time_limit=1.0)
    content = json.loads(json.dumps(plan.to_object()))
    assert checked_plan(content, graph).rewrites
    assert plan.graph is not None
    olla.check(plan.graph, plan)
    with pytest.raises(PlanError, match="made for another graph"):
        checked_plan(content, plan.graph)


def _exchanged(order: list[int], i: int) -> np.ndarray:
    return np.array([*order[:i], order[i + 1], order[i], *order[i + 2 :]], dtype=np.int32)


def _rewrite(entry: Path, content: Any) -> None:
    body = json.dumps(content).encode()
    entry.write_bytes(cache._head(body).encode() + b"\n" + body)


@pytest.mark.parametrize(
    "damage", ["bit", *(pytest.param(d, marks=pytest.mark.slow) for d in ("cut", "foreign", "empty", "number"))]
)
def test_a_damaged_entry_is_made_again(damage: str, tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    first = bench.run()
    [entry] = bench.entries.glob("*.plan")
    content = entry.read_bytes()
    middle = len(content) // 2
    entry.write_bytes(
        {
            "cut": content[:middle],
            "bit": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
            "foreign": b"GIF89a",
            "empty": b"",
            "number": content.replace(b"1", b"2"),
        }[damage]
    )
    again = bench.run()
    assert again[0] is False
    assert again[1:3] == first[1:3]
    assert bench.run()[0] is True


def test_the_recorded_places_are_used_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    first, second = bench.run(arena="True"), bench.run(arena="True")
    assert (first[0], second[0]) == (False, True)
    assert first[6] > 0 == second[6]  # seconds of recording
    assert second[1:3] == first[1:3]
    assert (second[4], second[7]) == (0, first[7])


def test_a_folder_that_others_can_write_to_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OLLA_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("OLLA_DISK_CACHE")
    (tmp_path / "steps").mkdir(mode=0o700)
    (tmp_path / "steps").chmod(0o777)
    model = nn.Linear(3, 3)
    step = olla.compile(model, loss=square, arena=False)
    step(torch.ones(2, 3))
    assert "others can write to" in step.report().note
    assert list((tmp_path / "steps").iterdir()) == []


def test_the_entries_used_last_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OLLA_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("OLLA_DISK_CACHE")
    monkeypatch.setattr(cache, "MAX_ENTRIES", 2)
    step = olla.compile(nn.Linear(3, 3), loss=square, arena=False)
    for size in (1, 2, 3, 4):
        step.model.zero_grad()  # adding to a gradient is another step
        step(torch.ones(size, 3))
    assert len(list((tmp_path / "steps").iterdir())) == 2
    again = olla.compile(nn.Linear(3, 3), loss=square, arena=False)
    again(torch.ones(4, 3))
    assert again.report().cached
    again.model.zero_grad()
    again(torch.ones(1, 3))
    assert not again.report().cached


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OLLA_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("OLLA_DISK_CACHE")
    step = olla.compile(nn.Linear(3, 3), loss=square, arena=False, disk_cache=False)
    step(torch.ones(2, 3))
    assert (step.report().cached, step.report().note.count("disk")) == (False, 0)
    assert not (tmp_path / "steps").exists()
