"""The folders of the C++ core: which may include which, no circles, none with more files than a reader can take in.

Its bindings: no defaults, and nobody picks a result by its number. All of C++: how long a file may be.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "cpp" / "olla"

# What a folder may include besides itself: folders, or single units of them.
MAY_INCLUDE = {
    "base": (),
    "graph": ("base",),
    "layout/problem": ("base",),
    "layout/greedy": ("layout/problem", "base"),
    "layout/exact": ("layout/problem", "base"),
    "layout/pipelines": ("layout/problem", "base"),
    "layout": ("layout/pipelines", "layout/exact", "layout/greedy", "layout/problem", "base"),
    "order": ("graph", "base"),
    "swap": ("graph", "base"),
    "check": ("graph", "base"),
    "recompute": ("order/flow", "graph", "base"),
    "ilp": ("recompute", "order", "layout", "layout/problem", "graph", "base"),
}
MAX_FILES = 15  # .cpp and .hpp counted apart
MAX_LINES = 400  # of a file
SYSTEM_HEADERS = {"dlfcn.h"}  # besides those of the standard library, which have no suffix

_INCLUDE = re.compile(r"""\s*#\s*include\s*([<"])([^>"]+)[>"]""")

Files = Mapping[str, str]  # text by path below cpp/olla


@dataclass(frozen=True)
class Include:
    """A line of a file that includes something."""

    file: str
    line: int
    target: str
    is_system: bool

    def __str__(self) -> str:
        return f"cpp/olla/{self.file}:{self.line}"


def read(core: Path) -> dict[str, str]:
    """Return the text of all C++ files below a folder."""
    return {path.relative_to(core).as_posix(): path.read_text() for path in sorted(core.rglob("*.[ch]pp"))}


def includes(files: Files) -> Iterator[Include]:
    """Yield every #include of the files."""
    for file, text in files.items():
        for number, line in enumerate(text.splitlines(), 1):
            if found := _INCLUDE.match(line):
                yield Include(file, number, found[2].removeprefix("olla/"), found[1] == "<")


def folder(file: str) -> str:
    """Return the folder of a file."""
    return PurePosixPath(file).parent.as_posix()


def unit(file: str) -> str:
    """Return a file without its suffix: a header and its source are one unit."""
    return PurePosixPath(file).with_suffix("").as_posix()


def breaks_table(include: Include, files: Files) -> str | None:
    """Say which rule about its target an include breaks."""
    if include.is_system:
        known = "." not in include.target or include.target in SYSTEM_HEADERS
        return None if known else f"<{include.target}> is no header of the standard library"
    if include.target not in files:
        return f'"{include.target}" is no file of the core; write its folder: "olla/<folder>/<unit>.hpp"'
    here, allowed = folder(include.file), MAY_INCLUDE.get(folder(include.file), ())
    if {here, *allowed} & {folder(include.target), unit(include.target)}:
        return None
    return f"{here} may include {', '.join(allowed) or 'no other folder'}; not {include.target}"


def circles(files: Files) -> Iterator[str]:
    """Yield the includes that close a circle of units, one for each circle that a search in depth meets."""
    edges: dict[str, dict[str, Include]] = {}
    for include in includes(files):
        if include.target in files and unit(include.target) != unit(include.file):
            edges.setdefault(unit(include.file), {}).setdefault(unit(include.target), include)
    done: set[str] = set()
    for start in edges:
        path = [start]
        ways = [iter(edges[start].items())] if start not in done else []
        while ways:
            target, include = next(ways[-1], (None, None))
            if target is None or include is None:
                ways.pop()
                done.add(path.pop())
            elif target in path:
                yield f"{include}: a circle: {' -> '.join([*path[path.index(target) :], target])}"
            elif target not in done:
                path.append(target)
                ways.append(iter(edges.get(target, {}).items()))


def problems(files: Files) -> list[str]:
    """Return what breaks the rules, each with its file, its line and the rule."""
    found = [f"{include}: {why}" for include in includes(files) if (why := breaks_table(include, files))]
    found += circles(files)
    for name in sorted({folder(file) for file in files}):
        if name not in MAY_INCLUDE:
            found.append(f"cpp/olla/{name}: a folder that the table of includes does not name")
        for suffix in (".cpp", ".hpp"):
            number = sum(folder(file) == name and file.endswith(suffix) for file in files)
            if number > MAX_FILES:
                found.append(f"cpp/olla/{name}: {number} {suffix} files; a folder has at most {MAX_FILES} of one kind")
    return found


def test_core_follows_its_table_of_includes() -> None:
    files = read(CORE)
    assert {folder(file) for file in files} == set(MAY_INCLUDE)
    assert problems(files) == []


@pytest.mark.parametrize(
    ("file", "line", "rule"),
    [
        ("base/types.hpp", '#include "olla/graph/graph.hpp"', "base may include no other folder; not graph/graph.hpp"),
        ("check/check.cpp", '#include "olla/order/order.hpp"', "check may include graph, base; not order/order.hpp"),
        ("recompute/evict.cpp", '  # include  "olla/order/cut.hpp"', "recompute may include order/flow, graph, base;"),
        ("layout/exact/exact.cpp", '#include "olla/layout/greedy/skyline.hpp"', "layout/exact may include layout"),
        ("layout/problem/packing.hpp", '#include "olla/layout/layout.hpp"', "layout/problem may include base; not"),
        ("ilp/highs.cpp", '#include "olla/layout/exact/exact.hpp"', "not layout/exact/exact.hpp"),
        ("order/cut.cpp", '#include "graph.hpp"', '"graph.hpp" is no file of the core'),
        ("order/cut.cpp", "#include <Python.h>", "<Python.h> is no header of the standard library"),
    ],
)
def test_forbidden_include_is_named_with_its_file_line_and_rule(file: str, line: str, rule: str) -> None:
    files = read(CORE)
    files[file] += line + "\n"
    (first, *_) = problems(files)
    assert first.startswith(f"cpp/olla/{file}:{len(files[file].splitlines())}: ")
    assert rule in first


def test_circle_of_units_is_named_with_the_line_that_closes_it() -> None:
    files = {
        "order/cut.hpp": '#include "olla/order/flow.hpp"\n',
        "order/flow.hpp": "",
        "order/flow.cpp": '#include "olla/order/flow.hpp"\n#include "olla/order/cut.hpp"\n',
    }
    assert problems(files) == ["cpp/olla/order/flow.cpp:2: a circle: order/cut -> order/flow -> order/cut"]


def test_crowded_and_unknown_folders_are_named() -> None:
    crowded = {f"swap/unit{i}.cpp": "" for i in range(16)} | {f"swap/unit{i}.hpp": "" for i in range(15)}
    assert problems(crowded) == ["cpp/olla/swap: 16 .cpp files; a folder has at most 15 of one kind"]
    assert problems({"misc/one.hpp": ""}) == ["cpp/olla/misc: a folder that the table of includes does not name"]


def long_files(files: Files) -> list[str]:
    """Return the files with too many lines."""
    numbers = {file: len(text.splitlines()) for file, text in files.items()}
    return [
        f"{file}: {number} lines; a file has at most {MAX_LINES}"
        for file, number in numbers.items()
        if number > MAX_LINES
    ]


def test_no_file_is_too_long() -> None:
    files = read(ROOT / "cpp")
    assert {file.partition("/")[0] for file in files} == {"bindings", "olla", "tests", "torch"}
    assert long_files(files) == []


def test_a_long_file_is_named() -> None:
    files = {"torch/short.hpp": "int i;\n" * 400, "torch/long.hpp": "int i;\n" * 401}
    assert long_files(files) == ["torch/long.hpp: 401 lines; a file has at most 400"]


# "name"_a = value, "name"_a.noconvert() = value; but not `core.name`, what a struct of the core says itself.
_DEFAULT = re.compile(r"""_a(?:\.\w+\(\))*\s*=(?!\s*core\.)""")


def defaults(text: str) -> list[int]:
    """Return the lines of a binding that give an argument a default."""
    return [text.count("\n", 0, found.start()) + 1 for found in _DEFAULT.finditer(text)]


def picked_by_number(source: str) -> list[int]:
    """Return the lines of a module where the result of a function of `olla._core` is indexed by a number."""
    tree = ast.parse(source)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "olla._core"]
    names = {alias.asname or alias.name for node in imports for alias in node.names}

    def is_core(function: ast.expr) -> bool:
        if isinstance(function, ast.Attribute):
            return isinstance(function.value, ast.Name) and function.value.id == "_core"
        return isinstance(function, ast.Name) and function.id in names

    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Call) and is_core(node.value.func)
    ]


def test_no_binding_has_a_default() -> None:
    files = set((ROOT / "cpp" / "bindings").glob("bind_*.cpp"))
    assert len(files) > 5
    assert {file.name: lines for file in files if (lines := defaults(file.read_text()))} == {}


def test_results_of_the_core_are_taken_by_name() -> None:
    modules = sorted((ROOT / "python" / "olla").rglob("*.py"))
    assert len(modules) > 50
    assert {module.name: lines for module in modules if (lines := picked_by_number(module.read_text()))} == {}


def test_defaults_and_numbered_results_are_found_with_their_lines() -> None:
    assert defaults('f(\n"a"_a, "b"_a = 0,\n"c"_a.noconvert() = nb::none(), "d"_a = core.d)') == [2, 3]
    assert defaults('"a"_a, "b"_a.noconvert(), "c"_a.none(), x = 1') == []
    source = "from olla._core import profile as p\nx = p(g,\n o)[3]\n_core.order(g)[0]\np(g).peak_bytes\nf(g)[1]\n"
    assert picked_by_number(source) == [2, 4]
