"""Whatever torch asks of its allocator for CUDA reaches it, with planned addresses in front of it or without."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from olla.pytorch.memory import extension  # noqa: E402

SOURCE = Path(__file__).with_name("forward.cpp")


def test_every_function_of_the_allocator_is_passed_on_with_its_arguments_and_its_answer(tmp_path: Path) -> None:
    made = tmp_path / "forward.so"
    flags = [*extension._flags("cuda"), f"-I{extension.SOURCES}", *extension._link_flags("cuda")]
    subprocess.run([*extension._compiler(), str(SOURCE), *flags, "-o", str(made)], check=True)
    library = ctypes.CDLL(str(made))
    library.not_forwarded.restype = ctypes.c_char_p
    assert library.not_forwarded().decode() == ""
