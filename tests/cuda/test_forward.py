"""Whatever torch asks of its allocator for CUDA reaches it, with planned addresses in front of it or without."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from olla.pytorch.memory import extension  # noqa: E402
from olla.pytorch.memory.replay import Replay  # noqa: E402
from tests.support.pytorch.windows import ones, table  # noqa: E402

SOURCE = Path(__file__).with_name("forward.cpp")


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The functions of forward.cpp."""
    made = tmp_path_factory.mktemp("calls") / "forward.so"
    flags = [*extension._flags("cuda"), f"-I{extension.SOURCES}", *extension._link_flags("cuda")]
    subprocess.run([*extension._compiler(), str(SOURCE), *flags, "-o", str(made)], check=True)
    library = ctypes.CDLL(str(made))
    library.not_forwarded.restype = ctypes.c_char_p
    library.base_of.restype = library.raw_allocate.restype = ctypes.c_void_p
    library.shared_at.restype = ctypes.c_ssize_t
    return library


def test_every_function_of_the_allocator_is_passed_on_with_its_arguments_and_its_answer(calls: ctypes.CDLL) -> None:
    assert calls.not_forwarded().decode() == ""


def test_what_torch_asks_of_a_block_in_the_arena_is_answered_for_the_arena(calls: ctypes.CDLL, replay: Replay) -> None:
    """Torch's own allocator would not know the address: it gave out the whole arena."""
    replay.activate(table([[(2048, 0), (2048, 4096)]], 8192)._replace(alignment=512))
    first, second = ones(replay, 0, 512, 512)
    size = ctypes.c_size_t()
    bases = [calls.base_of(ctypes.c_void_p(t.data_ptr()), ctypes.byref(size)) for t in (first, second)]
    assert bases[0] == bases[1] <= replay.arena[0]
    assert size.value >= 8192
    at = [calls.shared_at(ctypes.c_void_p(t.data_ptr())) for t in (first, second)]
    assert at == [replay.arena[0] - bases[0], replay.arena[0] - bases[0] + 4096]
    outside = torch.ones(16)
    assert calls.base_of(ctypes.c_void_p(outside.data_ptr()), None) <= outside.data_ptr()
    assert calls.shared_at(ctypes.c_void_p(outside.data_ptr())) >= 0
    replay.deactivate()


def test_raw_blocks_of_a_window_are_planned_and_given_back(calls: ctypes.CDLL, replay: Replay) -> None:
    replay.activate(table([[(2048, 0), (2048, 0)]], 2048)._replace(alignment=512))
    replay.begin(0)
    for _ in range(2):
        block = calls.raw_allocate(ctypes.c_size_t(2048))
        assert block == replay.arena[0]
        calls.raw_deallocate(ctypes.c_void_p(block))
    replay.end()
    assert replay.deactivate()[:2] == (2, 0)
    before = torch.cuda.memory_allocated()
    block = calls.raw_allocate(ctypes.c_size_t(2048))
    assert torch.cuda.memory_allocated() == before + 2048
    calls.raw_deallocate(ctypes.c_void_p(block))
    assert torch.cuda.memory_allocated() == before
