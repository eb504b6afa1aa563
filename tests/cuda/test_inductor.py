"""The backend "olla" of torch.compile on CUDA: what it plans is what torch's allocator counts, and steps run.

Kernels of Triton do nothing under the stand-in, those of libraries have a CPU's numbers: numbers are compared where a
graph holds products of matrices alone. Most tests leave kernels of Triton uncompiled there; the wrappers around them,
and so sizes, order and addresses of all that is allocated, are Inductor's own.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
offload_ops = pytest.importorskip("torch._functorch._activation_offloading.offload_ops", reason="torch before 2.13")

import olla  # noqa: E402
import olla.inductor  # noqa: E402
from olla.inductor.compat import fallback  # noqa: E402
from olla.inductor.saving import offload  # noqa: E402
from olla.inductor.saving.partition import Partitioner  # noqa: E402
from olla.inductor.simulate.split import Split, recorded  # noqa: E402
from olla.inductor.simulate.step import replay as simulated  # noqa: E402
from olla.plan import Link, Swapping  # noqa: E402
from tests.cuda.standin import Standin  # noqa: E402
from tests.support.pytorch import models, standing  # noqa: E402
from tests.support.pytorch.compiling import LEAST, blocks, fresh, square  # noqa: E402, F401
from tests.support.pytorch.steps import nn  # noqa: E402

BLOCK = 512  # bytes, what torch's allocator rounds up to
OURS: dict[str, Any] = {"backend": olla.inductor.backend}
THEIRS: dict[str, Any] = {"backend": "inductor", "options": None}


@pytest.fixture(autouse=True)
def untimed(standin: Standin | None) -> Iterator[None]:
    with standing.without_times() if standin is not None else contextlib.nullcontext():
        yield
    torch.compiler.reset()
    torch._C._cuda_clearCublasWorkspaces()
    while gc.collect():
        pass


@pytest.fixture
def uncompiled(standin: Standin | None) -> Iterator[None]:
    """Kernels of Triton are not compiled, where they would do nothing."""
    with standing.without_triton() if standin is not None else contextlib.nullcontext():
        yield


def train(step: Callable[[], Any], optimizer: torch.optim.Optimizer, num_steps: int = 3) -> int:
    """Train; return the most bytes of the last forward and backward above what lives before."""
    for _ in range(num_steps):
        optimizer.zero_grad()
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step().backward()
        peak = torch.cuda.max_memory_allocated() - before
        optimizer.step()
    return peak


def measured(model: Any, batch: Any, loss: Any, **compiling: Any) -> int:
    torch.compiler.reset()
    step = torch.compile(lambda model, batch: loss(model, batch), **compiling)
    return train(lambda: step(model, batch), torch.optim.AdamW(model.parameters(), lr=1e-3))


def foreseen(model: Any, batch: Any, loss: Any, **compiling: Any) -> int:
    found = simulated(model, batch, loss, **compiling)
    return found.peak_bytes - found.resident_bytes


def rounded(planned: int, number: int) -> range:
    """Return what may be measured of a plan, where a number of blocks is rounded up."""
    return range(planned, planned + BLOCK * number)


def transformer() -> tuple[Any, Any, Any]:
    return blocks(4, dropout=0.1).cuda(), torch.randn(512, 32, device="cuda"), square


def test_kernels_are_compiled_for_the_device_and_a_step_needs_what_was_foreseen() -> None:
    model, batch, loss = blocks(1, dropout=0.1).cuda(), torch.randn(512, 32, device="cuda"), square
    before = [p.detach().clone() for p in model.parameters()]
    peak = measured(model, batch, loss, **OURS, options=LEAST)
    assert peak in rounded(foreseen(model, batch, loss, **OURS, options=LEAST), 16)
    assert not any(torch.equal(a.cpu(), b.cpu()) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("options", [{}, LEAST], ids=["default", "least"])
def test_the_foreseen_peak_is_that_of_torchs_statistics(options: dict[str, Any]) -> None:
    """But for the workspaces of kernels, which the products of matrices share and nobody plans."""
    example = transformer()
    assert measured(*example, **OURS, options=options) in rounded(foreseen(*example, **OURS, options=options), 16)


@pytest.mark.usefixtures("uncompiled")
def test_a_goal_needs_less_than_inductor() -> None:
    example = transformer()
    assert measured(*example, **OURS, options=LEAST) < 0.4 * measured(*example, **THEIRS)


@pytest.mark.usefixtures("uncompiled")
def test_a_network_with_attention_needs_less_than_with_inductor() -> None:
    example = models.build("gpt2", 16, tiny=True, device="cuda")
    model, batch, loss = example.model, example.batch, example.loss
    assert measured(model, batch, loss, **OURS, options=LEAST) < 0.7 * measured(model, batch, loss, **THEIRS)


@pytest.mark.usefixtures("uncompiled")
def test_the_gradient_of_logits_lies_where_they_were() -> None:
    """Inductor itself would write a part of it to memory, beside the logits, because it takes more than four reads."""
    found = models.build("gpt2", 16, tiny=True, device="cuda", settings={"vocab_size": 4001})
    example = found.model, found.batch, found.loss
    logits_bytes = 16 * 16 * 4032 * 4  # rows are padded
    gradients = sum(p.nbytes for p in found.model.parameters())
    as_torch = {"realize_reads_threshold": 4}
    for options in ({}, LEAST):
        assert measured(*example, **OURS, options=options) < 1.2 * (logits_bytes + gradients)
    assert measured(*example, **OURS, options=as_torch) > 2 * logits_bytes


class Attention(nn.Module):
    """Softmax as an operator of its own: what it makes is larger than all else."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.of_all = nn.Linear(width, 3 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.of_all(x).chunk(3, dim=-1)
        weights = torch.softmax(query @ key.transpose(1, 2), dim=-1)
        return x + weights @ value


@pytest.mark.usefixtures("uncompiled")
def test_the_gradient_of_what_a_softmax_takes_lies_where_that_of_its_result_was() -> None:
    """Its kernel sums the row that it then writes over; a plan that does not know it keeps less than it could."""
    model = nn.Sequential(*(Attention(32) for _ in range(3))).cuda()
    example = model, torch.randn(2, 512, 32, device="cuda"), square
    found = olla.inductor.explain(*example, shares=())
    assert found.choices[0] is not None
    assert found.ours.peak_bytes <= found.choices[0].peak_bytes < 1.01 * found.ours.peak_bytes
    assert measured(*example, **OURS) in rounded(found.ours.peak_bytes - found.ours.resident_bytes, 16)


class Scaled(nn.Linear):
    """With a number on the CPU that kernels on the GPU take, forward's and backward's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).tanh() / torch.sqrt(torch.tensor(32.0))


@pytest.mark.usefixtures("uncompiled")
def test_a_step_with_a_number_on_the_cpu_is_foreseen() -> None:
    example = nn.Sequential(Scaled(32, 512), Scaled(512, 32)).cuda(), torch.randn(512, 32, device="cuda"), square
    assert measured(*example, **OURS, options=LEAST) in rounded(foreseen(*example, **OURS, options=LEAST), 16)


@pytest.mark.usefixtures("uncompiled")
def test_a_budget_for_images_is_held_by_code_that_looks_at_addresses() -> None:
    """Inductor copies inputs that are not aligned, and those that change back; fake ones have no address to look at."""
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.GELU(), nn.Conv2d(32, 32, 3, padding=1), nn.GELU()]
    model, batch = nn.Sequential(*layers).cuda(), torch.randn(8, 3, 64, 64, device="cuda")
    least = measured(model, batch, square, **OURS, options=LEAST)
    with pytest.warns(UserWarning, match="no way to fit") as caught:
        refused = measured(model, batch, square, **OURS, options={"budget": 1000})
    (text,) = {str(w.message) for w in caught if "no way to fit" in str(w.message)}
    assert refused == least
    kept = int(text.partition("Ask for budget=")[2].partition(",")[0])
    assert measured(model, batch, square, **OURS, options={"budget": kept}) == least


def free_of_products(example: tuple[Any, Any, Any], **compiling: Any) -> tuple[int, bool]:
    """The peak of a step, and whether no product of matrices runs twice in it."""
    splits: list[Split] = []
    with recorded(splits):
        peak = measured(*example, **compiling)
    return peak, sum(split.recomputed_flops for split in splits) == 0


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", ["gpt2", "vit_b16", "t5_small"])
def test_without_options_a_step_needs_no_more_than_under_budgets_of_torchs(name: str) -> None:
    found = models.build(name, 16, tiny=True, device="cuda")
    example = found.model, found.batch, found.loss
    theirs = []
    for share in (0.9, 0.7, 0.5, 0.3):
        with torch._functorch.config.patch(activation_memory_budget=share):
            theirs.append(free_of_products(example, **THEIRS))
    peak, is_free = free_of_products(example, **OURS)
    assert is_free
    assert peak <= min(peak for peak, is_free in theirs if is_free)


class Products(nn.Module):
    """A network whose forward and backward are products of matrices alone."""

    def __init__(self, num_layers: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ParameterList(torch.randn(64, 64) / 8 for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x @ layer
        return x


def trained(compile: Callable[[nn.Module], Any], rounds: Callable[[], Iterator[None]], num_rows: int = 32) -> list[Any]:
    """Losses of a training run, and the parameters behind it."""
    model = Products().cuda()
    step = compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for number, _ in enumerate(rounds()):
        optimizer.zero_grad()
        loss = square(step, torch.full((num_rows, 64), 0.1 * number + 0.1, device="cuda"))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
        del loss
    return [*losses, *(p.detach().cpu() for p in model.parameters())]


def eight() -> Iterator[None]:
    yield from [None] * 8


def equal(found: list[Any], expected: list[Any]) -> bool:
    return all(map(torch.equal, found, expected)) and len(found) == len(expected)


def test_products_of_compiled_steps_are_the_ordinary_ones(device: torch.device) -> None:
    expected = trained(lambda model: model, eight)
    assert equal(trained(lambda model: torch.compile(model, **OURS, options=LEAST), eight), expected)


def test_products_of_steps_behind_torchs_cuda_graphs_are_the_ordinary_ones(device: torch.device) -> None:
    """Torch captures them at the second call, in memory that is the graphs' own."""
    options = {**LEAST, "mode": "reduce-overhead"}
    expected = trained(lambda model: model, eight)
    assert equal(trained(lambda model: torch.compile(model, **OURS, options=options), eight), expected)


def test_compiled_steps_run_in_a_pool_at_planned_addresses(device: torch.device) -> None:
    reports = []

    def pooled() -> Iterator[None]:
        with olla.pool("cuda") as pool:
            for _ in range(8):
                yield
                pool.step()
            reports.append(pool.report())

    expected = trained(lambda model: model, eight)
    assert equal(trained(lambda model: torch.compile(model, **OURS, options=LEAST), pooled), expected)
    [report] = reports
    assert (report.state, report.num_misses) == ("planned", 0)
    assert report.served_bytes == report.requested_bytes


@pytest.fixture(params=[1e13, 2e10])
def copied(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let small tensors wait in host memory; says how many do, per graph. Over a slow link, waits come later."""
    speed = request.param
    link = Link(
        out_bytes_per_second=speed, in_bytes_per_second=speed, out_latency_seconds=1e-9, in_latency_seconds=1e-9
    )
    monkeypatch.setattr(offload, "LEAST_BYTES", 0)
    monkeypatch.setattr(Partitioner, "_host", lambda self, *_: self.swapping and Swapping(link=link))
    found: list[int] = []
    insert = offload.insert

    def watch(copies: offload.Offload, *others: Any) -> Any:
        found.append(len(copies.copy))
        return insert(copies, *others)

    monkeypatch.setattr(offload, "insert", watch)
    return found


WAITING = {"max_slowdown": 10.0, "max_recomputed": 0.0, "host_budget": "1GB"}


def test_what_waits_in_host_memory_comes_back_as_it_was(device: torch.device, copied: list[int]) -> None:
    expected = trained(lambda model: model, eight, 512)
    assert equal(trained(lambda model: torch.compile(model, **OURS, options=WAITING), eight, 512), expected)
    assert max(copied) >= 3
    assert not offload_ops._wait_registry  # every copy was waited for


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(("host", "is_named"), [({}, True), ({"host_budget": "1GB"}, False)], ids=["without", "with"])
def test_where_no_plan_fits_host_memory_is_named_as_a_way(host: dict[str, Any], is_named: bool) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        measured(blocks(1).cuda(), torch.randn(64, 32, device="cuda"), square, **OURS, options={"budget": 1000, **host})
    [said] = [str(w.message) for w in told if "found no way to fit" in str(w.message)]
    assert ("let tensors wait in host memory (host_budget)" in said) is is_named


def test_behind_torchs_cuda_graphs_nothing_waits_in_host_memory(device: torch.device) -> None:
    expected = trained(lambda model: model, eight, 512)
    options = {**WAITING, "mode": "reduce-overhead"}
    fallback.forget()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = trained(lambda model: torch.compile(model, **OURS, options=options), eight, 512)
    assert equal(found, expected)
    [said] = [str(w.message) for w in told if "host_budget" in str(w.message)]
    assert said.startswith("host_budget changes nothing in a compiled graph behind CUDA graphs")


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("copied", [1e13], indirect=True)
def test_what_waits_in_host_memory_takes_none_on_the_device_as_foreseen(copied: list[int]) -> None:
    example = blocks(6).cuda(), torch.randn(2048, 32, device="cuda"), square
    for goal, most in ((LEAST, 1.0), ({"max_slowdown": 0.1}, 0.8)):
        waiting = {**goal, "host_budget": "1GB"}
        peak = measured(*example, **OURS, options=waiting)
        assert peak in rounded(foreseen(*example, **OURS, options=waiting), 24)
        assert peak <= most * measured(*example, **OURS, options=goal)
        assert max(copied) >= 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunked_losses": 8}, "chunked_losses"),
        ({"budget": "much"}, "no number of bytes"),
        ({"minimise": "time"}, "minimise"),
        ({"budget": "1GB", **LEAST}, "each is a goal of its own"),
    ],
)
def test_what_the_backend_does_not_offer_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        torch.compile(Products(1).cuda(), **OURS, options=options)(torch.ones(4, 64, device="cuda"))
