"""What a step behind a CUDA graph takes: during the capture, when torch counts all of it, and in its own pool later."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from olla.pytorch.memory.replay import Replay, load  # noqa: E402
from olla.pytorch.program import cudagraph  # noqa: E402
from tests.cuda.test_compile import MODELS, example_of, planned  # noqa: E402
from tests.support.pytorch import models  # noqa: E402

STATE = 2 * 512  # bytes: seed and offset of the random numbers of a graph
LOSS = 512


class Captured(NamedTuple):
    """What a capture took, in bytes.

    Attributes:
        peak_bytes: most that torch's allocator gave at once.
        held_bytes: of it, what stays for the replays.
        pool_bytes: of this, what is in the graph's own pool.
        others: sizes of what was asked for in the windows of ops and had no place.
    """

    peak_bytes: int
    held_bytes: int
    pool_bytes: int
    others: list[int]


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Captured]:
    """The captures of the test."""
    found: list[Captured] = []
    counters: list[Any] = []
    capture, deactivate = cudagraph.capture, Replay.deactivate

    def counted(self: Replay, **options: Any) -> Any:
        counters.append(deactivate(self, **options))
        return counters[-1]

    def measured(run: Callable[[], Any], device: torch.device) -> Any:
        load(device).release()  # the arena of the steps before, as the step itself does
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        replay, results = capture(run, device)
        peak, held = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
        others = [miss.num_bytes for miss in counters[-1].misses]
        found.append(Captured(peak, held, pool_bytes(replay.__self__.pool()), others))
        return replay, results

    monkeypatch.setattr(cudagraph, "capture", measured)
    monkeypatch.setattr(Replay, "deactivate", counted)
    return found


def pool_bytes(pool: tuple[int, int]) -> int:
    """What is allocated in a pool of memory, as torch's allocator counts it."""
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment["segment_pool_id"] == pool]
    blocks = [block for segment in segments for block in segment["blocks"]]
    return sum(block["size"] for block in blocks if block["state"] == "active_allocated")


def workspace_bytes() -> int:
    """What cuBLAS asks for on every stream that it multiplies matrices on; now it has that of the current one."""
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()  # or what others left is freed meanwhile
    ones = torch.ones(8, 8, device="cuda")
    product = torch.empty_like(ones)
    before = torch.cuda.memory_allocated()
    torch.mm(ones, ones, out=product)
    return torch.cuda.memory_allocated() - before


@pytest.mark.parametrize("device", ["late"], indirect=True)
@pytest.mark.parametrize("optimizer", ["sgd", "capturable"])
@pytest.mark.parametrize("name", MODELS)
def test_a_captured_step_takes_what_is_planned(
    device: torch.device, captures: list[Captured], name: str, optimizer: str
) -> None:
    """Its peak is arena and outputs, and what only a capture has: a workspace of cuBLAS, and the seeds of attention."""
    workspace = workspace_bytes()
    trained = planned(name, optimizer, 5, arena=True, cuda_graph=True)
    report, [captured] = trained.report, captures
    assert report.num_misses == 0
    assert set(captured.others) <= {workspace, 8}
    assert captured.others.count(workspace) <= 1
    num_seeds = captured.others.count(8)
    kept = report.output_bytes + captured.others.count(workspace) * workspace
    assert captured.peak_bytes == report.arena_bytes + kept + num_seeds * 512 + STATE
    assert captured.held_bytes == kept + STATE
    assert captured.pool_bytes == kept
    batch = models.device_bytes(example_of(name).batch.values())
    assert trained.peak_bytes == trained.resident_bytes + batch + kept + STATE + LOSS
