"""What steps of small transformers need as compiled code, checkpointed and not, beside all of torch's memory budgets.

    python bench/inductor/bench_families.py --markdown bench/results/inductor/families.md
    python bench/inductor/bench_families.py --families llama vit --layers 4

Models of tests/support/pytorch/programs/families.py, with random weights; their losses are their own. Peaks are those
of the wrappers that Inductor generates for a CPU, replayed on fake tensors, without an optimizer's state. The best of
torch is the lowest peak among values of activation_memory_budget; olla is given the flops that this recomputes, at
most. Checkpoints recompute what they hold, whatever is chosen. Results are kept in --folder as they are found, and read
from there while olla and torch are the same.

Exit status: 0; 1 if a graph is left to torch, or olla needs more than the best of torch.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

from bench.inductor.bench_compile import DECIDING
from bench.support.harness import REPOSITORY, Cell, Report, digest
from olla.inductor.simulate.step import SimulatedStep, replay, sweep
from tests.support.pytorch.programs import families

FAMILIES = ["llama", "mistral", "gemma3_text", "qwen3", "gpt2", "bert", "vit", "whisper"]
SHARES = (1.0, 0.8, 0.5, 0.2)  # of what is saved
COLUMNS = ["model", "checkpoints", "eager, MiB", "torch.compile, MiB", "best of torch, MiB", "at budget"]
COLUMNS += ["its flops again, %", "olla, MiB", "of the best, %", "flops again, %", "graphs left to torch"]
MEBI = 2**20
LEFT = "olla leaves a compiled graph"


def measure(name: str, checkpointed: bool, sizes: dict[str, int]) -> dict[str, Any]:
    """Return what a step needs in eager mode, under torch's budgets, and with olla at no more flops."""
    step = *families.family(name, checkpointed=checkpointed, **sizes), families.loss_of
    found = sweep(*step, SHARES)
    at, best = min(found.items(), key=lambda item: (item[1].peak_bytes, -item[0]))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ours = replay(*step, backend="olla", options={"max_recomputed": best.recomputed_flops / best.flops})
    return {
        "eager_bytes": best.eager_peak_bytes,
        "default_bytes": found[1.0].peak_bytes,
        "best_at": at,
        "best": _record(best),
        "ours": _record(ours),
        "num_left": sum(LEFT in str(warning.message) for warning in said),
    }


def _record(run: SimulatedStep) -> dict[str, float]:
    return {"peak_bytes": run.peak_bytes, "again": run.recomputed_flops / run.flops}


def row_of(name: str, checkpointed: bool, found: dict[str, Any]) -> list[Cell]:
    """Return the table's row of a step."""
    best, ours = found["best"], found["ours"]
    row: list[Cell] = [name, "yes" if checkpointed else "no", found["eager_bytes"] / MEBI]
    row += [found["default_bytes"] / MEBI, best["peak_bytes"] / MEBI, found["best_at"], 100 * best["again"]]
    row += [ours["peak_bytes"] / MEBI, 100 * ours["peak_bytes"] / best["peak_bytes"], 100 * ours["again"]]
    return [*row, found["num_left"]]


def main() -> int:
    """Run it; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=list(families.CLASS))
    for name, number in {"width": 64, "layers": 2, "batch": 4, "length": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "build" / "bench_families")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--known", action="store_true", help="make the page of what is known, and measure nothing")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    sizes = {name: getattr(arguments, name) for name in ("width", "layers", "batch", "length")}
    stamp = f"{torch.__version__} {digest(DECIDING)}"
    page = Report("Small transformers as compiled code, checkpointed and not", COLUMNS)
    missing, left, above = [], 0, []
    for name in arguments.families:
        for checkpointed in (False, True):
            about = f"{name} {'with' if checkpointed else 'without'} checkpoints"
            path = arguments.folder / f"{'_'.join(map(str, (name, int(checkpointed), *sizes.values())))}.json"
            known = json.loads(path.read_text()) if path.is_file() else {}
            if known.get("stamp") != stamp and not arguments.known:
                known = measure(name, checkpointed, sizes) | {"stamp": stamp}
                path.write_text(json.dumps(known, indent=1))
                print(about, file=sys.stderr, flush=True)
            if known.get("stamp") != stamp:
                missing.append(about)
                continue
            page.rows.append(row_of(name, checkpointed, known))
            left += known["num_left"]
            above += [about] if known["ours"]["peak_bytes"] > known["best"]["peak_bytes"] else []
    page.summary["sizes"] = ", ".join(f"{name} {number}" for name, number in sizes.items())
    page.summary["budgets of torch"] = ", ".join(map(str, SHARES))
    page.summary["graphs left to torch"] = left
    page.summary["above the best of torch"] = ", ".join(above) or "none"
    if missing:
        page.summary["not measured"] = ", ".join(missing)
    page.print()
    if arguments.markdown:
        page.save(arguments.markdown)
    return 1 if left or above else 0


if __name__ == "__main__":
    sys.exit(main())
