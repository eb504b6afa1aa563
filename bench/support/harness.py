"""What every benchmark needs: graph files, the machine in words, timing, tables, and results as files."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from rich.console import Console
from rich.table import Table as RichTable

REPOSITORY = Path(__file__).resolve().parents[2]

Cell = str | int | float | bool | None
Answer = TypeVar("Answer")


def answer(found: object) -> NoReturn:
    """Print what a benchmark asked another process for, and end that process at once.

    Threads of torch's autograd may still drop Python objects then, which aborts an interpreter that ends (torch 2.13).
    """
    print(json.dumps(found), flush=True)
    sys.stderr.flush()
    os._exit(0)


def ask(*command: str, environment: Mapping[str, str] | None = None) -> Any:
    """Return what a script answers (`answer`) in a process of its own, which prints its errors here.

    Args:
        command: arguments of Python: the script and its own.
        environment: variables beside those of this process.

    Raises:
        SystemExit: the process failed.
    """
    variables = {**os.environ, **(environment or {})}
    done = subprocess.run([sys.executable, *command], env=variables, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed with status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def digest(parts: Sequence[str]) -> str:
    """Return a digest of code that results depend on: files of the repository, and folders with all in them."""
    found = hashlib.sha256()
    for part in sorted(parts):
        top = REPOSITORY / part
        files = [top] if top.is_file() else [*top.rglob("*.py"), *top.rglob("*.[ch]pp")]
        assert files, part
        for path in sorted(files):
            found.update(str(path.relative_to(REPOSITORY)).encode())
            found.update(path.read_bytes())
    return found.hexdigest()


def graph_folder() -> Path:
    """Return the folder of captured graphs: ``$OLLA_SHARED/graphs``, else ``../shared/graphs`` beside the repository.

    Raises:
        SystemExit: the folder is absent; the message says how to name it.
    """
    shared = Path(os.environ.get("OLLA_SHARED", REPOSITORY.parent / "shared"))
    folder = shared / "graphs"
    if not folder.is_dir():
        raise SystemExit(
            "no captured graphs: the folder 'graphs' was expected in ../shared beside the repository; "
            "set OLLA_SHARED to the folder that holds it, or name graph files"
        )
    return folder


def graph_files(names: Sequence[str] = ()) -> list[Path]:
    """Find graph files by name, by path or all of them, in the order of their names.

    Args:
        names: graph names (``gpt2_b1``, ``gpt2*``) or paths of graph files; empty for every captured graph.

    Raises:
        SystemExit: a name fits no file.
    """
    files: list[Path] = []
    for name in names or ["*"]:
        path = Path(name)
        found = [path] if path.is_file() else sorted(graph_folder().glob(f"{name}.json.gz"))
        if not found:
            raise SystemExit(f"no graph file fits {name!r}: expected a path, or a name such as gpt2_b1 or 'gpt2*'")
        files += found
    return files


def graph_name(path: Path) -> str:
    """Return a graph file's name without its folder and endings."""
    return path.name.removesuffix(".gz").removesuffix(".json")


def references(folder: Path) -> dict[str, dict[str, int]]:
    """Read the reference figures beside a folder's graphs: graph name -> column -> bytes (or count).

    Returns an empty table where the folder has no ``REFERENCE.csv``.
    """
    path = folder / "REFERENCE.csv"
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {row["graph"]: {key: int(row[key]) for key in row if key != "graph"} for row in rows}


def machine() -> dict[str, str]:
    """Describe where a number was measured: processor, memory, system, versions and commit. No paths."""
    facts = {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }
    for package in ("olla-planner", "numpy", "numba", "highspy", "torch"):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = "absent"
    facts["commit"] = _commit()
    return facts


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    git = ["git", "-C", str(REPOSITORY)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + (" with changes" if dirty.stdout.strip() else "")


@dataclass(frozen=True)
class Timing:
    """Seconds of repeated runs."""

    median_seconds: float
    min_seconds: float
    max_seconds: float
    num_repeats: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        return cls(statistics.median(seconds), min(seconds), max(seconds), len(seconds))

    def __str__(self) -> str:
        spread = f"{self.min_seconds:.3g} to {self.max_seconds:.3g}"
        return f"{self.median_seconds:.3g} s (median of {self.num_repeats}, {spread})"


def measure(run: Callable[[], Answer], num_repeats: int = 1) -> tuple[Answer, Timing]:
    """Run a function several times; return its last answer and the seconds of all runs."""
    seconds: list[float] = []
    for _ in range(max(1, num_repeats)):
        begin = time.perf_counter()
        answer = run()
        seconds.append(time.perf_counter() - begin)
    return answer, Timing.of(seconds)


@dataclass
class Report:
    """One benchmark's result: a table, a few summary lines, and the machine it was measured on."""

    title: str
    columns: list[str]
    rows: list[list[Cell]] = field(default_factory=list)
    summary: dict[str, Cell] = field(default_factory=dict)
    machine: dict[str, str] = field(default_factory=machine)

    def print(self) -> None:
        """Print the table and the summary; columns of numbers stand to the right."""
        table = RichTable(title=self.title, title_justify="left")
        for i, column in enumerate(self.columns):
            numeric = any(isinstance(row[i], int | float) for row in self.rows)
            table.add_column(column, justify="right" if numeric else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*(text(cell) for cell in row))
        # A file or a pipe has no width: never wrap a table that nobody watches on a terminal.
        console = Console() if sys.stdout.isatty() else Console(width=1000)
        console.print(table)
        for name, value in self.summary.items():
            console.print(f"{name}: {text(value)}", highlight=False)
        console.print(", ".join(f"{name} {value}" for name, value in self.machine.items()), highlight=False)

    def markdown(self) -> str:
        """Return the report as a Markdown page."""
        lines = [f"# {self.title}", "", "| " + " | ".join(self.columns) + " |", "|---" * len(self.columns) + "|"]
        lines += ["| " + " | ".join(text(cell) for cell in row) + " |" for row in self.rows]
        lines += ["", *(f"* {name}: {text(value)}" for name, value in self.summary.items())]
        lines += ["", "Measured on " + ", ".join(f"{name} {value}" for name, value in self.machine.items()) + ".", ""]
        return "\n".join(lines)

    def save(self, path: Path) -> None:
        """Write the report; the ending says how: ``.md``, ``.csv`` (the table alone) or ``.json``."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            path.write_text(self.markdown())
        elif path.suffix == ".csv":
            with path.open("w", newline="") as file:
                csv.writer(file).writerows([self.columns, *self.rows])
        elif path.suffix == ".json":
            rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
            document = {"title": self.title, "machine": self.machine, "rows": rows, "summary": self.summary}
            path.write_text(json.dumps(document, indent=1) + "\n")
        else:
            raise SystemExit(f"cannot write {path.name!r}: expected a name that ends in .md, .csv or .json")


def text(cell: Cell) -> str:
    """Format one cell: thousands apart, three digits of a fraction, yes and no."""
    match cell:
        case None:
            return "-"
        case bool():
            return "yes" if cell else "no"
        case int():
            return f"{cell:,}"
        case float():
            return f"{cell:.3f}" if abs(cell) < 1000 else f"{cell:,.0f}"
        case _:
            return str(cell)
