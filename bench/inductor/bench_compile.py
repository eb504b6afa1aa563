"""What compiled training steps need and recompute: eager, torch.compile, its memory budgets, and olla inside it.

    python bench/inductor/bench_compile.py --markdown bench/results/inductor/compile.md
    python bench/inductor/bench_compile.py --cases "resnet50 b32" --settings eager "budget 1.0" "budget 0.5" "olla 5 %"
    python bench/inductor/bench_compile.py --device cuda --markdown bench/results/inductor/cuda_compile.md

On the CPU peaks are those of the wrappers that Inductor generates, replayed on fake tensors: bytes of live storages,
optimizer state included, all gradients held, without the rounding of allocators and workspaces of kernels; planned is
what olla expected. On CUDA, a GPU's or that of its stand-in (docs/cuda.md), they are those of torch's caching allocator
over two steps of training, fused optimizer included: allocated, and reserved. Recomputed are flops of matrix products,
attention and convolutions, as a share of the step's. Seconds are processor time: of the compilation without that of the
kernels, of the partitioner and the passes before it, of olla's planning in it.

    budget B    torch.compile with activation_memory_budget=B; 1.0 is the default
    olla same   olla's least peak with no more recomputed flops than the best of torch's sweep (the lowest peak)
    olla peak   olla with that peak as its budget: what it recomputes for it
    olla time   both: the least added time (not by default)
    olla F %    olla's least peak with up to F % of the flops recomputed
    olla least  olla with minimise="peak"
    olla        olla without options
    olla pieces  the same with segment=False (not by default)
    olla F % chunked  with chunked_loss="auto" besides, which changes rounding as torch's chunker does
    olla N B    olla with a budget of that many bytes, the optimizer's state included (compile_budgets.py)

Results are kept in --folder as they are found, and read from there: those on CUDA beside their page, since torch's take
hours and depend on its version alone. Exit status: 0; 1 if something could not be compiled, or what olla allocates or
reserves is above the best of torch's with no more recomputed flops (of `olla`: with none).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

from bench.inductor.cuda_peaks import Peaks, measure
from bench.support.harness import REPOSITORY, Cell, Report, digest
from olla.inductor.compat.compat import config
from olla.inductor.saving.partition import Partitioner
from olla.inductor.settings import patches
from olla.inductor.simulate.split import Split
from olla.inductor.simulate.step import SimulatedStep, replay
from tests.support.pytorch import compile_cases

SWEEP = ("1.0", "0.5", "0.9", "0.3", "0.7", "0.1", "0.8", "0.6", "0.4", "0.2")
OLLA = ("olla same", "olla peak", "olla 0 %", "olla 5 %", "olla least")
THEIRS = (*(f"budget {b}" for b in SWEEP), "chunker")
ON_GPU = ("olla", "olla same", "olla 5 %", "olla least")
CHUNKED = "olla 5 % chunked"
WITH_LOGITS = ("bert", "gpt2", "llama", "t5", "whisper", "deberta")  # models whose losses could run in chunks
SETTINGS = {
    "cpu": ("eager", *THEIRS[:-1], *OLLA),
    "cuda": ("eager", *THEIRS, *ON_GPU, CHUNKED),
}
FOLDERS = {"cpu": "build/bench_compile", "cuda": "bench/results/inductor/cuda_compile"}
_RIVALS = ("olla same", "olla peak", "olla time")  # which depend on torch's best
COLUMNS = ["model", "setting", "peak MiB", "planned MiB", "of the default's, %", "recomputed flops, %"]
COLUMNS += ["recomputed ops", "saved MiB", "compile s", "of the default's", "partition s", "planning s"]
MEBI = 2**20
_ROOMS = ("backend.py", "settings.py", "compat", "kernels", "saving", "simulate")
_INDUCTOR = [f"python/olla/inductor/{name}" for name in _ROOMS]
_PLANNER = [f"python/olla/{name}" for name in ("base", "graph", "order", "plan", "recompute", "pipeline.py")]
DECIDING = ["cpp/olla", *_PLANNER, *_INDUCTOR]  # the code that results depend on


def columns(device: str) -> list[str]:
    """Return the columns of the table: bytes reserved are known of a device alone."""
    return COLUMNS if device == "cpu" else [*COLUMNS[:3], "reserved MiB", *COLUMNS[3:]]


class _Known(Exception):
    """The divided graphs are ones that were replayed before."""


class Case:
    """One model: its results so far, and how to find others."""

    def __init__(self, name: str, folder: Path, size: str = "full", device: str = "cpu") -> None:
        self.name, self.size, self.device = name, size, device
        self.path = folder / f"{re.sub('[^a-z0-9]+', '_', name.lower())}.json"
        self.partitioner: Partitioner | None = None  # olla's, in the compilation at hand
        self.found = self._kept()

    def _kept(self) -> dict[str, dict[str, Any]]:
        return json.loads(self.path.read_text()) if self.path.is_file() else {}

    def find(self, setting: str) -> bool:
        """Measure a setting, unless that is known; return whether it is known now."""
        if setting in self.found and self._stamp(setting) == self.found[setting]["stamp"]:
            return True
        if (setting == "eager" and self.device == "cpu") or (setting in _RIVALS and not self._best()):
            return setting in self.found
        start = time.perf_counter()
        try:
            result = self._measure(setting)
        except Exception:
            traceback.print_exc()
            return False
        result |= {"stamp": self._stamp(setting), "wall_seconds": time.perf_counter() - start}
        self.found[setting] = result
        self.found = self._kept() | {key: self.found[key] for key in ("eager", setting) if key in self.found}
        self.path.write_text(json.dumps(self.found, indent=1))
        print(f"{self.name}: {setting}: {result['peak_bytes'] / MEBI:.0f} MiB", file=sys.stderr, flush=True)
        return True

    def among(self, settings: list[str]) -> list[str]:
        """Return the settings that could differ from others on this model."""
        return [s for s in settings if s != CHUNKED or self.name.startswith(WITH_LOGITS)]

    def best_setting(self) -> str | None:
        """Return the setting of lowest peak in torch's sweep, as far as it is known."""
        sweep = [setting for setting in self.found if setting in THEIRS]
        return min(
            sweep, key=lambda s: (self.found[s]["peak_bytes"], self.found[s]["recomputed_flops"], s), default=None
        )

    def _best(self) -> dict[str, Any] | None:
        setting = self.best_setting()
        return self.found[setting] if setting else None

    def _stamp(self, setting: str) -> str:
        """Return what a result depends on besides the case."""
        if not setting.startswith("olla"):
            return str(torch.__version__)
        best = self._best()
        target = f" {best['peak_bytes']} {best['recomputed_flops']}" if setting in _RIVALS and best else ""
        return f"{torch.__version__} {digest(DECIDING)}{target}"

    def _measure(self, setting: str) -> dict[str, Any]:
        example, state_bytes = compile_cases.build(self.name, self.size, "meta" if self.device == "cuda" else None)
        seen: list[Split] = []
        known: dict[str, Any] = {}

        def watch(split: Split) -> None:
            seen.append(split)
            for other, result in self.found.items():
                same = result.get("digests") == [split.digest] and "copy_of" not in result
                same = same and "olla pieces" not in (setting, other)  # the same graphs, taken otherwise
                if same and _code(result["stamp"]) == _code(self._stamp(setting)) and other != setting:
                    known.update(result)
                    raise _Known

        with self.configured(setting, state_bytes):
            run: Peaks | SimulatedStep
            try:
                if self.device == "cuda":
                    run = measure(self.name, self.size, watch, eager=setting == "eager")
                else:
                    run = replay(example.model, example.batch, example.loss, state_bytes=state_bytes, watch=watch)
            except Exception:
                if not known:
                    raise
                same = ("digests", "copy_of")
                result = {key: value for key, value in known.items() if key not in same}
                result |= {"copy_of": seen[-1].digest, "digests": [], "partition_seconds": seen[-1].seconds}
                return result | self._planned(state_bytes)
        if "eager" not in self.found and isinstance(run, SimulatedStep):
            self.found["eager"] = {"peak_bytes": run.eager_peak_bytes, "stamp": self._stamp("eager")}
        return _record(run) | self._planned(state_bytes)

    def _planned(self, state_bytes: int) -> dict[str, Any]:
        """Return what olla expected of the step's only graph, and how long it took to plan."""
        choices = self.partitioner.choices if self.partitioner else None
        if not self.partitioner or not choices or len(choices) > 1:
            return {}
        return {
            "planned_bytes": choices[0].peak_bytes + state_bytes,
            "accepted_bytes": choices[0].known_peak_bytes + state_bytes,
            "saved_peak_bytes": choices[0].saved_peak_bytes + state_bytes,
            "planning_seconds": self.partitioner.planning_seconds,
        }

    @contextlib.contextmanager
    def configured(self, setting: str, state_bytes: int) -> Iterator[None]:
        """Compile under a setting in a block; those beside torch's best need its sweep."""
        kind, _, value = setting.partition(" ")
        self.partitioner = None
        if kind == "budget":
            with torch._functorch.config.patch(activation_memory_budget=float(value)):
                yield
            return
        if kind in ("eager", "chunker"):
            with config.patch({"auto_chunker.enable": kind == "chunker"}):
                yield
            return
        best = self._best()
        goals: dict[str, dict[str, Any]] = {"": {}, "least": {"minimise": "peak"}, "pieces": {"segment": False}}
        if best:
            goals["same"] = {"max_recomputed": best["recomputed_flops"] / best["flops"]}
            goals["peak"] = {"budget": best["peak_bytes"] - state_bytes}
            goals["time"] = goals["same"] | goals["peak"]
        chunked = {"chunked_loss": "auto"} if value.endswith(" chunked") else {}
        number, _, unit = value.partition(" ")
        if unit == "B":
            goals[value] = {"budget": int(number) - state_bytes}
        goal = goals[value] if value in goals else {"max_recomputed": float(number) / 100}
        with config.patch(settings := patches(**goal, **chunked)):
            self.partitioner = settings["custom_partitioner_fn"]
            self.partitioner.choices = []
            yield

    def rows(self, settings: list[str]) -> list[list[Cell]]:
        """Return the table's rows of this case."""
        default = self.found.get("budget 1.0", {}).get("peak_bytes")
        rows: list[list[Cell]] = []
        for setting in sorted(set(self.among(settings)) & set(self.found), key=_rank):
            result = self.found[setting]
            planned = result.get("planned_bytes")
            row: list[Cell] = [self.name, setting, result["peak_bytes"] / MEBI]
            row += [result["reserved_bytes"] / MEBI] if self.device == "cuda" else []
            row += [planned / MEBI if planned else None]
            row.append(100 * result["peak_bytes"] / default if default else None)
            if setting == "eager":
                rows.append([*row, *([None] * (len(columns(self.device)) - len(row)))])
                continue
            row += [100 * result["recomputed_flops"] / result["flops"], result["num_recomputed"]]
            row += [result["saved_bytes"] / MEBI]
            seconds = None if "copy_of" in result else result["compile_seconds"]
            usual = self.found.get("budget 1.0", {}).get("compile_seconds")
            row += [seconds, seconds / usual if seconds and usual else None]
            rows.append([*row, result["partition_seconds"], result.get("planning_seconds")])
        return rows

    def outdated(self, settings: list[str]) -> list[str]:
        """Return olla's results that other code found."""
        ours = [s for s in settings if s.startswith("olla") and s in self.found]
        return [f"{self.name}: {s}" for s in ours if _code(self.found[s]["stamp"]) != _code(self._stamp(s))]

    def faults(self) -> list[str]:
        """Return what olla does worse than torch: its budgets, and its chunker."""
        found, best, faults = self.found, self._best(), []
        if not best:
            return []
        if same := found.get("olla same"):
            if same["peak_bytes"] > best["peak_bytes"]:
                faults.append(f"{self.name}: peak {same['peak_bytes']} at a budget of {best['peak_bytes']} bytes")
            if same["recomputed_flops"] > best["recomputed_flops"]:
                again = same["recomputed_flops"], best["recomputed_flops"]
                faults.append(f"{self.name}: recomputes {again[0]} flops, torch {again[1]}")
        theirs = [found[s] for s in THEIRS if s in found]
        if default := found.get("olla"):
            free = min(r["peak_bytes"] for r in theirs if not r["recomputed_flops"])
            if default["peak_bytes"] > free:
                faults.append(f"{self.name}: peak {default['peak_bytes']} without options, torch {free}")
        return faults + self.reserved_above([0, best["recomputed_flops"], int(0.05 * best["flops"]), best["flops"]])

    def reserved_above(self, most_flops: Sequence[int]) -> list[str]:
        """Return for which of `ON_GPU` more is reserved than torch does at best with so many flops recomputed."""
        faults = []
        for setting, most in zip(ON_GPU, most_flops, strict=True):
            theirs = [self.found[s] for s in THEIRS if s in self.found]
            least = min(r.get("reserved_bytes", 0) for r in theirs if r["recomputed_flops"] <= most)
            if (ours := self.found.get(setting, {}).get("reserved_bytes", 0)) > least:
                faults.append(f"{self.name}: {setting}: reserves {ours}, torch {least}")
        return faults

    def gain(self, ours: Sequence[str] = OLLA, most_theirs: float = 1.0) -> float | None:
        """Return by what share olla's least peak with up to 5 % of the flops recomputed is below torch's best.

        Args:
            ours: settings of olla's.
            most_theirs: the most that torch's settings recompute.
        """

        def least(settings: Sequence[str], most: float) -> int | None:
            found = [self.found[s] for s in settings if s in self.found]
            return min((r["peak_bytes"] for r in found if r["recomputed_flops"] <= most * r["flops"]), default=None)

        our_bytes, their_bytes = least(ours, 0.05), least(THEIRS, most_theirs)
        return 1 - our_bytes / their_bytes if our_bytes and their_bytes else None


def _code(stamp: str) -> list[str]:
    """Return the versions a result was found with: torch's, and olla's where that took part."""
    return stamp.split(" ")[:2]


def _record(run: SimulatedStep | Peaks) -> dict[str, Any]:
    reserved = {"reserved_bytes": run.reserved_bytes} if isinstance(run, Peaks) else {}
    return reserved | {
        "peak_bytes": run.peak_bytes,
        "flops": run.flops,
        "recomputed_flops": run.recomputed_flops,
        "num_recomputed": sum(split.num_recomputed for split in run.splits),
        "saved_bytes": sum(split.saved_bytes for split in run.splits),
        "compile_seconds": run.compile_seconds,
        "partition_seconds": run.partition_seconds,
        "digests": [split.digest for split in run.splits],
    }


def _rank(setting: str) -> tuple[int, float, str]:
    kind, _, value = setting.partition(" ")
    return ("eager", "budget", "chunker", "olla").index(kind), -float(value) if kind == "budget" else 0.0, value


def report(cases: list[Case], settings: list[str], device: str) -> tuple[Report, list[str]]:
    """Return the page, and what is wrong."""
    measure = "peaks of the generated wrappers" if device == "cpu" else "what torch's allocator needs on CUDA"
    page = Report(f"Compiled training steps: {measure}, and what they recompute", columns(device))
    if device == "cuda":
        page.summary["device"] = torch.cuda.get_device_name()
    for case in cases:
        page.rows += case.rows(settings)
    faults = [fault for case in cases for fault in case.faults()]
    gains = {case.name: gain for case in cases if (gain := case.gain()) is not None}
    for name, gain in gains.items():
        page.summary[f"{name}: below the best of torch's sweep with up to 5 % of the flops again, %"] = 100 * gain
    if gains:
        page.summary["on average, %"] = 100 * sum(gains.values()) / len(gains)
        alike = [gain for case in cases if (gain := case.gain(most_theirs=0.05)) is not None]
        page.summary["on average, beside the best of those of torch's with up to 5 % as well, %"] = (
            100 * sum(alike) / len(alike)
        )
        if device == "cuda":
            chunked = [gain for case in cases if (gain := case.gain((*OLLA, CHUNKED))) is not None]
            page.summary["on average, with losses in chunks as torch's chunker has them, %"] = (
                100 * sum(chunked) / len(chunked)
            )
            default = [gain for case in cases if (gain := case.gain(["olla"], most_theirs=0.0)) is not None]
            page.summary["on average, without options, below the best of torch's that runs no product again, %"] = (
                100 * sum(default) / len(default)
            )
    page.summary["worse than torch's best with no more recomputed flops"] = "; ".join(faults) or "none"
    if device == "cuda":
        most = [fault for c in cases if c.found for fault in c.reserved_above([10**18] * len(ON_GPU))]
        page.summary["reserves more than torch does at best, whatever it recomputes"] = "; ".join(most) or "none"
    missing = {case.name: [s for s in case.among(settings) if s not in case.found] for case in cases}
    num_asked, num_missing = sum(len(case.among(settings)) for case in cases), sum(map(len, missing.values()))
    page.summary["settings found"] = f"{num_asked - num_missing} of {num_asked}"
    page.summary["not measured"] = (
        "; ".join(f"{name}: {', '.join(left)}" for name, left in missing.items() if left) or "-"
    )
    page.summary["found with earlier code"] = "; ".join(old for case in cases for old in case.outdated(settings)) or "-"
    page.summary["machine"] = (
        "shared with other work, more for some rows than for others: seconds of processor time compare with care"
    )
    return page, faults


def main() -> int:
    """Run it; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", default="cpu", choices=list(SETTINGS))
    parser.add_argument("--cases", nargs="+", choices=list(compile_cases.CASES_ON_GPU))
    parser.add_argument("--settings", nargs="+", metavar="SETTING")
    parser.add_argument("--folder", type=Path, help=f"default: {FOLDERS['cpu']}, or {FOLDERS['cuda']}")
    parser.add_argument("--only-report", action="store_true", help="what was found before")
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    device = arguments.device
    usual = list(compile_cases.CASES if device == "cpu" else compile_cases.CASES_ON_GPU)
    settings = arguments.settings or list(SETTINGS[device])
    folder = arguments.folder or REPOSITORY / FOLDERS[device]
    folder.mkdir(parents=True, exist_ok=True)
    cases = [Case(name, folder, device=device) for name in arguments.cases or usual]
    missing = []
    for case in [] if arguments.only_report else cases:
        asked = case.among(settings)
        missing += [f"{case.name}: {s}" for s in asked if not case.find(s) and (device, s) != ("cpu", "eager")]
    page, faults = report(cases, settings, device)
    page.print()
    if arguments.markdown:
        page.save(arguments.markdown)
    print(*(f"not measured: {m}" for m in missing), *faults, sep="\n", file=sys.stderr)
    return 1 if faults or missing else 0


if __name__ == "__main__":
    sys.exit(main())
