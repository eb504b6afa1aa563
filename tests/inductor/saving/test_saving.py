"""What is saved: torch's own choices among the plans, the limit on flops, the bound; what the code makes of it."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import numpy as np
import pytest
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import olla.inductor
from olla.graph import PROFILES
from olla.inductor.compat import compat
from olla.inductor.kernels import order
from olla.inductor.saving import kinds, partition, saving, split_sums
from olla.inductor.saving.joint import Joint
from olla.inductor.saving.kinds import Fusion, is_drawn, is_truth
from olla.inductor.saving.saving import Again
from olla.inductor.settings import patches
from olla.inductor.simulate.step import SimulatedStep, replay, sweep
from olla.plan import Goal
from tests.support.pytorch.compiling import fresh  # noqa: F401
from tests.support.pytorch.steps import nn, torch

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")]

WIDTH, VOCABULARY = 16, 512


class Tied(nn.Module):
    """A small language model whose last layer is its embedding, as GPT-2's: the gradient of its logits is large."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layers = [
            [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)] for _ in range(num_layers)
        ]
        self.layers = nn.ModuleList(nn.Sequential(*layer) for layer in layers)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + nn.functional.dropout(layer(x), 0.1)
        return x @ self.embedding.weight.t()


def loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def example() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Tied(), torch.randint(VOCABULARY, (8, 32))


class Seen:
    """Keeps what the partitioner is asked to choose from, and what it chooses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.joints: list[Joint] = []
        self.choices: list[saving.SavedChoice] = []
        begin, choose = saving.Front.__init__, saving.Front.choose

        def watch(front: saving.Front, joint: Joint, *others: Any) -> None:
            self.joints.append(joint)
            begin(front, joint, *others)

        def chosen(front: saving.Front, goal: Goal, **options: Any) -> saving.SavedChoice:
            self.choices.append(choose(front, goal, **options))
            return self.choices[-1]

        monkeypatch.setattr(saving.Front, "__init__", watch)
        monkeypatch.setattr(saving.Front, "choose", chosen)


def replayed(**goal: Any) -> SimulatedStep:
    with olla.inductor.enable(**goal):
        return replay(*example(), loss)


@pytest.fixture(scope="module")
def model() -> Joint:
    """What the planner sees of the example."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch")
        seen = Seen(patch)
        replayed(max_recomputed=0.0)
    return seen.joints[0]


LEAST = Goal.of(None, None, "peak", "cpu", True, True)
assert LEAST is not None


@pytest.mark.parametrize("share", [1.0, 0.9, 0.5, 0.2])
def test_no_budget_of_torch_needs_less_memory_with_as_many_flops_again(share: float) -> None:
    (torchs,) = sweep(*example(), loss, [share]).values()
    ours = replayed(max_recomputed=torchs.recomputed_flops / torchs.flops)
    assert ours.recomputed_flops <= torchs.recomputed_flops
    assert ours.peak_bytes <= torchs.peak_bytes


def test_nothing_runs_again_that_does_not_lower_the_peak(model: Joint, monkeypatch: pytest.MonkeyPatch) -> None:
    cleared = saving.choose(model, LEAST)
    monkeypatch.setattr(saving, "_clear", lambda best, _, __, evictor, ___: evictor.reset(best.values, best.steps))
    kept = saving.choose(model, LEAST)
    assert cleared.peak_bytes <= kept.peak_bytes
    assert cleared.added_seconds <= kept.added_seconds
    assert len(cleared.runs.op) < len(kept.runs.op)


def test_no_more_flops_run_again_than_allowed_and_more_of_them_never_raise_the_peak(model: Joint) -> None:
    choices = [saving.choose(model, LEAST, Again(share)) for share in (0.0, 0.02, 0.1, 0.5, 2.0)]
    shares = [choice.recomputed_flops / model.flops.sum() for choice in choices]
    assert all(share <= limit for share, limit in zip(shares, (0.0, 0.02, 0.1, 0.5, 2.0), strict=True))
    peaks = [choice.peak_bytes for choice in choices]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < peaks[0]


def test_ten_budgets_never_raise_the_peak_as_they_fall(model: Joint) -> None:
    most = saving.choose(model, LEAST, Again(0.0)).saved_peak_bytes
    goals = [Goal.of(most * tenth // 10, None, None, "cpu", True, True) for tenth in range(10, 0, -1)]
    peaks = [saving.choose(model, goal).peak_bytes for goal in goals if goal]
    assert len(peaks) == 10
    assert peaks == sorted(peaks, reverse=True)


def test_truth_values_that_take_long_to_keep_are_not_kept(model: Joint) -> None:
    """The masks of dropout, with all the memory there is; where they cost their bytes alone they are."""
    goal = Goal.of(2**40, None, None, "cpu", True, True)
    assert goal is not None
    masks = [v for v, n in enumerate(model.nodes) if n and is_truth(n) and any(map(is_drawn, n.all_input_nodes))]
    assert len(masks) == 3
    for joint, is_kept in ((model, False), (model.by_traffic(), True)):
        choice = saving.choose(joint, goal)
        offset, made = choice.values.makes
        of_masks = [made[offset[v]] for v in masks]
        in_memory = np.isin(choice.runs.value, of_masks) & (choice.runs.fused == 0)
        assert in_memory.any() == is_kept
        assert choice.recomputed_flops == 0


def test_where_time_is_no_matter_plans_of_both_measures_of_it_are_compared(model: Joint) -> None:
    by_traffic = model.by_traffic()
    assert (by_traffic.rerun_seconds >= 0).all()
    assert (by_traffic.rerun_seconds < model.rerun_seconds).any()
    assert by_traffic.by_traffic() is by_traffic
    for most_flops in (0.0, 0.1, 0.5):
        peaks = [saving.choose(joint, LEAST, Again(most_flops)).peak_bytes for joint in (model, by_traffic)]
        assert peaks[0] <= peaks[1]


def test_a_budget_that_some_plan_fits_is_kept(model: Joint, monkeypatch: pytest.MonkeyPatch) -> None:
    points = saving._points
    monkeypatch.setattr(saving, "_points", lambda j, evictor: points(j, evictor)[: 1 if j is model else None])
    least = saving.choose(model, LEAST)
    goal = Goal.of(least.peak_bytes, None, None, "cpu", True, True)
    assert goal is not None
    assert saving.choose(model, goal).peak_bytes <= least.peak_bytes < least.saved_peak_bytes


def test_no_plan_on_any_curve_is_below_its_bound(model: Joint) -> None:
    evictor = model.evictor()
    bounding, seconds = model.bounding()
    kernels = np.flatnonzero(model.fusion == Fusion.KERNEL).astype(np.int32)
    tightest = 0.0
    points = saving._points(model, evictor)
    for point in points[:: max(1, len(points) // 40)]:
        evictor.reset(point.values, point.steps)
        added = float(seconds[evictor.runs().op].sum() - seconds.sum())
        bounds, _ = bounding.least_peak(kernels, max(0.0, added), 60.0, None)
        assert bounds.max() <= point.peak
        tightest = max(tightest, bounds.max() / point.peak)
    assert tightest > 0.8


def test_the_choice_has_a_bound_above_what_is_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    replayed(minimise="peak")
    choice, *_ = seen.choices
    assert seen.joints[0].graph.resident_bytes < choice.lower_bound_bytes <= choice.peak_bytes


def test_the_gradient_of_tied_logits_does_not_wait_for_the_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = replayed(max_recomputed=0.0)
    monkeypatch.setattr(split_sums, "keep_apart", lambda *_: 0)
    together = replayed(max_recomputed=0.0)
    logits_bytes = 8 * 32 * VOCABULARY * 4
    assert apart.peak_bytes <= together.peak_bytes
    assert "addmm(buf" in together.sources[1]
    assert "addmm(buf" not in apart.sources[1]
    assert logits_bytes > 0.3 * apart.peak_bytes


def test_sums_kept_apart_are_the_same_numbers() -> None:
    def trained(**options: Any) -> list[torch.Tensor]:
        torch.compiler.reset()
        model, tokens = example()
        torch.manual_seed(1)
        torch.compile(loss, **options)(model, tokens).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    rewritten: list[int] = []
    keep_apart = split_sums.keep_apart
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_sums, "keep_apart", lambda *a: rewritten.append(keep_apart(*a)))
        found = trained(backend="olla", options={"minimise": "peak"})
    assert rewritten == [1]
    torch.testing.assert_close(found, trained(backend="inductor"), rtol=1e-4, atol=1e-5)


def test_inductor_takes_the_peak_for_what_the_order_was_planned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    estimate = compat.private("torch._inductor.codegen.wrapper", "EfficientPeakEstimate")
    taken: list[int] = []
    init = estimate.__init__

    def watch(self: Any) -> None:
        init(self)
        taken.append(self.overall_peak_memory)

    monkeypatch.setattr(estimate, "__init__", watch)
    found = replayed(max_recomputed=0.0)
    del taken[:-2]  # of code that was only foreseen
    assert taken == pytest.approx([record.peak_bytes for record in order.records()], rel=1e-3)
    assert found.peak_bytes >= max(taken)


def test_values_that_either_side_may_make_are_made_in_backward_unless_saved(model: Joint) -> None:
    evictor = model.evictor()
    late = saving._made_late(model, evictor)
    assert len(late)
    evictor.reset(late, np.full(len(late), model.split - 1, dtype=np.int32))
    runs = evictor.runs()
    assert not set(runs.op[runs.position < model.split].tolist()) & set(model.late.tolist())


@pytest.mark.parametrize("value", [-0.1, "5 %"])
def test_an_unreadable_share_of_flops_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"max_recomputed is .*: 0\.05 for 5 %"):
        patches(max_recomputed=value)


def test_decisions_are_known_by_the_limit_on_flops() -> None:
    given = [patches(max_recomputed=share)["custom_partitioner_fn"].uuid() for share in (0.0, 0.1)]
    assert given[0] != given[1]
    assert isinstance(patches(max_recomputed=0.0)["custom_partitioner_fn"], partition.Partitioner)


@pytest.mark.parametrize(
    ("precision", "dtype", "times"),
    [("ieee", torch.float32, 8.0), ("tf32", torch.float32, 1.0), ("ieee", torch.bfloat16, 0.5)],
)
def test_products_take_what_their_precision_takes(precision: str, dtype: torch.dtype, times: float) -> None:
    """An A100 multiplies 156 TFLOPS in TF32, 19.5 in full, 312 of 16 bits."""
    before, torch.backends.cuda.matmul.fp32_precision = torch.backends.cuda.matmul.fp32_precision, precision
    try:
        with FakeTensorMode():
            a = torch.empty(64, 64, dtype=dtype, device="cuda")
            graph = make_fx(torch.mm)(a, a).graph
        (product,) = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
        found = [kinds.arithmetic(product, PROFILES[name]) / (2 * 64**3) for name in ("a100", "gtx1080")]
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert found == [times, 1.0]  # of the second, one speed is known


def test_without_a_goal_hardly_a_product_runs_again_on_a_gpu_and_a_cpu_takes_hardly_longer() -> None:
    goal, again = partition.usual_goal(PROFILES["a100"], on_cpu=False)
    assert (goal.minimise, again) == ("peak", Again(flops=0.01, seconds=0.01))
    goal, again = partition.usual_goal(PROFILES["cpu"], on_cpu=True)
    assert (goal.max_slowdown, again) == (0.05, Again())
    assert len({patches(**given)["custom_partitioner_fn"].uuid() for given in ({}, {"max_recomputed": 0.0})}) == 2


def test_products_take_no_longer_than_allowed_and_more_time_never_needs_more_memory(model: Joint) -> None:
    shares = (0.0, 0.01, 0.05, 0.3, 2.0)
    choices = [saving.choose(model, LEAST, Again(seconds=share)) for share in shares]
    products = np.where(model.flops > 0, model.seconds, 0.0)
    seconds = [products[choice.runs.op].sum() - products.sum() for choice in choices]
    assert all(s <= share * model.step_seconds + 1e-12 for s, share in zip(seconds, shares, strict=True))
    assert seconds[-1] > 0
    peaks = [choice.peak_bytes for choice in choices]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize("again", [saving.EVERYTHING, Again(seconds=0.5), Again(flops=0.5)])
def test_where_there_is_no_product_all_limits_of_products_are_the_same(model: Joint, again: Again) -> None:
    """What does not lower the peak is taken back there as well."""
    nothing = dataclasses.replace(model, flops=np.zeros_like(model.flops))
    found, expected = saving.choose(nothing, LEAST, again), saving.choose(model, LEAST)
    assert found.recomputed_flops == 0
    assert (found.peak_bytes, len(found.runs.op)) == (expected.peak_bytes, len(expected.runs.op))


def test_more_flops_never_need_more_memory_and_none_are_beyond_the_limit(model: Joint) -> None:
    goal = Goal(minimise="peak", device=PROFILES["cpu"])
    shares = (0.0, 0.002, 0.01, 0.04, 0.2, 1.0)
    found = [saving.choose(model, goal, Again(share)) for share in shares]
    peaks = [choice.peak_bytes for choice in found]
    assert peaks == sorted(peaks, reverse=True)
    assert all(c.recomputed_flops <= s * model.flops.sum() for c, s in zip(found, shares, strict=True))


def test_of_small_products_alone_none_that_is_large_may_run_again(model: Joint) -> None:
    shares = model.flops / model.flops.sum()
    most = float(np.median(shares[shares > 0]))
    may = model.without_products(most).rerun != model.without_products().rerun
    assert may.any()
    assert (shares[may] <= most).all()


def test_a_segment_holds_what_is_alive_at_the_peak_but_for_inputs_and_the_largest_tensors(model: Joint) -> None:
    choice = saving.choose(model, Goal(minimise="peak", device=PROFILES["cpu"]), Again(0.0))
    alive = choice.peak_bytes - model.graph.resident_bytes
    left_out = alive - choice.segment_bytes
    assert 0 <= choice.segment_bytes <= alive
    assert left_out == 0 or left_out > 0.2 * alive
