"""Compiled training steps run for real, beside torch.compile's: are the numbers the same, and what is the time?

    python bench/inductor/bench_compile_steps.py --parts check time --markdown bench/results/inductor/compile_steps.md

check   20 steps of the tiny models (tests/support/pytorch/compile_cases.py), dropout on, real kernels,
        olla beside torch.compile's default. Every step runs from the same state, and each trains on its own: the
        largest difference of loss, gradients and buffers as a share of what torch's tests of its partitioners allow
        (tests/support/pytorch/compiled.py). Beside it the share that one ulp on all parameters makes in 20 steps, with
        eager kernels and nothing recomputed.
time    steps of the small models, forward and backward, in turns: torch.compile's default, torch.compile at the best
        of its memory budgets (the lowest replayed peak), and olla. Ratios of processor time are medians over pairs of
        runs beside each other, with an interval that holds the median in 95 % of the resamplings.

    least, 5 %, budget   goals of the checks: minimise="peak", max_slowdown=0.05, and a budget half-way between
                         the least peak and that with everything saved
    olla time            the least added time with a peak, and recomputed flops, no higher than those of torch's best
    olla same, olla 5 %  as in bench_compile.py: the least peak, at whatever time, with no more recomputed flops than
                         torch's best, and with up to 5 % of the flops

Results are kept in --folder as they are found. Exit status: 0; 1 if numbers differ, or "olla time" takes more than
1.03 times torch's best, by the whole interval.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import hashlib
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla.inductor
from bench.inductor.bench_compile import MEBI, Case
from bench.support.harness import REPOSITORY, Cell, Report
from olla.inductor.saving.saving import SavedChoice
from tests.support.pytorch import compile_cases
from tests.support.pytorch.compiled import MANY_STEPS, Compiled, compare, fresh_batches, spread

PARTS = ("check", "time")
NUM_STEPS = 20
GOALS: dict[str, dict[str, Any]] = {"least": {"minimise": "peak"}, "5 %": {"max_slowdown": 0.05}, "budget": {}}
SWEEP = tuple(f"budget {share}" for share in ("1.0", "0.5", "0.9", "0.3", "0.7", "0.1"))
OLLA = ("olla time", "olla same", "olla 5 %")
DEFAULT = "budget 1.0"
MOST_TIME = 1.03  # times torch's best
LEAST_SECONDS = 0.1  # of one sample: as many steps as that takes
RESAMPLINGS = 4000
CHECK_COLUMNS = ["model", "goal", "recomputed ops", "of torch's default", "recomputed flops, %"]
CHECK_COLUMNS += ["one step: of the tolerance", "20 steps: of the tolerance", "with an ulp", "equal"]
CHECK_COLUMNS += ["first loss", "last loss"]
TIME_COLUMNS = ["model", "setting", "peak MiB", "recomputed flops, %", "recomputed ops", "ms per step", "pairs"]
TIME_COLUMNS += [
    "of torch's best",
    "from",
    "to",
    "of the default's",
    "wall clock: of torch's best",
    "default's numbers",
]
Result = dict[str, Any]


class Kept:
    """Results of one part and case, on disk as soon as they are there."""

    def __init__(self, folder: Path, part: str, case: str) -> None:
        self.path = folder / f"{part} {hashlib.sha256(case.encode()).hexdigest()[:12]}.json"
        self.stamp = f"{torch.__version__} {olla.inductor.compat.compat.code_digest()} {torch.get_num_threads()}"
        kept = json.loads(self.path.read_text()) if self.path.is_file() else {}
        self.found: dict[str, Result] = kept.get("found", {})
        self.is_present = kept.get("stamp") == self.stamp

    def keep(self, key: str, result: Result) -> None:
        if not self.is_present:
            self.found, self.is_present = {}, True
        self.found[key] = result
        self.path.write_text(json.dumps({"stamp": self.stamp, "found": self.found}, indent=1))


@contextlib.contextmanager
def enabled(made: list[SavedChoice], **goal: Any) -> Iterator[None]:
    """Let olla decide in a block, and tell what it chose."""
    with olla.inductor.enable(**goal):
        torch._inductor.config.custom_partitioner_fn.choices = made
        yield


def check(case: str, goals: Sequence[str], kept: Kept) -> None:
    """Train a tiny model under every goal, beside torch.compile's default."""
    missing = [goal for goal in goals if not (kept.is_present and goal in kept.found)]
    if not missing:
        return
    torch.compiler.reset()
    torch.manual_seed(0)
    example, _ = compile_cases.build(case, "tiny")
    optimizer = functools.partial(compile_cases.optimizer, case)
    batches = list(fresh_batches(example.batch, NUM_STEPS))
    made: list[SavedChoice] = []
    ulp = spread(example, optimizer, batches)
    for goal in missing:
        asked = GOALS[goal] or {"budget": _half_way(kept.found["least"])}
        start = time.perf_counter()
        ours = Compiled(example, lambda made=made, asked=asked: enabled(made, **asked))
        default = Compiled(example)
        result = compare(default, ours, optimizer, batches)
        kept.keep(
            goal,
            {
                "ops": sum(split.num_recomputed for split in ours.splits),
                "torch_ops": sum(split.num_recomputed for split in default.splits),
                "flops": sum(s.recomputed_flops for s in ours.splits) / max(1, sum(s.flops for s in ours.splits)),
                "other": [s.digest for s in ours.splits] != [s.digest for s in default.splits],
                "peaks": [[c.peak_bytes, c.saved_peak_bytes] for c in made[-len(ours.splits) :]],
                "one_step": result.one_step,
                "many_steps": result.many_steps,
                "ulp": ulp,
                "equal": result.equal,
                "losses": result.losses,
            },
        )
        say(f"{case}: {goal}: equal {result.equal}, {time.perf_counter() - start:.0f} s")


def _half_way(least: Result) -> int:
    """Return a budget between the least peak of a model's one graph and that with everything saved."""
    ((least_bytes, saved_bytes),) = least["peaks"]
    return int(least_bytes + saved_bytes) // 2


def measure(case: str, settings: Sequence[str], kept: Kept, folder: Path, num_pairs: int, niceness: int) -> None:
    """Time a small model's step as torch.compile and olla make it, in turns."""
    replayed = Case(case, folder, "small")
    missing = [setting for setting in (*SWEEP, *settings) if not replayed.find(setting)]
    if missing:
        raise RuntimeError(f"not replayed: {', '.join(missing)}")
    best = replayed.best_setting()
    assert best is not None
    if kept.is_present and kept.found["best"]["setting"] == best and not set(settings) - set(kept.found):
        return
    kept.found.clear()  # samples belong together
    kept.keep("best", {"setting": best})
    torch.compiler.reset()
    torch.manual_seed(0)
    example, state_bytes = compile_cases.build(case, "small")
    steps: dict[str, Compiled] = {}
    for setting in dict.fromkeys((DEFAULT, best, *settings)):
        start = time.perf_counter()
        steps[setting] = Compiled(example, functools.partial(replayed.configured, setting, state_bytes))
        steps[setting].model = next(iter(steps.values())).model  # all on the same parameters
        steps[setting].compile(example.batch)
        say(f"{case}: {setting}: compiled in {time.perf_counter() - start:.0f} s")
    equal = _equal(steps, example.batch)
    with hurried(niceness):
        times = in_turns({s: functools.partial(step.run, example.batch) for s, step in steps.items()}, num_pairs)
    for setting, samples in times.items():
        figures = {key: replayed.found[setting][key] for key in ("peak_bytes", "flops", "recomputed_flops")}
        figures |= {"ops": replayed.found[setting]["num_recomputed"], "equal": equal[setting]}
        kept.keep(setting, figures | {"cpu": [s[0] for s in samples], "wall": [s[1] for s in samples]})


def _equal(steps: dict[str, Compiled], batch: Any) -> dict[str, bool]:
    """Return whose loss and gradients are those of torch.compile's default.

    With random numbers those of lower budgets are not: torch draws them anew in backward (its issue 190758).
    """
    found = {}
    for setting, step in steps.items():
        before = step.state()
        torch.manual_seed(2)
        found[setting] = [t.clone() for t in step.run(batch)]
        step.load(before)
    return {s: MANY_STEPS.share(tensors, found[DEFAULT]) <= 1 for s, tensors in found.items()}


@contextlib.contextmanager
def hurried(niceness: int) -> Iterator[None]:
    """Let this thread go before others in a block."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, niceness or before)
    yield
    os.setpriority(os.PRIO_PROCESS, 0, before)


def keep_freed_memory() -> None:
    """Let what is freed stay with the process: page faults depend on what ran before, and are no property of a step."""
    if sys.platform == "linux":
        mallopt = ctypes.CDLL(None).mallopt
        trim_threshold, mmap_max = -1, -4  # of malloc.h
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_max, 0)


def in_turns(runs: dict[str, Callable[[], Any]], num_pairs: int) -> dict[str, list[tuple[float, float]]]:
    """Run functions in turns, forwards and backwards; processor and wall-clock seconds of every sample."""
    for run in runs.values():
        run()
    start = time.process_time()
    for run in runs.values():
        run()
    number = max(1, round(LEAST_SECONDS * len(runs) / (time.process_time() - start)))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    gc.collect()
    gc.disable()
    for turn in range(num_pairs):
        for name in sorted(runs, reverse=turn % 2 == 1):
            wall, processor = time.perf_counter(), time.process_time()
            for _ in range(number):
                runs[name]()
            elapsed = time.process_time() - processor, time.perf_counter() - wall
            times[name].append((elapsed[0] / number, elapsed[1] / number))
    gc.enable()
    return times


def ratio(found: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of paired ratios, and the interval that holds it in 95 % of resamplings."""
    ratios = np.array(found) / np.array(base)
    drawn = np.random.default_rng(0).choice(ratios, (RESAMPLINGS, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(np.median(ratios)), float(low), float(high)


def check_page(found: dict[str, Kept]) -> tuple[Report, list[str]]:
    """Return the table of the checks, and what is wrong."""
    page = Report("Compiled training steps: 20 steps with olla beside torch.compile's default", CHECK_COLUMNS)
    faults = []
    for case, kept in found.items():
        for goal, r in kept.found.items():
            row: list[Cell] = [case, goal, r["ops"], r["torch_ops"], 100 * r["flops"], r["one_step"], r["many_steps"]]
            page.rows.append([*row, r["ulp"], r["equal"], r["losses"][0], r["losses"][-1]])
            if not r["equal"]:
                faults.append(f"{case}: {goal}: not the same numbers")
            if goal == "least" and not r["other"]:
                faults.append(f"{case}: {goal}: the graphs are torch's")
            if goal == "least" and not r["ops"]:
                faults.append(f"{case}: {goal}: other values are saved, but none made again")
    page.summary["not equal, or not shown"] = "; ".join(faults) or "none"
    page.summary["found with earlier code"] = outdated(found)
    page.summary["tolerances"] = "one step 1.3e-6 relative, 1e-5 absolute; 20 steps 1e-3 and 1e-3; 1 is all of it"
    return page, faults


def time_page(found: dict[str, Kept]) -> tuple[Report, list[str]]:
    """Return the table of the times, and what takes too long."""
    page = Report("Compiled training steps: time beside torch.compile at its best memory budget", TIME_COLUMNS)
    faults, medians = [], {setting: [] for setting in OLLA}  # type: tuple[list[str], dict[str, list[float]]]
    for case, kept in found.items():
        if DEFAULT not in kept.found:
            continue
        best, default = kept.found[kept.found["best"]["setting"]], kept.found[DEFAULT]
        for setting, r in kept.found.items():
            if setting == "best":
                continue
            name = f"{setting} (best)" if r is best else setting
            row: list[Cell] = [case, name, r["peak_bytes"] / MEBI, 100 * r["recomputed_flops"] / r["flops"], r["ops"]]
            middle, low, high = ratio(r["cpu"], best["cpu"])
            row += [1000 * statistics.median(r["cpu"]), len(r["cpu"]), middle, low, high]
            row += [ratio(r["cpu"], default["cpu"])[0], ratio(r["wall"], best["wall"])[0], r["equal"]]
            page.rows.append(row)
            if setting in OLLA and not r["equal"]:
                faults.append(f"{case}: {setting}: not the numbers of torch.compile's default")
            if setting in OLLA:
                medians[setting].append(middle)
            if setting == "olla time" and low > MOST_TIME:
                faults.append(f"{case}: {middle:.3f} times torch's best")
    for setting, values in medians.items():
        if values:
            page.summary[f"{setting}: of torch's best, median and most over models"] = (
                f"{statistics.median(values):.3f}, {max(values):.3f}"
            )
    page.summary[f"other numbers, or olla time above {MOST_TIME}"] = "; ".join(faults) or "none"
    page.summary["found with earlier code"] = outdated(found)
    page.summary["machine"] = (
        f"shared with other work; {torch.get_num_threads()} thread(s), processor time; freed memory kept"
    )
    return page, faults


def outdated(found: dict[str, Kept]) -> str:
    """Name the cases whose results are of other code than this."""
    return ", ".join(case for case, kept in found.items() if kept.found and not kept.is_present) or "-"


def say(line: str) -> None:
    """Tell how far it is."""
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Run it; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--cases", nargs="+", default=list(compile_cases.CASES), choices=list(compile_cases.CASES))
    parser.add_argument("--goals", nargs="+", default=list(GOALS), choices=list(GOALS))
    parser.add_argument("--settings", nargs="+", default=list(OLLA), choices=OLLA, help="of the times")
    parser.add_argument("--pairs", type=int, default=41)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--niceness", type=int, default=0, help="while timing; below 0 it needs the right to")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "build" / "bench_compile_steps")
    parser.add_argument("--only-report", action="store_true", help="what was found before")
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    found = {part: {c: Kept(arguments.folder, part, c) for c in arguments.cases} for part in arguments.parts}
    failed = []
    for part, case in [] if arguments.only_report else [(p, c) for p in arguments.parts for c in arguments.cases]:
        try:
            if part == "check":
                check(case, arguments.goals, found[part][case])
            else:
                measure(
                    case, arguments.settings, found[part][case], arguments.folder, arguments.pairs, arguments.niceness
                )
        except Exception:
            traceback.print_exc()
            failed.append(f"{part} {case}")
    pages = [{"check": check_page, "time": time_page}[part](found[part]) for part in arguments.parts]
    for page, _ in pages:
        page.print()
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(page.markdown() for page, _ in pages))
    faults = [fault for _, faults in pages for fault in faults]
    print(*(f"failed: {f}" for f in failed), *faults, sep="\n", file=sys.stderr)
    return 1 if faults or failed else 0


if __name__ == "__main__":
    sys.exit(main())
