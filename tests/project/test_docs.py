"""The pages of the docs run as printed, the reference names everything public, and every page is in the contents.

Blocks of `python` and `console` run, in their order, one namespace and one folder per page; `py`, `text` and indented
ones do not. Pages take for granted what `given` has: a small GPT-2, its data, its graph. Where a page says
`GPT2Config()` it gets one of a single layer.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import olla
from tests.support.pages import ROOT, Block, blocks

DOCS = ROOT / "docs"
PAGES = {page.relative_to(DOCS).as_posix(): blocks(page) for page in sorted(DOCS.rglob("*.md"))}
APART = {  # run elsewhere: in tests/integrations, tests/pytorch/ranks and tests/scale
    "distributed.md",
    "export.md",
    "scale.md",
    "torchtitan.md",
    "trainers.md",
}
SLOW = {"start.md", "inductor.md"}  # they train and compile for a minute
NO_TORCH = {"solver.md"}
MOST_SECONDS = 600


def needs(name: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a page."""
    marks = [] if name in NO_TORCH else [pytest.mark.torch]
    return [*marks, pytest.mark.slow] if name in SLOW else marks


def run_console(block: Block) -> None:
    """Run the lines in a shell that stops at the first failure; `olla` and `python` are those of this environment."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
    )
    assert done.returncode == 0, f"line {block.line}: {done.stdout}{done.stderr}"


def run(name: str, page: list[Block], names: dict[str, Any]) -> None:
    """Run the blocks of a page in the current folder."""
    for block in page:
        if block.kind == "file":
            Path(block.name).write_text(block.text)
        elif block.kind == "console":
            run_console(block)
        else:
            code = "\n" * (block.line - 1) + block.text  # errors name the line of the page
            exec(compile(code, str(DOCS / name), "exec"), names)


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, Any]]:
    """Return a function that makes the names a page takes for granted; the current folder has the graph's file."""

    def make() -> dict[str, Any]:
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        pytest.importorskip("matplotlib").use("agg")
        config = functools.partial(transformers.GPT2Config, n_layer=1, n_embd=32, n_head=2)
        monkeypatch.setattr(transformers, "GPT2Config", config)
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config())
        model.loss_type = "ForCausalLM"  # or transformers logs a warning, which breaks compiled graphs
        optimizer = torch.optim.AdamW(model.parameters())
        batches = [{"input_ids": t, "labels": t} for t in torch.randint(50257, (3, 2, 16))]

        def loss(model: Any, batch: Any) -> Any:
            return model(**batch).loss

        def train() -> None:
            torch.compile(torch.nn.Linear(4, 4))(torch.ones(2, 4)).sum().backward()

        wide = {name: torch.zeros((8, 1024), dtype=torch.long) for name in batches[0]}  # captured, never run
        graph = olla.capture(model, wide, optimizer=optimizer, loss=loss).graph
        graph.save(tmp_path / "step.json.gz")
        names = {"torch": torch, "olla": olla, "model": model, "optimizer": optimizer, "loss": loss, "graph": graph}
        return names | {"train": train, "batches": batches, "loader": batches, "data": batches}

    return make


@pytest.mark.timeout(MOST_SECONDS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs(name)) for name, page in PAGES.items() if page and name not in APART]
)
def test_a_page_runs_as_printed(
    name: str, given: Callable[[], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {} if name in NO_TORCH else given()
    run(name, PAGES[name], names)


def test_a_block_that_fails_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.md").write_text("```python\n# a.py\nx = 1\n```\n\n```console\npython a.py\nolla no-such\n```\n")
    with pytest.raises(AssertionError, match=r"line 7: .*no-such"):
        run("page.md", blocks(tmp_path / "page.md"), {})
    assert (tmp_path / "a.py").read_text() == "# a.py\nx = 1\n"


@pytest.mark.parametrize("module", ["olla", "olla.graph", "olla.inductor"])
def test_the_reference_has_every_public_name(module: str) -> None:
    if module == "olla.inductor":
        pytest.importorskip("torch")
        public = set(olla.inductor.__all__)
    else:
        public = set(olla.__all__ if module == "olla" else olla.graph.__all__)
    text = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    shown = set(re.findall(r":: (olla[\w.]*)", text))
    missing = {f"{module}.{name}" for name in public} - shown
    # What the package itself shows is not shown twice.
    assert {name for name in missing if name.rpartition(".")[2] not in olla.__all__ or module == "olla"} == set()


def test_every_page_is_in_the_contents() -> None:
    index = (DOCS / "index.md").read_text()
    contents = {
        line
        for block in re.findall(r"^```{toctree}\n(.*?)^```", index, re.DOTALL | re.MULTILINE)
        for line in block.split()
    }
    assert {name.removesuffix(".md") for name in PAGES} - contents == {"index"}


@pytest.mark.parametrize("name", sorted(PAGES))
def test_links_lead_to_files(name: str) -> None:
    page = DOCS / name
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
