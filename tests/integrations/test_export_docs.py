"""What docs/export.md shows runs, and prints what it says."""

from __future__ import annotations

import re
import shlex
import warnings
from pathlib import Path

import pytest

from olla.cli import main

TEXT = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
SECTIONS = {section.partition("\n")[0]: section for section in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]}
NEEDS = {
    "From torch: fx modules and exported programs": "torch",
    "From arrays": "numpy",
    "From ONNX": "onnxscript",  # which needs onnx
    "To ExecuTorch": "executorch.exir",
}


def blocks(section: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", SECTIONS[section], re.DOTALL | re.MULTILINE)


def test_every_section_with_an_example_is_run_here() -> None:
    assert {title for title in SECTIONS if blocks(title, "python")} == NEEDS.keys()


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("section", NEEDS)
def test_examples_run_and_print_what_they_say(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(NEEDS[section], reason=f"the examples of {section!r} need it")
    names: dict[str, object] = {}
    for block in blocks(section, "python"):
        exec(compile(block, "export.md", "exec"), names)
        printed = capsys.readouterr().out
        for line in re.findall(r"^print\(.*\n# (.*)$", block, re.MULTILINE):
            assert line in printed.splitlines()
    for block in blocks(section, "console"):
        for line in block.splitlines():
            command, *arguments = shlex.split(line)
            assert command == "olla"
            assert main(arguments) == 0, line
