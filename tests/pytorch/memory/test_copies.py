"""Copies to host memory and back: the same values and strides, through interrupts and forks."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

import olla
from olla.pytorch.memory.copies import Copies, HostMemory, Outline, whole
from tests.support.pytorch.steps import num_interrupted, torch

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


def test_interrupts_between_any_two_lines_hold_no_copy_up() -> None:
    value, num = torch.arange(1024.0), 4
    places = [i * value.nbytes for i in range(num)]
    host = Copies([value.nbytes] * num, places, [-1, 0, 1, 2], HostMemory("cpu"), num * value.nbytes, CPU)

    def there_and_back() -> None:
        host.begin()
        for i in range(num):
            host.out(i, value)
        found = []
        for i in range(num):
            host.wait(i)
            found.append(host.back(i))
        for i in range(num):
            host.wait(i)
        assert all(torch.equal(Outline.of(value).within(memory), value) for memory in found)
        host.end()

    start = time.perf_counter()
    for _ in range(10):
        there_and_back()
    seconds = (time.perf_counter() - start) / 10
    found = 0
    for _ in range(4):  # where other work takes the cores fewer interrupts find a copy running
        found += num_interrupted(5000, 1.1 * seconds, there_and_back, there_and_back)
        if found > 500:
            break
    assert found > 500


VIEWS = {
    "strides": torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)[1:, :, ::2],
    "offset": torch.arange(6, dtype=torch.int16)[2:],
    "conjugate": torch.randn(3, 4, dtype=torch.complex64).conj().t(),
    "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
    "expanded": torch.randn(2, 1).expand(2, 5),
}


def require_the_same_view(value: Any) -> None:
    """Swap a value out and back, wherever it lies."""
    num_bytes = whole(value).nbytes
    host = Copies([num_bytes], [64], [-1], HostMemory(value.device.type), 64 + num_bytes, value.device)
    host.begin()
    host.out(0, value)
    host.wait(0)
    found = Outline.of(value).within(host.back(0))
    host.wait(0)
    assert torch.equal(found, value)
    assert found.stride() == value.stride()
    assert found.data_ptr() != value.data_ptr()


@pytest.mark.parametrize("kind", VIEWS)
def test_views_are_the_same_in_the_memory_that_comes_back(kind: str) -> None:
    require_the_same_view(VIEWS[kind])


def require_the_size_of_the_capture(device: Any) -> None:
    """Swap out what is smaller than it was."""
    host = Copies([64], [0], [-1], HostMemory(device.type), 64, device)
    host.begin()
    with pytest.raises(olla.ReplayError, match="has 8 bytes where it had 64"):
        host.out(0, torch.ones(2, device=device))


def test_a_tensor_of_another_size_than_captured_is_refused() -> None:
    require_the_size_of_the_capture(CPU)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_copies_work_in_a_forked_child() -> None:
    host = Copies([16], [0], [-1], HostMemory("cpu"), 16, CPU)
    host.begin()
    child = os.fork()
    if child == 0:
        value = torch.arange(4.0)
        host.begin()
        host.out(0, value)
        host.wait(0)
        memory = host.back(0)
        host.wait(0)
        os._exit(0 if torch.equal(Outline.of(value).within(memory), value) else 1)
    assert os.waitpid(child, 0)[1] == 0
