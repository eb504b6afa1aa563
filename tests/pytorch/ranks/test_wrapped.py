"""DistributedDataParallel in a captured step: what is refused, and what decides about a capture; with a fake group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.testing._internal.distributed.fake_pg import FakeStore

import olla
from tests.support.ranks.parallel import loss, made

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::FutureWarning")]
_X = torch.ones(6, 8)


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


def wrapped(model: str = "small", **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    found = DistributedDataParallel(made(model), **options)
    return found, torch.optim.SGD(found.parameters(), lr=0.1)


def compiled(model: Any, **options: Any) -> Any:
    return olla.compile(model, time_limit=0.3, arena=False, disk_cache=False, **options)


def broadcasts(step: Any) -> int:
    return step.graph.collectives.count("broadcast")


def hooked(state, bucket):  # type: ignore[no-untyped-def]  # DistributedDataParallel looks at annotations
    raise NotImplementedError


class Doubled(DistributedDataParallel):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().forward(*args, **kwargs)


def _of_hook() -> Any:
    model = DistributedDataParallel(made("small"))
    model.register_comm_hook(None, hooked)
    return model


def _of_builtin_hook() -> Any:
    model = DistributedDataParallel(made("small"))
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return model


def _of_buffer_hook() -> Any:
    model = DistributedDataParallel(made("resnet"))
    model._register_buffer_comm_hook(None, hooked)
    return model


def _delayed() -> Any:
    inside: Any = made("small")
    named = [("first.weight", inside.first.weight)]
    return DistributedDataParallel(
        inside, delay_all_reduce_named_params=named, param_to_hook_all_reduce=inside.second.weight
    )


def _of_mixed_precision() -> Any:
    with mock.patch.object(torch, "Stream"):  # torch's build for GPUs makes none where there is no GPU
        return DistributedDataParallel(made("small"), mixed_precision=_MixedPrecision(torch.bfloat16))


def _joined() -> Any:
    model = DistributedDataParallel(made("small"))
    model._join_config = model._join_config._replace(enable=True)
    return model


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (_of_hook, "has a communication hook.*leave register_comm_hook"),
        (_of_builtin_hook, "has a communication hook"),
        (_of_buffer_hook, "has a hook for buffers"),
        (_delayed, "delays the reduction of some gradients"),
        (_joined, r"is within join\(\).*drop_last=True"),
        (lambda: Doubled(made("small")), "has another forward"),
        (_of_mixed_precision, r"mixed precision of its own.*torch\.autocast"),
        (
            lambda: DistributedDataParallel(
                made("small"), find_unused_parameters=True, skip_all_reduce_unused_params=True
            ),
            "skips unused parameters",
        ),
        (lambda: DistributedDataParallel(made("unused")), r"2 parameters .* \(module\.spare\.weight, .*find_unused"),
        (lambda: nn.Sequential(DistributedDataParallel(made("small"))), "wrap the whole model"),
    ],
)
def test_what_no_captured_step_does_is_refused_by_name(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(olla.CaptureError, match=text):
        olla.capture(make(), _X, loss=loss)


def test_a_second_backward_pass_through_one_forward_pass_is_refused() -> None:
    model, optimizer = wrapped()

    def step(model: Any, optimizer: Any, batch: torch.Tensor) -> torch.Tensor:
        value = loss(model, batch)
        value.backward(retain_graph=True)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    with pytest.raises(olla.CaptureError, match=r"second backward pass .* module\.second\.bias"):
        olla.capture(model, _X, optimizer=optimizer, step=step)


def test_one_collective_per_bucket_in_the_order_of_arrival_and_nothing_of_the_reducer_changes() -> None:
    model, optimizer = wrapped(bucket_cap_mb=0.001)
    graph = olla.capture(model, _X, optimizer=optimizer, loss=loss).graph
    sent = [int(b) for b, kind in zip(graph.message_bytes, graph.collectives, strict=True) if kind == "all_reduce"]
    assert sent == [4 * (8 + 8 * 32), 4 * (32 + 32 * 8)]  # the last layer's gradients arrive first
    olla.check(graph, olla.plan(graph))
    assert not model._has_rebuilt_buckets


def test_ignored_and_frozen_parameters_are_in_no_bucket() -> None:
    inside: Any = made("small")
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inside, ["first.weight"])
    inside.second.bias.requires_grad_(False)
    graph = olla.capture(DistributedDataParallel(inside), _X, loss=loss).graph
    assert int(graph.message_bytes.sum()) == 4 * (32 + 8 * 32)
    assert graph.name == "Small"


def test_passes_without_synchronisation_decide_about_the_next_broadcast_as_in_an_ordinary_loop() -> None:
    model, optimizer = wrapped("resnet")
    step, images = compiled(model, optimizer=optimizer, loss=loss), torch.ones(2, 3, 8, 8)
    step(images)
    assert broadcasts(step) == 2
    with torch.no_grad():
        model(images)
    step(images)
    assert broadcasts(step) == 0  # a pass without gradients was the last
    step(images)
    assert broadcasts(step) == 2
    with model.no_sync():
        step(images)
    assert broadcasts(step) == 2
    assert "all_reduce" not in step.graph.collectives
    step(images)
    assert (broadcasts(step), "all_reduce" in step.graph.collectives) == (0, True)
    assert step.report().num_captures == 3


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 always synchronises buffers")
def test_buffers_stay_as_they_are_where_they_are_not_synchronised() -> None:
    model, optimizer = wrapped("resnet", forward_sync_buffers=False)
    graph = olla.capture(model, torch.ones(2, 3, 8, 8), optimizer=optimizer, loss=loss).graph
    assert graph.collectives.count("broadcast") == 0


def test_gradients_that_are_left_are_reduced_and_not_added_to_others() -> None:
    model, _ = wrapped()
    step = compiled(model, loss=loss)
    step(_X)
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(olla.ReplayError, match=r"leaves them in \.grad, where there are some already"):
        step(_X)
    model.zero_grad()
    step(_X)
    with model.no_sync():
        step(_X)  # adds what is not reduced, as an ordinary loop does


def test_a_hook_that_comes_later_is_refused_too() -> None:
    model, optimizer = wrapped()
    step = compiled(model, optimizer=optimizer, loss=loss)
    step(_X)
    model.register_comm_hook(None, hooked)
    with pytest.raises(olla.CaptureError, match="communication hook"):
        step(_X)


def test_inductor_takes_no_wrapped_model() -> None:
    model, optimizer = wrapped()
    with pytest.raises(olla.ReplayError, match='kernels="inductor" does not keep'):
        olla.compile(model, optimizer=optimizer, loss=loss, kernels="inductor")(_X)


def test_buckets_are_sent_while_others_are_filled() -> None:
    model, optimizer = wrapped("gpt2", bucket_cap_mb=0.02)
    graph = olla.capture(model, torch.zeros(2, 16, dtype=torch.int64), optimizer=optimizer, loss=loss).graph
    plan = olla.plan(graph, time_limit=2.0)
    olla.check(graph, plan)
    program = olla.timeline(graph, np.arange(graph.num_ops))
    planned = olla.timeline(graph, plan.order)
    assert planned.link_seconds == program.link_seconds > 0
    assert planned.exposed_seconds < 0.1 * planned.link_seconds
    for order in (range(graph.num_ops), plan.order.tolist()):
        kinds = [graph.collectives[v] for v in order]
        last = max(i for i, v in enumerate(order) if "embedding_dense_backward" in graph.targets[v])
        assert kinds.count("all_reduce") == kinds.count("wait") == 4
        assert kinds[:last].count("all_reduce") == 3  # begun in the backward pass, where their gradients arrive
