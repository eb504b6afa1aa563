"""Time what a person waits for before anything is planned: the import, and a small plan in a fresh process.

    python bench/project/bench_start.py

Exit status 1 if the import is slow or loads a heavy package, or the plan is slow.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

from bench.support.harness import Cell, Report, Timing
from tests.support.generate import stack

HEAVY = ("torch", "numba", "highspy")
MAX_IMPORT_SECONDS, MAX_PLAN_SECONDS = 0.3, 2.0

IMPORT = f"""
import json, sys, time
begin = time.perf_counter()
import olla
seconds = time.perf_counter() - begin
print(json.dumps([seconds, [name for name in {HEAVY!r} if name in sys.modules]]))
"""
# Most plans are proved from the program order alone and never load numba: this is what the others wait for besides.
WARM_STARTS = """
import sys
import olla
from olla.order.warm_starts import hoist
hoist(olla.Graph.load(sys.argv[1]))
"""
PLAN = """
import json, sys
import olla
graph = olla.Graph.load(sys.argv[1])
plan = olla.plan(graph)
olla.check(graph, plan)
print(json.dumps(plan.seconds))
"""


def fresh(program: str, *arguments: str) -> tuple[object, float]:
    """Run a program in a fresh interpreter; return what it printed as JSON and the seconds of the whole process."""
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    if done.returncode != 0:
        raise SystemExit(f"the measured program failed:\n{done.stderr}")
    return json.loads(done.stdout), seconds


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    options = parser.parse_args()

    imports: list[float] = []
    loaded: set[str] = set()
    for _ in range(11):
        answer, _whole = fresh(IMPORT)
        assert isinstance(answer, list)
        imports.append(float(answer[0]))
        loaded |= set(answer[1])
    importing = Timing.of(imports[1:])  # the first run reads from a cold disk

    measured = [("import olla", importing, MAX_IMPORT_SECONDS)]
    stages: dict[str, Cell] = {}
    graph = stack(1000, family="convnet")
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "step.json.gz")
        graph.save(path)
        for program, how in ((PLAN, "planned"), (WARM_STARTS + PLAN, "warm starts computed, planned")):
            runs = [fresh(program, path) for _ in range(6)]
            planning = Timing.of([whole for _answer, whole in runs[1:]])  # the first run fills the cache of kernels
            measured.append((f"fresh process, {graph.num_ops:,} ops: {how}", planning, MAX_PLAN_SECONDS))
            stages[f"stages of the last plan ({how}), seconds"] = json.dumps(runs[-1][0])

    page = Report("Start-up", ["what", "median seconds", "least", "most", "runs", "allowed"])
    for name, timing, limit in measured:
        seconds = [timing.median_seconds, timing.min_seconds, timing.max_seconds]
        page.rows.append([name, *seconds, timing.num_repeats, limit])
    page.summary["heavy packages loaded by the import"] = ", ".join(sorted(loaded)) or "none"
    page.summary |= stages
    page.print()
    for out in (options.json, options.markdown):
        if out:
            page.save(out)
    slow = any(timing.median_seconds > limit for _name, timing, limit in measured)
    return 1 if slow or loaded else 0


if __name__ == "__main__":
    sys.exit(main())
