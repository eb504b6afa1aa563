"""Does the peak of a compiled step ever rise when its budget falls, and does it hold? Ten budgets per model, replayed.

    python bench/inductor/compile_budgets.py --markdown bench/results/inductor/compile_budgets.md
    python bench/inductor/compile_budgets.py --size tiny --cases "bert b32"

The budgets lie evenly between the planned peak with everything saved and the least planned peak. Peaks are those of the
wrappers that Inductor generates, found and kept as in bench_compile.py. A peak rises where it is above that of a larger
budget. A budget is refused where olla warns that nothing fits it, and names the least. Exit status: 0; 1 if a peak
rises, a budget neither holds nor is refused, or something could not be compiled.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

from bench.inductor.bench_compile import MEBI, Case
from bench.support.harness import REPOSITORY, Cell, Report
from tests.support.pytorch import compile_cases

COLUMNS = ["model", "budget MiB", "planned MiB", "peak MiB", "below the budget, %"]
COLUMNS += ["refused, least MiB", "rises by, %", "recomputed flops, %"]
NUM_BUDGETS = 10
TOLERANCE = 0.01
LEAST = "olla least"


def settings(case: Case) -> list[str]:
    """Return the settings of the budgets, largest first; none before the least plan is known."""
    known = case.found.get(LEAST)
    if known is None or "planned_bytes" not in known:  # several graphs, which have no peak in common
        return []
    least, most = known["planned_bytes"], known["saved_peak_bytes"]
    return [f"olla {most - (most - least) * i // (NUM_BUDGETS - 1)} B" for i in range(NUM_BUDGETS)]


def find(case: Case) -> bool:
    """Replay what is not known yet; return whether all is known now."""
    if not case.find(LEAST):
        return False
    known = [case.find(setting) for setting in settings(case)]
    return len(known) == NUM_BUDGETS and all(known)


def rows(case: Case) -> tuple[list[list[Cell]], int]:
    """Return the table's rows of a case, largest budget first, and how many peaks rise."""
    found: list[list[Cell]] = []
    least_peak, num_rises = sys.maxsize, 0
    for setting in settings(case):
        result = case.found.get(setting)
        if result is None:
            continue
        budget, peak = int(setting.split()[1]), result["peak_bytes"]
        rise = 100 * (peak / least_peak - 1) if peak > least_peak else None
        num_rises += rise is not None
        least_peak = min(least_peak, peak)
        row: list[Cell] = [case.name, budget / MEBI, result["planned_bytes"] / MEBI, peak / MEBI]
        least = result.get("accepted_bytes", 0)
        row += [100 * (1 - peak / budget), least / MEBI if least > budget else None]  # it warns, and names the least
        found.append([*row, rise, 100 * result["recomputed_flops"] / result["flops"]])
    return found, num_rises


def report(cases: list[Case], size: str) -> tuple[Report, int]:
    """Return the page, and how many peaks rise or budgets are broken."""
    page = Report(f"Compiled steps under {NUM_BUDGETS} budgets: replayed peaks, {size} models", COLUMNS)
    total = 0
    missing, outdated = [], []
    for case in cases:
        found, num_rises = rows(case)
        page.rows += found
        total += num_rises
        missing += [case.name] if len(found) < NUM_BUDGETS else []
        outdated += case.outdated([LEAST, *settings(case)])
    kept = [float(row[4]) >= -100 * TOLERANCE for row in page.rows if isinstance(row[4], float)]
    refused = [row[5] is not None for row in page.rows]
    page.summary["peaks above that of a larger budget"] = f"{total} of {len(page.rows)}"
    page.summary[f"budgets that hold within {TOLERANCE:.0%}"] = f"{sum(kept)} of {len(kept)}"
    page.summary["budgets refused, with the least that can be kept"] = sum(refused)
    num_broken = sum(not (a or b) for a, b in zip(kept, refused, strict=True))
    page.summary["neither"] = num_broken
    page.summary["not measured in full"] = ", ".join(missing) or "-"
    page.summary["found with earlier code"] = "; ".join(outdated) or "-"
    return page, total + num_broken


def main() -> int:
    """Run it; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--cases", nargs="+", default=list(compile_cases.CASES), choices=list(compile_cases.CASES))
    parser.add_argument("--size", default="full", choices=compile_cases.SIZES)
    parser.add_argument("--folder", type=Path, help="default: build/bench_compile, a folder in it for other sizes")
    parser.add_argument("--only-report", action="store_true", help="what was found before")
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    usual = REPOSITORY / "build" / "bench_compile"
    folder = arguments.folder or (usual if arguments.size == "full" else usual / arguments.size)
    folder.mkdir(parents=True, exist_ok=True)
    cases = [Case(name, folder, arguments.size) for name in arguments.cases]
    missing = [] if arguments.only_report else [case.name for case in cases if not find(case)]
    page, num_faults = report(cases, arguments.size)
    page.print()
    if arguments.markdown:
        page.save(arguments.markdown)
    return 1 if num_faults or missing else 0


if __name__ == "__main__":
    sys.exit(main())
