"""Print what comes of every odd loop: python tests/odd [--mode plain|peak|swap|wrap|loss|disk] [-k part-of-a-name]."""

import argparse
import collections
import os
import sys
import tempfile
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])  # the repository, in place of this folder


def main() -> int:
    from tests.odd.catalogue import REGISTER
    from tests.odd.runner import CLASSES, MODES, WRAPPED, in_two_processes, judge

    parser = argparse.ArgumentParser(prog="tests/odd", description=__doc__)
    parser.add_argument("--mode", choices=[*MODES, *WRAPPED, "disk", "all"], default="plain")
    parser.add_argument("-k", default="", help="only loops with this in their name")
    parser.add_argument("--every", type=int, default=1, help="only each loop of so many")
    parser.add_argument("--failing", action="store_true", help="print these only")
    arguments = parser.parse_args()
    os.environ.setdefault("OLLA_DISK_CACHE", "0")
    entries = [entry for entry in REGISTER.values() if arguments.k in entry.name][:: arguments.every]
    num_failing = 0
    for mode in [*MODES, *WRAPPED, "disk"] if arguments.mode == "all" else [arguments.mode]:
        if mode == "disk":
            with tempfile.TemporaryDirectory() as folder:
                verdicts = iter(in_two_processes([entry.name for entry in entries], Path(folder)))
        else:
            verdicts = (judge(entry, mode) for entry in entries)
        counts: collections.Counter[str] = collections.Counter()
        for verdict in verdicts:
            counts[verdict.kind] += 1
            counts["failing"] += verdict.fails
            counts["cached"] += verdict.cached
            if verdict.fails or not arguments.failing:
                print(verdict, flush=True)
        print(f"{mode}: {counts.total() - counts['failing'] - counts['cached']} loops,", end=" ")
        print(", ".join(f"{counts[kind]} {kind}" for kind in (*CLASSES, "failing", "cached")), flush=True)
        num_failing += counts["failing"]
    return int(num_failing > 0)


if __name__ == "__main__":
    sys.exit(main())
