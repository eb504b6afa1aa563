"""olla.pool: ordinary loops at planned addresses, with the numbers of the loop on torch's own allocator."""

from __future__ import annotations

from pathlib import Path

import pytest

import olla
from olla.cli.parser import main

torch = pytest.importorskip("torch")
from tests.support.pytorch.pooled import Loop, equal, halved  # noqa: E402
from tests.support.pytorch.steps import images, net  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
@pytest.mark.parametrize("name", ["gpt2", "resnet50", "bert_base", "unet"])
def test_a_pooled_loop_computes_the_same_and_is_served_as_planned(name: str, optimizer: str) -> None:
    stock = Loop(name, optimizer)
    pooled = stock.copy()
    torch.manual_seed(1)
    for _ in range(12):
        stock.iterate()
    torch.manual_seed(1)
    with olla.pool() as pool:
        for _ in range(12):
            pooled.iterate()
            pool.step()
    assert equal(stock, pooled)
    report = pool.report()
    assert report.num_planned >= 8
    assert report.served > 0.999
    assert report.num_misses == 0
    assert report.arena_bytes <= 1.005 * report.load_bytes


def test_a_loop_whose_batch_shrinks_half_way_keeps_its_places() -> None:
    stock = Loop("gpt2")
    pooled = stock.copy()
    small = halved(stock.batch)
    torch.manual_seed(1)
    for i in range(24):
        stock.iterate(small if i >= 12 else None)
    torch.manual_seed(1)
    with olla.pool() as pool:
        for i in range(24):
            pooled.iterate(small if i >= 12 else None)
            pool.step()
            if i == 11:
                before = pool.report()
    assert equal(stock, pooled)
    after = pool.report()
    assert (before.num_plans, after.num_plans) == (1, 1)
    assert after.num_planned == before.num_planned + 12
    assert after.arena_bytes == before.arena_bytes
    served, requested = (getattr(after, n) - getattr(before, n) for n in ("served_bytes", "requested_bytes"))
    assert served > 0.9 * requested
    assert after.num_misses > before.num_misses == 0


def test_one_iteration_that_deviates_keeps_the_plan() -> None:
    loop = Loop("gpt2", "momentum")
    small = halved(loop.batch)
    with olla.pool() as pool:
        for i in range(16):
            loop.iterate(small if i == 10 else None)
            pool.step()
            if i == 10:
                missed = pool.report().missed_bytes
    report = pool.report()
    assert report.num_plans == 1
    assert report.missed_bytes == missed > 0


def test_tensors_of_a_pool_outlive_it() -> None:
    model, kept = net(), []
    with olla.pool() as pool:
        for _ in range(6):
            output = model(images())
            output.square().mean().backward()
            kept.append(output.detach())
            model.zero_grad()
            pool.step()
        assert pool.report().state == "planned"
    values = [tensor.clone() for tensor in kept]
    torch.ones(100_000)
    assert all(torch.equal(a, b) for a, b in zip(kept, values, strict=True))


def test_an_exception_in_the_loop_leaves_the_process_healthy() -> None:
    stock = Loop("gpt2")
    pooled = stock.copy()

    def interrupted(loop: Loop) -> None:
        for i in range(8):
            loop.iterate()
            if i == 7:
                raise KeyboardInterrupt
            pool.step()

    for _ in range(2):
        torch.manual_seed(1)
        with pytest.raises(KeyboardInterrupt), olla.pool() as pool:
            interrupted(pooled)
        torch.manual_seed(1)
        for _ in range(8):
            stock.iterate()
        assert pool.report().num_planned > 0
    assert equal(stock, pooled)


def test_a_plan_is_saved_planned_offline_and_loaded(tmp_path: Path) -> None:
    stock = Loop("resnet50", "momentum")
    first, second = stock.copy(), stock.copy()
    with olla.pool() as pool:
        with pytest.raises(olla.ReplayError, match="no plan yet"):
            pool.save(tmp_path / "early.csv")
        for _ in range(6):
            first.iterate()
            pool.step()
    pool.save(tmp_path / "trace.csv")
    planned = tmp_path / "planned.csv"
    assert main(["layout", str(tmp_path / "trace.csv"), "-o", str(planned), "--alignment", "64"]) == 0
    second.iterate()  # makes the optimizer's state, which stays
    with olla.pool(plan=planned) as again:
        for _ in range(5):
            second.iterate()
            again.step()
    assert equal(first, second)
    report = again.report()
    assert report.num_planned == 5
    assert report.served > 0.999
    assert report.arena_bytes == pool.report().arena_bytes


def test_wrong_plan_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.csv"
    for text, expected in (
        ("id,lower,upper,size\n0,0,1,64\n", "needs a column offset"),
        ("id,lower,upper,size,offset\n1,0,1,64,0\n", "ids must be the positions"),
        ("id,lower,upper,size,offset\n0,0,1,64,32\n", "multiples of 64"),
        ("id,lower,upper,size,offset\n0,0,1,0,0\n", "size is 0"),
    ):
        path.write_text(text)
        with pytest.raises(olla.PlanError, match=expected):
            olla.pool(plan=path)
    with pytest.raises(olla.GraphError, match="cannot be read"):
        olla.pool(plan=tmp_path / "none.csv")


def test_steps_outside_and_pools_inside_pools_are_refused() -> None:
    pool = olla.pool()
    with pytest.raises(olla.ReplayError, match="outside"):
        pool.step()
    with pool, pytest.raises(olla.ReplayError, match="already records"):
        olla.pool().__enter__()
    with pytest.raises(olla.ReplayError, match="outside"):
        pool.step()
    with pool:  # once more
        pool.step()


def test_a_loop_that_never_repeats_is_only_recorded() -> None:
    with olla.pool() as pool:
        for i in range(45):
            for _ in range(i + 1):
                torch.ones(i + 1)
            pool.step()
    report = pool.report()
    assert (report.num_planned, report.num_plans, report.num_iterations) == (0, 0, 45)
    assert "No two of 20" in report.note
