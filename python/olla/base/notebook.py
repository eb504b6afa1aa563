"""HTML for notebooks: plans, graphs and reports as a small table with a picture."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

import numpy as np
from numpy.typing import NDArray

from olla.base.text import human_bytes, visible

_WIDTH, _HEIGHT, _ROW = 420, 96, 18  # pixels
_NAMES, _VALUES = 96, 76  # of the width, beside bars
_COLOR = "#4e79a7"  # on light and dark ground alike


def shown(title: str, rows: Iterable[tuple[str, str]], picture: str = "", notes: Iterable[str] = ()) -> str:
    """Return HTML of a title, a picture, a table and notes.

    Args:
        title: plain text, as everything but the picture.
        rows: name and value.
        picture: SVG, from `bars` or `curve`.
        notes: lines below the table; empty ones are left out.

    Example:
        >>> "<td>1 &lt; 2</td>" in shown("a plan", [("fact", "1 < 2")])
        True
    """
    style = "text-align: left; padding: 1px 14px 1px 0"
    cells = "".join(
        f'<tr><th style="{style}; font-weight: normal">{_text(n)}</th><td>{_text(v)}</td></tr>' for n, v in rows
    )
    table = f'<table style="margin: 4px 0; border-collapse: collapse">{cells}</table>' if cells else ""
    below = "".join(f"<div>{_text(note)}</div>" for note in notes if note)
    return f"<div><div><b>{_text(title)}</b></div>{picture}{table}{below}</div>"


def bars(rows: Iterable[tuple[str, int]], title: str) -> str:
    """Return byte counts as bars: SVG.

    Args:
        rows: name and bytes.
        title: what the picture says, for who does not see it.
    """
    given = list(rows)
    most = max((num for _, num in given), default=0) or 1
    room, parts = _WIDTH - _NAMES - _VALUES, []
    for i, (name, num) in enumerate(given):
        middle, length = i * _ROW + _ROW / 2, max(1.0, room * max(0, num) / most)
        parts.append(f'<text x="0" y="{middle + 4}">{_text(name)}</text>')
        parts.append(
            f'<rect x="{_NAMES}" y="{i * _ROW + 3}" width="{length:.1f}" height="{_ROW - 6}" fill="{_COLOR}"/>'
        )
        parts.append(f'<text x="{_NAMES + length + 5:.1f}" y="{middle + 4}">{_text(human_bytes(num))}</text>')
    return _svg(parts, len(given) * _ROW, title)


def curve(values: NDArray[np.int64], title: str) -> str:
    """Return bytes over steps as an area: SVG. Of the steps that share a pixel, the most counts.

    Args:
        values: int64[n].
        title: what the picture says, for who does not see it.
    """
    num = min(len(values), _WIDTH)
    if not num:
        return ""
    starts = np.arange(num) * len(values) // num
    most = np.maximum.reduceat(values, starts)
    heights = _HEIGHT - 2 - (_HEIGHT - 4) * most / max(1, int(most.max()))
    width = _WIDTH / num
    points = "".join(f"L{i * width:.1f} {y:.1f}H{(i + 1) * width:.1f}" for i, y in enumerate(heights.tolist()))
    return _svg([f'<path d="M0 {_HEIGHT}{points}V{_HEIGHT}Z" fill="{_COLOR}"/>'], _HEIGHT, title)


def _svg(parts: Iterable[str], height: int, title: str) -> str:
    size = f'width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
    style = "max-width: 100%; font: 12px sans-serif; margin: 4px 0"
    return (
        f'<svg {size} role="img" aria-label="{_text(title)}" fill="currentColor" style="{style}">{"".join(parts)}</svg>'
    )


def _text(text: str) -> str:
    return escape(visible(text))
