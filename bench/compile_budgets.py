"""Does the peak of a compiled step ever rise when its budget falls? Ten budgets per model, replayed.

    python bench/compile_budgets.py --markdown bench/results/compile_budgets.md
    python bench/compile_budgets.py --tiny --cases "bert b32"

The budgets lie evenly between the planned peak with everything saved and the least planned peak. Peaks are those of the
wrappers that Inductor generates, as in bench_compile.py, without an optimizer's state. A peak rises where it is above
that of a larger budget. Results are kept in --folder as they are found, and read from there. Exit status: 0; 1 if a
peak rises, or something could not be compiled.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import compile_cases
from harness import REPOSITORY, Cell, Report
from olla.inductor.compat import code_digest, inductor_settings
from olla.inductor.replay import replay
from olla.inductor.settings import patches
from olla.inductor.split import Split

COLUMNS = [
    "model",
    "budget MiB",
    "planned MiB",
    "peak MiB",
    "below the budget, %",
    "rises by, %",
    "recomputed flops, %",
]
NUM_BUDGETS = 10
MEBI = 2**20


class _Known(Exception):
    """The graph is divided as for another budget."""


@dataclass
class Case:
    """One model and what is known of it.

    Attributes:
        name: of compile_cases.
        tiny: whether the model is small.
        path: where results are kept.
        found: of the goal "least" or a budget in bytes: its figures.
    """

    name: str
    tiny: bool
    path: Path
    found: dict[str, dict[str, Any]]

    @classmethod
    def kept(cls, name: str, tiny: bool, folder: Path) -> Case:
        """Return a case with the results that this code found before."""
        stamp = f"{torch.__version__} {code_digest()}"
        key = hashlib.sha256(f"{name} {tiny} {stamp}".encode()).hexdigest()[:12]
        path = folder / f"budgets_{key}.json"
        return cls(name, tiny, path, json.loads(path.read_text()) if path.is_file() else {})

    def budgets(self) -> list[int]:
        """Return the budgets, largest first; the least plan must be known."""
        least, most = self.found["least"]["planned_bytes"], self.found["least"]["saved_peak_bytes"]
        return [most - (most - least) * i // (NUM_BUDGETS - 1) for i in range(NUM_BUDGETS)]

    def find_all(self) -> bool:
        """Replay what is not known yet; return whether all is known now."""
        if not self.find("least", minimise="peak"):
            return False
        known = [self.find(str(budget), budget=budget) for budget in self.budgets()]
        return all(known)

    def find(self, key: str, **goal: Any) -> bool:
        """Replay one goal, unless it is known; return whether it is known now."""
        if key in self.found:
            return True
        example, _ = compile_cases.build(self.name, tiny=self.tiny)
        settings = patches(**goal)
        partitioner = settings["custom_partitioner_fn"]
        partitioner.choices = []
        known: dict[str, Any] = {}

        def watch(split: Split) -> None:
            for result in self.found.values():
                if result["digests"] == [split.digest]:
                    known.update(result)
                    raise _Known

        try:
            with inductor_settings(settings):
                run = replay(example.model, example.batch, example.loss, watch=watch)
            result = {
                "peak_bytes": run.peak_bytes,
                "recomputed": run.recomputed_flops / max(1, run.flops),
                "digests": [split.digest for split in run.splits],
            }
        except Exception:
            if not known:
                traceback.print_exc()
                return False
            result = known
        if len(partitioner.choices) != 1:
            print(f"{self.name}: {len(partitioner.choices)} graphs, expected one", file=sys.stderr)
            return False
        (choice,) = partitioner.choices
        result |= {"planned_bytes": choice.peak_bytes, "saved_peak_bytes": choice.saved_peak_bytes}
        self.found[key] = result
        self.path.write_text(json.dumps(self.found, indent=1))
        print(f"{self.name}: {key}: {result['peak_bytes'] / MEBI:.1f} MiB", file=sys.stderr, flush=True)
        return True

    def rows(self) -> tuple[list[list[Cell]], int]:
        """Return the table's rows of this case, largest budget first, and how many peaks rise."""
        rows: list[list[Cell]] = []
        least_peak, num_rises = sys.maxsize, 0
        for budget in self.budgets() if "least" in self.found else []:
            result = self.found.get(str(budget))
            if result is None:
                continue
            peak = result["peak_bytes"]
            rise = 100 * (peak / least_peak - 1) if peak > least_peak else None
            num_rises += rise is not None
            least_peak = min(least_peak, peak)
            figures = [budget / MEBI, result["planned_bytes"] / MEBI, peak / MEBI, 100 * (1 - peak / budget)]
            rows.append([self.name, *figures, rise, 100 * result["recomputed"]])
        return rows, num_rises


def report(cases: list[Case], tiny: bool) -> tuple[Report, int]:
    """Return the page, and how many peaks rise."""
    size = "small models" if tiny else "the models of compile.md"
    page = Report(f"Compiled steps under ten budgets: replayed peaks, {size}", COLUMNS)
    total = 0
    for case in cases:
        rows, num_rises = case.rows()
        page.rows += rows
        total += num_rises
    budgets = [float(row[4]) for row in page.rows if isinstance(row[4], float)]
    page.summary["peaks above that of a larger budget"] = f"{total} of {len(page.rows)}"
    page.summary["budgets that hold"] = f"{sum(below >= 0 for below in budgets)} of {len(budgets)}"
    missing = [case.name for case in cases if len(case.rows()[0]) < NUM_BUDGETS]
    page.summary["not measured in full"] = ", ".join(missing) or "-"
    return page, total


def main() -> int:
    """Run it; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--cases", nargs="+", default=list(compile_cases.CASES), choices=list(compile_cases.CASES))
    parser.add_argument("--tiny", action="store_true", help="the small models that real runs use")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "build" / "bench_compile")
    parser.add_argument("--only-report", action="store_true", help="what was found before")
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    cases = [Case.kept(name, arguments.tiny, arguments.folder) for name in arguments.cases]
    missing = [] if arguments.only_report else [case.name for case in cases if not case.find_all()]
    page, num_rises = report(cases, arguments.tiny)
    page.print()
    if arguments.markdown:
        page.save(arguments.markdown)
    return 1 if num_rises or missing else 0


if __name__ == "__main__":
    sys.exit(main())
