"""docs/errors.md names every rule that an error can have, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from olla import errors

REPOSITORY = Path(__file__).resolve().parents[2]
CONSTANTS = {errors.FIRST_STEP, errors.MISUSE, errors.SPENT}
IN_PYTHON = re.compile(r'rule="(\w+)"')
IN_CPP = (
    re.compile(r'\b(?:fail|require_figure)\(\s*"([a-z_]+)"'),
    re.compile(r'Error\([^;]*?,\s*"([a-z_]+)",\s*\{'),
    re.compile(r'require\([^;]*?,\s*"([a-z_]+)",'),
    re.compile(r'Error\(message, "([a-z_]+)"'),
)


def rules_in_code() -> set[str]:
    found = set(CONSTANTS)
    for path in (REPOSITORY / "python").rglob("*.py"):
        found |= set(IN_PYTHON.findall(path.read_text()))
    for folder in ("olla", "bindings"):
        for path in (REPOSITORY / "cpp" / folder).rglob("*.?pp"):
            text = path.read_text()
            for pattern in IN_CPP:
                found |= set(pattern.findall(text))
    return found


def test_every_rule_has_its_line() -> None:
    rows = [
        line.split("|")[1] for line in (REPOSITORY / "docs/errors.md").read_text().splitlines() if line[:3] == "| `"
    ]
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    assert named == rules_in_code()


def test_every_exception_has_its_line() -> None:
    text = (REPOSITORY / "docs/errors.md").read_text()
    kinds = [kind.__name__ for kind in errors.OllaError.__subclasses__()]
    assert len(kinds) == 6
    assert [kind for kind in kinds if f"| `{kind}` |" not in text] == []
