"""Run the tests of CUDA, and say which lines they reach of the code that is for CUDA; `make cuda-coverage` runs it.

    eval "$(python tests/cuda/standin.py)"
    python tests/cuda/reached.py -k allocator  # options of pytest

Needs coverage, and GCC with its gcov. What the tests compile is compiled with counters, in build/cuda-coverage. Of a
Python file whose other half serves a CPU that half is left out. Lines are merged over all processes of the tests. Not
with -n: pytest-xdist ends its processes before they write what C++ has counted.

Exit status: 0; 1 where a file has fewer than 95 % of its lines reached; that of pytest where a test fails.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "build" / "cuda-coverage"
LEAST = 0.95
CPP = "cuda_"  # what the names of files begin with
PYTHON: dict[str, tuple[str, ...]] = {  # files, and what in them is for a CPU
    "cudagraph.py": (),
    "memory/arrange.py": (),
    "memory/copies.py": ("_Copy", "_Threads", "_serve", "_end", "_drain_all"),
    "memory/replay.py": (),
    "memory/selfcheck.py": (),
}
# Others that the tests compile, as the host code of Inductor, are left alone. Two processes may compile at once: each
# compilation has notes of its own.
COMPILER = """#!/bin/sh
case "$*" in *allocator.cpp*|*forward.cpp*) exec c++ --coverage -dumpdir {notes}/$$- "$@" -O0 ;; esac
exec c++ "$@"
"""
SETTINGS = """[run]
parallel = true
patch = subprocess
data_file = {folder}/data
include =
{files}
"""


class Lines(NamedTuple):
    """Lines of one file, by their numbers: those with code, and those that ran."""

    all: set[int]
    reached: set[int]

    def share(self) -> float:
        """Return the part that was reached."""
        return len(self.reached) / len(self.all) if self.all else 0.0

    def text(self) -> str:
        """Return counts, share, and what was not reached."""
        missed = ", ".join(map(str, sorted(self.all - self.reached)))
        return f"{len(self.reached):4} of {len(self.all):4} {self.share():7.1%}  {missed and 'not ' + missed}"


def main(options: list[str]) -> int:
    """Run it; see the module."""
    status = run_tests(options)
    found = dict(sorted({**cpp_lines(), **python_lines()}.items()))
    for name, lines in found.items():
        print(f"{name:24} {lines.text()}")
    num_expected = len(PYTHON) + 2  # the allocator of CUDA, and what it passes on
    if len(found) < num_expected:
        print(f"lines of {len(found)} files were found, expected those of {num_expected}", file=sys.stderr)
        return status or 1
    return status or int(min(lines.share() for lines in found.values()) < LEAST)


def run_tests(options: list[str]) -> int:
    """Run pytest with counters; return its status."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    environment = os.environ | {"CXX": str(counting_compiler()), "OLLA_CACHE_DIR": str(FOLDER / "cache")}
    settings = FOLDER / "coveragerc"
    files = "\n".join(f"    */olla/pytorch/{name}" for name in PYTHON)
    settings.write_text(SETTINGS.format(folder=FOLDER, files=files))
    command = ["coverage", "run", f"--rcfile={settings}", "-m", "pytest", *options, "tests/cuda"]
    return subprocess.run([sys.executable, "-m", *command], env=environment, cwd=REPOSITORY, check=False).returncode


def counting_compiler() -> Path:
    """Write the compiler of the tests, and return where it is."""
    (FOLDER / "notes").mkdir(parents=True)
    compiler = FOLDER / "c++"
    compiler.write_text(COMPILER.format(notes=FOLDER / "notes"))
    compiler.chmod(0o755)
    return compiler


def cpp_lines() -> dict[str, Lines]:
    """Return the lines of C++ files."""
    found: dict[str, Lines] = {}
    for path in sorted((FOLDER / "notes").glob("*.gcda")):
        for file in json.loads(output("gcov", "--json-format", "--stdout", str(path)))["files"]:
            if not (name := Path(file["file"]).name).startswith(CPP):
                continue
            lines = found.setdefault(name, Lines(set(), set()))
            lines.all.update(line["line_number"] for line in file["lines"])
            lines.reached.update(line["line_number"] for line in file["lines"] if line["count"] > 0)
    return found


def python_lines() -> dict[str, Lines]:
    """Return the lines of Python files that are not for a CPU alone."""
    coverage, settings = [sys.executable, "-m", "coverage"], f"--rcfile={FOLDER / 'coveragerc'}"
    output(*coverage, "combine", "--quiet", settings)
    output(*coverage, "json", "--quiet", settings, "-o", str(FOLDER / "python.json"))
    files: dict[str, Any] = json.loads((FOLDER / "python.json").read_text())["files"]
    return {name: of_cuda(file, PYTHON[name]) for path, file in files.items() if (name := named(path)) is not None}


def named(path: str) -> str | None:
    """Return the name of a file in PYTHON."""
    return next((name for name in PYTHON if path.endswith(f"/pytorch/{name}")), None)


def of_cuda(file: dict[str, Any], left_out: tuple[str, ...]) -> Lines:
    """Return the lines of a file but those of some functions and classes."""
    lines = Lines(set(), set())
    for function, part in file["functions"].items():
        if function.split(".")[0] not in left_out:
            lines.reached.update(part["executed_lines"])
            lines.all.update(part["executed_lines"], part["missing_lines"])
    return lines


def output(*command: str) -> str:
    """Return what a program prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
