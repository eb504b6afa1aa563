"""What torch's caching allocator takes from a GPU for a compiled step: in one piece."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import olla.inductor  # noqa: E402
from olla.inductor.compat import codegen  # noqa: E402
from olla.inductor.kernels.segment import Segment  # noqa: E402
from tests.cuda.standin import Standin  # noqa: E402
from tests.support.pytorch import standing  # noqa: E402
from tests.support.pytorch.compiling import blocks, fresh  # noqa: E402, F401

MEBI = 2**20


@pytest.fixture
def pieces(device: torch.device) -> Iterator[Callable[[], list[int]]]:
    """Yield what tells the sizes in MiB of what the allocator has come to hold since, beside small blocks.

    What other tests of the process left is full meanwhile: nothing of it serves a request.
    """
    torch._C._cuda_clearCublasWorkspaces()
    while gc.collect():
        pass
    torch.cuda.empty_cache()
    left = large()
    usual = [block for segment in left if segment["segment_pool_id"] == (0, 0) for block in segment["blocks"]]
    free = [block["size"] for block in usual if block["state"] == "inactive" and block["size"] > MEBI]
    held = [torch.empty(num_bytes, dtype=torch.uint8, device="cuda") for num_bytes in sorted(free, reverse=True)]
    others = {segment["address"] for segment in left}
    assert {segment["address"] for segment in large()} == others
    yield lambda: sorted(s["total_size"] // MEBI for s in large() if s["address"] not in others)
    del held


def large() -> list[dict[str, Any]]:
    """Return the allocator's segments beside those of small blocks."""
    return [segment for segment in torch.cuda.memory_snapshot() if segment["segment_type"] == "large"]


def test_a_piece_is_taken_whole_and_nothing_lives_in_it(pieces: Callable[[], list[int]]) -> None:
    before = torch.cuda.memory_allocated()
    Segment(0, 100 * MEBI)()
    assert pieces() == [100]
    assert torch.cuda.memory_allocated() == before
    first, second = (torch.empty(num * MEBI, dtype=torch.uint8, device="cuda") for num in (30, 60))
    assert pieces() == [100]
    del first, second


def test_the_second_run_takes_what_has_come_to_lie_in_the_piece_and_later_ones_nothing(
    pieces: Callable[[], list[int]],
) -> None:
    segment = Segment(0, 100 * MEBI)
    segment()
    state = torch.empty(40 * MEBI, dtype=torch.uint8, device="cuda")
    segment()
    assert pieces() == [40, 100]
    more = torch.empty(60 * MEBI, dtype=torch.uint8, device="cuda")
    segment()
    assert pieces() == [40, 100]
    del state, more


def test_a_second_graph_shares_the_piece_of_the_first(pieces: Callable[[], list[int]]) -> None:
    Segment(0, 100 * MEBI)()
    saved = torch.empty(25 * MEBI, dtype=torch.uint8, device="cuda")
    Segment(0, 90 * MEBI)()  # 75 are free: less than the allocator takes at once anyway is lacking
    assert pieces() == [100]
    del saved


def test_what_is_free_in_the_pool_of_a_graph_is_no_part_of_the_piece(pieces: Callable[[], list[int]]) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.empty(60 * MEBI, dtype=torch.uint8, device="cuda")
    (pool,) = pieces()
    assert pool >= 60
    Segment(0, 100 * MEBI)()
    assert pieces() == [pool, 100]


def test_more_than_the_device_has_is_not_asked_for(pieces: Callable[[], list[int]]) -> None:
    Segment(0, 2 * torch.cuda.mem_get_info()[1])()
    assert pieces() == []


@pytest.mark.parametrize("settings", ["expandable_segments:True", "backend:native,max_split_size_mb:64"])
def test_an_allocator_that_does_not_split_large_pieces_is_left_alone(
    settings: str, monkeypatch: pytest.MonkeyPatch, pieces: Callable[[], list[int]]
) -> None:
    monkeypatch.setattr(codegen, "allocator_settings", lambda: settings)
    Segment(0, 100 * MEBI)()
    assert pieces() == []


def test_a_capture_is_left_alone_and_the_run_behind_it_takes_the_piece(pieces: Callable[[], list[int]]) -> None:
    segment = Segment(0, 100 * MEBI)
    graph, x = torch.cuda.CUDAGraph(), torch.ones(4, device="cuda")
    with torch.cuda.graph(graph):
        segment()
        x.add_(1)
    assert max(pieces(), default=0) < 100
    segment()
    assert max(pieces()) == 100


def train(**options: Any) -> None:
    """Train for a few compiled steps."""
    torch.compiler.reset()
    model, x = blocks(2).cuda(), torch.randn(1 << 17, 32, device="cuda")
    optimizer = torch.optim.SGD(model.parameters())
    step = torch.compile(model, backend=olla.inductor.backend, options=options)
    for _ in range(4):
        step(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_two_forwards_take_the_planned_bytes_and_one_backward_gives_back(
    standin: Standin | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if standin is None:
        pytest.skip("kernels are left out, which only the stand-in allows")
    seen: list[int] = []
    take = Segment._take

    def watched(self: Segment) -> None:
        seen.append(self.num_bytes)
        take(self)

    monkeypatch.setattr(Segment, "_take", watched)
    with standing.without_times(), standing.without_triton():
        train(segment=False)
        assert seen == []
        train()
    planned, *others = seen
    assert planned > 20 * MEBI
    assert others == [0, planned]
