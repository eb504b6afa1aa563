"""Who may import whom: every import line counts, those inside functions and under TYPE_CHECKING included.

And how long a file, a class and a function may be.
"""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest

import olla

PACKAGE = Path(olla.__file__).parent
ROOT = Path(__file__).parents[2]
MOST_FILES = 15  # of a kind in a folder
MOST_LINES, MOST_CLASS_LINES, MOST_FUNCTION_LINES = 400, 250, 60  # of a function, those of its docstring do not count

# Room -> the rooms it may import, besides itself. A room is a folder, or a module at the root of the package; `errors`
# and `_core` are for everyone. The methods are imported by name alone, when one is asked for.
PLANNING = {
    "base": "",
    "graph": "base",
    "plan": "base graph",
    "ilp": "base graph",
    "layout": "base graph",
    "report": "base",
    "order": "base graph plan ilp layout",
    "methods": "base graph plan ilp layout order",
    "check": "graph plan",
    "picture": "base graph plan",
    "pipeline": "base graph plan layout order",
    "chunk": "base graph plan pipeline",
    "recompute": "base graph plan ilp order pipeline",
    "swap": "base graph plan pipeline recompute",
    "rewriting": "base graph plan pipeline chunk recompute swap",
    "planner": "base graph plan check pipeline rewriting report",
}
PYTORCH = {
    "pytorch.guards": "",
    "pytorch.checks": "",
    "pytorch.ranks": "graph plan check",
    "pytorch.sharded": "",
    "pytorch.sites": "",
    "pytorch.capture": "graph pytorch.guards pytorch.checks pytorch.ranks pytorch.sharded pytorch.sites",
    "pytorch.dynamo": "pytorch.capture pytorch.guards pytorch.sites",
    "pytorch.memory": "base graph plan layout planner recompute",
    "pytorch.lengths": "",
    "pytorch.ordinary": "plan report",
    "pytorch.program": "graph plan layout chunk pytorch.checks pytorch.capture pytorch.ranks pytorch.memory",
}
INDUCTOR = {
    "inductor.compat": "",
    "inductor.saving": "graph plan inductor.compat",
    "inductor.kernels": "graph plan layout planner inductor.compat",
    "inductor.simulate": "inductor.compat pytorch.capture",
    "inductor.whole": "graph plan inductor.compat inductor.saving inductor.kernels inductor.simulate pytorch.capture",
}
ATEN = {
    "aten": "base graph plan planner inductor.compat inductor.saving pytorch.capture pytorch.dynamo "
    "pytorch.memory pytorch.ordinary pytorch.program",
}
MAY_IMPORT = {
    **PLANNING,
    **PYTORCH,
    "pytorch": " ".join(["base graph plan layout check picture planner report inductor.whole aten", *PYTORCH]),
    **INDUCTOR,
    "inductor": " ".join(["base graph plan planner aten", *INDUCTOR]),
    **ATEN,
    "fit": "base graph plan planner rewriting pytorch.capture",
    "checkpointing": "base graph plan ilp fit pytorch.capture pytorch.ordinary pytorch.sharded",
    "integrations": "base graph plan layout report pytorch pytorch.ranks inductor aten checkpointing",
    "scale": "base graph plan planner report",
    "cli": "base graph plan layout check picture planner report fit scale pytorch.capture integrations olla",
    "olla": " ".join(
        [*PLANNING, "fit pytorch.capture pytorch inductor aten checkpointing integrations"]
    ),  # the public face
    "__main__": "cli",
}
FOR_EVERYONE = ("errors", "_core")


class Import(NamedTuple):
    """A name that a line imports."""

    file: str
    line: int
    module: str
    name: str  # empty: the module itself


def module_of(file: str) -> str:
    """Return the module of a file, such as "graph.columns"; "" is the package's own."""
    parts = PurePosixPath(file).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """Return the folder of a module, or itself where it stands at the root."""
    parts = module.split(".")
    return next((room for k in (2, 1) if (room := ".".join(parts[:k])) in MAY_IMPORT), module or "olla")


@cache
def imported(file: str, source: str, modules: frozenset[str]) -> tuple[Import, ...]:
    """Return what a file imports from the package."""

    def found() -> Iterator[Import]:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top, _, module = alias.name.partition(".")
                    if top == "olla":
                        yield Import(file, node.lineno, module, "")
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}:{node.lineno}: a relative import; write the module's full name"
                top, _, module = (node.module or "").partition(".")
                for alias in node.names if top == "olla" else ():
                    submodule = f"{module}.{alias.name}".lstrip(".")
                    is_module = submodule in modules or submodule == "_core"
                    yield (
                        Import(file, node.lineno, submodule, "")
                        if is_module
                        else Import(file, node.lineno, module, alias.name)
                    )

    return tuple(found())


def circle(edges: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Say which importers form a circle, each with the place of its import line."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        ring = error.args[1][::-1]  # every item imports the next
        return [f"{edges[a][b]}: {a} imports {b}" for a, b in pairwise(ring)]
    return []


def broken_rules(sources: Mapping[str, str]) -> list[str]:
    """Return a line for every broken rule: file, line, rule.

    Args:
        sources: file of the package -> its text.
    """
    modules = {module_of(file): file for file in sources}
    faces = {
        module: set(ast.literal_eval(node.value))
        for module, file in modules.items()
        if module and file.endswith("__init__.py")
        for node in ast.parse(sources[file]).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"
    }
    found = []
    files: dict[str, dict[str, str]] = {}
    rooms: dict[str, dict[str, str]] = {}
    for file, source in sources.items():
        mine = room_of(module_of(file))
        for _, line, module, name in imported(file, source, frozenset(modules)):
            place, theirs = f"{file}:{line}", room_of(module)
            if theirs in FOR_EVERYONE:
                continue
            files.setdefault(file, {})[modules.get(module, module)] = place
            if theirs == mine:
                continue
            rooms.setdefault(mine, {})[theirs] = place
            if theirs not in MAY_IMPORT.get(mine, "").split():
                found.append(f"{place}: {mine} may not import {theirs}")
            if module != theirs and name in faces.get(theirs, ()):
                found.append(f"{place}: import {name} from its folder, olla.{theirs}")
    for file in sources:
        if (room := room_of(module_of(file))) not in MAY_IMPORT and room not in FOR_EVERYONE:
            found.append(f"{file}:1: {room} is not in the table of this test")
    for what, edges in (("files", files), ("folders", rooms)):
        if ring := circle(edges):
            found.append(f"{ring[0]}, in a circle of {what}: {'; '.join(ring)}")
    return found + crowded(sources)


def crowded(files: Iterable[str]) -> list[str]:
    """Return a line for every folder with more files of a kind than a reader can take in."""
    kinds = Counter((str(path.parent), path.suffix) for path in map(PurePosixPath, files))
    return [
        f"{folder}:1: {num} {kind} files, at most {MOST_FILES} of a kind in a folder"
        for (folder, kind), num in kinds.items()
        if num > MOST_FILES
    ]


def lines_of(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return how many lines a definition has; those of a function's docstring do not count."""
    parts = [node]
    if not isinstance(node, ast.ClassDef) and ast.get_docstring(node) is not None:
        parts.append(node.body[0])
    whole, *docstring = [(part.end_lineno or part.lineno) - part.lineno + 1 for part in parts]
    return whole - sum(docstring)


def too_long(sources: Mapping[str, str]) -> list[str]:
    """Return a line for every file, class and function with too many lines: file, line, what it is.

    Args:
        sources: file of the package -> its text.
    """
    found = []
    for file, source in sources.items():
        if (num := len(source.splitlines())) > MOST_LINES:
            found.append(f"{file}:1: a file of {num} lines, at most {MOST_LINES}")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                kind, most = (
                    ("class", MOST_CLASS_LINES) if isinstance(node, ast.ClassDef) else ("function", MOST_FUNCTION_LINES)
                )
                if (num := lines_of(node)) > most:
                    found.append(f"{file}:{node.lineno}: {node.name}, a {kind} of {num} lines, at most {most}")
    return found


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def test_every_import_is_allowed_and_none_closes_a_circle(sources: dict[str, str]) -> None:
    assert broken_rules(sources) == []


@pytest.mark.parametrize(
    ("file", "text", "rule"),
    [
        ("base/text.py", "from olla.graph import Graph", "base may not import graph"),
        ("graph/graph.py", "def f():\n    from olla.plan import Plan", "graph may not import plan"),
        ("check/check.py", "if TYPE_CHECKING:\n    import olla.recompute.search", "check may not import recompute"),
        ("swap/combine.py", "from olla import planner", "swap may not import planner"),
        ("inductor/saving/joint.py", "from olla.pytorch import step", "inductor.saving may not import pytorch"),
        ("layout/layout.py", "import olla", "layout may not import olla"),
        ("plan/fields.py", "from olla.plan.plan import Plan", "in a circle of files"),
        ("base/files.py", "from olla.planner import plan", "in a circle of folders"),
        ("methods/roam.py", "from olla.graph.graph import Graph", "import Graph from its folder, olla.graph"),
        ("shed/tool.py", "", "shed.tool is not in the table"),
    ],
)
def test_one_forbidden_line_is_found(sources: dict[str, str], file: str, text: str, rule: str) -> None:
    before = sources.get(file, "")
    line = before.count("\n") + text.count("\n") + 1
    (*_, place) = [found for found in broken_rules({**sources, file: before + text + "\n"}) if rule in found]
    assert place.startswith(f"{file}:{line}:") or "circle" in rule


def test_a_crowded_folder_is_found(sources: dict[str, str]) -> None:
    more = {f"base/more{i}.py": "" for i in range(MOST_FILES)}
    (found,) = broken_rules({**sources, **more})
    assert found.startswith("base:1: ")


@pytest.mark.parametrize("top", ["tests", "bench"])
def test_no_folder_of_tests_and_benchmarks_is_crowded(top: str) -> None:
    paths = (path.relative_to(ROOT) for path in (ROOT / top).rglob("*") if path.is_file())
    files = [path.as_posix() for path in paths if "__pycache__" not in path.parts]
    assert len(files) > MOST_FILES
    assert crowded(files) == []
    (found,) = crowded([*files, *(f"{top}/layout/more{i}.py" for i in range(MOST_FILES))])
    assert found.startswith(f"{top}/layout:1: ")


def test_every_file_class_and_function_fits_on_a_few_screens(sources: dict[str, str]) -> None:
    assert too_long(sources) == []


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("pass\n" * 401, "1: a file of 401 lines, at most 400"),
        ("x = 1\nclass A:\n" + "    x = 1\n" * 250, "2: A, a class of 251 lines, at most 250"),
        ("def f():\n" + "    pass\n" * 60, "1: f, a function of 61 lines, at most 60"),
        ("class A:\n    async def f():\n" + "        pass\n" * 60, "2: f, a function of 61 lines, at most 60"),
        ("def f():\n    def g():\n" + "        pass\n" * 59, "1: f, a function of 61 lines, at most 60"),
    ],
)
def test_what_is_too_long_is_found(text: str, rule: str) -> None:
    assert too_long({"base/text.py": text}) == [f"base/text.py:{rule}"]


def test_the_docstring_of_a_function_does_not_count() -> None:
    docstring = '    """Say it.\n\n' + "    More.\n" * 40 + '    """\n'
    assert too_long({"base/text.py": "def f():\n" + docstring + "    pass\n" * 59}) == []
    assert too_long({"base/text.py": "def f():\n" + docstring + "    pass\n" * 60}) != []


def test_a_relative_import_is_found(sources: dict[str, str]) -> None:
    with pytest.raises(AssertionError, match=r"base/text\.py:1: a relative import"):
        broken_rules({**sources, "base/text.py": "from . import files"})
