"""The picture of docs/pictures.md: a captured step, planned and drawn, in a headless Chromium.

    python bench/picture/pictures.py --output docs/pictures

It also tells how large the page is, how long a browser takes to open it and to draw a frame. Exit status: 0; 1 if there
is no Chromium.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

import olla
from bench.support.harness import graph_files, graph_name

_TIMED = """<script>
const start = performance.now();
for (let i = 0; i < 20; i++) for (const panel of panels) panel.draw();
const drawn = (performance.now() - start) / 20;
document.body.dataset.times = `opened in ${start.toFixed(0)} ms, ${drawn.toFixed(1)} ms to draw all`;
</script>"""


def main() -> int:
    """Run it; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--graph", default="gpt2xl_b4", help="name or path of a captured graph")
    parser.add_argument("--output", type=Path, required=True, help="folder of the picture")
    arguments = parser.parse_args()
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        print("no Chromium here: install it (Debian: apt install chromium)", file=sys.stderr)
        return 1
    (path,) = graph_files([arguments.graph])
    graph = olla.Graph.load(path)
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    with tempfile.TemporaryDirectory() as folder:
        page, timed = Path(folder) / "page.html", Path(folder) / "timed.html"
        olla.plot(graph, olla.plan(graph, max_slowdown=0.05), page)
        timed.write_text(page.read_text() + _TIMED)
        command += [f"--user-data-dir={folder}/profile", "--window-size=1200,1130"]
        picture = arguments.output / f"{graph_name(path)}.png"
        subprocess.run([*command, f"--screenshot={picture}", "--virtual-time-budget=3000", page.as_uri()], check=True)
        shown = subprocess.run([*command, "--dump-dom", timed.as_uri()], capture_output=True, text=True, check=True)
        times = re.search(r'data-times="([^"]*)"', shown.stdout)
        print(f"{graph_name(path)}: {page.stat().st_size:,} bytes, {times[1] if times else 'not opened'}")
        return 0 if times else 1


if __name__ == "__main__":
    sys.exit(main())
