"""Run the first page of the docs as printed: what does its loop take, as an ordinary one and with olla?

    python bench/project/bench_first_saving.py

Exit status 1 if a loss differs, a request is missed, or the planned loop needs no less.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

from bench.support.harness import Cell, Report, Timing
from tests.support.pages import ROOT, blocks

_FIGURES = {
    "loss": r"^loss (\S+)",
    "most MiB": r"^most memory: (\d+) MiB",
    "planned peak bytes": r"^ *planned peak .* ([\d,]+) +saves",
    "measured peak bytes": r"^ *measured peak .* ([\d,]+)$",
    "missed bytes": r"^ *missed .* ([\d,]+) +0 requests",
}


def figures(how: str, folder: str) -> dict[str, str]:
    """Run the page's loop in a fresh process; return what it says, and how long it took."""
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "train.py", how], cwd=folder, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    if done.returncode != 0:
        raise SystemExit(f"train.py {how} failed:\n{done.stderr}")
    lines = done.stdout.splitlines()
    found = {what: [m[1] for line in lines if (m := re.match(pattern, line))] for what, pattern in _FIGURES.items()}
    return {what: values[0] for what, values in found.items() if values} | {"seconds": str(seconds)}


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="of each loop")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    options = parser.parse_args()

    (script,) = (block for block in blocks(ROOT / "docs" / "start.md") if block.kind == "file")
    columns = ["loop", "most MiB", "least of the runs", "most of the runs", "loss", "seconds of the process"]
    page = Report("The loop of the first page: most memory it adds to its process", columns)
    most: dict[str, int] = {}
    losses = set()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, script.name).write_text(script.text)
        for how in ("eager", "olla"):
            runs = [figures(how, folder) for _ in range(options.runs)]
            mib = sorted(int(run["most MiB"]) for run in runs)
            most[how] = mib[len(mib) // 2]
            losses |= {run["loss"] for run in runs}
            timing = Timing.of([float(run["seconds"]) for run in runs])
            row: list[Cell] = [how, most[how], mib[0], mib[-1], runs[0]["loss"], timing.median_seconds]
            page.rows.append(row)
    planned, measured, missed = (runs[-1][f"{what} bytes"] for what in ("planned peak", "measured peak", "missed"))
    page.summary |= {"planned peak, bytes": planned, "measured peak, bytes": measured, "missed bytes": missed}
    page.print()
    for out in (options.json, options.markdown):
        if out:
            page.save(out)
    good = len(losses) == 1 and planned == measured and missed == "0" and most["olla"] < most["eager"]
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
