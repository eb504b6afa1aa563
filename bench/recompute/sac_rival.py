"""PyTorch's own planner of selective checkpointing as a rival: the MILP of `torch.distributed._tools`.

Its stages run as their documentation says, on fake tensors and without a GPU: MemTracker and RuntimeEstimator watch
steps, SACEstimator the forward pass, `sac_milp` decides which modules are checkpointed and what share of each is
discarded, and `get_optimal_checkpointing_policy_per_module` which operators are saved. Where they would ask a GPU for
its speed, the profile of ours answers.

A decision is judged by what it does: the modules' forward is wrapped in `torch.utils.checkpoint` with that policy, and
the step is captured anew. Read and run with torch 2.13, which needs pulp, pwlf and scipy for this.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools import runtime_estimator
from torch.distributed._tools.ilp_utils import Graph as Modules
from torch.distributed._tools.ilp_utils import (
    aggregate_stats,
    get_peak_memory_runtime_baseline,
    parse_module_info,
)
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.runtime_estimator import RuntimeEstimator
from torch.distributed._tools.sac_estimator import SACEstimator
from torch.distributed._tools.sac_ilp import get_optimal_checkpointing_policy_per_module, sac_milp
from torch.utils import _runtime_estimation
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import masking_utils

import olla
from olla.graph import profile_of

_MODE = "operator-level-cost-model"
_GIB = 2**30

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Watched:
    """What the estimators saw of a step.

    Attributes:
        modules: the tree of modules with their memory and runtimes, which `sac_milp` takes.
        policies: statistics of the operators of each module, by its name.
        peak_bytes: of the ordinary step, as they estimate it.
        seconds: to watch.
    """

    modules: Modules
    policies: Mapping[str, Any]
    peak_bytes: int
    seconds: float


@dataclass(frozen=True)
class Decision:
    """Which modules are checkpointed, and what share of each is discarded.

    Attributes:
        shares: module -> share discarded.
        peak_bytes: as they predict it.
        seconds: to decide, policies of the modules included.
        saves: module -> for each of its operators whether its result is saved.
    """

    shares: dict[str, float]
    peak_bytes: int
    seconds: float
    saves: dict[str, list[int]]


def watch(build: Callable[[], Any], batch: Callable[[], Batch], device: str) -> Watched:
    """Watch steps of a model with AdamW on fake tensors."""
    start = time.perf_counter()
    profile = profile_of(device)
    with FakeTensorMode(), ExitStack() as patches:
        speeds = {
            "get_device_tflops": lambda dtype: profile.flops_per_second / 1e12,
            "get_gpu_dram_gbps": lambda: profile.bytes_per_second / 1e9,
        }
        for name, answer in speeds.items():
            patches.enter_context(mock.patch.object(_runtime_estimation, name, answer))
        # No sequences are packed in our batches, which transformers cannot see on fake tensors: it would make a mask.
        patches.enter_context(mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None))
        model, inputs = build(), batch()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

        def step() -> None:
            model(**inputs).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        step()  # its state is there before memory is tracked
        memory = MemTracker()
        memory.track_external(model, optimizer)
        with memory:
            step()
            memory.reset_mod_stats()
            step()
        patches.enter_context(mock.patch.object(runtime_estimator.torch.cuda, "is_available", return_value=True))
        runtime, estimator = RuntimeEstimator(), SACEstimator()
        with runtime(_MODE):
            step()
        with estimator(_MODE):
            model(**inputs)
    modules = parse_module_info(aggregate_stats(model, memory, runtime, estimator, torch.device("cpu")))
    peak, _ = get_peak_memory_runtime_baseline(modules)
    return Watched(modules, estimator.sac_mod_stats, peak, time.perf_counter() - start)


def decide(watched: Watched, share: float) -> Decision | None:
    """Let the MILPs decide for a share of the peak they see; None where they find nothing."""
    start = time.perf_counter()
    shares, _, peak = sac_milp(watched.modules, watched.peak_bytes * share / _GIB)
    if peak < 0:
        return None
    saves = {
        name: get_optimal_checkpointing_policy_per_module(watched.policies[name], 1 - discarded)
        for name, discarded in shares.items()
    }
    return Decision(shares, peak, time.perf_counter() - start, saves)


def capture(
    build: Callable[[], Any],
    batch: Callable[[], Batch],
    watched: Watched | None = None,
    decision: Decision | None = None,
) -> olla.Graph:
    """Capture the step, its modules checkpointed as decided, where something was.

    Returns:
        The graph.

    Raises:
        CaptureError: a module runs other operators than those that were decided about.
    """
    with torch.device("meta"):
        model = build()
    for name, saves in (decision.saves if decision and watched else {}).items():
        module = model.get_submodule(name.partition(".")[2])
        module.forward = _checkpointed(module.forward, saves, watched.policies[name].func_names)
    optimizer = torch.optim.AdamW(model.parameters())
    found = olla.capture(model, batch(), optimizer=optimizer, loss=lambda model, batch: model(**batch).loss)
    return found.graph


def _checkpointed(forward: Any, saves: list[int], names: list[str]) -> Callable[..., Any]:
    """Return a module's forward under a checkpoint whose policy is a list: the k-th operator is saved, or not."""

    def contexts() -> Any:
        counts = SimpleNamespace(first=itertools.count(), again=itertools.count())

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            k = next(counts.again if context.is_recompute else counts.first)
            if k >= len(names) or names[k] != op._overloadpacket.__name__:
                raise RuntimeError(f"operator {k} is {op}, decided about was {names[k : k + 1]}")
            is_saved = k < len(saves) and saves[k]
            return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        options = {"use_reentrant": False, "preserve_rng_state": False}
        return checkpoint(forward, *args, **options, context_fn=contexts, **kwargs)

    return wrapped
