"""The pictures of docs/pictures.md: the step of the README at three widths, and a large captured step, in a Chromium.

    python bench/picture/pictures.py --output docs/pictures

It also tells how large the pages are, how long a browser takes to open them, to draw all and to search. Exit status: 0;
1 if there is no Chromium.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla
from bench.support.harness import graph_files, graph_name
from tests.picture import browser
from tests.support.pages import ROOT, blocks

_STEP_SIZES = ((390, 1260, False), (820, 1180, True), (1440, 900, False))  # width, height, dark
_TIMES = """
const opened = performance.getEntriesByType("navigation")[0].domComplete, times = [];
for (const what of [() => app.panels.forEach(panel => panel.draw()), () => app.run.find("mlp")]) {
  const start = performance.now();
  for (let i = 0; i < 10; i++) what();
  times.push((performance.now() - start) / 10);
}
return `opened in ${opened.toFixed(0)} ms, ${times[0].toFixed(1)} ms to draw all, ${times[1].toFixed(1)} ms to search`;
"""


def readme_step(page: Path) -> None:
    """Run the step of the README as printed, and write its page."""
    code = next(block for block in blocks(ROOT / "README.md") if "olla.compile" in block.text)
    names: dict[str, Any] = {}
    exec(compile(code.text, "train.py", "exec"), names)
    names["step"].plot(page)


def main() -> int:
    """Run it; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--graph", default="gpt2xl_b4", help="name or path of a captured graph; empty: none")
    parser.add_argument(
        "--step", action=argparse.BooleanOptionalAction, default=True, help="whether to run the README's"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the pictures")
    arguments = parser.parse_args()
    if browser.MISSING:
        print(browser.MISSING, file=sys.stderr)
        return 1
    output = arguments.output.resolve()
    with tempfile.TemporaryDirectory() as folder, browser.browser() as window:

        def show(name: str, page: Path, width: int, height: int, dark: bool) -> None:
            window.show(width, height, dark=dark)
            window.open(page)
            (output / f"{name}.png").write_bytes(window.picture())
            print(f"{name}: {page.stat().st_size:,} bytes, {window.run(_TIMES)}")

        page = Path(folder) / "page.html"
        if arguments.graph:
            (path,) = graph_files([arguments.graph])
            graph = olla.Graph.load(path)
            olla.plot(graph, olla.plan(graph, max_slowdown=0.05), page)
            show(graph_name(path), page, 1200, 1000, dark=False)
        if arguments.step:
            os.chdir(folder)
            readme_step(page)
            for width, height, dark in _STEP_SIZES:
                show(f"step_{width}", page, width, height, dark)
    return 0


if __name__ == "__main__":
    sys.exit(main())
