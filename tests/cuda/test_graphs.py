"""Steps behind CUDA graphs, and beside graphs and pools of memory that are the user's."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import olla  # noqa: E402
from olla.pytorch.memory.copies import Copies  # noqa: E402
from olla.pytorch.memory.replay import Replay  # noqa: E402
from tests.support.pytorch import windows  # noqa: E402
from tests.support.pytorch.steps import World, deep, images, net, nn, same, square  # noqa: E402

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, capturable=True, amsgrad=True, foreach=False),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2, capturable=True, foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, capturable=True, foreach=False),
    "tensor rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2, device="cuda"), capturable=True, foreach=False),
}


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    yield
    while gc.collect():
        pass


def world_of(optimizer: str = "sgd") -> World:
    model = net().cuda()
    return World(model, OPTIMIZERS[optimizer](model.parameters()), images().cuda(), square)


def trained(world: World, step: Callable[[Any], Any], batches: list[Any]) -> list[Any]:
    """Losses of a training run, and all that it changed."""
    torch.manual_seed(7)
    return [*(step(batch).detach().cpu() for batch in batches), *(value.cpu() for value in world.values())]


def ordinary(world: World) -> Callable[[Any], Any]:
    def step(batch: Any) -> Any:
        world.optimizer.zero_grad()
        loss = square(world.model, batch)
        loss.backward()
        world.optimizer.step()
        return loss

    return step


def compiled(world: World, **options: Any) -> Any:
    return world.compiled(**{"arena": True} | options)


def steps(number: int) -> list[Any]:
    return [images().cuda() + 0.1 * i for i in range(number)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_graphs_of_any_optimizer_take_new_batches(device: torch.device, optimizer: str) -> None:
    expected, world = world_of(optimizer), world_of(optimizer)
    step = compiled(world, cuda_graph=True)
    assert same(trained(world, step, steps(7)), trained(expected, ordinary(expected), steps(7)))
    assert step._latest._graphed is not None
    assert step.report().num_misses == 0


@pytest.mark.parametrize("arena", [True, False])
def test_each_shape_of_batches_has_a_graph_and_all_of_them_live(device: torch.device, arena: bool) -> None:
    batches = [batch for i in range(6) for batch in (images().cuda() + i, images()[:1].cuda() - i)]
    expected, world = world_of(), world_of()
    step = compiled(world, cuda_graph=True, arena=arena)
    assert same(trained(world, step, batches), trained(expected, ordinary(expected), batches))
    assert step.report().num_captures == 2


def test_a_released_step_replays_its_graph(device: torch.device) -> None:
    """The graph's own memory is not the arena's that release() gives back."""
    expected, world = world_of(), world_of()
    step = compiled(world, cuda_graph=True)

    def released(batch: Any) -> Any:
        loss = step(batch)
        step.release()
        return loss

    assert same(trained(world, released, steps(7)), trained(expected, ordinary(expected), steps(7)))


SWAPS = {"minimise": "peak", "swap": True, "recompute": False, "disk_cache": False, "time_limit": 3.0}


def deep_world(optimizer: str) -> World:
    model, batch = deep(2048, "cuda")
    return World(model, OPTIMIZERS[optimizer](model.parameters()), batch, square)


@pytest.mark.parametrize("arena", [True, False])
def test_copies_of_swaps_are_captured_with_the_step(device: torch.device, arena: bool) -> None:
    """Batches of two sizes share the host memory: one needs more than the graph of the other was captured with."""
    rows = [1024] * 5 + [2048] * 5 + [1024] * 3 + [2048] * 2
    batches = [deep(number, "cuda")[1] + i for i, number in enumerate(rows)]
    expected, world = deep_world("adam"), deep_world("adam")
    step = compiled(world, **SWAPS | {"arena": arena, "cuda_graph": True})
    assert same(trained(world, step, batches), trained(expected, ordinary(expected), batches))
    report = step.report()
    assert step._latest._graphed is not None
    assert report.num_misses == 0
    assert report.swap.num_swaps > 0
    step.release()  # the host memory too
    assert same(trained(world, step, batches[-3:]), trained(expected, ordinary(expected), batches[-3:]))


def run(step: Callable[[Any], Any], batch: Any) -> None:
    for _ in range(5):
        step(batch)


@pytest.mark.parametrize("options", [{}, SWAPS], ids=["plain", "swapped"])
def test_what_no_graph_can_hold_is_named(device: torch.device, options: dict[str, Any]) -> None:
    def checked(model: Any, x: Any) -> Any:
        loss = square(model, x)
        if not loss > -1:  # when copies of swaps are on their way
            raise ValueError("below 0")
        return loss

    model, batch = deep(2048, "cuda")
    optimizer = OPTIMIZERS["sgd"](model.parameters())  # without one there is nothing to swap
    step = olla.compile(model, optimizer=optimizer, loss=checked, cuda_graph=True, **{"disk_cache": False} | options)
    current = torch.cuda.current_stream()
    with pytest.raises(olla.ReplayError, match=r"cannot be captured in a CUDA graph: .*Leave cuda_graph out"):
        run(step, batch)
    assert torch.cuda.current_stream() == current


def test_an_interrupt_amid_copies_that_are_captured_is_an_interrupt(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, world = deep_world("sgd"), deep_world("sgd")
    step = compiled(world, **SWAPS, cuda_graph=True)
    wait, interrupts = Copies.wait, list[int]()

    def interrupted(self: Copies, swap: int) -> None:
        if torch.cuda.is_current_stream_capturing() and not interrupts:
            interrupts.append(swap)
            raise KeyboardInterrupt
        wait(self, swap)

    def call(batch: Any) -> Any:
        try:
            return step(batch)
        except KeyboardInterrupt:
            return step(batch)

    monkeypatch.setattr(Copies, "wait", interrupted)
    batches = [deep(2048, "cuda")[1] + i for i in range(8)]
    assert same(trained(world, call, batches), trained(expected, ordinary(expected), batches))
    assert len(interrupts) == 1


def test_counters_of_an_optimizer_on_the_cpu_are_named(device: torch.device) -> None:
    model = net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    step = olla.compile(model, optimizer=optimizer, loss=square, cuda_graph=True, disk_cache=False)
    with pytest.raises(olla.ReplayError, match="is on cpu, and a CUDA graph needs it on cuda:0"):
        run(step, images().cuda())


@pytest.mark.filterwarnings("ignore:the CUDA graph is captured anew")
def test_rates_and_replaced_tensors_are_those_of_the_next_replay(device: torch.device) -> None:
    def changing(world: World, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        calls = iter(range(100))

        def call(batch: Any) -> Any:
            number = next(calls)
            if number == 4:
                world.optimizer.param_groups[0]["lr"] = 0.01
            if number == 6:
                world.model[0].weight.data = world.model[0].weight.data.clone()
            return step(batch)

        return call

    expected, world = world_of(), world_of()
    found = trained(world, changing(world, compiled(world, cuda_graph=True)), steps(9))
    assert same(found, trained(expected, changing(expected, ordinary(expected)), steps(9)))


def reserved() -> Counter[Any]:
    """Bytes of torch's segments, by the pool they belong to."""
    found: Counter[Any] = Counter()
    for segment in torch.cuda.memory_snapshot():
        found[segment["segment_pool_id"]] += segment["total_size"]
    return found


def own_graph(stream: Any = None) -> tuple[Callable[[float], Any], nn.Module]:
    """A graph of the user's that makes and keeps values of its own; what it gives for a number, and its model."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).cuda()
    given = torch.zeros(32, 64, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        model(given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream), torch.no_grad():
        result = model(given)

    def replay(value: float) -> Any:
        given.fill_(value)
        graph.replay()
        return result.cpu()

    return replay, model


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_a_graph_of_the_users_and_a_planned_step_leave_each_other_alone(device: torch.device, cuda_graph: bool) -> None:
    replay, model = own_graph()
    expected, world = world_of(), world_of()
    step = compiled(world, cuda_graph=cuda_graph)
    pools = {pool: size for pool, size in reserved().items() if pool != (0, 0)}

    def beside(batch: Any) -> Any:
        loss = step(batch)
        value = float(batch.mean())
        with torch.no_grad():
            assert torch.equal(replay(value), model(torch.full((32, 64), value, device="cuda")).cpu())
        return loss

    assert same(trained(world, beside, steps(6)), trained(expected, ordinary(expected), steps(6)))
    now = reserved()
    assert {pool: now[pool] for pool in pools} == pools


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_graphed_callables_train_beside_a_planned_step(device: torch.device) -> None:
    def graphed_and_step(planned: bool) -> list[Any]:
        torch.manual_seed(2)
        x = torch.randn(8, 32, device="cuda")
        layer = torch.cuda.make_graphed_callables(nn.Linear(32, 32).cuda(), (x.clone().requires_grad_(),))
        world = world_of()
        step = compiled(world) if planned else ordinary(world)

        def both(batch: Any) -> Any:
            layer.zero_grad()
            layer(x.clone().requires_grad_()).square().mean().backward()
            with torch.no_grad():
                for p in layer.parameters():
                    p.sub_(p.grad)
            return step(batch)

        return [*trained(world, both, steps(6)), *(p.detach().cpu() for p in layer.parameters())]

    assert same(graphed_and_step(True), graphed_and_step(False))


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_steps_under_a_pool_of_memory_train_and_leave_it_empty(device: torch.device, cuda_graph: bool) -> None:
    expected, world = world_of(), world_of()
    made = [compiled(world, cuda_graph=cuda_graph)]
    pool = torch.cuda.MemPool()

    def pooled(batch: Any) -> Any:
        with torch.cuda.use_mem_pool(pool):
            return made[0](batch)

    assert same(trained(world, pooled, steps(6)), trained(expected, ordinary(expected), steps(6)))
    made.clear()
    world.optimizer.state.clear()
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # cuBLAS keeps it; every test begins without one
    blocks = [block for segment in pool.snapshot() for block in segment["blocks"]]
    assert [block["size"] for block in blocks if block["state"] == "active_allocated"] == []


def test_what_is_captured_has_no_address_of_an_arena_from_before(replay: Replay) -> None:
    """The graph would write there at any later time, whatever the arena holds by then."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        replay.activate(windows.table([[(64, 0)], [(64, 0)]], 512)._replace(alignment=512))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            [captured] = windows.ones(replay, 0, 16)
        [planned] = windows.ones(replay, 1, 16)
        assert [windows.in_arena(replay, tensor) for tensor in (captured, planned)] == [False, True]
        planned.fill_(5)
        graph.replay()
        assert bool(planned.cpu().eq(5).all())
        assert [miss.reason for miss in replay.deactivate().misses] == ["stream"]


def test_what_a_graph_captures_in_a_pool_of_olla_is_the_graphs_own(device: torch.device) -> None:
    """A planned address would be another tensor's at the next iteration, when the graph still writes there."""
    world, expected, side = world_of(), world_of(), torch.cuda.Stream()

    def capturing(step: Callable[[Any], Any], end: Callable[[], None]) -> Callable[[Any], Any]:
        made: list[Any] = []

        def call(batch: Any) -> Any:
            loss = step(batch)
            if not made and len(losses) == 6:
                made.append(own_graph(side))
            losses.append(made[0][0](0.5) if made else None)
            end()
            return loss

        losses: list[Any] = []
        call.losses = losses  # type: ignore[attr-defined]
        return call

    plain = capturing(ordinary(expected), lambda: None)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # where the arena is taken, too
        wanted = trained(expected, plain, steps(10))
        with olla.pool("cuda") as pool:
            call = capturing(ordinary(world), pool.step)
            found = trained(world, call, steps(10))
            assert pool.report().state == "planned"
    assert same(found, wanted)
    assert same(call.losses[6:], plain.losses[6:])


def test_a_step_in_a_graph_of_the_users_keeps_its_memory_when_it_is_released(device: torch.device) -> None:
    world, twin, side = world_of(), world_of(), torch.cuda.Stream()
    given = images().cuda()

    def graphed(step: Callable[[Any], Any], release: Callable[[], None]) -> list[Any]:
        torch.manual_seed(7)
        for _ in range(3):
            step(given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            loss = step(given)
        release()
        others = [torch.full((1 << 19,), 3.0, device="cuda") for _ in range(8)]  # where the arena was
        losses = []
        for batch in steps(4):
            given.copy_(batch)
            graph.replay()
            losses.append(loss.cpu())
        assert all(bool((other.cpu() == 3).all()) for other in others)
        given.copy_(images())
        return losses

    step, other = compiled(world), compiled(twin)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # where the arena is taken, too
        found = graphed(step, step.release)
        torch.manual_seed(7)
        expected = [other(batch).cpu() for batch in [given, given, given, *steps(4)]][3:]
    assert same(found, expected)
    assert same(world.values(), twin.values())
