"""What the pages of the docs show: their blocks of Python and of commands, in order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(python|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# (\S+\.py)\n")  # the first line of a block that the reader saves under that name


class Block(NamedTuple):
    """A block that runs as printed; others on a page (`py`, `text`, indented ones) do not."""

    kind: str
    """"python", "console" or, of Python that the page has the reader save, "file"."""

    text: str
    line: int  # of the page, from 1
    name: str = ""  # of a file


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page that say they run.

    Example:
        >>> [block.kind for block in blocks(ROOT / "docs" / "start.md")]
        ['console', 'file', 'console', 'console']
    """
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        kind, code = match.groups()
        named = _FILE.match(code) if kind == "python" else None
        line = text.count("\n", 0, match.start(2)) + 1
        found.append(Block("file" if named else kind, code, line, named[1] if named else ""))
    return found
