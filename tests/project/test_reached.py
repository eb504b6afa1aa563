"""The lines that tests reach, as tests/cuda/reached.py counts them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cuda import reached

PROGRAM = """#include "cuda_forward.hpp"
int main(int argc, char**) {
  if (argc == 2)
    return 2;
  if (argc == 3)
    return 3;
  if (argc == 4)
    return 4;
  return forwarded(argc);
}
"""


@pytest.mark.skipif(shutil.which("gcov") is None, reason="needs gcov")
def test_lines_of_cpp_are_merged_over_processes_and_other_sources_have_no_counters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reached, "FOLDER", tmp_path / "counted")
    compiler = reached.counting_compiler()
    (tmp_path / "cuda_forward.hpp").write_text("inline int forwarded(int x) {\n  return x * x % 7;\n}\n")
    for name in ("cuda_allocator", "other"):
        source, made = tmp_path / f"{name}.cpp", tmp_path / name
        source.write_text(PROGRAM)
        subprocess.run([compiler, "-O2", str(source), "-o", str(made)], check=True)
        for arguments in ([], ["x"], ["x", "x"]):
            subprocess.run([made, *arguments], check=False)
    lines = reached.cpp_lines()
    assert sorted(lines) == ["cuda_allocator.cpp", "cuda_forward.hpp"]
    assert lines["cuda_forward.hpp"].share() == 1
    assert lines["cuda_allocator.cpp"].all - lines["cuda_allocator.cpp"].reached == {8}
    assert lines["cuda_allocator.cpp"].text().endswith("not 8")


def test_what_is_for_a_cpu_alone_does_not_count() -> None:
    functions = {
        "": {"executed_lines": [1, 2], "missing_lines": []},
        "_Threads.copy": {"executed_lines": [], "missing_lines": [3, 4]},
        "_Streams.copy": {"executed_lines": [5], "missing_lines": [6]},
    }
    lines = reached.of_cuda({"functions": functions}, reached.PYTHON["memory/copies.py"])
    assert (lines.all, lines.reached) == ({1, 2, 5, 6}, {1, 2, 5})
    assert lines.share() == 0.75
