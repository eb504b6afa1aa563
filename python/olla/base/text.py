"""Numbers and names as people write and read them: byte counts, ratios, text that a terminal may show."""

from __future__ import annotations

import io
import math
import re
import unicodedata
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from olla.errors import BudgetError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control characters, also those of direction; surrogates; other line ends
_UNITS = {"B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}iB"] = 1024**_power
_SCALES = {"": 1, **{unit.upper(): scale for unit, scale in _UNITS.items()}}  # 16gb is 16GB
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)")
_REMEDY = 'write "16GB" (1000^3), "16GiB" (1024^3) or a whole number of bytes'
_MOST_BYTES = 2**62


def visible(text: str) -> str:
    r"""Return text from a file as a terminal may show it: characters that would steer the terminal as escapes.

    Example:
        >>> visible("a name"), visible("\x1b[2Jgone") == r"\x1b[2Jgone"
        ('a name', True)
    """
    if text.isprintable():
        return text
    return "".join(c.encode("unicode_escape").decode() if unicodedata.category(c) in _HIDDEN else c for c in text)


def cells(*texts: str, style: str = "") -> list[Text]:
    """Return texts for rich as they are: `visible`, and "[0]" or "[red]" in a name is no markup."""
    from rich.text import Text

    return [Text(visible(text), style) for text in texts]


def plain(*parts: RenderableType, width: int) -> str:
    """Return what rich prints of some parts, one below the other, as text without colours or trailing spaces.

    Args:
        parts: tables, texts, lines.
        width: columns, whatever the terminal has.

    Example:
        >>> plain("a line", "another", width=80)
        'a line\\nanother'
    """
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def figures(*columns: Mapping[str, Any]) -> Table:
    """Return an empty table for rich with these columns, indented and without lines and titles."""
    from rich.table import Column, Table

    return Table(*(Column(**column) for column in columns), box=None, show_header=False, padding=(0, 2, 0, 2))


def human_bytes(num_bytes: int) -> str:
    """Return a byte count for a reader.

    Example:
        >>> human_bytes(0), human_bytes(1536), human_bytes(5 * 2**30), human_bytes(-2048)
        ('0 B', '1.50 KiB', '5.00 GiB', '-2.00 KiB')
    """
    size, unit = float(abs(num_bytes)), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if size < 1024.0:
            break
        size, unit = size / 1024.0, larger
    sign = "-" if num_bytes < 0 else ""
    return f"{sign}{size:.0f} B" if unit == "B" else f"{sign}{size:.2f} {unit}"


def percent(ratio: float) -> str:
    """Return a ratio in percent; a small one never reads as zero.

    Example:
        >>> percent(0.0), percent(0.1234), percent(1e-7), percent(float("inf"))
        ('0 %', '12.34 %', '<0.01 %', 'unknown')
    """
    if not math.isfinite(ratio):
        return "unknown"
    if ratio != 0 and abs(ratio) < 1e-4:
        return "<0.01 %" if ratio > 0 else ">-0.01 %"
    return f"{ratio * 100:.2f} %" if ratio else "0 %"


def parse_bytes(value: object, name: str = "budget") -> int:
    """Return a number of bytes from what people write.

    Args:
        value: text such as "16GB", "16 GiB", "512MiB", or a whole number of bytes.
        name: what the value is called in messages.

    Returns:
        Bytes, at least 1; a fraction of a byte is dropped.

    Raises:
        BudgetError: rule "budget"; the message names the value and what to write instead.

    Example:
        >>> parse_bytes("16GB"), parse_bytes("1.5 KiB"), parse_bytes("200kB"), parse_bytes(4096)
        (16000000000, 1536, 200000, 4096)
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise _error(name, value, "is no number of bytes")
    if isinstance(value, int):
        number = value
    else:
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            raise _error(name, value, "is no number of bytes")
        digits, unit = match.groups()
        scale = _SCALES.get(unit.upper())
        if scale is None:
            raise _error(name, value, f"has the unknown unit {unit!r}; known are {', '.join(_UNITS)}")
        if not unit and "." in digits:
            raise _error(name, value, "is no whole number of bytes")
        whole, _, fraction = digits.partition(".")
        number = int(whole) * scale + (int(fraction) * scale // 10 ** len(fraction) if fraction else 0)
    if number <= 0:
        raise _error(name, value, "leaves no memory")
    if number > _MOST_BYTES:
        raise _error(name, value, "is above 2^62 bytes")
    return number


def _error(name: str, value: object, wrong: str) -> BudgetError:
    return BudgetError(f"{name} {value!r} {wrong}: {_REMEDY}", rule="budget")
