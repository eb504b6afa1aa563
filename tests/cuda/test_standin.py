"""The stand-in itself: what is not waited for shows, what is refused on a device is refused, numbers are the CPU's."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.cuda.standin import Standin  # noqa: E402


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("reads_late", [True, False])
def test_what_does_not_wait_reads_other_numbers(faults: Standin, waits: bool, reads_late: bool) -> None:
    """Late: the write of the side stream comes after the read. Early: before a read that was queued earlier."""
    faults.schedule("late" if reads_late else "early")
    side = torch.cuda.Stream()
    x = torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    before = None if reads_late else x + 1
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.fill_(5)
    if reads_late:
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        read = x + 1
        assert read.cpu().eq(6 if waits else 1).all()
    else:
        assert before is not None
        torch.cuda.synchronize()
        assert before.cpu().eq(1 if waits else 6).all()
    torch.cuda.synchronize()
    faults.schedule("now")


def test_events_are_not_ready_before_the_host_waits(faults: Standin) -> None:
    faults.schedule("late")
    torch.ones(3, device="cuda").add_(1)
    event = torch.cuda.Event()
    event.record()
    assert not event.query()
    event.synchronize()
    assert event.query()
    faults.schedule("now")


def test_pinned_memory_is_read_when_the_copy_runs_and_other_memory_when_it_is_queued(faults: Standin) -> None:
    faults.schedule("late")
    pinned, plain = torch.ones(4).pin_memory(), torch.ones(4)
    x, y = pinned.to("cuda", non_blocking=True), plain.to("cuda", non_blocking=True)
    pinned.fill_(2)
    plain.fill_(2)
    assert x.cpu().eq(2).all()
    assert y.cpu().eq(1).all()
    faults.schedule("now")


def test_graphs_repeat_what_was_captured_on_all_streams(device: torch.device, faults: Standin) -> None:
    x, y = torch.zeros(8, device=device), torch.zeros(8, device=device)
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y.copy_(x)
        torch.cuda.current_stream().wait_stream(side)
        y.add_(1)
    for value in (3.0, 4.0):
        x.fill_(value)
        graph.replay()
        assert y.cpu().eq(value + 1).all()


def test_what_a_capture_does_not_allow_ends_it(faults: Standin) -> None:
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(8, device="cuda")
    with pytest.raises(RuntimeError, match=r"StreamCapture(Unsupported|Invalidated)"), torch.cuda.graph(graph):
        x.sum().item()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)
        with pytest.raises(RuntimeError, match="StreamCaptureUnjoined"):
            graph.capture_end()
    assert x.add_(1).cpu().eq(1).all()


def test_memory_ends_where_it_is_asked_to(faults: Standin) -> None:
    torch.cuda.empty_cache()
    used = faults.used_bytes()
    faults.fail_after(0)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    faults.fail_after(-1)
    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    assert faults.used_bytes() == used + (1 << 30)
    del x
    torch.cuda.empty_cache()
    assert faults.used_bytes() == used


def test_numbers_are_those_of_a_cpu(device: torch.device, faults: Standin) -> None:
    def train(place: torch.device | str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = (
            torch.nn.Conv2d(3, 8, 3),
            torch.nn.BatchNorm2d(8),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(288, 10),
        )
        model = torch.nn.Sequential(*layers).to(place)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        batch = torch.randn(4, 3, 8, 8).to(place)
        for _ in range(3):
            torch.nn.functional.cross_entropy(model(batch), torch.arange(4, device=place)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [value.detach().cpu() for value in model.state_dict().values()]

    assert all(map(torch.equal, train(device), train("cpu")))


def test_draws_follow_the_generator_of_the_device(device: torch.device, faults: Standin) -> None:
    torch.manual_seed(3)
    first, second = torch.rand(100, device=device), torch.rand(100, device=device)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert torch.equal(torch.rand(100, device=device).cpu(), first.cpu())
    assert not torch.equal(first.cpu(), second.cpu())
    assert torch.equal(torch.get_rng_state(), before)  # the CPU's generator is left alone
    kept = torch.nn.functional.dropout(torch.ones(1000, device=device), 0.3)
    assert 600 < kept.cpu().count_nonzero() < 800
