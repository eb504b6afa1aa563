"""Forward, backward and update in one graph of Inductor, beside backend "olla" with the optimizer after it.

    python bench/inductor/bench_whole_step.py --markdown bench/results/inductor/whole_step.md
    python bench/inductor/bench_whole_step.py --cases "bert b32: olla" --no-times

Peaks are those of the wrappers that Inductor generates for the CPU, replayed on fake tensors: parameters, gradients,
the optimizer's state and its own step included, without the rounding of allocators and workspaces of kernels. Both
have the same goal: olla's without options, or minimise="peak" ("least"). Taken is what olla.compile runs.

Times are of a GPT-2 of 4 layers with dropout, torch.compile and its optimizer beside the whole step. Steps run in
turns, and their losses are compared. A compilation is the first step, in a process with caches of its own: processor
time, compilers of kernels included.

Results are kept in --folder as they are found, and read from there unless the code has changed. Exit status: 0; 1 if
a step that is taken as one graph needs more than separate graphs, losses differ or were not of one graph, or
something is not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla
from bench.support.harness import REPOSITORY, Report
from olla.inductor.compat.compat import code_digest
from olla.inductor.settings import patches
from olla.inductor.simulate.step import replay
from olla.inductor.simulate.wrappers import LiveBytes
from olla.inductor.whole.compile import compile_step
from olla.inductor.whole.joined import Asked
from tests.support.pytorch import compile_cases, models
from tests.support.pytorch.models import Example

GOALS: dict[str, dict[str, Any]] = {"olla": {}, "least": {"minimise": "peak"}}
MODELS = ("llama 1B b4", "gpt2 b1, 512 tokens", "gpt2 b8, 1024 tokens", "bert b32", "resnet50 b32")
CASES = [f"{model}: {goal}" for model in MODELS for goal in GOALS]
COLUMNS = ["model", "goal", "separate MiB", "whole MiB", "of separate, %", "resident MiB", "taken"]
MEBI = 2**20
_TIMED = "gpt2, 4 layers of 512, b2, 128 tokens"  # its state outweighs its activations, so that one graph is taken
_WIDE = {"n_embd": 512, "n_layer": 4, "n_head": 8, "vocab_size": 8192, "bos_token_id": 0, "eos_token_id": 0}
_STEPS = 20
_TOLERANCE = 1e-4  # between the losses of both, step by step


def example_of(model: str) -> tuple[Example, Callable[[torch.nn.Module], torch.optim.Optimizer]]:
    """Return a training step on the meta device, and what makes its optimizer."""
    if model == "gpt2 b1, 512 tokens":
        return models.build("gpt2", 1, length=512, device="meta"), lambda m: models.optimizer("adam", m)
    return compile_cases.build(model)[0], lambda m: compile_cases.optimizer(model, m)


def optimizer_peak(model: torch.nn.Module, make: Callable[[torch.nn.Module], torch.optim.Optimizer]) -> tuple[int, int]:
    """Return the peak of an optimizer's own step, gradients included, and the bytes of its state."""
    with FakeTensorMode():
        live = LiveBytes()
        fakes = [torch.nn.Parameter(torch.empty(p.shape, dtype=p.dtype)) for p in model.parameters()]
        optimizer = make(torch.nn.ParameterList(fakes))
        for parameter in fakes:
            parameter.grad = torch.empty_like(parameter)
            live.add(parameter)
            live.add(parameter.grad)
        with live:
            optimizer.step()
            live.peak_bytes = live.live_bytes
            state_bytes = live.live_bytes - 2 * sum(p.nbytes for p in fakes)
            optimizer.step()
        return live.peak_bytes, state_bytes


def peaks(case: str) -> dict[str, Any]:
    """Return the peaks of one model under one goal."""
    name, _, goal = case.partition(": ")
    example, make = example_of(name)
    of_step, state_bytes = optimizer_peak(example.model, make)
    found = replay(
        example.model, example.batch, example.loss, backend="olla", options=GOALS[goal], state_bytes=state_bytes
    )
    others = found.resident_bytes - state_bytes - sum(p.nbytes for p in example.model.parameters())
    captured = olla.capture(example.model, example.batch, optimizer=make(example.model), loss=example.loss)
    wanted = patches(**GOALS[goal])["custom_partitioner_fn"].goal
    whole = compile_step(captured, Asked(wanted, compares=True), kernels=False)
    taken = "separate" if whole.is_worse else "whole"
    if whole.run is None:
        whole = compile_step(captured, Asked(wanted), kernels=False)
    return {
        "separate": max(found.peak_bytes, of_step + others),
        "whole": whole.peak_bytes,
        "taken": taken,
        "resident": found.resident_bytes,
    }


def timed() -> dict[str, float]:
    """Compile and train a small model both ways, in processes with caches of their own."""
    separate, whole = (float(_elsewhere("--compile-here", kind)) for kind in ("separate", "whole"))
    steps: dict[str, float] = json.loads(_elsewhere("--steps-here"))
    return steps | {"compile": whole / separate, "separate, seconds to compile": separate}


def _elsewhere(*arguments: str) -> str:
    """Return the last line this benchmark prints with arguments, in a process whose caches are empty."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder}
        command = [sys.executable, __file__, *arguments]
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return answer.splitlines()[-1]


def _step(kind: str) -> tuple[Example, Callable[[Any], Any]]:
    torch.manual_seed(0)
    example = models.build("gpt2", 2, length=128, device="cpu", settings=_WIDE)
    optimizer = models.optimizer("adam", example.model)
    if kind == "separate":
        return example, _separate(example, optimizer)
    return example, olla.compile(example.model, optimizer=optimizer, loss=example.loss, kernels="inductor")


def compile_here(kind: str) -> float:
    """Return the seconds of processor time of a first step."""
    example, step = _step(kind)
    users = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    before = [resource.getrusage(user) for user in users]
    step(example.batch)
    after = [resource.getrusage(user) for user in users]
    return sum(a.ru_utime + a.ru_stime - b.ru_utime - b.ru_stime for a, b in zip(after, before, strict=True))


def steps_here() -> dict[str, float]:
    """Train both ways in turns, and compare the losses."""
    pairs = [_step(kind) for kind in ("separate", "whole")]
    losses: list[list[float]] = []
    for example, step in pairs:
        torch.manual_seed(1)
        losses.append([_loss(step(example.batch)) for _ in range(_STEPS)])
    ratios = []
    for _ in range(_STEPS):
        seconds = []
        for example, step in pairs:
            start = time.perf_counter()
            step(example.batch)
            seconds.append(time.perf_counter() - start)
        ratios.append(seconds[1] / seconds[0])
    whole: Any = pairs[1][1]
    return {
        "step": statistics.median(ratios),
        "taken as one graph": float(whole._captures.latest.runner.separate is None),
        "difference": max(abs(a - b) for a, b in zip(*losses, strict=True)),
    }


def _separate(example: Example, optimizer: torch.optim.Optimizer) -> Callable[[Any], Any]:
    compiled = torch.compile(example.loss)

    def step(batch: Any) -> Any:
        result = compiled(example.model, batch)
        (result[0] if isinstance(result, tuple) else result).backward()
        optimizer.step()
        optimizer.zero_grad()
        return result

    return step


def _loss(result: Any) -> float:
    return float(result[0] if isinstance(result, tuple) else result)


def find(name: str, folder: Path, run: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """Return what was found before with this code, else measure it."""
    path = folder / (name.replace(" ", "_").replace(":", "").replace(",", "") + ".json")
    before = json.loads(path.read_text()) if path.exists() else {}
    stamp = f"{torch.__version__} {code_digest()}"
    if before.get("code") == stamp:
        return before.get("result")  # type: ignore[no-any-return]
    try:
        result = run()
    except Exception:
        traceback.print_exc()
        return None
    path.write_text(json.dumps({"code": stamp, "result": result}))
    return result


def main() -> int:
    """Run it; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--steps-here", action="store_true", help="what the benchmark calls itself with")
    parser.add_argument("--compile-here", metavar="KIND", help="likewise")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "build" / "bench_whole_step")
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    if arguments.steps_here or arguments.compile_here:
        print(json.dumps(compile_here(arguments.compile_here) if arguments.compile_here else steps_here()))
        return 0
    arguments.folder.mkdir(parents=True, exist_ok=True)
    page = Report("Forward, backward and update in one graph of Inductor, beside separate graphs", COLUMNS)
    worse, missing, differs = [], [], False
    for case in arguments.cases:
        found = find(case, arguments.folder, lambda case=case: peaks(case))  # type: ignore[misc]
        if found is None:
            missing.append(case)
            continue
        share = found["whole"] / found["separate"]
        page.rows.append([
            *case.split(": "), found["separate"] / MEBI, found["whole"] / MEBI, 100 * share,
            found["resident"] / MEBI, found["taken"],
        ])  # fmt: skip
        worse += [case] if share > 1 and found["taken"] == "whole" else []
    if not arguments.no_times:
        times = find("times", arguments.folder, timed)
        missing += ["times"] if times is None else []
        differs = times is not None and not (times["difference"] <= _TOLERANCE and times["taken as one graph"])
        for name, value in (times or {}).items():
            page.summary[f"{_TIMED}: {name}"] = value
    page.summary["taken as one graph, and needs more"] = "; ".join(worse) or "none"
    page.summary["not measured"] = "; ".join(missing) or "none"
    page.print()
    if arguments.markdown:
        page.save(arguments.markdown)
    return 1 if worse or missing or differs else 0


if __name__ == "__main__":
    sys.exit(main())
