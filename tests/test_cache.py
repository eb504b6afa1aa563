"""The cache on disk: a second process runs the same step without capturing it, and any change captures it anew."""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest
from steps import nn, square, torch

import olla
from olla.pytorch import cache, fingerprint, origins
from olla.pytorch.extension import cache_folder
from olla.pytorch.feeds import flatten
from olla.pytorch.walk import NotUnderstood, Walk

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

    def run(self, **changes: str) -> list[Any]:
        """Run the program in a process of its own: [cached, losses, state, note, misses, seconds..., peak]."""
        program = PROGRAM
        for name, value in (DEFAULTS | changes).items():
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


def test_a_second_process_captures_nothing_and_computes_the_same_to_the_bit(warm: tuple[Bench, list[Any]]) -> None:
    bench, first = warm
    second = bench.run()
    assert second[0] is True
    assert second[1:5] == first[1:5]
    assert second[7] == first[7]


@pytest.mark.parametrize(
    "changes",
    [
        {"slope": "0.2"},  # a value in the model's settings
        {"power": "3"},  # a constant in the closure of the loss
        {"scale": "2.0"},  # a global that the loss names
        {"change": "helper.OFFSET = 3.0"},  # a global of a module
        {"change": "Net.forward = lambda self, x: self.second(self.first(x))"},
    ],
    ids=str,
)  # fmt: skip
def test_another_step_is_captured_anew(changes: dict[str, str], warm: tuple[Bench, list[Any]]) -> None:
    bench, _ = warm
    assert bench.run(**changes)[0] is False


def digest_of(**changes: str) -> str:
    """The digest of the program's step, without running it."""
    text = PROGRAM.partition("step = olla.compile")[0]
    for name, value in (DEFAULTS | changes).items():
        text = text.replace(f"{{{name}}}", value)
    helper = types.ModuleType("helper")
    exec(HELPER, vars(helper))
    space: dict[str, Any] = {"__name__": "program", "__builtins__": builtins, "helper": helper}
    exec(text.replace("import helper", ""), space)
    loss = space["make_loss"](int((DEFAULTS | changes)["power"]))
    batch = flatten(torch.randn(int((DEFAULTS | changes)["size"]), 6))
    return fingerprint.fingerprint(space["model"], space["optimizer"], loss, None, *batch).digest


@pytest.mark.parametrize(
    "changes",
    [
        {"slope": "0.2"},
        {"power": "3"},
        {"scale": "2.0"},
        {"p": "0.4"},
        {"tied": "True"},
        {"constant": "[1.0, 3.0]"},  # the value of a plain tensor
        {"momentum": "0.8"},
        {"size": "5"},
        {"change": "model.first.eval()"},
        {"change": "model.drop.eval()"},
        {"change": "model.first.bias.requires_grad_(False)"},
        {"change": "model.first.bias.data = model.second.bias.data"},  # one storage
        {"change": "model.first.weight.data = model.first.weight.data.T"},
        {"change": "model.settings.other = 1"},
        {"change": "model.double()"},
        {"change": "model.extra = nn.Linear(1, 1)"},
        {"change": "model.teacher = [nn.Linear(1, 1)]"},  # no child: its parameters are constants
        {"change": "helper.OFFSET = 3.0"},
        {"change": "helper.shift = lambda x: x - 1.0"},
        {"change": "helper.shift.__defaults__ = (1,)"},
        {"change": "Net.forward = lambda self, x: self.second(self.first(x))"},
        {"change": "model.forward = lambda x: model.second(model.first(x))"},
        {"change": "Net.__call__ = lambda self, x: self.forward(x) * 2"},
        {"change": "model.first.register_forward_hook(lambda module, inputs, output: output * 2)"},
    ],
    ids=str,
)  # fmt: skip
def test_a_change_gives_another_digest(changes: dict[str, str]) -> None:
    same = digest_of()
    assert same == digest_of()
    changed = digest_of(**changes)
    assert changed != same
    assert changed == digest_of(**changes)
    assert digest_of() == same


def test_every_parameter_of_a_distillation_teacher_is_compared() -> None:
    torch.manual_seed(0)
    teacher = nn.Linear(3, 3)
    model = nn.Linear(3, 3)

    def loss(model: nn.Module, x: Any) -> Any:
        return (model(x) - teacher(x)).square().mean()

    before = digest(model, loss)
    with torch.no_grad():
        teacher.bias[2] += 1
    assert digest(model, loss) != before


@pytest.mark.parametrize(
    ("change", "undo"),
    [
        ("nn.Linear.forward = lambda self, x: x @ self.weight.T", "nn.Linear.forward = old"),
        ("nn.functional.linear = lambda x, w, b: x @ w.T", "nn.functional.linear = old_function"),
        ("torch.use_deterministic_algorithms(True)", "torch.use_deterministic_algorithms(False)"),
        ("torch.backends.mkldnn.enabled = False", "torch.backends.mkldnn.enabled = True"),
        ("torch.set_default_dtype(torch.float64)", "torch.set_default_dtype(torch.float32)"),
        ("torch.backends.cuda.enable_flash_sdp(False)", "torch.backends.cuda.enable_flash_sdp(True)"),
        ("hook = nn.modules.module.register_module_forward_hook(lambda m, i, o: o * 2)", "hook.remove()"),
    ],
)
def test_another_state_of_torch_gives_another_digest(change: str, undo: str) -> None:
    model = nn.Linear(3, 3)
    before = digest(model)
    space = {"torch": torch, "nn": nn, "old": nn.Linear.forward, "old_function": nn.functional.linear}
    exec(change, space)
    try:
        changed = digest(model)
    finally:
        exec(undo, space)
    assert changed != before == digest(model)


def test_the_source_of_an_imported_module_is_compared(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    first = bench.run()
    bench.helper.write_text(HELPER.replace("1.0", "1.5"))
    changed = bench.run()
    assert (first[0], changed[0]) == (False, False)
    assert changed[1] != first[1]
    bench.helper.write_text(HELPER.replace("1.0", "1.5") + "# whatever a trace might have read of it")
    assert bench.run()[0] is False
    assert bench.run()[0] is True


@pytest.mark.parametrize("damage", ["cut", "bit", "foreign", "empty", "number"])
def test_a_damaged_entry_is_made_again(damage: str, tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    first = bench.run()
    [entry] = bench.entries.glob("*.step")
    content = entry.read_bytes()
    middle = len(content) // 2
    entry.write_bytes(
        {
            "cut": content[:middle],
            "bit": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
            "foreign": b"GIF89a",
            "empty": b"",
            "number": content.replace(b'"aten::mul', b'"aten::add'),
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


def digest(model: nn.Module, loss: Any = square, optimizer: Any = None) -> str:
    return fingerprint.fingerprint(model, optimizer, loss, None, *flatten(torch.ones(2, 3))).digest


def test_what_is_not_understood_is_named() -> None:
    model = nn.Linear(3, 3)
    model.source = iter([1])  # type: ignore[assignment]
    with pytest.raises(NotUnderstood, match=r"model\.source is a builtins\.list_iterator"):
        digest(model)
    kept = [(other := nn.Linear(3, 3)).weight]
    with pytest.raises(NotUnderstood, match="weight, reached on a second way"):
        digest(other, loss=lambda model, x: (model(x) * kept[0]).sum())
    with torch.device("cpu"), pytest.raises(NotUnderstood, match="a torch function mode"):
        digest(nn.Linear(3, 3))


def test_values_of_parameters_and_the_learning_rate_do_not_matter() -> None:
    one, two = nn.Linear(3, 3), nn.Linear(3, 3)
    assert digest(one) == digest(two)
    optimizers = [torch.optim.SGD(m.parameters(), lr=rate) for m, rate in ((one, 0.1), (two, 0.2))]
    assert digest(one, optimizer=optimizers[0]) == digest(two, optimizer=optimizers[1])
    assert digest(one) != digest(one, optimizer=optimizers[0])


def test_a_cycle_of_objects_and_a_deep_one_are_walked() -> None:
    cycle: list[Any] = [1]
    cycle.append(cycle)
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    walk = Walk({})
    walk.add("cycle", cycle)
    walk.add("deep", deep)
    assert len(walk.digest) == 64


def test_a_patch_of_torch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(origins.patches())
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x)
    assert set(dict(origins.patches())) - set(before) == {"Linear.forward"}


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
        step(torch.ones(size, 3))
    assert len(list((tmp_path / "steps").iterdir())) == 2
    again = olla.compile(nn.Linear(3, 3), loss=square, arena=False)
    again(torch.ones(4, 3))
    assert again.report().cached
    again(torch.ones(1, 3))
    assert not again.report().cached


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OLLA_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("OLLA_DISK_CACHE")
    step = olla.compile(nn.Linear(3, 3), loss=square, arena=False, disk_cache=False)
    step(torch.ones(2, 3))
    assert (step.report().cached, step.report().note.count("disk")) == (False, 0)
    assert not (tmp_path / "steps").exists()
