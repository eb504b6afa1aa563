"""Judge odd training loops, eager against planned, and say what came of them.

    python bench/project/bench_odd.py --mode loss --part 0/3 --verdicts loss.0
    python bench/project/bench_odd.py --table loss.0 loss.1 loss.2 --markdown bench/results/project/odd.md

A part of the loops (``tests/odd``) is judged per call, and goes on where it was ended. Exit status 1 if a loop of a
table is wrong in silence or raises a raw error.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

from bench.support.harness import Report

ROOT = f"{Path(__file__).resolve().parents[2]}/"
CLASSES = ("equal", "rounding", "error", "WRONG", "RAW")


def judge_part(mode: str, part: str, path: Path) -> None:
    """Append the verdicts of a part of the loops to a file, a line each, but for those that stand there."""
    from tests.odd.catalogue import REGISTER
    from tests.odd.runner import judge

    number, of = map(int, part.split("/"))
    done = {json.loads(line)[0] for line in path.read_text().splitlines()} if path.exists() else set()
    with path.open("a") as file:
        for name in list(REGISTER)[number::of]:
            if name not in done:
                start = time.process_time()
                verdict = judge(REGISTER[name], mode)
                seconds = round(time.process_time() - start, 2)
                note = verdict.note.replace(ROOT, "")[:300]  # paths in it are those of the repository
                row = [name, verdict.kind, verdict.fails, verdict.num_captures, note, seconds]
                print(json.dumps(row), file=file, flush=True)


def main() -> int:
    """Judge loops, or make a table of verdicts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", default="loss", help="see tests/odd")
    parser.add_argument("--part", default="0/1", help="which of how many parts")
    parser.add_argument("--verdicts", type=Path, help="the file to append to")
    parser.add_argument("--table", type=Path, nargs="*", help="files called MODE.PART to make a table of")
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("OLLA_DISK_CACHE", "0")
    if arguments.verdicts is not None:
        logging.disable(logging.CRITICAL)  # of Dynamo
        judge_part(arguments.mode, arguments.part, arguments.verdicts)
        return 0
    report = Report("Odd training loops, eager against planned", ["mode", "loop", "verdict", "why"])
    num_bad = 0
    for mode in dict.fromkeys(path.name.partition(".")[0] for path in arguments.table):
        files = (path for path in arguments.table if path.name.startswith(f"{mode}."))
        rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
        counts = Counter(kind for _, kind, *_ in rows)
        report.rows += [[mode, row[0], row[1], row[4].replace("|", "/")[:120]] for row in rows if row[1] != "equal"]
        report.summary[mode] = f"{len(rows)} loops, " + ", ".join(f"{counts[kind]} {kind}" for kind in CLASSES)
        num_bad += counts["WRONG"] + counts["RAW"]
    report.print()
    if arguments.markdown is not None:
        arguments.markdown.write_text(report.markdown())
    return int(num_bad > 0)


if __name__ == "__main__":
    sys.exit(main())
