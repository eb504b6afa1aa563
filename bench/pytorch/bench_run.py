"""Run training steps: eager, compiled by torch, captured in program order, as planned by olla; memory and time of each.

    python bench/pytorch/bench_run.py --markdown bench/results/pytorch/run.md
    python bench/pytorch/bench_run.py --cases gpt2:1:256 --optimizers adamw --modes eager program compile olla
    python bench/pytorch/bench_run.py --device cuda --modes eager compile reduce-overhead program olla olla-graphs

On CUDA `bench_gpu.py` runs the parts of this script.

A case is model:batch[:tokens]. For each model and optimizer, each part in a process of its own:

check   5 steps of olla give the losses, parameters, buffers and optimizer state of the program order, to the bit; the
        measured peak is the planned one; nothing is missed. On CUDA with deterministic kernels, updates one parameter
        at a time, and an ordinary loop twice: "repeats" says whether it has the same numbers again.
memory  the most a process had resident (VmHWM) during three steps after the first three; on CUDA, the most that was
        allocated and reserved. olla must stay below eager wherever its plan saves more than 5 %.
time    program order and olla take turns; the other modes run alone. olla may take 1.03 times the program order.

Exit status: 0; 1 if a check fails. It has its own columns: equal to program, as planned, below eager, within 1.03.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla
from bench.support import worlds
from bench.support.harness import Cell, Report, answer, ask
from olla.pytorch.binding import flatten
from olla.pytorch.capture.inputs import InputBinding
from olla.pytorch.program.program import compile_program
from tests.cuda import standin
from tests.support.pytorch import models

MODES = ("eager", "compile", "reduce-overhead", "compile-olla", "program", "olla", "olla-graphs")
PAIR = ("program", "olla")  # always measured
CASES = ["gpt2:1:256", "bert_base:2:128", "vit_b16:2", "resnet50:4", "unet:1", "llama_100m:1:256"]
PARTS = ("check", "memory", "time")
WARMUP = 3
NUM_CHECKED = 5
MOST_TIME = 1.03  # times the program order
LEAST_SAVED = 0.05  # by plan, from where the process must show it
Train = Callable[[], torch.Tensor]


class World:
    """One model with its optimizer and batch, and the ways to take a step of it."""

    def __init__(self, case: str, optimizer: str, device: str) -> None:
        name, batch, *length = case.split(":")
        torch.manual_seed(0)
        name, is_tiny = name.removesuffix("-tiny"), name.endswith("-tiny")
        size = int(length[0]) if length else None
        if name in worlds.NAMES:
            example = worlds.build(name, int(batch), tiny=is_tiny)
        else:
            example = models.build(name, int(batch), tiny=is_tiny, length=size, device="cpu")
        self.model = example.model.to(device)
        self.batch = {name: value.to(device) for name, value in example.batch.items()}
        self.loss = example.loss
        self.optimizer = models.optimizer(optimizer, self.model)

    def train(self, mode: str) -> tuple[Train, Any]:
        """Return a function that takes one step, and the compiled step if there is one."""
        if mode == "eager":
            return self._loop(self.model), None
        if mode == "program":
            return self._program(), None
        if mode in ("olla", "olla-graphs"):
            on_cuda = next(self.model.parameters()).is_cuda
            options: dict[str, Any] = {"cuda_graph": True} if mode == "olla-graphs" else {}
            for group in self.optimizer.param_groups if options else ():
                group |= {"capturable": True} if "capturable" in group else {}  # Adam counts its steps on the GPU
            step = olla.compile(
                self.model, optimizer=self.optimizer, loss=self.loss, arena=True if on_cuda else None, **options
            )
            return lambda: step(self.batch), step
        backend = {"backend": "olla"} if mode == "compile-olla" else {}
        torch_mode = mode if mode == "reduce-overhead" else None
        return self._loop(torch.compile(self.model, mode=torch_mode, **backend)), None

    def values(self) -> list[torch.Tensor]:
        """Parameters, buffers and optimizer state."""
        states = [self.optimizer.state.get(p, {}) for p in self.model.parameters()]
        return [*self.model.state_dict().values(), *(s[k] for s in states for k in sorted(s) if s[k] is not None)]

    def _loop(self, model: Any) -> Train:
        def train() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.loss(model, self.batch)
            loss.backward()
            self.optimizer.step()
            return loss.detach()

        return train

    def _program(self) -> Train:
        captured = olla.capture(self.model, self.batch, optimizer=self.optimizer, loss=self.loss)
        sources = InputBinding(self.model, self.optimizer).gatherer(captured.inputs)
        program = compile_program(captured, range(captured.graph.num_ops))

        def train() -> torch.Tensor:
            leaves, _ = flatten(self.batch)
            with torch.no_grad():
                return program(sources(leaves))[0]

        return train


def check(case: str, optimizer: str, device: str) -> dict[str, Any]:
    """Return whether the planned step computes what the program order and eager compute, and what its report says."""
    first = World(case, optimizer, device)
    if device == "cuda":
        make_repeatable(first)
    losses: dict[str, list[float]] = {}
    values: dict[str, list[torch.Tensor]] = {}
    for name in ("olla", "program", "eager", *(["again"] if device == "cuda" else [])):
        world = copy.deepcopy(first)
        train, step = world.train("eager" if name == "again" else name)
        torch.manual_seed(7)
        losses[name] = [float(train()) for _ in range(NUM_CHECKED)]
        if step is not None:
            report = step.report()
            step.release()
        values[name] = [value.detach().cpu() for value in world.values()]
        del world, train, step

    def equal(other: str, name: str = "olla") -> bool:
        pairs = zip(values[name], values[other], strict=True)
        return losses[name] == losses[other] and all(torch.equal(a, b) for a, b in pairs)

    return {
        "ops": report.num_ops,
        "planned": report.planned_peak_bytes,
        "saved": 1 - report.planned_peak_bytes / report.eager_peak_bytes,
        "missed": report.missed_bytes,
        "once": report.capture_seconds + report.plan_seconds + report.record_seconds,
        "as planned": report.num_misses == 0 and report.planned_peak_bytes == report.measured_peak_bytes,
        "equal program": equal("program"),
        "equal eager": equal("eager"),
        "losses equal eager": losses["olla"] == losses["eager"],
        "repeats": device != "cuda" or equal("again", "eager"),
    }


def make_repeatable(world: World) -> None:
    """Let a GPU, or its stand-in, compute the same numbers again: kernels without atomics, updates as olla has them."""
    standin.with_numbers()
    for group in world.optimizer.param_groups:
        group["foreach"] = False
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.deterministic = True
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        copy.deepcopy(world).train("eager")[0]()
    except RuntimeError as error:  # an operator has no kernel without atomics
        print(f"not all kernels are deterministic: {str(error).splitlines()[0]}", file=sys.stderr)
        torch.use_deterministic_algorithms(True, warn_only=True)


def measure_memory(case: str, optimizer: str, device: str, mode: str) -> dict[str, Any]:
    """Return the most memory held during three steps."""
    train, _ = World(case, optimizer, device).train(mode)
    for _ in range(WARMUP):
        train()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    for _ in range(3):
        train()
    if device == "cuda":
        torch.cuda.synchronize()
        return {"bytes": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    return {"bytes": resident_bytes("VmHWM")}


def resident_bytes(key: str) -> int:
    """Return VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {key}: memory is measured on Linux only")


def measure_time(case: str, optimizer: str, device: str, num_rounds: int, modes: list[str]) -> dict[str, Any]:
    """Let the modes take turns; return the seconds of each step."""
    first = World(case, optimizer, device)
    trains = {mode: copy.deepcopy(first).train(mode)[0] for mode in modes}
    del first
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    for turn in range(WARMUP + num_rounds):
        for mode, train in trains.items():
            torch.manual_seed(turn)
            wait()
            begin = time.perf_counter()
            loss = train()
            wait()
            seconds[mode].append(time.perf_counter() - begin)
            del loss
    return {mode: s[WARMUP:] for mode, s in seconds.items()}


def in_own_process(part: str, *arguments: str) -> dict[str, Any]:
    """Run a part of this script in a process of its own."""
    found: dict[str, Any] = ask(__file__, "--part", part, *arguments)
    return found


def run_part(part: str, case: str, optimizer: str, device: str, *rest: str) -> dict[str, Any]:
    """What a process of its own does."""
    if part == "check":
        return check(case, optimizer, device)
    if part == "memory":
        return measure_memory(case, optimizer, device, *rest)
    return measure_time(case, optimizer, device, int(rest[0]), list(rest[1:]))


class Row:
    """One model with one optimizer: its cells by column, and the checks that failed."""

    def __init__(self, case: str, optimizer: str, args: argparse.Namespace) -> None:
        self.cells: dict[str, Cell] = {"model": case, "optimizer": optimizer}
        self.failed: list[str] = []
        self._where = (case, optimizer, args.device)
        self._modes: list[str] = args.modes
        if "check" in args.only:
            self._check()
        if "memory" in args.only:
            self._memory()
        if "time" in args.only:
            self._time(args.num_rounds)

    def _verdict(self, name: str, holds: bool) -> None:
        self.cells[name] = holds
        if not holds:
            self.failed.append(name)

    def _check(self) -> None:
        c = in_own_process("check", *self._where)
        self.saved = c["saved"]
        self.cells |= {
            "ops": c["ops"],
            "planned MiB": round(c["planned"] / 2**20),
            "saved by plan": f"{c['saved']:.1%}",
        }
        self._verdict("equal to program", c["equal program"])
        self.cells["equal to eager"] = "losses" if c["losses equal eager"] > c["equal eager"] else c["equal eager"]
        self._verdict("as planned", c["as planned"])
        self.cells |= {"missed bytes": c["missed"], "once s": c["once"]}

    def _memory(self) -> None:
        measured = {mode: in_own_process("memory", *self._where, mode) for mode in self._modes}
        for mode, m in measured.items():
            self.cells[f"{mode} MiB"] = round(m["bytes"] / 2**20)
            if "reserved" in m:
                self.cells[f"{mode} reserved MiB"] = round(m["reserved"] / 2**20)
        if "eager" in measured and "saved by plan" in self.cells:
            if self.saved > LEAST_SAVED:
                self._verdict("below eager", measured["olla"]["bytes"] < measured["eager"]["bytes"])
            else:
                self.cells["below eager"] = None

    def _time(self, num_rounds: int) -> None:
        pair = in_own_process("time", *self._where, str(num_rounds), *PAIR)
        seconds = dict(pair)
        for mode in self._modes:
            if mode not in PAIR:
                seconds |= in_own_process("time", *self._where, str(num_rounds), mode)
        for mode in self._modes:
            middle = statistics.median(seconds[mode])
            self.cells[f"{mode} s"] = middle
            self.cells[f"{mode} spread"] = f"{(max(seconds[mode]) - min(seconds[mode])) / middle:.0%}"
        ratio = statistics.median(a / b for a, b in zip(pair["olla"], pair["program"], strict=True))
        self.cells["olla / program"] = ratio
        self.cells["of medians"] = statistics.median(pair["olla"]) / statistics.median(pair["program"])
        self._verdict("within 1.03", ratio <= MOST_TIME)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES, help="model:batch[:tokens]; model-tiny for a try")
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "momentum"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["eager", *PAIR], help="program, olla: always")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--num-rounds", type=int, default=10)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        answer(run_part(*args.part))
    args.modes = [mode for mode in MODES if mode in args.modes or mode in PAIR]
    device = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} threads of the CPU"
    rows: list[Row] = []
    for case in args.cases:
        for optimizer in args.optimizers:
            rows.append(Row(case, optimizer, args))
            print(json.dumps(rows[-1].cells), file=sys.stderr, flush=True)
    columns = list(dict.fromkeys(name for row in rows for name in row.cells))
    report = Report(f"Training steps on {device}", columns, [[row.cells.get(c) for c in columns] for row in rows])
    failed = [f"{row.cells['model']} {row.cells['optimizer']}: {', '.join(row.failed)}" for row in rows if row.failed]
    report.summary["failed"] = "; ".join(failed) or "none"
    report.print()
    for path in (args.markdown, args.json):
        if path is not None:
            report.save(path)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
